"""Context parallelism: the part of every sequence that a rank holds, and functions that gather the parts.

A sequence is split into ``2 * size`` equal chunks. Rank r holds chunks r and ``2 * size - 1 - r``, one from
the cheap beginning and one from the expensive end of a causal mask, so that all ranks have the same work.
Packed sequences are split one by one in the same way.

Legend: S positions over all ranks, s = S / size positions on this rank.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megarl.distributed.device import sent_to


@dataclass(frozen=True, slots=True)
class ContextShare:
    """This process's rank among the ranks that share sequences.

    Attributes:
        rank, size: index of this rank, and number of ranks.
        group: process group of the ranks; None when there is one rank.
        ring: attention passes keys and values around the ranks (``megarl.models.engine.ring_attention``)
            instead of gathering them.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None
    ring: bool = False

    def chunks(self, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """Return the ranges of one sequence, at positions ``start`` to ``end``, that this rank holds. The
        sequence's length must be a multiple of 2 * size."""
        if self.size == 1:
            return ((start, end),)
        # The division is exact, because sequences are padded to a multiple (Shapes.packed_multiple,
        # row_multiple).
        width = (end - start) // (2 * self.size)
        last = 2 * self.size - 1 - self.rank
        return (
            (start + self.rank * width, start + (self.rank + 1) * width),
            (start + last * width, start + (last + 1) * width),
        )

    def index(self, starts: tuple[int, ...], device: torch.device | None = None) -> torch.Tensor:
        """Return the positions that this rank holds, [s] int64 in the rank's order, of sequences that begin
        at ``starts`` (the last entry is the end)."""
        return _index(starts, self.rank, self.size, device)

    def order(self, starts: tuple[int, ...], device: torch.device | None = None) -> torch.Tensor:
        """Return for each position, in order, its index in the concatenation of all ranks' parts, [S]
        int64."""
        return _order(starts, self.size, device)


# Cached, because every layer of a micro-batch asks for the same index.
@functools.lru_cache(maxsize=32)
def _index(starts: tuple[int, ...], rank: int, size: int, device: torch.device | None) -> torch.Tensor:
    share = ContextShare(rank, size)
    ranges = itertools.chain.from_iterable(itertools.starmap(share.chunks, itertools.pairwise(starts)))
    index = torch.cat([torch.arange(*limits) for limits in ranges])
    return index if device is None else sent_to(index, device)


@functools.lru_cache(maxsize=32)
def _order(starts: tuple[int, ...], size: int, device: torch.device | None) -> torch.Tensor:
    # argsort inverts a permutation.
    order = torch.cat([_index(starts, rank, size, None) for rank in range(size)]).argsort()
    return order if device is None else sent_to(order, device)


class _GatherReplicated(torch.autograd.Function):
    """Gather of all ranks' parts for a computation that all ranks repeat; in the backward pass each rank
    keeps the gradient of its own part."""

    @staticmethod
    def forward(
        ctx: Any, part: torch.Tensor, order: torch.Tensor, index: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.save_for_backward(index)
        return _all_gather(part, group).index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (index,) = ctx.saved_tensors
        # Do not sum over ranks: each computes the same loss from the gathered tensor, so that a sum would
        # multiply the gradient by the number of ranks.
        return gradient.index_select(0, index), None, None, None


class _GatherShared(torch.autograd.Function):
    """Gather of all ranks' parts for a computation that differs between ranks; in the backward pass the
    ranks' gradients are summed."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, order: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.save_for_backward(order)
        ctx.group = group
        return _all_gather(part, group).index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (order,) = ctx.saved_tensors
        by_rank = torch.empty_like(gradient)
        # Restore the order in which the parts came from the ranks: reduce_scatter splits the tensor into
        # equal parts by rank.
        by_rank[order] = gradient
        part = torch.empty_like(gradient[: gradient.shape[0] // dist.get_world_size(ctx.group)])
        dist.reduce_scatter_tensor(part, by_rank, group=ctx.group)
        return part, None, None


def _all_gather(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    whole = torch.empty(
        part.shape[0] * dist.get_world_size(group), *part.shape[1:], dtype=part.dtype, device=part.device
    )
    # Transposed keys are a view that is not contiguous, and the collective requires contiguous memory.
    dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
    return whole


def gather_replicated(part: torch.Tensor, starts: tuple[int, ...], share: ContextShare) -> torch.Tensor:
    """Gather every rank's part [s, ...] into the whole [S, ...] in order, for results from which all ranks
    compute the same loss."""
    if share.group is None:
        return part
    return _GatherReplicated.apply(
        part, share.order(starts, part.device), share.index(starts, part.device), share.group
    )


def gather_shared(part: torch.Tensor, starts: tuple[int, ...], share: ContextShare) -> torch.Tensor:
    """Gather every rank's part [s, ...] into the whole [S, ...] in order, for keys and values, which every
    rank's queries read."""
    if share.group is None:
        return part
    return _GatherShared.apply(part, share.order(starts, part.device), share.group)
