"""Algorithms: what one is, what it is made of, and the roles that models play in it.

An algorithm is one file: a class with its configuration sections, what it needs, and how a step goes. The built-in ones are listed in
``megarl.config.algorithms``; ``algorithm: path/to/file.py:Name`` runs one of a user's own. A configuration is checked by what the class
says, and that loads neither torch nor Ray: such a file imports them where it uses them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from megarl.algorithms.turns import Turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.algorithms.refit import Refit
    from megarl.algorithms.skipped_batches import SkippedBatches
    from megarl.data.datasets import Dataset
    from megarl.data.sampler import Sampler
    from megarl.models.policy.lm_policy import Policy
    from megarl.observe.timing import PhaseTimer
    from megarl.rollout.environment import Environment
    from megarl.rollout.sample_log import SampleLog


@dataclass(frozen=True, slots=True)
class Role:
    """The part that a model plays in an algorithm.

    Attributes:
        name: of the role.
        directory: of its weights, optimizer state and tokenizer in a checkpoint; None for a model that is not trained.
        has_workers: it has workers of its own, trained or not; else those of another role have its weights.
        section: dotted path of the section of a configuration that the model is made by.
    """

    name: str
    directory: str | None
    has_workers: bool = True
    section: str = "policy"

    @property
    def is_trained(self) -> bool:
        """Whether the model has an optimizer and a place in checkpoints."""
        return self.directory is not None


ACTOR = Role("actor", "policy")
"""The policy that is trained."""

REFERENCE = Role("reference", None, has_workers=False)
"""The policy as it was before training. The actor's workers keep it."""

CRITIC = Role("critic", "critic", section="critic")
"""The model that says what the actor's states are worth."""


REWARD_MODEL = Role("reward_model", None, section="reward_model")
"""A model that scores answers, and is not trained."""


@dataclass(frozen=True, slots=True)
class ModelSection:
    """Section of a configuration for a model beside the policy. It has the keys of ``policy``; those that are absent are as there.

    Attributes:
        meaning: in words, without a full stop.
        scores: the model has a score layer and generates nothing; else it is a language model, whose log-probabilities follow from how the
            policy's answers are drawn.
        is_trained: it has an optimizer.
        has_backbone_of_policy: it is of the policy's family, and all its sizes are the same.
        by_name: the section has several of them under names of the user's.
        is_optional: without the section there is no such model; else the model is then made by ``policy`` alone.
    """

    meaning: str
    scores: bool = False
    is_trained: bool = False
    has_backbone_of_policy: bool = False
    by_name: bool = False
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts: what an algorithm is made of.

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
        turns: whose turn it is on the devices. A step of a run with several models takes the turn of a model before it calls it, and that
            of the actor before samples are collected.
    """

    config: Mapping[str, Any]
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


class Algorithm(ABC):
    """One way to train.

    Attributes:
        SECTIONS: the sections of a configuration that the algorithm needs, TypedDicts by name. Its own comes first and has
            ``max_num_steps``; where it has ``max_num_epochs``, ``val_period``, ``val_at_start`` or ``val_at_end``, a run heeds them.
        OPTIONAL: those of them that a run may lack; rules say when.
        MODELS: sections of models beside the policy, by name; a role names its own as ``section``, ``NAME`` or ``NAME.NAME_OF_THE_USER``.
        GENERATES: a step samples responses, so that ``policy.generation``, ``env`` and prompts are needed; else the data have answers.
        PAIRS: the data are pairs of a better and a worse answer, two rows of a batch one after the other;
            ``policy.train_global_batch_size`` and ``policy.train_micro_batch_size`` count pairs.
        SCORES: the actor is a model that scores (``policy.reward_model_cfg``).
        PROMPTS: dotted key of the prompts of a step; None for ``policy.train_global_batch_size``.
        GENERATIONS: dotted key of the responses to a prompt; None for one.
        sampler: the order of the training data, whose state a checkpoint keeps.

    Args:
        parts: what it is made of.
    """

    SECTIONS: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    OPTIONAL: ClassVar[frozenset[str]] = frozenset()
    MODELS: ClassVar[Mapping[str, ModelSection]] = MappingProxyType({})
    GENERATES: ClassVar[bool] = True
    PAIRS: ClassVar[bool] = False
    SCORES: ClassVar[bool] = False
    PROMPTS: ClassVar[str | None] = None
    GENERATIONS: ClassVar[str | None] = None

    def __init__(self, parts: Parts) -> None:
        self.sampler = parts.sampler

    @classmethod
    def section(cls) -> str:
        """Name of the algorithm's own section."""
        return next(iter(cls.SECTIONS))

    @classmethod
    def roles(cls, config: Mapping[str, Any]) -> tuple[Role, ...]:
        """The models that a run needs, the actor first."""
        del config
        return (ACTOR,)

    @abstractmethod
    def step(self, step: int) -> dict[str, float]:
        """Train once; ``step`` counts from 1. Returns the step's metrics, ``num_tokens`` (of the samples) among them."""

    def is_warming_up(self, step: int) -> bool:
        """Whether ``step`` is one of the first, which have not all the metrics of the others."""
        del step
        return False

    def validate(self) -> dict[str, float]:
        """Metrics on the validation data; empty without any. Changes nothing."""
        return {}
