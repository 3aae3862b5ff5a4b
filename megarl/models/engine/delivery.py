"""Whole tensors of a divided model as the shards of one bucket after another arrive: one by one, or many at once for a transfer."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator

import torch
import torch.distributed as dist

from megarl.models.engine.assembly import Assembly
from megarl.models.engine.spare_memory import SpareMemory
from megarl.weight_sync.parcels import Parcel, ParcelStream


class Arrival:
    """Whole tensors whose shards are on their way to this rank.

    Args:
        assembly: of the tensors.
        shards: [ranks, elements of a rank's shards], see ``Assembly.flats``.
        pending: the collective that brings them; None where they are there.
        spare: where the memory of ``shards`` is from, and where it goes when nobody needs it any more; None where it is somebody's.
    """

    def __init__(self, assembly: Assembly, shards: torch.Tensor, pending: dist.Work | None, spare: SpareMemory | None = None) -> None:
        self.assembly = assembly
        self._shards = shards
        self._pending = pending
        self.spare = spare

    def wait(self) -> None:
        """Until they are there."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def flats(self) -> tuple[torch.Tensor, ...]:
        """Wait for them; what the places of the assembly lie in."""
        self.wait()
        return self.assembly.flats(self._shards, self.spare)


class Delivery(ParcelStream):
    """The tensors of every arrival; while those of one are taken the next is on its way.

    Args:
        arrivals: each sets out when it is asked for, into memory of others that were taken in parcels.
    """

    def __init__(self, arrivals: Iterable[Arrival]) -> None:
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
        self._assembly: Assembly | None = None
        self._flats = ()
        self._next = self._count = 0
        self._pairs = None

    def _is_at_end(self) -> bool:
        """Whether no tensor is left, after going on to the next arrival where none is left of the present one."""
        while self._next == self._count:
            self._leave()
            arrived = next(self._arrived, None)
            if arrived is None:
                return True
            self._assembly, self._flats, self._spare = arrived
            self._count = len(self._assembly.places)
        return False

    def __next__(self) -> tuple[str, torch.Tensor]:
        """Name and tensor, contiguous. It is nobody else's; but many lie in one storage, which is there for as long as one is kept."""
        if self._next == self._count and self._is_at_end():
            raise StopIteration
        assert self._assembly is not None
        self._kept = True
        if self._pairs is None:
            self._pairs = iter(self._assembly.tensors_from(self._next, self._flats))
        self._next += 1
        return next(self._pairs)

    def take(self, most: int) -> Parcel | None:
        """Tensors of the present arrival that come next, from one up to ``most``; None after the last one."""
        if self._is_at_end():
            return None
        assert self._assembly is not None
        parcel = Parcel(self._assembly.places, self._next, min(most, self._count - self._next), self._flats)
        self._next += parcel.count
        self._pairs = None
        return parcel

    def close(self) -> None:
        """Wait for what is under way; no more comes."""
        self._leave()
        self._arrived.close()


def _one_ahead(arrivals: Iterable[Arrival]) -> Generator[tuple[Assembly, tuple[torch.Tensor, ...], SpareMemory | None]]:
    """Each arrival once it is there, with the next one on its way."""
    setting_out = iter(arrivals)
    coming = next(setting_out, None)
    try:
        while coming is not None:
            present, coming = coming, next(setting_out, None)
            arrived = present.assembly, present.flats(), present.spare
            # neither the shards nor, after they were taken, the tensors are kept until the next but one sets out
            del present
            yield arrived
            del arrived
    finally:
        if coming is not None:
            coming.wait()
