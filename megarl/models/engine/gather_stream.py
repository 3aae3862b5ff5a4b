"""Gather streams, which yield the full tensors of a sharded model from the gathered shards of one bucket
after another, one tensor at a time or many at once.

The origin of every element is described by copies between two flat tensors, few of which remain after merging
(``weight_sync.plan``). Buckets are gathered into memory pages that the kernel allocates and clears once, and
not for every bucket.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import torch
import torch.distributed as dist

from megarl.weight_sync.plan import BufferRegion, Copy, FlatBucket, FlatBucketIterator, merged


class SpareMemory:
    """A pool of memory blocks that are not in use at present."""

    def __init__(self) -> None:
        self._pieces: list[torch.Tensor] = []

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised tensor [count], from a spare block that is large enough, or else from new
        memory that replaces a spare block."""
        if not count:
            # Allocate an empty tensor without a spare block: `give` could not take the block back.
            return torch.empty(0, dtype=dtype, device=device)
        nbytes = count * dtype.itemsize
        for index, piece in enumerate(self._pieces):
            if piece.numel() >= nbytes and piece.device == device:
                return self._pieces.pop(index)[:nbytes].view(dtype)
        # Drop one block for each one that is allocated, so that there are never more blocks than were in
        # flight together.
        del self._pieces[:1]
        return torch.empty(count, dtype=dtype, device=device)

    def give(self, tensor: torch.Tensor) -> None:
        """Add the whole storage of ``tensor`` to the pool; no part of the storage may be used afterwards."""
        if tensor.numel() and not tensor.is_meta:
            self._pieces.append(
                torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            )


Item = TypeVar("Item")

# The source of a tensor: the shards, if one of them holds it in one piece, or the memory for copies.
_SHARDS, _COPIED = 0, 1


@dataclass(frozen=True, slots=True)
class FullTensor:
    """A full tensor and the origin of its elements.

    Attributes:
        name, shape: of the tensor.
        copies: copies from all shards into this tensor alone, which together fill it.
    """

    name: str
    shape: tuple[int, ...]
    copies: tuple[Copy, ...]


