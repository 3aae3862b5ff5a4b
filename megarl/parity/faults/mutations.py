"""Known faults, put into a worker on purpose: the fuzzer is worth what it catches of them.

Each is a mistake that training code of this kind has really had. A fault replaces a function or an attribute of the engine, of a backend or
of Megatron for as long as a case runs. It says on which cases it must be seen; a fault that survives there is a hole in the comparison.

Not here, because it is no fault: positions that run on over packed sequences instead of starting anew. Rotary embeddings see only
differences of positions, and packed sequences do not see one another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from megarl.errors import ConfigError
from megarl.parity.case import Case
from megarl.parity.faults import advantages, distillation, engine, losses, megatron, preferences, scoring, torch_backends
from megarl.parity.faults.patching import Mutation

GROUPS: Mapping[str, Mapping[str, Mutation]] = MappingProxyType(
    {
        "engine": engine.FAULTS,
        "losses": {
            **losses.FAULTS,
            **advantages.FAULTS,
            **preferences.FAULTS,
            **scoring.FAULTS,
            **distillation.FAULTS,
        },
        "backends": {**megatron.FAULTS, **torch_backends.FAULTS},
    }
)
"""The known faults by name, in groups: those that all backends share, those of losses and of what these read, those of one backend."""
MUTATIONS: Mapping[str, Mutation] = MappingProxyType({name: fault for group in GROUPS.values() for name, fault in group.items()})
"""All known faults by name."""


@contextlib.contextmanager
def applied(name: str | None, case: Case) -> Iterator[None]:
    """Inside, the fault called ``name`` is in this process; None for no fault.

    Raises:
        ConfigError: there is no fault of that name.
    """
    with contextlib.ExitStack() as stack:
        if name is not None:
            mutation(name).put_in(stack, case)
        yield


def named(name: str) -> list[str]:
    """The faults of a group, or the one of that name.

    Raises:
        ConfigError: there is no such group and no such fault.
    """
    if name in GROUPS:
        return list(GROUPS[name])
    mutation(name)
    return [name]


def mutation(name: str) -> Mutation:
    """The fault called ``name``.

    Raises:
        ConfigError: there is none.
    """
    if name not in MUTATIONS:
        raise ConfigError(f"mutation {name!r}: there is none of that name; the mutations are {', '.join(sorted(MUTATIONS))}")
    return MUTATIONS[name]
