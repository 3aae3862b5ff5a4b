"""Algorithms: what one is, what it is made of, and the roles that models play in it.

An algorithm is one file: a class with its configuration sections, what it needs, and how a step goes. The
built-in ones are listed in ``megarl.config.algorithms``; ``algorithm: path/to/file.py:Name`` runs one of a
user's own. A configuration is checked by what the class says, and that loads neither torch nor Ray: such a
file imports them where it uses them.
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
        models: by role; those of the roles that have workers of their own.
        refit: engines beside the actor; None where it generates itself, or nothing is generated.
        tokenizer: of the actor.
        environment: rewards responses; None for an algorithm that generates none.
        train_data, validation_data: the records; None for no validation.
        sampler: the order of the training data.
        timer: told the phases of a step.
        skipped: trains, and keeps batches that could not be trained on.
        sample_log: keeps samples for people to read; None for none.
        turns: whose turn it is on the devices. A step of a run with several models takes the turn of a model
            before it calls it, and that of the actor before samples are collected.
        last_step: number of the last step; None where it is not known.
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
    """One way to train.

    Attributes:
        sampler: the order of the training data, whose state a checkpoint keeps.

    Args:
        parts: what it is made of.
    """

    def __init__(self, parts: Parts) -> None:
        self.sampler = parts.sampler

    @abstractmethod
    def step(self, step: int) -> dict[str, float]:
        """Train once; ``step`` counts from 1. Returns the step's metrics, ``num_tokens`` (of the samples)
        among them."""

    def is_warming_up(self, step: int) -> bool:
        """Return whether ``step`` is one of the first, which lack some metrics of the others."""
        del step
        return False

    def validate(self) -> dict[str, float]:
        """Metrics on the validation data; empty without any. Changes nothing."""
        return {}

    def validate_beside(self) -> bool:
        """Have the last step validated while the next one trains, with the current weights; return False
        where this run cannot, and ``validate`` is to be called."""
        return False

    def validated_beside(self) -> dict[str, float] | None:
        """Return at the end of a step the figures of the validation that ``validate_beside`` has put beside
        it; None, and give it up, where no step has followed."""
        return None

    def save(self, directory: Path) -> None:
        """Write into a checkpoint what a resumed run needs beside models and the order of the data."""

    def load(self, directory: Path) -> None:
        """Read what ``save`` wrote, before the first step of a resumed run."""

    def close(self) -> None:
        """Leave nothing behind."""
