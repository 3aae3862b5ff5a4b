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
from megarl.parity.faults import distillation, engine, losses, megatron, scoring, torch_backends
from megarl.parity.faults.patching import Mutation

MUTATIONS: Mapping[str, Mutation] = MappingProxyType(
    {
        **engine.FAULTS,
        **losses.FAULTS,
        **scoring.FAULTS,
        **distillation.FAULTS,
        **megatron.FAULTS,
        **torch_backends.FAULTS,
    }
)
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


def mutation(name: str) -> Mutation:
    """The fault called ``name``.

    Raises:
        ConfigError: there is none.
    """
    if name not in MUTATIONS:
        raise ConfigError(f"mutation {name!r}: there is none of that name; the mutations are {', '.join(sorted(MUTATIONS))}")
    return MUTATIONS[name]
