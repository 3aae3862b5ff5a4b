"""Sources of the batches of a run's steps, and the part of waiting batches that a checkpoint keeps."""

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
    """Returns each step's batch, and may sample later ones while the step trains.

    Attributes:
        metrics: of the last batch and of the waiting ones.
        is_ahead: batches are sampled before their steps, with older weights.
    """

    metrics: Mapping[str, float]
    is_ahead: bool

    def next(self, step: int) -> Sampling:
        """Return the batch of a step. Sampling ahead continues with the policy's current weights."""
        ...

    def settle(self) -> None:
        """Wait at the end of a step for the sampling and the validation in progress.

        Raises:
            MegarlError: one of them has failed.
        """
        ...

    def validate_beside(self, validate: Callable[[], Validated]) -> bool:
        """Let a validation run during the next step; return False if this source runs nothing during
        steps."""
        ...

    def validated(self) -> Validated | None:
        """Return the result of a validation during the last step, once; None if there was none, and a pending
        one is then cancelled."""
        ...

    def save(self, directory: Path) -> None:
        """Write the waiting batches into a checkpoint; call it between steps.

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
        """Begin nothing more."""
        ...


class WaitingBatches(dict[int, Sampling]):
    """Batches that were sampled but not trained on yet, by their steps."""

    def save(self, directory: Path) -> None:
        """See ``RolloutSource``."""
        save_batches(directory, self)

    def load(self, directory: Path, data: Dataset) -> None:
        """See ``RolloutSource``."""
        groups, batches = groups_of(directory), load_batches(directory, data)
        waiting = 0 if groups is None else len(batches) + len(groups["running"])
        # If no batches wait, and no groups whose prompts were taken, another schedule loses nothing.
        if waiting:
            raise other_schedule(directory, waiting, "ready_first")
        self.update(batches)


class InTurn:
    """The source that samples the batch of a step when the step begins.

    Args:
        sample: samples the batch of a step.

    Attributes:
        waiting: batches of a checkpoint whose run sampled ahead.
    """

    metrics: Mapping[str, float] = {}
    is_ahead = False

    def __init__(self, sample: Callable[[int], Sampling]) -> None:
        self._sample, self.waiting = sample, WaitingBatches()

    def next(self, step: int) -> Sampling:
        """Return a waiting batch, or sample one now."""
        return self.waiting.pop(step) if step in self.waiting else self._sample(step)

    def settle(self) -> None:
        """Do nothing: nothing is sampled during a step."""

    def validate_beside(self, validate: Callable[[], Validated]) -> bool:
        """Return False: validation and training run one after the other."""
        del validate
        return False

    def validated(self) -> Validated | None:
        """Return None: nothing is validated during a step."""
        return None

    def save(self, directory: Path) -> None:
        """See ``RolloutSource``."""
        self.waiting.save(directory)

    def load(self, directory: Path, data: Dataset) -> None:
        """Read the batches of a run that sampled ahead; they are trained on first."""
        self.waiting.load(directory, data)

    def close(self) -> None:
        """Do nothing: nothing is sampled between steps."""


class ValidatesBeside:
    """The part of a source that runs a validation during the next step."""

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
        # Clear the result, so that a stop before the next validation does not find these metrics again.
        found, self._found = self._found, None
        return found

    def _take_wanted(self) -> Callable[[], Validated] | None:
        """Return the validation that the starting step has to run, or None."""
        validate, self._wanted, self._found = self._wanted, None, None
        return validate


def other_schedule(directory: Path, batches: int, there: str) -> UnusableCheckpointError:
    """Return the error for a checkpoint whose waiting batches belong to another schedule."""
    return UnusableCheckpointError(
        f"{directory} has {batches} batches of the schedule {there} that wait or are being "
        "sampled, and this run has another schedule. Fix: continue with grpo.async_grpo.schedule: "
        f"{there}, or from a checkpoint without such batches"
    )
