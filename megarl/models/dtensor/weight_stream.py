"""The weights of a divided model as whole tensors: the stream of exports and refits.

Parameters that neighbour in the order are gathered together from all ranks, already in the dtype that they are exported in; and while one
bucket is taken apart the next is on its way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megarl.models.dtensor.shards import Block, block_of
from megarl.models.engine.assembly import Assembly, Copy, Whole, one_ahead

# of the blocks of all ranks that are gathered together, unless those of one parameter alone are larger
BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Parameters that are gathered together.

    Attributes:
        names: of the parameters.
        spaces: elements that each takes in a rank's row: those of the largest block.
        assembly: of the rows of all ranks.
    """

    names: tuple[str, ...]
    spaces: tuple[int, ...]
    assembly: Assembly


class _Arrival:
    """A bucket on its way to all ranks.

    Args:
        bucket: which.
        divided: the parameters by name.
        dtype: to send them in.
        device: where collectives work.
    """

    @torch.no_grad()
    def __init__(self, bucket: _Bucket, divided: Mapping[str, DTensor], dtype: torch.dtype, device: torch.device) -> None:
        self._assembly = bucket.assembly
        row = torch.empty(sum(bucket.spaces), dtype=dtype, device=device)
        for name, space in zip(bucket.names, row.split(bucket.spaces), strict=True):
            local = divided[name].to_local()
            space[: local.numel()].view(local.shape).copy_(local)
        self._rows = row[None]
        self._pending: dist.Work | None = None
        if dist.get_world_size() > 1:
            self._rows = torch.empty(dist.get_world_size(), len(row), dtype=dtype, device=device)
            self._pending = dist.all_gather_into_tensor(self._rows.view(-1), row, async_op=True)
            self._row = row  # kept until it has been sent

    def wait(self) -> None:
        """Until the bucket is there."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Names and whole tensors."""
        self.wait()
        return self._assembly.tensors(self._rows)


class WeightStream:
    """Gives all weights of a model, any number of times.

    Args:
        order: names of the parameters.
        rows: true rows of every parameter, without what pads the vocabulary.
        dtype: of the tensors that come out.
        device: where collectives work.
    """

    def __init__(self, order: Sequence[str], rows: Mapping[str, int], dtype: torch.dtype, device: torch.device) -> None:
        self._order = order
        self._true_rows = rows
        self._dtype = dtype
        self._device = device
        self._buckets: list[_Bucket] | None = None

    def of(self, divided: Mapping[str, DTensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and whole tensors on this rank's device. A collective: all ranks take as many.

        Tensors are contiguous and nobody else's; but many lie in one storage, which is there for as long as one of them is kept.

        Args:
            divided: the present parameters by name, divided as they were the first time.
        """
        if self._buckets is None:
            self._buckets = list(self._plan(divided))
        yield from one_ahead(_Arrival(bucket, divided, self._dtype, self._device) for bucket in self._buckets)

    def _plan(self, divided: Mapping[str, DTensor]) -> Iterator[_Bucket]:
        spaces = {
            name: math.prod((block.run, *block.part[1:])) for name, block in ((name, block_of(divided[name])) for name in self._order)
        }
        taken: list[str] = []
        room = 0
        for name in [*self._order, None]:
            size = 0 if name is None else spaces[name] * self._dtype.itemsize * dist.get_world_size()
            if taken and (name is None or size > room):
                lengths = tuple(spaces[each] for each in taken)
                yield _Bucket(tuple(taken), lengths, Assembly(self._wholes(taken, lengths, divided)))
                taken = []
            if name is not None:
                room = (room if taken else max(BUCKET_BYTES, size)) - size
                taken.append(name)

    def _wholes(self, names: Sequence[str], spaces: Sequence[int], divided: Mapping[str, DTensor]) -> Iterator[Whole]:
        position = 0
        for name, space in zip(names, spaces, strict=True):
            shape = (self._true_rows[name], *divided[name].shape[1:])
            copies = (_copy(block, shape, rank * sum(spaces) + position) for rank, block in _blocks(divided[name]))
            yield Whole(name, shape, tuple(copy for copy in copies if copy is not None))
            position += space


def _blocks(parameter: DTensor) -> Iterator[tuple[int, Block]]:
    """Ranks and their blocks, which make up a parameter; of ranks that have the same one only the first."""
    own, mesh = block_of(parameter), parameter.device_mesh.mesh
    for sharding_rank in range(own.sharding_size):
        for tensor_rank in range(1 if own.tensor_dimension is None else own.tensor_size):
            rank = mesh[sharding_rank, tensor_rank] if mesh.ndim == 2 else mesh[sharding_rank]
            yield int(rank), replace(own, sharding_rank=sharding_rank, tensor_rank=tensor_rank)


def _copy(block: Block, shape: Sequence[int], begin: int) -> Copy | None:
    """A block that begins at ``begin``, into a whole tensor of ``shape``, which may have fewer rows; None where it has none of them."""
    rows, *others = block.slices
    count = min(rows.stop, shape[0]) - rows.start
    sizes = (count, *(place.stop - place.start for place in others))
    if min(sizes) <= 0:
        return None
    strides = _strides(shape)
    target = sum(place.start * stride for place, stride in zip(block.slices, strides, strict=True))
    if sizes[1:] == tuple(shape[1:]):
        return Copy(begin, target, (math.prod(sizes),), (1,), (1,))
    return Copy(begin, target, sizes, _strides(sizes), strides)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(tuple(shape), device="meta").stride()
