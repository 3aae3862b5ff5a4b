"""Algorithms: their interface, the parts that they work with, and the roles of their models.

An algorithm is one file: a class with its configuration sections, its requirements, and its step. The
built-in
ones are listed in ``megarl.config.algorithms``; ``algorithm: path/to/file.py:Name`` runs a user's own. A
configuration is checked against the class without loading torch or Ray: such a file imports them where it
uses them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.algorithms.turns import Turns
from megarl.config.plugins import ACTOR, CRITIC, REFERENCE, REWARD_MODEL, AlgorithmSpec, ModelSection, Role

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.algorithms.refit import Refit
    from megarl.algorithms.skipped_batches import SkippedBatches
    from megarl.config.sections import RunConfig
    from megarl.data.datasets import Dataset
    from megarl.data.sampler import Sampler
    from megarl.models.policy.lm_policy import Policy
    from megarl.observe.timing import PhaseTimer
    from megarl.rollout.environment import Environment
    from megarl.rollout.sample_log import SampleLog

__all__ = ["ACTOR", "CRITIC", "REFERENCE", "REWARD_MODEL", "Algorithm", "ModelSection", "Parts", "Role"]


@dataclass(frozen=True, slots=True)
class Parts:
    """The models, data and tools that an algorithm works with.

    Attributes:
        config: of the whole run.
        models: by role; only roles that have workers of their own.
        refit: weight transfer to the actor's engines; None if it generates itself, or if nothing is
            generated.
        tokenizer: of the actor.
        environment: scores responses; None for an algorithm that generates none.
        train_data, validation_data: the records; None for no validation.
        sampler: the order of the training data.
        timer: records the phases of a step.
        skipped: trains, and keeps batches that could not be trained on.
        sample_log: keeps samples for people to read; None for none.
        turns: time-sharing of the devices. A step of a run with several models calls ``take`` before it uses
            a model, and for the actor before samples are collected.
        last_step: number of the last step; None if unknown.
    """

    config: RunConfig
    models: Mapping[Role, Policy]
    refit: Refit | None
    tokenizer: PreTrainedTokenizerBase
    environment: Environment | None
    train_data: Dataset
    validation_data: Dataset | None
    sampler: Sampler
    timer: PhaseTimer
    skipped: SkippedBatches
    sample_log: SampleLog | None = None
    turns: Turns = field(default_factory=lambda: Turns({}))
    last_step: int | None = None


class Algorithm(AlgorithmSpec, ABC):
    """A way to train.

    Attributes:
        sampler: the order of the training data, whose state a checkpoint keeps.

    Args:
        parts: models, data and tools of the run.
    """

    def __init__(self, parts: Parts) -> None:
        self.sampler = parts.sampler

    @abstractmethod
    def step(self, step: int) -> dict[str, float]:
        """Train once; ``step`` counts from 1. Return the step's metrics, including ``num_tokens`` (of the
        samples)."""

    def is_warming_up(self, step: int) -> bool:
        """Return whether ``step`` is one of the first, which lack some metrics of the later ones."""
        del step
        return False

    def validate(self) -> dict[str, float]:
        """Return metrics on the validation data, empty without such data. Changes no state."""
        return {}

    def validate_beside(self) -> bool:
        """Start a validation of the current weights that runs during the next step; return False if this run
        cannot, so that ``validate`` must be called."""
        return False

    def validated_beside(self) -> dict[str, float] | None:
        """Return at the end of a step the metrics of the validation that ``validate_beside`` started; None if
        no step has followed, and the validation is then abandoned."""
        return None

    def save(self, directory: Path) -> None:
        """Write the state that a resumed run needs besides models and the order of the data into a
        checkpoint."""

    def load(self, directory: Path) -> None:
        """Read the state that ``save`` wrote, before the first step of a resumed run."""

    def close(self) -> None:
        """Release everything that the algorithm holds."""
