"""Collectives of a step, recorded while it runs and replayed by themselves, which measures the cost of its
communication alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.timing import Spent


@dataclass(frozen=True, slots=True)
class Collective:
    """One recorded collective.

    Attributes:
        kind: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``broadcast``, or the name of another
            operator.
        elements: number of elements that each rank contributes.
        dtype: their dtype.
        ranks: ranks of the group.
    """

    kind: str
    elements: int
    dtype: torch.dtype
    ranks: int


# These are torch.distributed's operators in C++, and what calls them: its Python functions, and the
# functional ones of DTensor.
_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "c10d::allreduce_": "all_reduce",
        "c10d::_allgather_base_": "all_gather",
        "c10d::allgather_": "all_gather",
        "c10d::_reduce_scatter_base_": "reduce_scatter",
        "c10d::broadcast_": "broadcast",
        "c10d::allreduce_coalesced_": "all_reduce",
        "c10d::allgather_into_tensor_coalesced_": "all_gather",
        "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
        "_c10d_functional::all_reduce": "all_reduce",
        "_c10d_functional::all_reduce_": "all_reduce",
        "_c10d_functional::all_gather_into_tensor": "all_gather",
        "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
        "_c10d_functional::broadcast": "broadcast",
    }
)
# The second argument of these operators, not the first, is the tensor that a rank sends.
_GIVEN_SECOND = (
    *("_allgather_base_", "_reduce_scatter_base_", "allgather_"),
    *("allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_"),
)
# These operators send no numbers.
_SILENT = ("wait_tensor", "barrier", "monitored_barrier")


class Recorded(TorchDispatchMode):
    """Records the collectives of the code that runs inside, in order. Groups of one rank are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Collective] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        """Record the call if it is a collective, then run it."""
        name = function._schema.name
        if (
            name.startswith(("c10d::", "_c10d_functional::"))
            and not name.endswith(_SILENT)
            and (ranks := _ranks(function, arguments)) > 1
        ):
            given = arguments[1 if name.startswith("c10d::") and name.endswith(_GIVEN_SECOND) else 0]
            for tensor in given if isinstance(given, list | tuple) else [given]:
                self.found.append(Collective(_KINDS.get(name, name), tensor.numel(), tensor.dtype, ranks))
        return function(*arguments, **(options or {}))


def _ranks(function: Any, arguments: Any) -> int:
    # Do not use strict: arguments with defaults may be missing.
    for place, argument in zip(function._schema.arguments, arguments, strict=False):
        if place.name == "process_group":
            return int(dist.ProcessGroup.unbox(argument).size())
        if place.name == "group_size":
            return int(argument)
        if place.name == "group_name":
            return int(dist.distributed_c10d._resolve_process_group(argument).size())
    # An operator without a group runs over all ranks.
    return dist.get_world_size()


def send(collectives: Sequence[Collective], repeats: int) -> Spent:
    """Replay the collectives over all ranks, one after another with nothing between them, and return the
    seconds. The first replay is a warm-up.

    Raises:
        ValueError: a collective has an unknown kind, or its group does not have all ranks.
    """
    # Create the buffers before anything is timed.
    calls = [_call(each) for each in collectives]
    spent = Spent()
    for turn in range(1 + repeats):
        dist.barrier()
        with spent.repeat(turn > 0):
            for call in calls:
                call()
    return spent


def _call(collective: Collective) -> Callable[[], Any]:
    ranks, given = collective.ranks, torch.zeros(collective.elements, dtype=collective.dtype)
    if ranks != dist.get_world_size():
        raise ValueError(
            f"{collective} is of a group of {ranks} ranks and there are {dist.get_world_size()}: sent to "
            "all it takes another time. "
            "Fix: measure a layout with one axis, or send it in its group"
        )
    if collective.kind == "all_reduce":
        return lambda: dist.all_reduce(given)
    if collective.kind == "all_gather":
        gathered = given.new_zeros(ranks * given.numel())
        return lambda: dist.all_gather_into_tensor(gathered, given)
    if collective.kind == "reduce_scatter":
        part = given.new_zeros(given.numel() // ranks)
        return lambda: dist.reduce_scatter_tensor(part, given)
    if collective.kind == "broadcast":
        return lambda: dist.broadcast(given, 0)
    raise ValueError(
        f"a collective of an unknown kind was recorded: {collective}. Fix: name its operator in "
        "benchmarks/collectives.py"
    )
