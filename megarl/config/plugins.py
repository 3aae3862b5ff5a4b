"""Declarations of what can be plugged in: roles of models, algorithms, and kinds of rollout engines.

Importing this module imports neither torch nor Ray.
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
    """The role of a model in an algorithm.

    Attributes:
        name: name of the role.
        directory: subdirectory of a checkpoint for its weights, optimizer state and tokenizer; None for a
            model that is not trained.
        has_workers: the model has its own workers, trained or not; otherwise another role's workers hold its
            weights.
        section: dotted path of the configuration section that the model is built from.
    """

    name: str
    directory: str | None
    has_workers: bool = True
    section: str = "policy"

    @property
    def is_trained(self) -> bool:
        """True if the model has an optimizer and is saved in checkpoints."""
        return self.directory is not None


ACTOR = Role("actor", "policy")
"""The policy that is trained."""

REFERENCE = Role("reference", None, has_workers=False)
"""The policy as it was before training. The actor's workers keep its weights."""

CRITIC = Role("critic", "critic", section="critic")
"""The model that estimates the value of the actor's states."""


REWARD_MODEL = Role("reward_model", None, section="reward_model")
"""A model that scores responses and is not trained."""


@dataclass(frozen=True, slots=True)
class ModelSection:
    """Configuration section of a model other than the policy. It has the keys of ``policy``, and inherits
    absent keys from it.

    Attributes:
        meaning: description in words, without a full stop.
        scores: the model has a score layer and generates nothing. Otherwise it is a language model, whose
            log-probabilities follow from how the policy's responses are sampled.
        is_trained: the model has an optimizer.
        has_backbone_of_policy: the model has the policy's family and sizes.
        by_name: the section holds several models under user-chosen names.
        is_optional: the model exists only if the section does. Otherwise the model can be built from
            ``policy`` alone.
    """

    meaning: str
    scores: bool = False
    is_trained: bool = False
    has_backbone_of_policy: bool = False
    by_name: bool = False
    is_optional: bool = False


class AlgorithmSpec:
    """Declaration of an algorithm to the configuration.

    Attributes:
        SECTIONS: configuration sections that the algorithm needs, TypedDicts by name. Its own section comes
            first and has ``max_num_steps``. A run also uses ``max_num_epochs``, ``val_period``,
            ``val_at_start`` and ``val_at_end`` of that section if it has them.
        OPTIONAL: sections of ``SECTIONS`` that a run may lack; rules decide when.
        MODELS: sections of models other than the policy, by name. A role gives its section as ``section``:
            ``NAME``, or ``NAME.NAME_OF_THE_USER``.
        GENERATES: a step samples responses, so that ``policy.generation``, ``env`` and prompts are needed;
            otherwise the data contain the answers.
        PAIRS: the data are pairs of a better and a worse answer, which become two consecutive rows of a
            batch; ``policy.train_global_batch_size`` and ``policy.train_micro_batch_size`` count pairs.
        SCORES: the actor is a scoring model (``policy.reward_model_cfg``).
        PROMPTS: dotted key of the number of prompts per step; None for ``policy.train_global_batch_size``.
        GENERATIONS: dotted key of the number of responses per prompt; None for one.
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
        """Return the roles of the models that a run needs, the actor first."""
        del config
        return (ACTOR,)


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Memory of a rollout engine on one device, in bytes.

    Attributes:
        weights: the device's part of the model.
        budget: device memory that the engine may use.
        token: keys and values of one token, and its share of the states of a full-length sequence.
        share: the budget in words.
        rest: the engine's other memory within the budget: counters of its sampler, CUDA graphs.
        experts: the device's part of one layer's routed experts.
        host: host memory that a rank takes while weights arrive.
        ranks: number of devices that share one engine.
    """

    weights: int
    budget: int
    token: int
    share: str
    rest: int = 0
    experts: int = 0
    host: int = 0
    ranks: int = 1

    @property
    def cached_tokens(self) -> int:
        """Number of tokens whose keys and values fit next to the weights and the rest; 0 if there is
        no room."""
        return max(0, self.budget - self.weights - self.rest) // max(self.token, 1)


@dataclass(frozen=True, slots=True)
class EngineKind:
    """A kind of rollout engine.

    Attributes:
        title: name of the engine for people.
        start: starts a run's engines and returns a ``RolloutEngine``; called with the ``RayVirtualCluster``
            and the whole configuration.
        complete: fills in the ``generation`` section; called with it and the ``policy`` section.
        section: TypedDict (of ``typing_extensions``) of ``policy.generation.engine_cfg``, the engine's own
            keys; None if it has none.
        rules: rules on the engine's part of the configuration.
        memory: returns the engine's memory on one device; called with a checked run's configuration and the
            model's sizes. None if the memory is unknown.
        distributions: names of Python distributions, one of which must be installed; empty for none.
        extra: megarl's extra that installs one of them, in words.
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
        """Return the name of the engine's package if it is not installed, otherwise None."""
        is_there = not self.distributions or any(map(installed_version, self.distributions))
        return None if is_there else self.distributions[0]
