"""Declarations of what can be plugged in: models' roles, algorithms, and kinds of rollout engines.

Importing this module loads neither torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from converters.model_config.architecture import ModelFacts
from megarl.config.sections import RunConfig
from megarl.env import installed_version
from megarl.errors import Violation


@dataclass(frozen=True, slots=True)
class Role:
    """The part that a model plays in an algorithm.

    Attributes:
        name: of the role.
        directory: of its weights, optimizer state and tokenizer in a checkpoint; None for a model that is not
            trained.
        has_workers: it has workers of its own, trained or not; else those of another role have its weights.
        section: dotted path of the section of a configuration that the model is made by.
    """

    name: str
    directory: str | None
    has_workers: bool = True
    section: str = "policy"

    @property
    def is_trained(self) -> bool:
        """True if the model has an optimizer and a place in checkpoints."""
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
    """Section of a configuration for a model beside the policy. It has the keys of ``policy``; those that are
    absent are as there.

    Attributes:
        meaning: in words, without a full stop.
        scores: the model has a score layer and generates nothing; else it is a language model, whose
            log-probabilities follow from how the policy's answers are sampled.
        is_trained: it has an optimizer.
        has_backbone_of_policy: it is of the policy's family, and all its sizes are the same.
        by_name: the section has several of them under names of the user's.
        is_optional: without the section there is no such model; else the model is then made by ``policy``
            alone.
    """

    meaning: str
    scores: bool = False
    is_trained: bool = False
    has_backbone_of_policy: bool = False
    by_name: bool = False
    is_optional: bool = False


class AlgorithmSpec:
    """An algorithm's declaration of itself to the configuration.

    Attributes:
        SECTIONS: the sections of a configuration that the algorithm needs, TypedDicts by name. Its own comes
            first and has ``max_num_steps``; where it has ``max_num_epochs``, ``val_period``, ``val_at_start``
            or ``val_at_end``, a run heeds them.
        OPTIONAL: those of them that a run may lack; rules say when.
        MODELS: sections of models beside the policy, by name; a role names its own as ``section``, ``NAME``
            or ``NAME.NAME_OF_THE_USER``.
        GENERATES: a step samples responses, so that ``policy.generation``, ``env`` and prompts are needed;
            else the data have answers.
        PAIRS: the data are pairs of a better and a worse answer, two rows of a batch one after the other;
            ``policy.train_global_batch_size`` and ``policy.train_micro_batch_size`` count pairs.
        SCORES: the actor is a model that scores (``policy.reward_model_cfg``).
        PROMPTS: dotted key of the prompts of a step; None for ``policy.train_global_batch_size``.
        GENERATIONS: dotted key of the responses to a prompt; None for one.
    """

    SECTIONS: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    OPTIONAL: ClassVar[frozenset[str]] = frozenset()
    MODELS: ClassVar[Mapping[str, ModelSection]] = MappingProxyType({})
    GENERATES: ClassVar[bool] = True
    PAIRS: ClassVar[bool] = False
    SCORES: ClassVar[bool] = False
    PROMPTS: ClassVar[str | None] = None
    GENERATIONS: ClassVar[str | None] = None

    @classmethod
    def section(cls) -> str:
        """Return the name of the algorithm's own section."""
        return next(iter(cls.SECTIONS))

    @classmethod
    def roles(cls, config: RunConfig) -> tuple[Role, ...]:
        """Return the models that a run needs, the actor first."""
        del config
        return (ACTOR,)


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Memory of a device of a rollout engine.

    Attributes:
        weights: its part of the model.
        budget: what the engine may take of the device.
        token: keys and values of one token, and its share of the states of a sequence of full length.
        share: the budget in words.
        rest: what else the engine takes of it: counters of its sampler, CUDA graphs.
        experts: its part of the routed experts of one layer.
        host: host memory that a rank takes while weights arrive.
    """

    weights: int
    budget: int
    token: int
    share: str
    rest: int = 0
    experts: int = 0
    host: int = 0

    @property
    def cached_tokens(self) -> int:
        """Tokens whose keys and values have room beside the weights and the rest; 0 where there is none."""
        return max(0, self.budget - self.weights - self.rest) // max(self.token, 1)


@dataclass(frozen=True, slots=True)
class EngineKind:
    """A kind of rollout engine.

    Attributes:
        title: what people call it.
        start: starts the engines of a run, a ``RolloutEngine``; called with the ``RayVirtualCluster`` and the
            whole configuration.
        complete: fills the ``generation`` section in, called with it and the ``policy`` section.
        section: TypedDict (of ``typing_extensions``) of ``policy.generation.engine_cfg``, its own keys; None
            for none.
        rules: on the engine's part of the configuration.
        memory: of a device, called with a checked run's configuration and the model's sizes; None where it is
            not known.
        distributions: names of Python distributions, one of which has to be installed; empty for none.
        extra: megarl's extra that installs one, in words.
    """

    title: str
    start: Callable[[Any, RunConfig], Any]
    complete: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]] = lambda generation, policy: (
        dict(generation)
    )
    section: Any = None
    rules: tuple[Callable[[Any], Iterator[Violation]], ...] = ()
    memory: Callable[[RunConfig, ModelFacts], EngineMemory] | None = None
    distributions: tuple[str, ...] = ()
    extra: str = ""

    def missing_package(self) -> str | None:
        """Return the name of the engine's package where it is not installed; None where it is."""
        is_there = not self.distributions or any(installed_version(name) for name in self.distributions)
        return None if is_there else self.distributions[0]
