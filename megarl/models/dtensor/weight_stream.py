"""The weights of a divided model as whole tensors: the stream of exports and refits.

Parameters that neighbour in the order are gathered together from all ranks, already in the dtype that they
are exported in; and while one bucket is taken apart the next is on its way.
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
        names: of the parameters.
        spaces: elements that each takes in a rank's row: as many as one rank sends at the most.
        sent: the elements of its pieces that this rank sends.
        unshard_plan: of the rows of all ranks.
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
    """Send a bucket to all ranks.

    Args:
        bucket: which.
        pieces: this rank's, by the name of the parameter; what gives them may compute a piece when it is
            asked for.
        dtype: to send them in.
        device: where collectives work.
        spare: memory for it.
    """
    ranks, length = dist.get_world_size(), sum(bucket.spaces)
    rows = spare.empty(ranks * length, dtype, device).view(ranks, length)
    own = rows[dist.get_rank()]
    for name, space, sent in zip(bucket.names, own.split(bucket.spaces), bucket.sent, strict=True):
        piece = pieces[name].flatten()[sent]
        # Rounded to the dtype of the export here, which halves what travels.
        space[: len(piece)].copy_(piece)
    pending = dist.all_gather_into_tensor(rows.view(-1), own, async_op=True) if len(rows) > 1 else None
    return InFlightBucket(bucket.unshard_plan, rows, pending, spare)


class WeightStream:
    """Gives all weights of a model, any number of times.

    Args:
        order: names of the parameters.
        rows: true rows of every parameter, without what pads the vocabulary.
        dtype: of the tensors that come out.
        device: where collectives work.
        bucket_bytes: of all shards that are gathered together, unless those of one parameter alone take more.
        tensor_rank, tensor_size: of the tensor-parallel group. They have the fastest place in the order of
            all ranks.
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
        """Names and whole tensors on this rank's device. A collective: all ranks take as many.

        Args:
            divided: the present parameters by name, divided as they were the first time.
            pieces: what is sent of them.
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
        # a tensor-parallel plan knows nothing of the parameters that it leaves alone: all its ranks have them
        rank, size = self._tensor_rank, self._tensor_size
        blocks = {
            name: replace(block_of(divided[name]), tensor_rank=rank, tensor_size=size) for name in self._order
        }

        def of_all_ranks(name: str) -> int:
            return _space(blocks[name]) * self._dtype.itemsize * dist.get_world_size()

        for names in in_buckets(self._order, of_all_ranks, self._bucket_bytes):
            spaces = tuple(_space(blocks[name]) for name in names)
            sent = tuple(_sent(blocks[name]) for name in names)
            yield _Bucket(
                tuple(names),
                spaces,
                sent,
                UnshardPlan(self._wholes([blocks[name] for name in names], names, spaces)),
            )

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
            yield FullTensor(name, shape, tuple(copy for copy in copies if copy is not None))
            position += space


def _space(block: Block) -> int:
    """Elements of a parameter that one rank sends at the most."""
    largest = block.run * math.prod(block.part[1:])
    return largest if block.tensor_dimension is not None else -(-largest // block.tensor_size)


def _sent(block: Block) -> slice:
    """The elements of its block that a rank sends: all, or a share where tensor-parallel ranks have the same
    one."""
    first, last = block.rows
    count = (last - first) * math.prod(block.part[1:])
    if block.tensor_dimension is not None:
        return slice(0, count)
    # Ranks with the same block send a share each: nobody sends what another one does.
    begin = min(block.tensor_rank * _space(block), count)
    return slice(begin, min(begin + _space(block), count))


def _of_all_ranks(block: Block) -> Iterator[Block]:
    """The blocks of all ranks, in their order."""
    for sharding_rank in range(block.sharding_size):
        for tensor_rank in range(block.tensor_size):
            yield replace(block, sharding_rank=sharding_rank, tensor_rank=tensor_rank)


def _copy(block: Block, shape: Sequence[int], begin: int) -> Copy | None:
    """Return what a rank sends of its block, found at ``begin``, into a whole tensor of ``shape``, which may
    have fewer rows; None for nothing."""
    strides = strides_of(shape)
    target = sum(place.start * stride for place, stride in zip(block.slices, strides, strict=True))
    if block.tensor_dimension is None:  # whole rows: one run of elements
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
