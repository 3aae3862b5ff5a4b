"""Resume: the contents of a run's checkpoint, how it is written, and where a resumed run continues."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import yaml

from megarl.algorithms.turns import Turns
from megarl.checkpoint.background import CheckpointMemory, Write
from megarl.checkpoint.manager import CONFIG_NAME
from megarl.checkpoint.storage import is_file, read_again, said_of_space
from megarl.config.defaults import without_tildes
from megarl.config.resume_changes import check_changes
from megarl.config.sections import RunConfig
from megarl.errors import (
    WORKER_TRACE,
    CheckpointError,
    ConfigError,
    DeadlineError,
    StorageError,
    UnusableCheckpointError,
    Violation,
)
from megarl.redaction import redacted

if TYPE_CHECKING:
    from megarl.checkpoint.manager import CheckpointManager
    from megarl.config.plugins import Role
    from megarl.models.policy.interfaces import PolicyInterface

logger = logging.getLogger(__name__)

WEIGHTS, OPTIMIZER, TOKENIZER = "weights", "optimizer", "tokenizer"
"""Subdirectories of a role's directory in a checkpoint."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Starting point of a run.

    Attributes:
        step: finished steps, 0 for a fresh run.
        sampler_state: for ``ResumableSampler.load_state``; None for a fresh run.
        checkpoint: the checkpoint that the run continues from; None for a fresh run.
    """

    step: int = 0
    sampler_state: Mapping[str, Any] | None = None
    checkpoint: Path | None = None

    def weights_path(self, role: Role) -> Path | None:
        """Return the weights of a role's model; None for the weights that it is built with."""
        return self._path(role, WEIGHTS)

    def optimizer_path(self, role: Role) -> Path | None:
        """Return the optimizer state of a role's model; None for a fresh one."""
        return self._path(role, OPTIMIZER)

    def _path(self, role: Role, part: str) -> Path | None:
        return (
            None
            if self.checkpoint is None or role.directory is None
            else self.checkpoint / role.directory / part
        )


def find_resume_point(manager: CheckpointManager | None, resume: str) -> ResumePoint:
    """Return the latest valid checkpoint, or the start of training.

    Args:
        manager: finds checkpoints; None for a run without.
        resume: ``"auto"``, or ``"never"`` for the start of training.

    Raises:
        UnusableCheckpointError: there are checkpoints, but none can be used.
        CheckpointError: ``resume`` is "never", but there is a checkpoint that a later launch would resume
            from.
    """
    path, damaged = (None, {}) if manager is None else manager.latest_and_damaged()
    if manager is None or path is None:
        if damaged and resume != "never":
            raise UnusableCheckpointError(_none_can_be_used(damaged))
        return ResumePoint()
    if resume == "never":
        # Refuse this: the next automatic resume of this run would continue from that checkpoint.
        raise CheckpointError(
            f"checkpointing.resume = 'never', but {path} exists, and a later launch would resume from it. "
            "Fix: choose another run_dir, remove the old checkpoints, or resume with 'auto'"
        )
    info = manager.load_training_info(path) or {}
    step, sampler = info.get("step"), info.get("sampler")
    if not isinstance(step, int) or not isinstance(sampler, Mapping):
        raise UnusableCheckpointError(
            f"checkpoint {path}: training_info has step = {step!r} and sampler = {sampler!r}, expected a "
            "whole number and an object. "
            f"Fix: remove {path} to resume from an earlier one"
        )
    return ResumePoint(step, sampler, path)


def _none_can_be_used(damaged: Mapping[Path, Sequence[str]]) -> str:
    faults = "; ".join(f"{path}: {', '.join(problems[:3])}" for path, problems in damaged.items())
    return (
        f"the run has {len(damaged)} checkpoints and none can be used. {faults}. Fix: bring one "
        "back from a copy, or start over with checkpointing.resume=never, for one launch only; the "
        "rows of metrics.jsonl are kept in another file then"
    )


def report_changes(start: ResumePoint, config: RunConfig) -> None:
    """Compare the configuration with that of the checkpoint that a run continues from, and log the
    differences.

    Raises:
        ConfigError: a change would have no effect, or is not accepted (``checkpointing.accept_changes``).
        UnusableCheckpointError: the checkpoint's configuration is damaged.
        StorageError: the checkpoint's configuration cannot be read now.
    """
    if start.checkpoint is None or not is_file(start.checkpoint / CONFIG_NAME):
        return
    path = start.checkpoint / CONFIG_NAME
    try:
        before = yaml.safe_load(read_again(lambda: path.read_text(encoding="utf-8"), str(path)))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UnusableCheckpointError(
            f"{path} cannot be read: {error}. Fix: resume from another one"
        ) from error
    name = f"{start.checkpoint.parent.name}/{start.checkpoint.name}"
    # Earlier versions kept the ~ at the beginning of paths.
    before = without_tildes(before) if isinstance(before, dict) else before
    # Redact both configurations: the stored one has its secrets hidden, and each secret would appear to have
    # changed.
    for key, (old, new) in check_changes(
        redacted(before), redacted(config), name, config["checkpointing"]["accept_changes"]
    ).items():
        logger.warning(
            "a value differs from checkpoint %s: %s = %r, in the checkpoint %r", name, key, new, old
        )


