"""Resume: what a checkpoint of a run holds, how it is written, and where a resumed run goes on."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from megarl.checkpoint.manager import CONFIG_NAME
from megarl.config.resume_changes import check_changes
from megarl.errors import CheckpointError, ConfigError, UnusableCheckpointError, Violation
from megarl.observe.redact import redacted

if TYPE_CHECKING:
    from megarl.algorithms.algorithm import Role
    from megarl.checkpoint.manager import CheckpointManager
    from megarl.models.policy.interfaces import PolicyInterface

logger = logging.getLogger(__name__)

WEIGHTS, OPTIMIZER, TOKENIZER = "weights", "optimizer", "tokenizer"
"""Directories of a role's directory in a checkpoint."""


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Starting point of a run.

    Attributes:
        step: finished steps, 0 for a fresh run.
        sampler_state: for ``ResumableSampler.load_state``; None for a fresh run.
        checkpoint: that the run goes on from; None for a fresh run.
    """

    step: int = 0
    sampler_state: Mapping[str, Any] | None = None
    checkpoint: Path | None = None

    def weights_path(self, role: Role) -> Path | None:
        """Weights of the model of a role; None takes those that it is made with."""
        return self._path(role, WEIGHTS)

    def optimizer_path(self, role: Role) -> Path | None:
        """State of its optimizer; None for a fresh one."""
        return self._path(role, OPTIMIZER)

    def _path(self, role: Role, part: str) -> Path | None:
        return None if self.checkpoint is None or role.directory is None else self.checkpoint / role.directory / part


def find_resume_point(manager: CheckpointManager, resume: str) -> ResumePoint:
    """The latest valid checkpoint, or the very beginning.

    Args:
        manager: finds checkpoints.
        resume: ``"auto"``, or ``"never"`` for the beginning.

    Raises:
        UnusableCheckpointError: there are checkpoints, and none of them can be used.
        CheckpointError: a run that is not to resume finds a checkpoint that another launch would resume from.
    """
    path, damaged = manager.latest_and_damaged()
    if path is None:
        if damaged and resume != "never":
            raise UnusableCheckpointError(_none_can_be_used(damaged))
        return ResumePoint()
    if resume == "never":
        # Left there, it would be what the next automatic resume of this run goes on from.
        raise CheckpointError(
            f"checkpointing.resume = 'never', but {path} exists, and a later launch would resume from it. "
            "Fix: choose another run_dir, remove the old checkpoints, or resume with 'auto'"
        )
    info = manager.load_training_info(path) or {}
    step, sampler = info.get("step"), info.get("sampler")
    if not isinstance(step, int) or not isinstance(sampler, Mapping):
        raise UnusableCheckpointError(
            f"checkpoint {path}: training_info has step = {step!r} and sampler = {sampler!r}, expected a whole number and an object. "
            f"Fix: remove {path} to resume from an earlier one"
        )
    return ResumePoint(step, sampler, path)


def _none_can_be_used(damaged: Mapping[Path, Sequence[str]]) -> str:
    faults = "; ".join(f"{path}: {', '.join(problems[:3])}" for path, problems in damaged.items())
    return (
        f"the run has {len(damaged)} checkpoints and none can be used. {faults}. "
        "Fix: bring one back from a copy, or start over with checkpointing.resume=never, for one launch alone; "
        "the rows of metrics.jsonl are kept beside then"
    )


def report_changes(start: ResumePoint, config: Mapping[str, Any]) -> None:
    """Compare the configuration with that of the checkpoint that a run goes on from, and say what is another one.

    Raises:
        ConfigError: a change would do nothing, or is not accepted (``checkpointing.accept_changes``).
    """
    if start.checkpoint is None or not (start.checkpoint / CONFIG_NAME).is_file():
        return
    try:
        before = yaml.safe_load((start.checkpoint / CONFIG_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UnusableCheckpointError(f"{start.checkpoint / CONFIG_NAME} cannot be read: {error}. Fix: resume from another one") from error
    name = f"{start.checkpoint.parent.name}/{start.checkpoint.name}"
    for key, (old, new) in check_changes(before, redacted(config), name, config["checkpointing"]["accept_changes"]).items():
        logger.warning("another value than in checkpoint %s: %s = %r, there %r", name, key, new, old)


@dataclass(frozen=True, slots=True)
class CheckpointWriter:
    """Writes the checkpoints of a run.

    Attributes:
        manager: names, commits and prunes them.
        models: by role; each writes its weights, optimizer state and tokenizer into the role's directory.
        save_period: steps between checkpoints.
        run_config: kept beside every checkpoint.
        committed: told the step of every checkpoint from which another start would go on.
        before_commit: called when all of a checkpoint is written but its name.
        metric_notes: of ``require_metric``: whether a step has had the metric (``_HAD``), and whether its absence was said (``_TOLD``).
    """

    manager: CheckpointManager
    models: Mapping[Role, PolicyInterface]
    save_period: int
    run_config: Mapping[str, Any] = field(default_factory=dict)
    committed: Callable[[int], None] = lambda step: None
    before_commit: Callable[[], None] = lambda: None
    metric_notes: set[str] = field(default_factory=set)

    def due(self, step: int, last_step: int) -> bool:
        """Whether a checkpoint follows this step; one always follows the last."""
        return step == last_step or step % self.save_period == 0

    def require_metric(self, metrics: Mapping[str, float]) -> None:
        """Refuse a ``checkpointing.metric_name`` that the run does not have, before a checkpoint would be ranked by it.

        One that an earlier step had, or that is absent from a validation some answers of which could not be scored, is no wrong name: the
        checkpoint of such a step has no figure, and is the best one only where none has. That is said once.

        Args:
            metrics: of a step that was taken; those of a validation tell of its names too.

        Raises:
            ConfigError: with the names that are most like it.
        """
        name, known = self.manager.metric_name, _ranking_metrics(metrics)
        of_validation = name is not None and name.startswith(_OF_VALIDATION)
        if name is None or name == "step" or (of_validation and not any(each.startswith(_OF_VALIDATION) for each in known)):
            return
        if name in known:
            self.metric_notes.add(_HAD)
            return
        if _HAD in self.metric_notes or self.manager.has_metric() or (of_validation and metrics.get(_SCORED, 1.0) < 1):
            if _TOLD not in self.metric_notes:
                self.metric_notes.add(_TOLD)
                logger.warning(
                    "checkpointing.metric_name = %s is not among the metrics of this step: a checkpoint without it is not taken for the "
                    "best where another has it. This is not said again",
                    name,
                )
            return
        kin = [each for each in known if each.startswith(_OF_VALIDATION) == of_validation]
        alike = difflib.get_close_matches(name, kin, n=3, cutoff=0.5) or sorted(kin)
        raise ConfigError([Violation("checkpointing.metric_name", name, "this run has no such metric", f"write {' or '.join(alike)}")])

    @contextmanager
    def saving(self, step: int, sampler_state: Mapping[str, Any], metrics: Mapping[str, float]) -> Iterator[None]:
        """Write a checkpoint, run the block, then make the checkpoint visible.

        What the block leaves (the log of the step) so exists before anyone can resume after the step, and never without it.
        """
        info = {"step": step, "sampler": dict(sampler_state), "metrics": _ranking_metrics(metrics)}
        path = Path(self.manager.init_tmp_checkpoint(step, info, self.run_config))
        for role, model in self.models.items():
            if role.directory is not None:
                of_role = path / role.directory
                model.save_checkpoint(
                    weights_path=str(of_role / WEIGHTS), optimizer_path=str(of_role / OPTIMIZER), tokenizer_path=str(of_role / TOKENIZER)
                )
        yield
        self.before_commit()
        self.manager.finalize_checkpoint(path)
        self.committed(step)


_OF_VALIDATION = ("val_", "validation/")
_SCORED = "validation/scored"
_HAD, _TOLD = "had", "told"


def _ranking_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """The step's metrics, those of a validation also as ``val_loss``, ``val_accuracy``: names that ``metric_name`` may take."""
    short = {f"val_{name.removeprefix('validation/')}": value for name, value in metrics.items() if name.startswith("validation/")}
    return {**metrics, **short}
