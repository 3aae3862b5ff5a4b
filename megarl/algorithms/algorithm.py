"""Interface of algorithms, the parts of a run that they get, and the roles of their models.

An algorithm is one file: a class with its configuration sections, its requirements and its step. The built-in
ones are listed in ``megarl.config.algorithms``; ``algorithm: path/to/file.py:Name`` runs a user-defined one.
Configurations are checked against the class without loading torch or Ray, so such a file must import them
inside functions.
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
    """Models, data and tools of a run, which its algorithm gets.

    Attributes:
        config: configuration of the run.
        models: models with their own workers, by role.
        refit: transfers weights to the actor's engines; None if the actor generates itself, or if nothing is
            generated.
        tokenizer: the actor's tokenizer.
        environment: scores responses; None for an algorithm that samples none.
        train_data, validation_data: the records; None for no validation.
        sampler: yields the record indices in data order.
        timer: times the phases of a step.
        skipped: calls the policy's training, and stores batches that could not be trained on.
        sample_log: writes samples for people to read; None for none.
        turns: time-sharing of the devices between several models. A step must call ``take`` before it uses a
            model, and for the actor before it samples.
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
    """Base class of training algorithms.

    Attributes:
        sampler: yields the record indices in data order; checkpoints store its state.

    Args:
        parts: models, data and tools of the run.
    """

    def __init__(self, parts: Parts) -> None:
        self.sampler = parts.sampler

    @abstractmethod
    def step(self, step: int) -> dict[str, float]:
        """Run one training step, counted from 1. Return its metrics, including ``num_tokens`` (tokens of all
        samples)."""

    def is_warming_up(self, step: int) -> bool:
        """Return whether ``step`` is a warm-up step, which lacks some metrics of later steps."""
        del step
        return False

    def validate(self) -> dict[str, float]:
        """Return metrics on the validation data; empty if there are none. Must not change any state."""
        return {}

    def validate_beside(self) -> bool:
        """Request a validation of the current weights in the background of the next step. Return False if
        this is not possible, and ``validate`` must be called instead."""
        return False

    def validated_beside(self) -> dict[str, float] | None:
        """Return the metrics of the validation that ``validate_beside`` requested, at the end of the step.
        Return None if no step has run since; the validation is then cancelled."""
        return None

    def save(self, directory: Path) -> None:
        """Write into a checkpoint whatever a resumed run needs in addition to the models and the sampler."""

    def load(self, directory: Path) -> None:
        """Restore what ``save`` wrote, before the first step of a resumed run."""

    def close(self) -> None:
        """Release all resources of the algorithm."""
