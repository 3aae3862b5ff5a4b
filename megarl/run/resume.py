"""Write the checkpoints of a run, and find the checkpoint from which a run resumes."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import yaml

from megarl.algorithms.turns import Turns
from megarl.checkpoint.background import CheckpointMemory, Write
from megarl.checkpoint.manager import CONFIG_NAME, CheckpointManager, TrainingInfo
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
    from megarl.config.plugins import Role
    from megarl.models.policy.interfaces import PolicyInterface

logger = logging.getLogger(__name__)

WEIGHTS, OPTIMIZER, TOKENIZER = "weights", "optimizer", "tokenizer"
"""Subdirectories of each role's directory in a checkpoint."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Starting point of a run.

    Attributes:
        step: number of finished steps; 0 for a fresh run.
        sampler_state: for ``ResumableSampler.load_state``; None for a fresh run.
        checkpoint: checkpoint to load; None for a fresh run.
    """

    step: int = 0
    sampler_state: Mapping[str, object] | None = None
    checkpoint: Path | None = None

    def weights_path(self, role: Role) -> Path | None:
        """Return the directory of a role's weights in the checkpoint; None if the configured model is
        loaded."""
        return self._path(role, WEIGHTS)

    def optimizer_path(self, role: Role) -> Path | None:
        """Return the directory of a role's optimizer state in the checkpoint; None for a new optimizer."""
        return self._path(role, OPTIMIZER)

    def _path(self, role: Role, part: str) -> Path | None:
        return (
            None
            if self.checkpoint is None or role.directory is None
            else self.checkpoint / role.directory / part
        )


