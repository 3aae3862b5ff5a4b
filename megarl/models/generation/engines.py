"""The registry of rollout engines: what ``policy.generation.backend`` may name beside the policy's own generation.

An engine is a ``RolloutEngine`` (``megarl.models.generation.interfaces``) and an ``EngineKind`` that says how to start it. The kind of a
user's own engine is named by import path, ``policy.generation.backend: path/to/file.py:KIND``. This module loads neither torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from megarl.env import installed_version
from megarl.errors import ConfigError, Violation
from megarl.import_path import is_import_path, load_object

if TYPE_CHECKING:
    from converters.model_config.architecture import ModelFacts
    from megarl.config.memory_run import EngineMemory
    from megarl.config.rules.view import Rule
    from megarl.distributed.virtual_cluster import RayVirtualCluster
    from megarl.models.generation.interfaces import RolloutEngine

KEY = "policy.generation.backend"
OF_THE_POLICY = ("megatron", "hf")
"""Backends by which the policy itself generates."""


@dataclass(frozen=True, slots=True)
class EngineKind:
    """A kind of rollout engine.

    Attributes:
        title: what people call it.
        start: starts the engines of a run on a cluster, called with the cluster and the whole configuration.
        complete: fills the ``generation`` section in, called with it and the ``policy`` section.
        rules: on the engine's part of the configuration.
        memory: of a device, called with a checked run's configuration and the model's sizes; None where it is not known.
        distributions: names of Python distributions, one of which has to be installed; empty for none.
        extra: megarl's extra that installs one, in words.
    """

    title: str
    start: Callable[[RayVirtualCluster, Mapping[str, Any]], RolloutEngine]
    complete: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]] = lambda generation, policy: dict(generation)
    rules: tuple[Rule, ...] = ()
    memory: Callable[[Mapping[str, Any], ModelFacts], EngineMemory] | None = None
    distributions: tuple[str, ...] = ()
    extra: str = ""

    def missing_package(self) -> str | None:
        """Return the name of the engine's package where it is not installed; None where it is."""
        is_there = not self.distributions or any(installed_version(name) for name in self.distributions)
        return None if is_there else self.distributions[0]


class SharesDevices(Protocol):
    """What shares its devices with engines: a policy."""

    def offload_after_refit(self) -> None:
        """Leave the devices."""

    def prepare_for_lp_inference(self) -> None:
        """Take them again, as far as log-probabilities need."""


Engines = TypeVar("Engines", bound="RolloutEngine")


def started_on_empty_devices(policy: SharesDevices | None, start: Callable[[], Engines]) -> Engines:
    """Engines that start when the policy has left their devices, and sleep before its parameters return.

    vLLM starts only where its whole share of a device is free, and a policy in training leaves less, above all a resumed one with its
    moments. Gradients and optimizer state stay in host memory until the next step trains.

    Args:
        policy: on the same devices; None where they have devices of their own.
        start: starts the engines.
    """
    if policy is None:
        return start()
    policy.offload_after_refit()
    engines = start()
    engines.finish_generation()
    policy.prepare_for_lp_inference()
    return engines


ENGINES: Mapping[str, str] = MappingProxyType({"vllm": "megarl.models.generation.vllm.kind:KIND"})
"""Import paths of the built-in kinds, by the name that the configuration has for them."""


def is_engine(backend: object) -> bool:
    """Whether a backend is an engine beside the policy."""
    return isinstance(backend, str) and backend not in OF_THE_POLICY


def engine_kind(backend: str) -> EngineKind:
    """The kind of engine that ``policy.generation.backend`` names.

    Raises:
        ConfigError: nothing can be imported under that name, or it is no ``EngineKind``.
    """
    path = ENGINES.get(backend, backend)
    found = load_object(path, KEY) if is_import_path(path) else None
    if not isinstance(found, EngineKind):
        bound = f"it must be {', '.join((*OF_THE_POLICY, *ENGINES))} or the import path of an EngineKind"
        raise ConfigError([Violation(KEY, backend, bound, "write one of those names, or path/to/file.py:KIND")])
    return found
