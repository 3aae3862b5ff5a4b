"""Gather streams: full tensors of a divided model out of the shards of one bucket after another, one by one
or many at once.

Where every element comes from is written as copies between two flat tensors, of which few are left
(``weight_sync.plan``). Buckets are gathered into pages that the kernel handed out, and cleared, once and not
for every bucket.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from megarl.weight_sync.plan import BufferRegion, Copy, FlatBucket, FlatBucketIterator, merged


class SpareMemory:
    """Pieces that nobody uses at present."""

    def __init__(self) -> None:
        self._pieces: list[torch.Tensor] = []

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """[count], undefined: a spare piece that is large enough, or new memory in place of one that is
        not."""
        if not count:
            # of no piece, which could not be given back
            return torch.empty(0, dtype=dtype, device=device)
        nbytes = count * dtype.itemsize
        for index, piece in enumerate(self._pieces):
            if piece.numel() >= nbytes and piece.device == device:
                return self._pieces.pop(index)[:nbytes].view(dtype)
        # One goes for the one that comes, so that there are never more pieces than were in flight together.
        del self._pieces[:1]
        return torch.empty(count, dtype=dtype, device=device)

    def give(self, tensor: torch.Tensor) -> None:
        """Make the whole memory of ``tensor`` a spare piece; nobody may look at any part of it from now
        on."""
        if tensor.numel() and not tensor.is_meta:
            self._pieces.append(
                torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
            )


Item = TypeVar("Item")

# where a tensor is found: among the shards, if it is there in one piece, or among what was copied
_SHARDS, _COPIED = 0, 1


@dataclass(frozen=True, slots=True)
class FullTensor:
    """A tensor and where it comes from.

    Attributes:
        name, shape: of the tensor.
        copies: that make it, from all shards into it alone; together they fill it.
    """

    name: str
    shape: tuple[int, ...]
    copies: tuple[Copy, ...]


class UnshardPlan:
    """FullTensor tensors out of the shards of all ranks.

    Args:
        tensors: in the order in which they are given.

    Attributes:
        places: of the tensors, in their order.
    """

    def __init__(self, tensors: Iterable[FullTensor]) -> None:
        self._length = 0
        self.places: list[BufferRegion] = []
        # Copies of a regular form become one strided copy: Python runs once for thousands of them.
        self._copies = merged([copy for tensor in tensors for copy in self._add(tensor)])
        self._keeps_shards = any(place.flat == _SHARDS for place in self.places)

    def _add(self, tensor: FullTensor) -> Iterator[Copy]:
        """The copies that it needs."""
        count = math.prod(tensor.shape)
        # A tensor that is in one piece among the shards is shown there, without a copy.
        in_shards = len(tensor.copies) == 1 and tensor.copies[0].form == ((count,), (1,), (1,))
        flat, begin = (_SHARDS, tensor.copies[0].source) if in_shards else (_COPIED, self._length)
        self.places.append(BufferRegion(tensor.name, tensor.shape, flat, begin))
        if not in_shards:
            for copy in tensor.copies:
                yield Copy(copy.source, copy.target + self._length, *copy.form)
            self._length += count

    @torch.no_grad()
    def flats(self, shards: torch.Tensor, spare: SpareMemory | None = None) -> tuple[torch.Tensor, ...]:
        """The flat tensors of the places.

        Args:
            shards: [ranks, elements of a rank's shards]; no more to be written to, as tensors may be views of
                it.
            spare: where the memory of ``shards`` is from, and goes if no tensor is a view of it; None where
                it is somebody's.
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
        """Names and whole tensors, contiguous; of shards see ``flats``."""
        return self.tensors_from(0, self.flats(shards))

    @torch.no_grad()
    def tensors_from(self, first: int, flats: Sequence[torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        """Names and whole tensors from index ``first`` on, as views of what ``flats`` gave."""
        return [(place.name, place.of(flats)) for place in self.places[first:]]


def in_buckets(items: Iterable[Item], size_of: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Neighbours that take at most ``most`` bytes together, or one that alone takes more; ``size_of`` gives
    bytes."""
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
    """FullTensor tensors whose shards are on their way to this rank.

    Args:
        unshard_plan: of the tensors.
        shards: [ranks, elements of a rank's shards], see ``UnshardPlan.flats``.
        pending: the collective that brings them; None where they are there.
        spare: where the memory of ``shards`` is from, and where it goes when nobody needs it any more; None
            where it is somebody's.
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
        """Wait until the shards are there."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def flats(self) -> tuple[torch.Tensor, ...]:
        """Wait for the shards; return the flat tensors that the places of the unshard plan are in."""
        self.wait()
        return self.unshard_plan.flats(self._shards, self.spare)


class GatherStream(FlatBucketIterator):
    """The tensors of every bucket in flight; while those of one are taken the next is on its way.

    Args:
        arrivals: each sets out when it is asked for, into memory of others that were taken in flat_buckets.
    """

    def __init__(self, arrivals: Iterable[InFlightBucket]) -> None:
        self._arrived = _one_ahead(arrivals)
        self._spare: SpareMemory | None = None
        self._flats: tuple[torch.Tensor, ...] = ()
        self._pairs: Iterator[tuple[str, torch.Tensor]] | None = None
        # whether somebody may keep one of the present tensors
        self._kept = False
        self._leave()

    def _leave(self) -> None:
        """Done with the present tensors; they are not kept while others come."""
        if self._spare is not None and not self._kept:
            for flat in self._flats:
                self._spare.give(flat)
        self._kept = False
        self._unshard_plan: UnshardPlan | None = None
        self._flats = ()
        self._next = self._count = 0
        self._pairs = None

    def _is_at_end(self) -> bool:
        """Return whether no tensor is left, after going on to the next bucket in flight where none is left of
        the present one."""
        while self._next == self._count:
            self._leave()
            arrived = next(self._arrived, None)
            if arrived is None:
                return True
            self._unshard_plan, self._flats, self._spare = arrived
            self._count = len(self._unshard_plan.places)
        return False

    def __next__(self) -> tuple[str, torch.Tensor]:
        """Name and tensor, contiguous. It is nobody else's; but many share one storage, which is there for
        as long as one is kept."""
        if self._next == self._count and self._is_at_end():
            raise StopIteration
        assert self._unshard_plan is not None
        # Given out one by one a tensor may be kept, so its memory must not become spare.
        self._kept = True
        if self._pairs is None:
            self._pairs = iter(self._unshard_plan.tensors_from(self._next, self._flats))
        self._next += 1
        return next(self._pairs)

    def take(self, most: int) -> FlatBucket | None:
        """Tensors of the present bucket in flight that come next, from one up to ``most``; None after the
        last one."""
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
        """Wait for what is under way; no more comes."""
        self._leave()
        self._arrived.close()


def _one_ahead(
    arrivals: Iterable[InFlightBucket],
) -> Generator[tuple[UnshardPlan, tuple[torch.Tensor, ...], SpareMemory | None]]:
    """Each bucket in flight once it is there, with the next one on its way."""
    setting_out = iter(arrivals)
    coming = next(setting_out, None)
    try:
        while coming is not None:
            # The next one sets out before this one is waited for: that is the overlap.
            present, coming = coming, next(setting_out, None)
            arrived = present.unshard_plan, present.flats(), present.spare
            # neither the shards nor, after they were taken, the
            # tensors are kept until the next but one sets out
            del present
            yield arrived
            del arrived
    finally:
        if coming is not None:
            coming.wait()
