"""The process groups of one worker, which its backend creates, and a context for work that only rank 0 does
while the other ranks wait."""

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
    """Process groups and this process's ranks in them.

    Global ranks vary fastest over tensor, then context, data and pipeline parallelism, as in
    ``NamedSharding(arange(world).reshape(pp, dp, cp, tp))``.

    Attributes:
        tensor, context, data, pipeline: process groups.
        ring: the context-parallel ranks use ring attention instead of gathering keys and values.
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
        """This process's position among the ranks that share every sequence."""
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
        """True if this process has tensor-, context- and data-parallel rank 0 in its pipeline stage."""
        return self.tensor_rank == self.context_rank == self.data_rank == 0

    @property
    def last_stage_global_rank(self) -> int:
        """Global rank of the process on the last pipeline stage with the same tensor-, context- and
        data-parallel ranks as this process."""
        return dist.get_global_rank(self.pipeline, self.pipeline_size - 1)

    def coordinates(self) -> str:
        """Return the process's ranks in all groups for messages, for example ``pp1 dp0 cp0 tp1``."""
        return f"pp{self.pipeline_rank} dp{self.data_rank} cp{self.context_rank} tp{self.tensor_rank}"

    def sum_over_data(self, values: torch.Tensor) -> torch.Tensor:
        """All-reduce ``values`` in place over the data-parallel group, and return it."""
        if self.data_size > 1:
            dist.all_reduce(values, group=self.data)
        return values

    def from_last_stage(self, values: torch.Tensor) -> torch.Tensor:
        """Broadcast ``values`` in place from the last pipeline stage to all stages, and return it. Shape and
        dtype must be equal on all stages."""
        if self.pipeline_size > 1:
            dist.broadcast(values, src=self.last_stage_global_rank, group=self.pipeline)
        return values

    def object_from_last_stage(self, value: Any) -> Any:
        """Return the last pipeline stage's ``value`` on every stage. It must be small and picklable."""
        if self.pipeline_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=self.last_stage_global_rank, group=self.pipeline)
        return box[0]


class _SummedGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        # Clone the gradient, because autograd may pass the same memory to other functions.
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


def summed_gradients(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the tensor. The backward pass sums its gradient over the group.

    Megatron-Core's ``copy_to_tensor_model_parallel_region`` (0.16) skips the sum for gradients that are not
    contiguous.
    """
    if dist.get_world_size(group) == 1:
        return tensor
    summed: torch.Tensor = _SummedGradients.apply(tensor, group)  # type: ignore[no-untyped-call]
    return summed


def share_random_state(here: DeviceRuntime, group: dist.ProcessGroup) -> None:
    """Set the random-generator states of all ranks of a group to those of its first rank. Collective over the
    group.

    Tensor-parallel ranks that compute the same activations must apply the same dropout mask. Otherwise
    activations and replicated parameters would differ between ranks.
    """
    if dist.get_world_size(group) > 1:
        states = here.rng_state()
        # Broadcast the states as byte tensors, not as objects, because a resume must not unpickle anything.
        for name, state in states.items():
            shared = state.to(here.device)
            dist.broadcast(shared, src=dist.get_global_rank(group, 0), group=group)
            states[name] = shared.cpu()
        here.set_rng_state(states)


@contextlib.contextmanager
def on_first_rank(kind: type[MegarlError] = CheckpointError) -> Iterator[bool]:
    """Yield True on rank 0 and False elsewhere; the other ranks wait for rank 0 at the end of the context. An
    error on rank 0 is raised on all ranks (on the others as ``kind``), so that none waits indefinitely."""
    failure: Exception | None = None
    try:
        yield dist.get_rank() == 0
    except Exception as error:
        failure = error
    # Broadcast a flag first: without an error, no slower collective of objects is needed.
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
