"""The registry of rollout engines: what ``policy.generation.backend`` may name beside the policy's own
generation."""

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
"""Backends by which the policy itself generates."""

ENGINES: Mapping[str, str] = MappingProxyType({"vllm": "megarl.models.generation.vllm.kind:KIND"})
"""Import paths of the built-in kinds, by the name that the configuration has for them."""

APART = "megarl.models.policy.policy_engines:KIND"
"""Workers of the policy's backend that only generate: what ``OF_THE_POLICY`` means with ``colocated.enabled:
false``."""


def is_engine(generation: GenerationConfig | None) -> bool:
    """Return whether an engine other than the policy generates, by a ``policy.generation`` section with its
    defaults; its types need not be right."""
    if generation is None:
        return False
    backend = at(generation, "backend")
    # The policy's own backend on ranks of its own is an engine too (``APART``).
    return isinstance(backend, str) and (
        backend not in OF_THE_POLICY or at(generation, "colocated.enabled") is False
    )


def kind_of(generation: GenerationConfig | None) -> EngineKind | None:
    """Return the kind of engine that a ``policy.generation`` section asks for; None where the policy itself
    generates.

    Raises:
        ConfigError: as ``engine_kind``.
    """
    return engine_kind(generation["backend"]) if generation is not None and is_engine(generation) else None


def engine_kind(backend: str) -> EngineKind:
    """Return the kind of engine that ``policy.generation.backend`` names.

    Raises:
        ConfigError: nothing can be imported under that name, or it is no ``EngineKind``.
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
            f"the section of its kind is {found.section!r:.60}, and a TypedDict of typing_extensions is "
            "wanted"
        )
        raise ConfigError([Violation(KEY, backend, bound, "write class NAME(typing_extensions.TypedDict)")])
    return found