class UnshardPlan:
    """Plan that builds full tensors from the shards of all ranks.

    Args:
        tensors: the tensors, in the order in which they are returned.

    Attributes:
        places: regions of the tensors, in the same order.
    """

    def __init__(self, tensors: Iterable[FullTensor]) -> None:
        self._length = 0
        self.places: list[BufferRegion] = []
        # Merge copies of a regular form into one strided copy, so that Python runs once for thousands of
        # them.
        self._copies = merged(list(chain.from_iterable(map(self._add, tensors))))
        self._keeps_shards = any(place.flat == _SHARDS for place in self.places)

    def _add(self, tensor: FullTensor) -> Iterator[Copy]:
        """Add a region for the tensor, and yield the copies that it needs."""
        count = math.prod(tensor.shape)
        # Return a view of a tensor that is in one piece among the shards, without a copy.
        in_shards = len(tensor.copies) == 1 and tensor.copies[0].form == ((count,), (1,), (1,))
        flat, begin = (_SHARDS, tensor.copies[0].source) if in_shards else (_COPIED, self._length)
        self.places.append(BufferRegion(tensor.name, tensor.shape, flat, begin))
        if not in_shards:
            for copy in tensor.copies:
                yield Copy(copy.source, copy.target + self._length, *copy.form)
            self._length += count

    @torch.no_grad()
    def flats(self, shards: torch.Tensor, spare: SpareMemory | None = None) -> tuple[torch.Tensor, ...]:
        """Return the flat tensors that contain the regions.

        Args:
            shards: [ranks, elements of a rank's shards]; must not be written to afterwards, as tensors may be
                views of it.
            spare: the pool that the memory of ``shards`` came from, and to which it returns if no tensor is a
                view of it; None if the memory belongs to another owner.
        """
        copied = (spare or SpareMemory()).empty(self._length, shards.dtype, shards.device)
        for copy in self._copies:
            copy.run(shards, copied)
        if self._keeps_shards:
            return shards, copied
        if spare is not None:
            spare.give(shards)
        return shards.new_empty(0), copied

    def tensors(self, shards: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Return names and full tensors, contiguous; see ``flats`` for ``shards``."""
        return self.tensors_from(0, self.flats(shards))

    @torch.no_grad()
    def tensors_from(self, first: int, flats: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        """Return names and full tensors from index ``first`` on, as views of the result of ``flats``."""
        return [(place.name, place.of(flats)) for place in self.places[first:]]


def in_buckets(items: Iterable[Item], size_of: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Yield runs of consecutive items that take at most ``most`` bytes together, or a single item that takes
    more; ``size_of`` returns bytes."""
    bucket: list[Item] = []
    taken = 0
    for item in items:
        size = size_of(item)
        if bucket and taken + size > most:
            yield bucket
            bucket, taken = [], 0
        bucket.append(item)
        taken += size
    if bucket:
        yield bucket


class InFlightBucket:
    """Full tensors whose shards are being gathered to this rank.

    Args:
        unshard_plan: plan of the tensors.
        shards: [ranks, elements of a rank's shards], see ``UnshardPlan.flats``.
        pending: the collective that gathers the shards; None if they are complete.
        spare: the pool that the memory of ``shards`` came from, and to which it returns when it is no longer
            needed; None if the memory belongs to another owner.
    """

    def __init__(
        self,
        unshard_plan: UnshardPlan,
        shards: torch.Tensor,
        pending: dist.Work | None,
        spare: SpareMemory | None = None,
    ) -> None:
        self.unshard_plan = unshard_plan
        self._shards = shards
        self._pending = pending
        self.spare = spare

    def wait(self) -> None:
        """Wait until the shards are complete."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def flats(self) -> tuple[torch.Tensor, ...]:
        """Wait for the shards; return the flat tensors that contain the regions of the unshard plan."""
        self.wait()
        return self.unshard_plan.flats(self._shards, self.spare)


class GatherStream(FlatBucketIterator):
    """Stream of the tensors of every bucket in flight; the next bucket is gathered while the tensors of one
    are consumed.

    Args:
        arrivals: yields buckets, each of which begins its gather when it is requested, into memory of earlier
            buckets that were taken as flat buckets.
    """

    def __init__(self, arrivals: Iterable[InFlightBucket]) -> None:
        self._arrived = _one_ahead(arrivals)
        self._spare: SpareMemory | None = None
        self._flats: tuple[torch.Tensor, ...] = ()
        self._pairs: Iterator[tuple[str, torch.Tensor]] | None = None
        # True if a caller may keep one of the present tensors.
        self._kept = False
        self._leave()

    def _leave(self) -> None:
        """Release the present tensors, so that their memory is not kept while others arrive."""
        if self._spare is not None and not self._kept:
            for flat in self._flats:
                self._spare.give(flat)
        self._kept = False
        self._unshard_plan: UnshardPlan | None = None
        self._flats = ()
        self._next = self._count = 0
        self._pairs = None

    def _is_at_end(self) -> bool:
        """Advance to the next bucket in flight if the present one is exhausted; return whether no tensor is
        left at all."""
        while self._next == self._count:
            self._leave()
            arrived = next(self._arrived, None)
            if arrived is None:
                return True
            self._unshard_plan, self._flats, self._spare = arrived
            self._count = len(self._unshard_plan.places)
        return False

    def __next__(self) -> tuple[str, torch.Tensor]:
        """Return the next name and tensor, contiguous. The tensor is the caller's own, but many share one
        storage, which exists as long as one of its tensors is kept."""
        if self._next == self._count and self._is_at_end():
            raise StopIteration
        assert self._unshard_plan is not None
        # The caller may keep a tensor that is returned singly, so that its memory must not become spare.
        self._kept = True
        if self._pairs is None:
            self._pairs = iter(self._unshard_plan.tensors_from(self._next, self._flats))
        self._next += 1
        return next(self._pairs)

    def take(self, most: int) -> FlatBucket | None:
        """Return the next tensors of the present bucket in flight, at least one and at most ``most``; None
        after the last one."""
        if self._is_at_end():
            return None
        assert self._unshard_plan is not None
        flat_bucket = FlatBucket(
            self._unshard_plan.places, self._next, min(most, self._count - self._next), self._flats
        )
        self._next += flat_bucket.count
        self._pairs = None
        return flat_bucket

    def close(self) -> None:
        """Wait for pending collectives, and end the stream."""
        self._leave()
        self._arrived.close()


def _one_ahead(
    arrivals: Iterable[InFlightBucket],
) -> Generator[tuple[UnshardPlan, tuple[torch.Tensor, ...], SpareMemory | None]]:
    """Yield each bucket in flight once it is complete, with the gather of the next one already begun."""
    setting_out = iter(arrivals)
    coming = next(setting_out, None)
    try:
        while coming is not None:
            # Begin the next gather before waiting for this one, so that they overlap.
            present, coming = coming, next(setting_out, None)
            arrived = present.unshard_plan, present.flats(), present.spare
            # Release the shards, and the tensors once they are taken: nothing may be kept until the next but
            # one gather begins.
            del present
            yield arrived
            del arrived
    finally:
        if coming is not None:
            coming.wait()
