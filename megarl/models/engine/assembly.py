"""How whole tensors come out of the shards of many parameters at once, with few copies however many tensors there are.

Where every element comes from is said as copies between two flat tensors, of which few are left (``megarl.weight_sync.copies``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from megarl.models.engine.spare_memory import SpareMemory
from megarl.weight_sync.copies import Copy, merged
from megarl.weight_sync.parcels import Place

Item = TypeVar("Item")

# where a tensor is found: among the shards, if it lies there in one piece, or among what was copied
_SHARDS, _COPIED = 0, 1


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor and where it comes from.

    Attributes:
        name, shape: of the tensor.
        copies: that make it, from all shards into it alone; together they fill it.
    """

    name: str
    shape: tuple[int, ...]
    copies: tuple[Copy, ...]


class Assembly:
    """Whole tensors out of the shards of all ranks.

    Args:
        tensors: in the order in which they are given.

    Attributes:
        places: of the tensors, in their order.
    """

    def __init__(self, tensors: Iterable[Whole]) -> None:
        self._length = 0
        self.places: list[Place] = []
        self._copies = merged([copy for tensor in tensors for copy in self._add(tensor)])
        self._keeps_shards = any(place.flat == _SHARDS for place in self.places)

    def _add(self, tensor: Whole) -> Iterator[Copy]:
        """The copies that it needs."""
        count = math.prod(tensor.shape)
        in_shards = len(tensor.copies) == 1 and tensor.copies[0].form == ((count,), (1,), (1,))
        flat, begin = (_SHARDS, tensor.copies[0].source) if in_shards else (_COPIED, self._length)
        self.places.append(Place(tensor.name, tensor.shape, flat, begin))
        if not in_shards:
            for copy in tensor.copies:
                yield Copy(copy.source, copy.target + self._length, *copy.form)
            self._length += count

    @torch.no_grad()
    def flats(self, shards: torch.Tensor, spare: SpareMemory | None = None) -> tuple[torch.Tensor, ...]:
        """The flat tensors of the places.

        Args:
            shards: [ranks, elements of a rank's shards]; no more to be written to, as tensors may lie in it.
            spare: where the memory of ``shards`` is from, and goes if no tensor lies in it; None where it is somebody's.
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
        """Names and whole tensors from index ``first`` on, where they lie in what ``flats`` gave."""
        return [(place.name, place.of(flats)) for place in self.places[first:]]


def in_buckets(items: Iterable[Item], size_of: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Neighbours that take at most ``most`` bytes together, or one that alone takes more; ``size_of`` gives bytes."""
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
