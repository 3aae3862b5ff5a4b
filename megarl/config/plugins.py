"""Interfaces of plug-ins, without torch or Ray: roles of models, algorithms, and kinds of rollout engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from converters.model_config.architecture import ModelFacts
from megarl.config.sections import Config, RunConfig
from megarl.env import installed_version
from megarl.errors import Violation


@dataclass(frozen=True, slots=True)
class Role:
    """Role of a model in an algorithm, such as actor or critic.

    Attributes:
        name: name of the role.
        directory: subdirectory of a checkpoint with the model's weights, optimizer state and tokenizer; None
            if the model is not trained.
        has_workers: the model has worker processes of its own; otherwise another role's workers hold its
            weights.
        section: dotted path of the configuration section that describes the model.
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
"""Role of the policy that is trained."""

REFERENCE = Role("reference", None, has_workers=False)
"""Role of the policy's initial weights, the reference of the KL. The actor's workers hold them."""

CRITIC = Role("critic", "critic", section="critic")
"""Role of the value model, which estimates the returns of the actor's responses."""


REWARD_MODEL = Role("reward_model", None, section="reward_model")
"""Role of a model that scores responses and is not trained."""


@dataclass(frozen=True, slots=True)
class ModelSection:
    """Declaration of a configuration section for a model other than the policy. The section has the keys of
    ``policy``, and inherits absent keys from it.

    Attributes:
        meaning: text for the table of keys; it ends with a full stop.
        scores: the model has a score head and generates nothing; otherwise it is a language model, whose
            log-probabilities depend on the policy's sampling settings.
        is_trained: the model has an optimizer.
        has_backbone_of_policy: the model has the policy's family and sizes.
        by_name: the section contains several models under user-chosen names.
        is_optional: the model exists only if the section does; otherwise it can be built from ``policy``
            alone.
    """

    meaning: str
    scores: bool = False
    is_trained: bool = False
    has_backbone_of_policy: bool = False
    by_name: bool = False
    is_optional: bool = False


class AlgorithmSpec:
    """Declaration of an algorithm, as far as the configuration needs it.

    Attributes:
        SECTIONS: configuration sections that the algorithm reads, name -> TypedDict. The first one is the
            algorithm's own section and has ``max_num_steps``. The run loop also reads ``max_num_epochs``,
            ``val_period``, ``val_at_start`` and ``val_at_end`` there, if the section has them.
        OPTIONAL: names of the ``SECTIONS`` that a run may lack; rules decide when.
        MODELS: sections of models other than the policy, by name. ``Role.section`` refers to such a section
            as ``NAME``, or ``NAME.USER_NAME`` if it contains several models.
        GENERATES: steps sample responses, so ``policy.generation``, ``env`` and prompts are needed; otherwise
            the data contain the answers.
        PAIRS: records are pairs of a chosen and a rejected answer, which become two adjacent rows of a batch;
            ``policy.train_global_batch_size`` and ``policy.train_micro_batch_size`` count pairs.
        SCORES: the actor is a reward model (``policy.reward_model_cfg``).
        PROMPTS: dotted key of the number of prompts per step; None for ``policy.train_global_batch_size``.
        GENERATIONS: dotted key of the number of responses per prompt; None for one response.
    """

    SECTIONS: ClassVar[Mapping[str, type]] = MappingProxyType({})
    OPTIONAL: ClassVar[frozenset[str]] = frozenset()
    MODELS: ClassVar[Mapping[str, ModelSection]] = MappingProxyType({})
    GENERATES: ClassVar[bool] = True
    PAIRS: ClassVar[bool] = False
    SCORES: ClassVar[bool] = False
    PROMPTS: ClassVar[str | None] = None
    GENERATIONS: ClassVar[str | None] = None

    @classmethod
    def section(cls) -> str:
        """Return the name of the algorithm's own section, the first of ``SECTIONS``."""
        return next(iter(cls.SECTIONS))

    @classmethod
    def roles(cls, config: RunConfig) -> tuple[Role, ...]:
        """Return the roles of the models that a run needs, the actor first. The default is the actor
        alone."""
        del config
        return (ACTOR,)


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Memory of a rollout engine on one device, in bytes.

    Attributes:
        weights: the device's shard of the model's weights.
        budget: device memory that the engine may use in total.
        token: KV cache of one token, plus the token's share of the recurrent state of a sequence of maximum
            length.
        share: description of the budget for people.
        rest: memory inside the budget for other purposes: token counts of the sampler, CUDA graphs.
        experts: the device's shard of the routed experts of one layer.
        host: host memory that a rank needs while it receives weights.
        ranks: number of devices of one engine.
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
        """Number of tokens whose KV cache fits into the budget next to ``weights`` and ``rest``; 0 if these
        already exceed it."""
        return max(0, self.budget - self.weights - self.rest) // max(self.token, 1)


@dataclass(frozen=True, slots=True)
class EngineKind:
    """Description of a kind of rollout engine, by which megarl checks, plans and starts it.

    Attributes:
        title: name of the engine for people.
        start: starts the engines of a run; called with the ``RayVirtualCluster`` and the run's configuration,
            returns a ``RolloutEngine``.
        complete: fills in defaults; called with the ``generation`` and the ``policy`` section, returns the
            completed ``generation`` section.
        section: TypedDict (of ``typing_extensions``) with the keys of ``policy.generation.engine_cfg``; None
            for no such keys.
        rules: rules on the engine's part of the configuration. Each is called with a ``View``
            (``megarl.config.rules.view``), reads values by dotted keys, and yields a ``Violation``
            (``megarl.errors``) for each fault.
        memory: returns the engine's memory on one device; called with a checked run and the model's sizes.
            None if the memory is unknown.
        distributions: names of Python distributions of which one must be installed; empty for none.
        extra: the megarl extra that installs such a distribution, for messages.
    """

    title: str
    start: Callable[[Any, RunConfig], Any]
    complete: Callable[[Config, Config], Config] = lambda generation, policy: dict(generation)
    section: Any = None
    rules: tuple[Callable[[Any], Iterator[Violation]], ...] = ()
    memory: Callable[[RunConfig, ModelFacts], EngineMemory] | None = None
    distributions: tuple[str, ...] = ()
    extra: str = ""

    def missing_package(self) -> str | None:
        """Return the first of ``distributions`` if none of them is installed, else None."""
        # One is enough: the same package may have distributions for CPUs and for GPUs.
        is_there = not self.distributions or any(map(installed_version, self.distributions))
        return None if is_there else self.distributions[0]