@dataclass(frozen=True, slots=True)
class CheckpointInFlight:
    """A checkpoint that is being written while training continues.

    Attributes:
        step: finished steps.
        path: its temporary directory.
        write: writes its files there.
    """

    step: int
    path: Path
    write: Write


@dataclass(frozen=True, slots=True)
class UncommittedCheckpoint:
    """A checkpoint that lacks only its name and the metrics of the step's validation.

    Attributes:
        step: finished steps.
        path: its temporary directory.
        info: of the checkpoint, without these metrics.
        memory: memory that it waits in; None if it is in ``path``.
        is_last: as for ``CheckpointWriter.saving``.
    """

    step: int
    path: Path
    info: Mapping[str, Any]
    memory: CheckpointMemory | None
    is_last: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class CheckpointWriter:
    """Writes the checkpoints of a run.

    Attributes:
        manager: names, commits and prunes them.
        models: by role; each writes its weights, optimizer state and tokenizer into the role's directory.
        save_period: steps between checkpoints.
        run_config: stored in every checkpoint.
        committed: called with the step of every checkpoint that another launch would continue from.
        before_commit: called when a checkpoint lacks only its name.
        most_failed: number of failed saves in a row that ends the run.
        estimated_bytes: estimated size of a checkpoint, used before there is one.
        memory: checkpoints wait there while training continues and another process writes them, at most one
            at a time; None: training waits.
        longest_s: maximum seconds for a checkpoint once it is waited for.
        beside: writes the other contents of a checkpoint into its directory.
        turns: loads each model onto the devices, if several share them.
        in_flight: the checkpoint that is being written.
        uncommitted: the checkpoint that waits for metrics of its validation.
        seconds: duration of the last one.
        failed: steps whose checkpoints could not be written, since the last one that could.
        metric_notes: state of ``require_metric``: whether a step has had the metric (``_HAD``), and whether
            its absence was logged (``_TOLD``).
    """

    manager: CheckpointManager
    models: Mapping[Role, PolicyInterface]
    save_period: int
    run_config: Mapping[str, Any] = field(default_factory=dict)
    committed: Callable[[int], None] = lambda step: None
    before_commit: Callable[[], None] = lambda: None
    most_failed: int = 1
    estimated_bytes: int = 0
    memory: CheckpointMemory | None = None
    longest_s: float = 1800.0
    beside: Callable[[Path], None] = lambda directory: None
    turns: Turns = field(default_factory=lambda: Turns({}))
    in_flight: list[CheckpointInFlight] = field(default_factory=list)
    uncommitted: list[UncommittedCheckpoint] = field(default_factory=list)
    seconds: list[float] = field(default_factory=lambda: [0.0])
    failed: list[int] = field(default_factory=list)
    metric_notes: set[str] = field(default_factory=set)

    def due(self, step: int, last_step: int) -> bool:
        """Return whether a checkpoint follows this step; one always follows the last step."""
        return step == last_step or step % self.save_period == 0

    def require_metric(self, metrics: Mapping[str, float]) -> None:
        """Refuse a ``checkpointing.metric_name`` that the run does not have, before a checkpoint would be
        ranked by it.

        A metric that an earlier step had, or that is absent from a validation with responses that could not
        be scored, is not a wrong name: the checkpoint of such a step has no value, and is the best one only
        if no other has a value. That is logged once.

        Args:
            metrics: of a step that was taken, and of a validation; each has only its own names.

        Raises:
            ConfigError: with the most similar names.
        """
        name, known = self.manager.metric_name, _ranking_metrics(metrics)
        of_validation = name is not None and name.startswith(_OF_VALIDATION)
        kin = [each for each in known if each.startswith(_OF_VALIDATION) == of_validation]
        if name is None or name == "step" or not kin:
            return
        if name in known:
            self.metric_notes.add(_HAD)
            return
        if (
            _HAD in self.metric_notes
            or self._some_checkpoint_has_it()
            or (of_validation and metrics.get(_SCORED, 1.0) < 1)
        ):
            if _TOLD not in self.metric_notes:
                self.metric_notes.add(_TOLD)
                logger.warning(
                    "checkpointing.metric_name = %s is not among the metrics of this step: a "
                    "checkpoint without it is not chosen as the best if another has it. This is "
                    "logged only once",
                    name,
                )
            return
        alike = difflib.get_close_matches(name, kin, n=3, cutoff=0.5) or sorted(kin)
        raise ConfigError(
            [
                Violation(
                    "checkpointing.metric_name",
                    name,
                    "this run has no such metric",
                    f"write {' or '.join(alike)}",
                )
            ]
        )

    def _some_checkpoint_has_it(self) -> bool:
        """Return whether any checkpoint has the metric; True also if the storage fails, which is no reason to
        end a run."""
        try:
            return self.manager.has_metric()
        except StorageError as error:
            logger.warning("it is unknown whether a checkpoint has the metric: %s", error)
            return True

    @contextmanager
    def saving(
        self,
        step: int,
        sampler_state: Mapping[str, Any],
        metrics: Mapping[str, float],
        is_last: Callable[[], bool] = lambda: False,
        *,
        is_validated: bool = True,
    ) -> Iterator[None]:
        """Write a checkpoint, run the block, then make the checkpoint visible.

        So the block's results (the log of the step) exist before anyone can resume after the step, and never
        without the checkpoint.

        A checkpoint that cannot be written is removed, with a warning, and the run continues with the earlier
        ones.

        Args:
            step: finished steps.
            sampler_state: position in the data.
            metrics: of the step.
            is_last: called if the checkpoint could not be written: whether no other one follows, so that
                continuing would lose the step.
            is_validated: False if metrics are still missing: ``complete`` makes it visible then.

        Raises:
            CheckpointError: it could not be written, and is the last one, or ``most_failed`` in a row could
                not.
        """
        # Write one checkpoint at a time, because the memory that the previous one waits in is needed again.
        self.settle(wait=True)
        info = {"step": step, "sampler": dict(sampler_state), "metrics": _ranking_metrics(metrics)}
        failure: CheckpointError | OSError | None = None
        path: Path | None = None
        memory: CheckpointMemory | None = None
        try:
            path = begun = Path(self.manager.init_tmp_checkpoint(step, info, self.run_config))
            self.beside(begun)
            # Write the last checkpoint to disk directly: the run waits for it in any case, and memory would
            # be a detour.
            memory = None if self.memory is None or is_last() else self._left_in(self.memory)
            if memory is None:
                self._write_models(lambda role: begun)
        except DeadlineError:
            # Re-raise it: a DeadlineError is an OSError, but comes from workers that hang and could not run
            # the next step either.
            raise
        except (CheckpointError, OSError) as error:
            failure = error
            self._discard(path)
        # Yield outside of the try statement: an error in the caller's block is not a failed checkpoint.
        yield
        if failure is not None or path is None:
            self._settled(step, failure, is_last)
            return
        self.uncommitted.append(UncommittedCheckpoint(step, path, info, memory, is_last))
        if is_validated:
            self.complete({})

    def complete(self, figures: Mapping[str, float]) -> None:
        """Make the checkpoint that waits for the metrics of its validation visible, if there is one.

        Args:
            figures: of the validation, for the ranking.

        Raises:
            CheckpointError: as in ``saving``.
        """
        if not self.uncommitted:
            return
        current, failure = self.uncommitted.pop(), None
        # The samples of its steps have to be on disk before anybody can resume from this checkpoint.
        self.before_commit()
        try:
            if figures:
                known = {**current.info["metrics"], **_ranking_metrics(figures)}
                self.manager.replace_info(current.path, {**current.info, "metrics": known})
            if current.memory is not None:
                write = current.memory.write(current.path)
                self.in_flight.append(CheckpointInFlight(current.step, current.path, write))
                return
            self.manager.finalize_checkpoint(current.path)
        except (CheckpointError, OSError) as error:
            failure = error
            self._discard(current.path)
        self._settled(current.step, failure, current.is_last)

    def settle(self, *, wait: bool = False, is_last: Callable[[], bool] = lambda: False) -> None:
        """Make the checkpoint that was written meanwhile visible, if there is one and its write has ended.

        Args:
            wait: wait until the write has ended.
            is_last: as for ``saving``.

        Raises:
            CheckpointError: as in ``saving``.
        """
        if not self.in_flight or not (wait or self.in_flight[0].write.has_ended()):
            return
        current, failure = self.in_flight.pop(), None
        try:
            self.seconds[0] = current.write.wait(self.longest_s)
            # The process that wrote the checkpoint has flushed its files and made its manifest
            # (``Write.wait``).
            self.manager.finalize_checkpoint(current.path, is_sealed=True)
        except (CheckpointError, OSError) as error:
            failure = error
            self._discard(current.path)
        self._settled(current.step, failure, is_last)

    def leave(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait at the end of a run, as the exit of an ``ExitStack``, for the checkpoint that is being
        written, even if an error ends the run; discard it if the run must end at once. A checkpoint that
        waits for metrics is removed: a run resumed from it would never log them."""
        if self.uncommitted:
            self._discard(self.uncommitted.pop().path)
        # An interrupt ends the run at once, while after an error there is time to finish the write.
        if self.in_flight and not (error is None or isinstance(error, Exception)):
            current = self.in_flight.pop()
            current.write.abort()
            self._discard(current.path)
            return
        try:
            self.settle(wait=True)
        except CheckpointError as lost:
            logger.error("the checkpoint that was being written is lost: %s", lost)
        if self.memory is not None:
            # A save that was interrupted before its write began may have left memory.
            self.memory.free()

    def _settled(
        self, step: int, failure: CheckpointError | OSError | None, is_last: Callable[[], bool]
    ) -> None:
        """Count a checkpoint that was written, or that failed."""
        if failure is not None:
            self._note_failure(step, failure, is_last())
            return
        self.failed.clear()
        self.committed(step)

    def _discard(self, path: Path | None) -> None:
        """Remove the files of a checkpoint, on disk and in memory."""
        if self.memory is not None:
            self.memory.free()
        if path is not None and path.exists():
            self.manager.discard_tmp_checkpoint(path)

    def _needed_bytes(self) -> int:
        return self.manager.bytes_of_latest() or self.estimated_bytes

    def _left_in(self, memory: CheckpointMemory) -> CheckpointMemory | None:
        """Return the memory after all models have written there; None if it has no room for them, as was
        known before or turned out meanwhile."""
        if not memory.take(self._needed_bytes()):
            return None
        try:
            self._write_models(lambda role: memory.directories(role.name))
            memory.hold()
        except DeadlineError:
            # Re-raise it, as in ``saving``: workers that hang cannot write to disk either.
            raise
        except (CheckpointError, OSError) as error:
            logger.warning("a checkpoint cannot wait in memory and is written to the disk at once: %s", error)
            memory.free()
            return None
        return memory

    def _write_models(self, directories: Callable[[Role], Path | list[Path]]) -> None:
        """Have all models write below a directory, or each rank below its own."""
        for role, model in self.models.items():
            if role.directory is not None:
                self.turns.bring(role)
                places = directories(role)
                model.save_checkpoint(
                    weights_path=_below(places, role.directory, WEIGHTS),
                    optimizer_path=_below(places, role.directory, OPTIMIZER),
                    tokenizer_path=_below(places, role.directory, TOKENIZER),
                )

    def _note_failure(self, step: int, failure: CheckpointError | OSError, is_last: bool) -> None:
        """Warn of a checkpoint that could not be written.

        Raises:
            CheckpointError: the run must not continue without it.
        """
        self.failed.append(step)
        directory = self.manager.checkpoint_dir
        space = said_of_space(directory, self._needed_bytes(), failure)
        try:
            latest = next((path.name for _, path in self.manager.checkpoints()), None)
            kept = "there is no earlier one" if latest is None else f"{latest} is the newest one"
        except StorageError as error:
            kept = f"the newest checkpoint is unknown ({error})"
        # Omit the worker's traceback if the disk is full, because it does not help.
        reason = f"{space}. {str(failure).partition(WORKER_TRACE)[0]}" if space else str(failure)
        what = f"the checkpoint of step {step} could not be written: {reason}"
        if not is_last and len(self.failed) < self.most_failed:
            logger.warning(
                "%s; %s. Training continues; %d such saves in a row would end it",
                what,
                kept,
                self.most_failed,
            )
            return
        why = (
            "no later save follows"
            if is_last
            else f"{len(self.failed)} in a row, checkpointing.max_failed_saves = {self.most_failed}"
        )
        raise CheckpointError(
            f"{what}; {kept}, and {why}. Fix: check space and permissions in {directory}, and "
            "start again to resume"
        ) from failure


def _below(places: Path | list[Path], *parts: str) -> str | list[str]:
    """Return a path below a directory, or below each directory of a list."""
    return (
        [str(place.joinpath(*parts)) for place in places]
        if isinstance(places, list)
        else str(places.joinpath(*parts))
    )


_OF_VALIDATION = ("val_", "validation/")
_SCORED = "validation/scored"
_HAD, _TOLD = "had", "told"


def _ranking_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the step's metrics, those of a validation also as ``val_loss``, ``val_accuracy``, which
    ``metric_name`` may name."""
    short = {
        f"val_{name.removeprefix('validation/')}": value
        for name, value in metrics.items()
        if name.startswith("validation/")
    }
    return {**metrics, **short}