def find_resume_point(manager: CheckpointManager | None, resume: str) -> ResumePoint:
    """Return the newest valid checkpoint as a starting point, or the start of training if there is none.

    Args:
        manager: finds checkpoints; None for a run without.
        resume: ``"auto"``, or ``"never"`` to start over.

    Raises:
        UnusableCheckpointError: there are checkpoints, but none is valid.
        CheckpointError: ``resume`` is "never" but a checkpoint exists.
    """
    path, damaged = (None, {}) if manager is None else manager.latest_and_damaged()
    if manager is None or path is None:
        if damaged and resume != "never":
            raise UnusableCheckpointError(_none_can_be_used(damaged))
        return ResumePoint()
    if resume == "never":
        # The next launch with ``auto`` would silently continue from that old checkpoint.
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
    """Compare the configuration with the one stored in the checkpoint, and log the differences.

    Raises:
        ConfigError: a change would have no effect, or needs ``checkpointing.accept_changes``.
        UnusableCheckpointError: the stored configuration is damaged.
        StorageError: the storage failed; the stored configuration may be intact.
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
    # Earlier versions stored paths with ``~``.
    before = without_tildes(before) if isinstance(before, dict) else before
    # Secrets are stored redacted, so redact both sides. Otherwise each secret would appear to have changed.
    for key, (old, new) in check_changes(
        redacted(before), redacted(config), name, config["checkpointing"]["accept_changes"]
    ).items():
        logger.warning(
            "a value differs from checkpoint %s: %s = %r, in the checkpoint %r", name, key, new, old
        )


@dataclass(frozen=True, slots=True)
class CheckpointInFlight:
    """A checkpoint that is being written to disk while training continues.

    Attributes:
        step: number of finished steps.
        path: temporary directory of the checkpoint.
        write: the running write.
    """

    step: int
    path: Path
    write: Write


@dataclass(frozen=True, slots=True)
class UncommittedCheckpoint:
    """A checkpoint that is saved, but still has its temporary name because its step's validation metrics are
    missing.

    Attributes:
        step: number of finished steps.
        path: temporary directory of the checkpoint.
        info: contents of ``training_info.json`` so far.
        memory: memory that contains the model files; None if they are in ``path``.
        is_last: see ``CheckpointWriter.saving``.
    """

    step: int
    path: Path
    info: TrainingInfo
    memory: CheckpointMemory | None
    is_last: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class CheckpointWriter:
    """Writes the checkpoints of a run.

    Attributes:
        manager: names, commits and prunes checkpoints.
        models: role -> model, which writes weights, optimizer state and tokenizer to the role's directory.
        save_period: steps between checkpoints.
        run_config: configuration to store in every checkpoint.
        committed: called with the step of each committed checkpoint.
        before_commit: called before a complete checkpoint is renamed to its final name.
        most_failed: number of consecutive failed saves that ends the run.
        estimated_bytes: estimated size of a checkpoint, used until one has been written.
        memory: for asynchronous saves: models write there, and another process copies the files to disk. None
            for synchronous saves.
        longest_s: timeout in seconds when the run waits for an asynchronous write.
        beside: writes further files, such as the algorithm's state, to the checkpoint directory.
        turns: loads a model onto the devices before it saves, if models share devices.
        in_flight: the checkpoint that is being written, if any.
        uncommitted: the checkpoint that waits for validation metrics, if any.
        seconds: duration of the last asynchronous write, as a list of one.
        failed: steps of the consecutive failed saves.
        metric_notes: state of ``require_metric``: whether a step has had the metric (``_HAD``), and whether a
            missing metric was logged (``_TOLD``).
    """

    manager: CheckpointManager
    models: Mapping[Role, PolicyInterface]
    save_period: int
    run_config: RunConfig | None = None
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
        """Return whether a checkpoint is written after this step: every ``save_period`` steps and after the
        last."""
        return step == last_step or step % self.save_period == 0

    def require_metric(self, metrics: Mapping[str, float]) -> None:
        """Check that ``checkpointing.metric_name`` is a metric of the run, before checkpoints are ranked by
        it.

        A missing metric is not an error if an earlier step had it, or if the validation could not score some
        responses. Such a checkpoint has no value, and ranks below all that have one. This is logged once.

        Args:
            metrics: metrics of a training step, a validation, or both, with prefixes. ``metric_name`` is
                checked only if its kind is present.

        Raises:
            ConfigError: the metric does not exist; names the most similar ones.
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
        """Return whether any checkpoint has the metric. Returns True on a storage error, which must not end
        the run."""
        try:
            return self.manager.has_metric()
        except StorageError as error:
            logger.warning("it is unknown whether a checkpoint has the metric: %s", error)
            return True

    @contextmanager
    def saving(
        self,
        step: int,
        sampler_state: Mapping[str, object],
        metrics: Mapping[str, float],
        is_last: Callable[[], bool] = lambda: False,
        *,
        is_validated: bool = True,
    ) -> Iterator[None]:
        """Save a checkpoint, run the block, then commit the checkpoint.

        The block logs the step. So the log exists before a launch can resume after the step, and a save that
        is interrupted leaves no checkpoint without a log. If a save fails, its files are removed, a warning
        is logged, and the run continues.

        Args:
            step: number of finished steps.
            sampler_state: position in the training data.
            metrics: metrics of the step, for the ranking of checkpoints.
            is_last: called when the save fails; returns whether no other save follows, so that the step would
                be lost.
            is_validated: False if validation metrics are still missing; ``complete`` then commits the
                checkpoint.

        Raises:
            CheckpointError: the save failed, and it was the last one or the ``most_failed``-th in a row.
        """
        # The previous checkpoint occupies the memory that this one needs, so wait for its write.
        self.settle(wait=True)
        info: TrainingInfo = {
            "step": step,
            "sampler": dict(sampler_state),
            "metrics": _ranking_metrics(metrics),
        }
        failure: CheckpointError | OSError | None = None
        path: Path | None = None
        memory: CheckpointMemory | None = None
        try:
            path = begun = self.manager.init_tmp_checkpoint(step, info, self.run_config)
            self.beside(begun)
            # The run waits for the last checkpoint in any case, so write it directly to disk.
            memory = None if self.memory is None or is_last() else self._left_in(self.memory)
            if memory is None:
                self._write_models(lambda role: begun)
        except DeadlineError:
            # A DeadlineError is an OSError, but its workers hang and could not train the next step either.
            raise
        except (CheckpointError, OSError) as error:
            failure = error
            self._discard(path)
        # Yield outside of ``try``, because an error in the caller's block is not a failed save.
        yield
        if failure is not None or path is None:
            self._settled(step, failure, is_last)
            return
        self.uncommitted.append(UncommittedCheckpoint(step, path, info, memory, is_last))
        if is_validated:
            self.complete({})

    def complete(self, figures: Mapping[str, float]) -> None:
        """Commit the checkpoint that waits for validation metrics, if there is one. With asynchronous saves,
        start its write to disk instead.

        Args:
            figures: validation metrics, for the ranking of checkpoints.

        Raises:
            CheckpointError: as in ``saving``.
        """
        if not self.uncommitted:
            return
        current, failure = self.uncommitted.pop(), None
        # The samples of the checkpoint's steps must be on disk before a launch can resume from it.
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
        """Commit the checkpoint that was written in the background, if its write has ended.

        Args:
            wait: wait for the end of the write.
            is_last: as in ``saving``.

        Raises:
            CheckpointError: as in ``saving``.
        """
        if not self.in_flight or not (wait or self.in_flight[0].write.has_ended()):
            return
        current, failure = self.in_flight.pop(), None
        try:
            self.seconds[0] = current.write.wait(self.longest_s)
            # The writing process has flushed the files and written the manifest already (``Write.wait``).
            self.manager.finalize_checkpoint(current.path, is_sealed=True)
        except (CheckpointError, OSError) as error:
            failure = error
            self._discard(current.path)
        self._settled(current.step, failure, is_last)

    def leave(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish background work at the end of a run; the signature is that of an ``ExitStack`` exit
        callback.

        A background write is awaited, even if the run fails with an error. An interrupt, such as
        ``SystemExit``, aborts it. A checkpoint that waits for validation metrics is removed, because a run
        resumed from it would never log them.
        """
        if self.uncommitted:
            self._discard(self.uncommitted.pop().path)
        # After an error there is time to finish the write, but an interrupt must end the run at once.
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
            # Free the memory of a save that was interrupted before its write began.
            self.memory.free()

    def _settled(
        self, step: int, failure: CheckpointError | OSError | None, is_last: Callable[[], bool]
    ) -> None:
        """Record a save as committed or failed."""
        if failure is not None:
            self._note_failure(step, failure, is_last())
            return
        self.failed.clear()
        self.committed(step)

    def _discard(self, path: Path | None) -> None:
        """Delete the files of a failed checkpoint on disk and in memory."""
        if self.memory is not None:
            self.memory.free()
        if path is not None and path.exists():
            self.manager.discard_tmp_checkpoint(path)

    def _needed_bytes(self) -> int:
        return self.manager.bytes_of_latest() or self.estimated_bytes

    def _left_in(self, memory: CheckpointMemory) -> CheckpointMemory | None:
        """Save all models to memory and return it; return None if there is too little memory."""
        if not memory.take(self._needed_bytes()):
            return None
        try:
            self._write_models(lambda role: memory.directories(role.name))
            memory.hold()
        except DeadlineError:
            # Workers that hang cannot write to disk either.
            raise
        except (CheckpointError, OSError) as error:
            logger.warning("a checkpoint cannot wait in memory and is written to the disk at once: %s", error)
            memory.free()
            return None
        return memory

    def _write_models(self, directories: Callable[[Role], Path | list[Path]]) -> None:
        """Save each role's model.

        Args:
            directories: returns a role's base directory, or one base directory per rank.
        """
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
        """Log a failed save.

        Raises:
            CheckpointError: it was the last save or one failure too many.
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
    """Join parts to a directory, or to each directory of a list."""
    return (
        [str(place.joinpath(*parts)) for place in places]
        if isinstance(places, list)
        else str(places.joinpath(*parts))
    )


_OF_VALIDATION = ("val_", "validation/")
_SCORED = "validation/scored"
_HAD, _TOLD = "had", "told"


def _ranking_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics, with those of a validation also as ``val_NAME``, which ``metric_name`` accepts."""
    short = {
        f"val_{name.removeprefix('validation/')}": value
        for name, value in metrics.items()
        if name.startswith("validation/")
    }
    return {**metrics, **short}
