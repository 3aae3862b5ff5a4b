"""Rollout sources, which provide the batch of each step, and the storage of waiting batches in
checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from megarl.algorithms.sampled_batch import Sampling, groups_of, load_batches, save_batches
from megarl.errors import UnusableCheckpointError

if TYPE_CHECKING:
    from megarl.data.datasets import Dataset
    from megarl.rollout.evaluation import ValidatedSet

    Validated = list[ValidatedSet]


class RolloutSource(Protocol):
    """Provides each step's batch, and may sample later ones while the step trains.

    Attributes:
        metrics: metrics of the last batch and of the waiting ones.
        is_ahead: batches are sampled before their steps, with older weights.
    """

    metrics: Mapping[str, float]
    is_ahead: bool

    def next(self, step: int) -> Sampling:
        """Return the batch of a step. Background sampling continues with the policy's current weights."""
        ...

    def settle(self) -> None:
        """Wait at the end of a step for the sampling and validation that run during it.

        Raises:
            MegarlError: one of them has failed.
        """
        ...

    def validate_beside(self, validate: Callable[[], Validated]) -> bool:
        """Schedule a validation in the background of the next step. Return False if this source does nothing
        in the background."""
        ...

    def validated(self) -> Validated | None:
        """Return the result of the last step's background validation, once. Return None if there was none;
        one that is still scheduled is cancelled."""
        ...

    def save(self, directory: Path) -> None:
        """Write the waiting batches into a checkpoint. Call this between steps.

        Raises:
            OSError: a file cannot be written.
        """
        ...

    def load(self, directory: Path, data: Dataset) -> None:
        """Read the waiting batches of a checkpoint.

        Raises:
            UnusableCheckpointError: they cannot be read, or belong to another schedule.
        """
        ...

    def close(self) -> None:
        """Start nothing more."""
        ...


class WaitingBatches(dict[int, Sampling]):
    """Batches that were sampled but not trained on yet, by step."""

    def save(self, directory: Path) -> None:
        """See ``RolloutSource``."""
        save_batches(directory, self)

    def load(self, directory: Path, data: Dataset) -> None:
        """See ``RolloutSource``."""
        groups, batches = groups_of(directory), load_batches(directory, data)
        waiting = 0 if groups is None else len(batches) + len(groups["running"])
        # Without waiting batches and without groups in progress, another schedule loses nothing.
        if waiting:
            raise other_schedule(directory, waiting, "ready_first")
        self.update(batches)


class InTurn:
    """Rollout source that samples the batch of a step when the step starts.

    Args:
        sample: samples the batch of a step.

    Attributes:
        waiting: batches from the checkpoint of a run that sampled ahead.
    """

    metrics: Mapping[str, float] = {}
    is_ahead = False

    def __init__(self, sample: Callable[[int], Sampling]) -> None:
        self._sample, self.waiting = sample, WaitingBatches()

    def next(self, step: int) -> Sampling:
        """Return the waiting batch of a step, or sample it now."""
        return self.waiting.pop(step) if step in self.waiting else self._sample(step)

    def settle(self) -> None:
        """Do nothing: no sampling runs during a step."""

    def validate_beside(self, validate: Callable[[], Validated]) -> bool:
        """Return False: nothing runs in the background of a step."""
        del validate
        return False

    def validated(self) -> Validated | None:
        """Return None: no validation runs in the background."""
        return None

    def save(self, directory: Path) -> None:
        """See ``RolloutSource``."""
        self.waiting.save(directory)

    def load(self, directory: Path, data: Dataset) -> None:
        """Read the waiting batches of a run that sampled ahead. They are trained on first."""
        self.waiting.load(directory, data)

    def close(self) -> None:
        """Do nothing: no sampling runs in the background."""


class ValidatesBeside:
    """Mixin of a rollout source that runs a validation in the background of the next step."""

    def __init__(self) -> None:
        self._wanted: Callable[[], Validated] | None = None
        self._found: Validated | None = None

    def validate_beside(self, validate: Callable[[], Validated]) -> bool:
        """See ``RolloutSource``."""
        self._wanted = validate
        return True

    def validated(self) -> Validated | None:
        """See ``RolloutSource``."""
        self._wanted = None
        # Clear the result, so that a stop before the next validation does not report it again.
        found, self._found = self._found, None
        return found

    def _take_wanted(self) -> Callable[[], Validated] | None:
        """Return and clear the validation that the starting step has to run; None if none is scheduled."""
        validate, self._wanted, self._found = self._wanted, None, None
        return validate


def other_schedule(directory: Path, batches: int, there: str) -> UnusableCheckpointError:
    """Build the error for a checkpoint whose waiting batches belong to another schedule."""
    return UnusableCheckpointError(
        f"{directory} has {batches} batches of the schedule {there} that wait or are being "
        "sampled, and this run has another schedule. Fix: continue with grpo.async_grpo.schedule: "
        f"{there}, or from a checkpoint without such batches"
    )
