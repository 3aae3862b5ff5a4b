"""The batches of a run's steps: where they come from, and what a checkpoint keeps of those that wait."""

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
    """Gives each step its batch, and may sample later ones while it trains.

    Attributes:
        metrics: of the last batch and of those that wait.
        is_ahead: batches are sampled before their steps, with older weights.
    """

    metrics: Mapping[str, float]
    is_ahead: bool

    def next(self, step: int) -> Sampling:
        """Return the batch of a step. What is sampled ahead goes on with the weights that the policy has
        now."""
        ...

    def settle(self) -> None:
        """At the end of a step, wait for what is sampled and validated during it.

        Raises:
            MegarlError: that has failed.
        """
        ...

    def validate_beside(self, validate: Callable[[], Validated]) -> bool:
        """Have a validation go on during the next step, where something does; False where nothing does."""
        ...

    def validated(self) -> Validated | None:
        """Return what a validation during the last step has found, once; None where there was none, which
        then is not wanted any more."""
        ...

    def save(self, directory: Path) -> None:
        """Write the batches that wait into a checkpoint; to be called between steps.

        Raises:
            OSError: a file cannot be written.
        """
        ...

    def load(self, directory: Path, data: Dataset) -> None:
        """Read them.

        Raises:
            UnusableCheckpointError: they cannot be read, or belong to another schedule.
        """
        ...

    def close(self) -> None:
        """Begin nothing more."""
        ...


class WaitingBatches(dict[int, Sampling]):
    """Batches that were sampled and not trained on yet, by their steps."""

    def save(self, directory: Path) -> None:
        """See ``RolloutSource``."""
        save_batches(directory, self)

    def load(self, directory: Path, data: Dataset) -> None:
        """See ``RolloutSource``."""
        groups, batches = groups_of(directory), load_batches(directory, data)
        waiting = 0 if groups is None else len(batches) + len(groups["running"])
        # Without batches that wait, and groups whose prompts were taken, nothing is lost by another schedule.
        if waiting:
            raise other_schedule(directory, waiting, "ready_first")
        self.update(batches)


class InTurn:
    """Samples the batch of a step when that begins.

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
        """See ``RolloutSource``: one that waits, or one that is sampled now."""
        return self.waiting.pop(step) if step in self.waiting else self._sample(step)

    def settle(self) -> None:
        """Nothing is sampled during a step."""

    def validate_beside(self, validate: Callable[[], Validated]) -> bool:
        """Validation and training take turns."""
        del validate
        return False

    def validated(self) -> Validated | None:
        """Nothing is validated during a step."""
        return None

    def save(self, directory: Path) -> None:
        """See ``RolloutSource``."""
        self.waiting.save(directory)

    def load(self, directory: Path, data: Dataset) -> None:
        """See ``RolloutSource``; the batches of a run that sampled ahead are trained on first."""
        self.waiting.load(directory, data)

    def close(self) -> None:
        """Nothing is sampled between steps."""


class ValidatesBeside:
    """The part of a source that has a validation go on during the next step."""

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
        # Taken, so that a stop before the next validation does not find the figures of this one again.
        found, self._found = self._found, None
        return found

    def _take_wanted(self) -> Callable[[], Validated] | None:
        """Return the validation that the step which begins has to go on with."""
        validate, self._wanted, self._found = self._wanted, None, None
        return validate


def other_schedule(directory: Path, batches: int, there: str) -> UnusableCheckpointError:
    """Return the error of a checkpoint whose waiting batches are of another schedule."""
    return UnusableCheckpointError(
        f"{directory} has {batches} batches of the schedule {there} that wait or are under way, and this run "
        f"has another schedule. Fix: go on with grpo.async_grpo.schedule: {there}, or from a checkpoint "
        "without any"
    )
