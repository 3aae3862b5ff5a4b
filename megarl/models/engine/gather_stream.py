"""Streams that yield the full tensors of a sharded model. Shards are all-gathered in buckets; tensors are
returned one at a time or many at once.

Where the elements of a full tensor come from is described by copies between two flat tensors, which are
merged into few strided copies (``weight_sync.plan``). The memory of buckets is reused: fresh pages would have
to be allocated and cleared by the kernel for every bucket.
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
    """A pool of memory blocks for reuse."""

    def __init__(self) -> None:
        self._pieces: list[torch.Tensor] = []

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialized tensor [count] from a large enough block of the pool. If there is none,
        allocate new memory and drop one block of the pool."""
        if not count:
            # Do not use a block of the pool: `give` ignores empty tensors, so the block would be lost.
            return torch.empty(0, dtype=dtype, device=device)
        nbytes = count * dtype.itemsize
        for index, piece in enumerate(self._pieces):
            if piece.numel() >= nbytes and piece.device == device:
                return self._pieces.pop(index)[:nbytes].view(dtype)
        # Drop one block for each new one, so that the pool never exceeds the number of blocks in use at once.
        del self._pieces[:1]
        return torch.empty(count, dtype=dtype, device=device)

    def give(self, tensor: torch.Tensor) -> None:
        """Return the whole storage of ``tensor`` to the pool. No tensor with this storage may be used
        afterwards."""
        if tensor.numel() and not tensor.is_meta:
            self._pieces.append(
                torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            )


Item = TypeVar("Item")

# Index of the flat tensor that contains a full tensor: the shards, if it is contiguous in them, or the
# copies.
_SHARDS, _COPIED = 0, 1


@dataclass(frozen=True, slots=True)
class FullTensor:
    """A full tensor and where its elements come from.

    Attributes:
        name, shape: name and shape of the tensor.
        copies: copies from the shards of all ranks that together fill this tensor.
    """

    name: str
    shape: tuple[int, ...]
    copies: tuple[Copy, ...]


class UnshardPlan:
    """A plan that assembles full tensors from the shards of all ranks.

    Args:
        tensors: the tensors, in the order in which they are to be returned.

    Attributes:
        places: where each tensor is in the result of ``flats``, in the same order.
    """

    def __init__(self, tensors: Iterable[FullTensor]) -> None:
        self._length = 0
        self.places: list[BufferRegion] = []
        # Merge copies of a regular form into one strided copy, so that Python runs once for thousands of
        # them.
        self._copies = merged(list(chain.from_iterable(map(self._add, tensors))))
        self._keeps_shards = any(place.flat == _SHARDS for place in self.places)

    def _add(self, tensor: FullTensor) -> Iterator[Copy]:
        """Assign a region of the flat tensors to a full tensor, and yield the copies that fill the region."""
        count = math.prod(tensor.shape)
        # A tensor that is contiguous in the shards needs no copy; a view is enough.
        in_shards = len(tensor.copies) == 1 and tensor.copies[0].form == ((count,), (1,), (1,))
        flat, begin = (_SHARDS, tensor.copies[0].source) if in_shards else (_COPIED, self._length)
        self.places.append(BufferRegion(tensor.name, tensor.shape, flat, begin))
        if not in_shards:
            for copy in tensor.copies:
                yield Copy(copy.source, copy.target + self._length, *copy.form)
            self._length += count

    @torch.no_grad()
    def flats(self, shards: torch.Tensor, spare: SpareMemory | None = None) -> tuple[torch.Tensor, ...]:
        """Return the two flat tensors in which ``places`` are regions: the shards themselves, and memory for
        copies.

        Args:
            shards: [ranks, elements of a rank's shards]. Must not be written to afterwards, because returned
                tensors may be views of it.
            spare: the pool that the memory of ``shards`` came from. The memory is returned to it unless a
                tensor is a view of ``shards``. None if the memory belongs to another owner.
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
        """Return names and full tensors, contiguous. ``shards`` is as in ``flats``."""
        return self.tensors_from(0, self.flats(shards))

    @torch.no_grad()
    def tensors_from(self, first: int, flats: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        """Return names and full tensors from index ``first`` on, as views of ``flats``, the result of
        ``flats()``."""
        return [(place.name, place.of(flats)) for place in self.places[first:]]


def in_buckets(items: Iterable[Item], size_of: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Group consecutive items into buckets of at most ``most`` bytes. A larger item gets a bucket of its
    own."""
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
    """A bucket of full tensors whose shards are being gathered to this rank.

    Args:
        unshard_plan: the plan that assembles the tensors.
        shards: [ranks, elements of a rank's shards]; see ``UnshardPlan.flats``.
        pending: the collective that gathers the shards; None if it is complete.
        spare: the pool that the memory of ``shards`` came from, and is returned to when it is no longer
            needed. None if the memory belongs to another owner.
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
        """Wait until all shards have arrived."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def flats(self) -> tuple[torch.Tensor, ...]:
        """Wait for the shards. Return the flat tensors of the unshard plan."""
        self.wait()
        return self.unshard_plan.flats(self._shards, self.spare)


