"""The registry of rollout engines: what ``policy.generation.backend`` may name beside the policy's own generation."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from typing_extensions import is_typeddict

from megarl.config.plugins import EngineKind
from megarl.errors import ConfigError, Violation
from megarl.import_path import is_import_path, load_object

KEY = "policy.generation.backend"
OF_THE_POLICY = ("megatron", "hf")
"""Backends by which the policy itself generates."""

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
    if found.section is not None and not is_typeddict(found.section):
        bound = f"the section of its kind is {found.section!r:.60}, and a TypedDict of typing_extensions is wanted"
        raise ConfigError([Violation(KEY, backend, bound, "write class NAME(typing_extensions.TypedDict)")])
    return found
