"""Streams the full tensors of a sharded model's weights for exports and refits.

Consecutive parameters are converted to the exported dtype and gathered together in buckets. While one bucket
is unpacked, the next is in flight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megarl.models.dtensor.shards import Block, block_of
from megarl.models.engine.gather_stream import (
    FullTensor,
    GatherStream,
    InFlightBucket,
    SpareMemory,
    UnshardPlan,
    in_buckets,
)
from megarl.weight_sync.plan import Copy, strides_of


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Parameters that are gathered together.

    Attributes:
        names: names of the parameters.
        spaces: for each parameter, the elements reserved in a rank's row: the most that any rank sends.
        sent: for each parameter, the slice of this rank's flattened shard that it sends.
        unshard_plan: plan that builds the full tensors from the rows of all ranks.
    """

    names: tuple[str, ...]
    spaces: tuple[int, ...]
    sent: tuple[slice, ...]
    unshard_plan: UnshardPlan


@torch.no_grad()
def _set_out(
    bucket: _Bucket,
    pieces: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
    spare: SpareMemory,
) -> InFlightBucket:
    """Start the all-gather of a bucket.

    Args:
        bucket: the bucket.
        pieces: this rank's shards by parameter name; the mapping may compute a shard on access.
        dtype: dtype of the sent elements.
        device: device for collectives.
        spare: provides memory for the bucket.
    """
    ranks, length = dist.get_world_size(), sum(bucket.spaces)
    rows = spare.empty(ranks * length, dtype, device).view(ranks, length)
    own = rows[dist.get_rank()]
    for name, space, sent in zip(bucket.names, own.split(bucket.spaces), bucket.sent, strict=True):
        piece = pieces[name].flatten()[sent]
        # Convert to the exported dtype before sending, which halves the traffic for 16-bit exports.
        space[: len(piece)].copy_(piece)
    pending = dist.all_gather_into_tensor(rows.view(-1), own, async_op=True) if len(rows) > 1 else None
    return InFlightBucket(bucket.unshard_plan, rows, pending, spare)


class WeightStream:
    """A stream of all full weights of a model, which can be read any number of times.

    Args:
        order: names of the parameters, in the order of the stream.
        rows: number of rows of every parameter, without vocabulary padding.
        dtype: dtype of the streamed tensors.
        device: device for collectives.
        bucket_bytes: maximum bytes gathered together from all ranks, unless a single parameter is larger.
        tensor_rank, tensor_size: rank in the tensor-parallel group and its size. Tensor-parallel ranks are
            adjacent in the global rank order.
    """

    def __init__(
        self,
        order: Sequence[str],
        rows: Mapping[str, int],
        dtype: torch.dtype,
        device: torch.device,
        bucket_bytes: int,
        *,
        tensor_rank: int,
        tensor_size: int,
    ) -> None:
        self._order = order
        self._tensor_rank, self._tensor_size = tensor_rank, tensor_size
        self._true_rows = rows
        self._dtype = dtype
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._buckets: list[_Bucket] | None = None

    def of(self, divided: Mapping[str, DTensor], pieces: Mapping[str, torch.Tensor]) -> GatherStream:
        """Return the stream of names and full tensors on this rank's device. Collective: all ranks must read
        the same number of tensors.

        Args:
            divided: the current parameters by name, sharded as in the first call.
            pieces: this rank's shards to send, by name.
        """
        return GatherStream(self._arrivals(divided, pieces, SpareMemory()))

    def _arrivals(
        self, divided: Mapping[str, DTensor], pieces: Mapping[str, torch.Tensor], spare: SpareMemory
    ) -> Iterator[InFlightBucket]:
        if self._buckets is None:
            self._buckets = list(self._plan(divided))
        for bucket in self._buckets:
            yield _set_out(bucket, pieces, self._dtype, self._device, spare)

    def _plan(self, divided: Mapping[str, DTensor]) -> Iterator[_Bucket]:
        # Set the tensor-parallel rank here: a DTensor does not have it for parameters that the plan leaves
        # replicated.
        rank, size = self._tensor_rank, self._tensor_size
        blocks = {
            name: replace(block_of(divided[name]), tensor_rank=rank, tensor_size=size) for name in self._order
        }

        def of_all_ranks(name: str) -> int:
            return _space(blocks[name]) * self._dtype.itemsize * dist.get_world_size()

        for names in in_buckets(self._order, of_all_ranks, self._bucket_bytes):
            chosen = [blocks[name] for name in names]
            spaces = tuple(map(_space, chosen))
            plan = UnshardPlan(self._wholes(chosen, names, spaces))
            yield _Bucket(tuple(names), spaces, tuple(map(_sent, chosen)), plan)

    def _wholes(
        self, blocks: Sequence[Block], names: Sequence[str], spaces: Sequence[int]
    ) -> Iterator[FullTensor]:
        position = 0
        for block, name, space in zip(blocks, names, spaces, strict=True):
            shape = (self._true_rows[name], *block.shape[1:])
            copies = (
                _copy(other, shape, rank * sum(spaces) + position)
                for rank, other in enumerate(_of_all_ranks(block))
            )
            yield FullTensor(name, shape, tuple(filter(None, copies)))
            position += space


def _space(block: Block) -> int:
    """Return the maximum number of elements of a parameter that any rank sends."""
    largest = block.run * math.prod(block.part[1:])
    return largest if block.tensor_dimension is not None else -(-largest // block.tensor_size)


def _sent(block: Block) -> slice:
    """Return the slice of its flattened block that a rank sends: all of it, or a part if the block is
    replicated on tensor-parallel ranks."""
    first, last = block.rows
    count = (last - first) * math.prod(block.part[1:])
    if block.tensor_dimension is not None:
        return slice(0, count)
    # Ranks with the same block divide it among themselves, so that nothing is sent twice.
    begin = min(block.tensor_rank * _space(block), count)
    return slice(begin, min(begin + _space(block), count))


def _of_all_ranks(block: Block) -> Iterator[Block]:
    """Yield the blocks of all ranks, in rank order."""
    for sharding_rank in range(block.sharding_size):
        for tensor_rank in range(block.tensor_size):
            yield replace(block, sharding_rank=sharding_rank, tensor_rank=tensor_rank)


def _copy(block: Block, shape: Sequence[int], begin: int) -> Copy | None:
    """Return the copy of a rank's sent elements, which begin at ``begin``, into a full tensor of ``shape``;
    None if there is nothing to copy. ``shape`` may have fewer rows than the parameter (no vocabulary
    padding)."""
    strides = strides_of(shape)
    target = sum(place.start * stride for place, stride in zip(block.slices, strides, strict=True))
    if block.tensor_dimension is None:  # Full rows are contiguous.
        sent = _sent(block)
        count = min(target + sent.stop, math.prod(shape)) - (target + sent.start)
        return Copy.run_of(count, begin, target + sent.start) if count > 0 else None
    rows, *others = block.slices
    sizes = (min(rows.stop, shape[0]) - rows.start, *(place.stop - place.start for place in others))
    if min(sizes) <= 0:
        return None
    if sizes[1:] == tuple(shape[1:]):
        return Copy.run_of(math.prod(sizes), begin, target)
    return Copy(begin, target, sizes, strides_of(sizes), strides)