class GatherStream(FlatBucketIterator):
    """A stream of the full tensors of several buckets. While the tensors of one bucket are consumed, the next
    bucket is gathered.

    Args:
        arrivals: yields buckets; requesting a bucket starts its gather. The gather may reuse the memory of
            earlier buckets whose tensors were all returned by ``take``.
    """

    def __init__(self, arrivals: Iterable[InFlightBucket]) -> None:
        self._arrived = _one_ahead(arrivals)
        self._spare: SpareMemory | None = None
        self._flats: tuple[torch.Tensor, ...] = ()
        self._pairs: Iterator[tuple[str, torch.Tensor]] | None = None
        # True if the caller may still use one of the current bucket's tensors.
        self._kept = False
        self._leave()

    def _leave(self) -> None:
        """Release the current bucket's tensors, so that their memory can be reused for the next bucket."""
        if self._spare is not None and not self._kept:
            for flat in self._flats:
                self._spare.give(flat)
        self._kept = False
        self._unshard_plan: UnshardPlan | None = None
        self._flats = ()
        self._next = self._count = 0
        self._pairs = None

    def _is_at_end(self) -> bool:
        """Advance to the next bucket if the current one is exhausted. Return whether no bucket is left."""
        while self._next == self._count:
            self._leave()
            arrived = next(self._arrived, None)
            if arrived is None:
                return True
            self._unshard_plan, self._flats, self._spare = arrived
            self._count = len(self._unshard_plan.places)
        return False

    def __next__(self) -> tuple[str, torch.Tensor]:
        """Return the next name and tensor, contiguous. The caller may keep the tensor, but many tensors share
        one storage, which is freed only when all of them are."""
        if self._next == self._count and self._is_at_end():
            raise StopIteration
        assert self._unshard_plan is not None
        # The caller may keep this tensor, so the bucket's memory must not return to the pool.
        self._kept = True
        if self._pairs is None:
            self._pairs = iter(self._unshard_plan.tensors_from(self._next, self._flats))
        self._next += 1
        return next(self._pairs)

    def take(self, most: int) -> FlatBucket | None:
        """Return the next tensors of the current bucket, at least one and at most ``most``; None at the end
        of the stream."""
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
    """Yield each bucket once it has arrived, after starting the gather of the next one."""
    setting_out = iter(arrivals)
    coming = next(setting_out, None)
    try:
        while coming is not None:
            # Begin the next gather before waiting for this one, so that they overlap.
            present, coming = coming, next(setting_out, None)
            arrived = present.unshard_plan, present.flats(), present.spare
            # Drop the references to the shards here, and to the tensors after the yield. Otherwise their
            # memory would stay allocated while the gather after the next one begins.
            del present
            yield arrived
            del arrived
    finally:
        # A caller may stop early. The memory of a gather in flight must not be released before it has
        # finished.
        if coming is not None:
            coming.wait()
