"""Registry of rollout engines, the possible values of ``policy.generation.backend``."""

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
"""Values of ``policy.generation.backend`` with which the policy itself generates, unless
``colocated.enabled`` is false."""

ENGINES: Mapping[str, str] = MappingProxyType({"vllm": "megarl.models.generation.vllm.kind:KIND"})
"""Value of ``policy.generation.backend`` -> import path of the built-in ``EngineKind``."""

APART = "megarl.models.policy.policy_engines:KIND"
"""Import path of the engine kind whose workers run the policy's own backend, and only generate. It is used
for ``OF_THE_POLICY`` if ``colocated.enabled`` is false."""


def is_engine(generation: GenerationConfig | None) -> bool:
    """Return whether a ``policy.generation`` section selects an engine; otherwise the policy itself
    generates.

    Args:
        generation: the section with its defaults, not yet checked, so values may have wrong types.
    """
    if generation is None:
        return False
    backend = at(generation, "backend")
    # The policy's own backend on separate ranks is an engine too (``APART``).
    return isinstance(backend, str) and (
        backend not in OF_THE_POLICY or at(generation, "colocated.enabled") is False
    )


def kind_of(generation: GenerationConfig | None) -> EngineKind | None:
    """Return the ``EngineKind`` that a ``policy.generation`` section selects, or None if the policy itself
    generates.

    Raises:
        ConfigError: there is no such kind, or the object is not a valid ``EngineKind``.
    """
    return engine_kind(generation["backend"]) if generation is not None and is_engine(generation) else None


def engine_kind(backend: str) -> EngineKind:
    """Return the ``EngineKind`` for a value of ``policy.generation.backend``, a name or an import path.

    Raises:
        ConfigError: there is no such kind, or the object is not a valid ``EngineKind``.
    """
    # A backend of the policy gets here only with engines on separate ranks.
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
