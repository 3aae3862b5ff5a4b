"""The process groups of one worker, as the engine needs them, and calls that rank 0 alone makes while the
others wait.

A backend builds them; nothing here knows which.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megarl.distributed.device import DeviceRuntime, runtime
from megarl.errors import CheckpointError, MegarlError
from megarl.models.engine.context import ContextShare


@dataclass(frozen=True, slots=True)
class ParallelGroups:
    """Process groups and this process's place in them.

    Ranks are laid out with tensor parallel fastest, then context, data and pipeline parallel slowest, as in
    ``NamedSharding(arange(world).reshape(pp, dp, cp, tp))``.

    Attributes:
        tensor, context, data, pipeline: process groups.
        ring: the context-parallel ranks send keys and values round instead of gathering them.
    """

    tensor: dist.ProcessGroup
    context: dist.ProcessGroup
    data: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    ring: bool = field(default=False, kw_only=True)

    @property
    def tensor_rank(self) -> int:
        return dist.get_rank(self.tensor)

    @property
    def tensor_size(self) -> int:
        return dist.get_world_size(self.tensor)

    @property
    def data_rank(self) -> int:
        return dist.get_rank(self.data)

    @property
    def data_size(self) -> int:
        return dist.get_world_size(self.data)

    @property
    def pipeline_rank(self) -> int:
        return dist.get_rank(self.pipeline)

    @property
    def pipeline_size(self) -> int:
        return dist.get_world_size(self.pipeline)

    @property
    def context_rank(self) -> int:
        return dist.get_rank(self.context)

    @property
    def context_size(self) -> int:
        return dist.get_world_size(self.context)

    @property
    def context_share(self) -> ContextShare:
        """This process's part of every sequence."""
        return (
            ContextShare(self.context_rank, self.context_size, self.context, self.ring)
            if self.context_size > 1
            else ContextShare()
        )

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline_size - 1

    @property
    def is_first_in_stage(self) -> bool:
        """Return whether this process is the one of its pipeline stage that stands first in all other
        dimensions."""
        return self.tensor_rank == self.context_rank == self.data_rank == 0

    @property
    def last_stage_global_rank(self) -> int:
        """Global rank of the last pipeline stage that shares this process's other coordinates."""
        return dist.get_global_rank(self.pipeline, self.pipeline_size - 1)

    def coordinates(self) -> str:
        """Coordinates for error messages and logs: ``pp1 dp0 cp0 tp1``."""
        return f"pp{self.pipeline_rank} dp{self.data_rank} cp{self.context_rank} tp{self.tensor_rank}"

    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` summed in place over the data-parallel group."""
        if self.data_size > 1:
            dist.all_reduce(values, group=self.data)
        return values

    def from_last_stage(self, values: torch.Tensor) -> torch.Tensor:
        """``values`` of the last pipeline stage, on every stage; the tensor has to have the same shape and
        dtype everywhere."""
        if self.pipeline_size > 1:
            dist.broadcast(values, src=self.last_stage_global_rank, group=self.pipeline)
        return values

    def object_from_last_stage(self, value: Any) -> Any:
        """A small picklable object of the last pipeline stage, on every stage."""
        if self.pipeline_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=self.last_stage_global_rank, group=self.pipeline)
        return box[0]


def share_random_state(here: DeviceRuntime, group: dist.ProcessGroup) -> None:
    """Give the ranks of a group the random-number state of its first one. A collective over the group.

    Tensor-parallel ranks that compute the same activations have to drop the same values of them: else what
    each of them has whole, activations and parameters, becomes another on every rank.
    """
    if dist.get_world_size(group) > 1:
        states = here.rng_state()
        # As bytes: objects would be unpickled, and nothing is in a resume.
        for name, state in states.items():
            shared = state.to(here.device)
            dist.broadcast(shared, src=dist.get_global_rank(group, 0), group=group)
            states[name] = shared.cpu()
        here.set_rng_state(states)


@contextlib.contextmanager
def on_first_rank(kind: type[MegarlError] = CheckpointError) -> Iterator[bool]:
    """True on rank 0, which works while the others wait; what fails there fails on all ranks (as ``kind``),
    so that none waits indefinitely."""
    failure: Exception | None = None
    try:
        yield dist.get_rank() == 0
    except Exception as error:
        failure = error
    # a number first, so that the usual way, on which nothing fails, takes no collective of objects
    device = runtime().device
    failed = torch.tensor([int(failure is not None)], device=device)
    dist.broadcast(failed, src=0)
    if not int(failed):
        if failure is not None:
            raise failure
        return
    message = [None if failure is None else f"{type(failure).__name__}: {failure}"]
    dist.broadcast_object_list(message, src=0)
    if failure is not None:
        raise failure
    raise kind(f"rank 0 failed: {message[0]}")
