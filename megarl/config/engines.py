"""The registry of rollout engines: the possible values of ``policy.generation.backend``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from typing_extensions import is_typeddict

from megarl.config.generation import GenerationConfig
from megarl.config.nested import at
from megarl.config.plugins import EngineKind
from megarl.errors import ConfigError, Violation
from megarl.import_path import is_import_path, load_object

KEY = "policy.generation.backend"
OF_THE_POLICY = ("megatron", "hf")
"""Backends with which the policy itself generates."""

ENGINES: Mapping[str, str] = MappingProxyType({"vllm": "megarl.models.generation.vllm.kind:KIND"})
"""Name of each built-in engine kind in the configuration, to its import path."""

APART = "megarl.models.policy.policy_engines:KIND"
"""Engine kind whose workers run the policy's backend and only generate. ``OF_THE_POLICY`` selects it if
``colocated.enabled`` is false."""


def is_engine(generation: GenerationConfig | None) -> bool:
    """Return whether a ``policy.generation`` section with defaults selects an engine, so that the policy does
    not generate itself. Values in the section may have the wrong types."""
    if generation is None:
        return False
    backend = at(generation, "backend")
    # The policy's own backend on separate ranks is an engine too (``APART``).
    return isinstance(backend, str) and (
        backend not in OF_THE_POLICY or at(generation, "colocated.enabled") is False
    )


def kind_of(generation: GenerationConfig | None) -> EngineKind | None:
    """Return the engine kind that a ``policy.generation`` section selects; None if the policy itself
    generates.

    Raises:
        ConfigError: as in ``engine_kind``.
    """
    return engine_kind(generation["backend"]) if generation is not None and is_engine(generation) else None


def engine_kind(backend: str) -> EngineKind:
    """Return the engine kind that ``policy.generation.backend`` names.

    Raises:
        ConfigError: there is no such kind, or the object is not a valid ``EngineKind``.
    """
    path = APART if backend in OF_THE_POLICY else ENGINES.get(backend, backend)
    found = load_object(path, KEY) if is_import_path(path) else None
    if not isinstance(found, EngineKind):
        bound = f"it must be {', '.join((*OF_THE_POLICY, *ENGINES))} or the import path of an EngineKind"
        raise ConfigError(
            [Violation(KEY, backend, bound, "write one of those names, or path/to/file.py:KIND")]
        )
    if found.section is not None and not is_typeddict(found.section):
        bound = (
            f"the section of its EngineKind is {found.section!r:.60}, but must be a TypedDict of "
            "typing_extensions"
        )
        raise ConfigError([Violation(KEY, backend, bound, "write class NAME(typing_extensions.TypedDict)")])
    return found
