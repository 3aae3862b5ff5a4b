"""How whole tensors come out of the shards of many parameters at once, with few copies however many tensors there are.

Where every element comes from is said as copies between two flat tensors, and copies of one form at equal distances (the groups of query
heads, the ranks, the experts of a layer) become a single one with one more dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

Item = TypeVar("Item")

# of all shards that are gathered together, unless those of one parameter alone are larger
BUCKET_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements of one flat tensor that go into another one.

    Attributes:
        source, target: the first element's place there and here.
        sizes: of the dimensions along which they lie.
        source_strides, target_strides: elements from one index to the next, a dimension each.
    """

    source: int
    target: int
    sizes: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]

    @property
    def form(self) -> tuple[tuple[int, ...], ...]:
        """All but the places."""
        return self.sizes, self.source_strides, self.target_strides

    def run(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy; both tensors begin where their storages do."""
        there = source.as_strided(self.sizes, self.source_strides, self.source)
        target.as_strided(self.sizes, self.target_strides, self.target).copy_(there)


def merged(copies: Sequence[Copy]) -> list[Copy]:
    """Fewer copies of the same elements to the same places, in any order."""
    while True:
        forms: dict[tuple[tuple[int, ...], ...], list[Copy]] = {}
        for copy in copies:
            forms.setdefault(copy.form, []).append(copy)
        fewer = [copy for alike in forms.values() for copy in _at_equal_distances(alike)]
        if len(fewer) == len(copies):
            return fewer
        copies = fewer


def _at_equal_distances(copies: Sequence[Copy]) -> Iterator[Copy]:
    """Copies of one form: runs of them whose places rise evenly as one."""
    first = 0
    while first < len(copies):
        begin, last = copies[first], first
        step = _distance(begin, copies[first + 1]) if first + 1 < len(copies) else (0, 0)
        while min(step) > 0 and last + 1 < len(copies) and _distance(copies[last], copies[last + 1]) == step:
            last += 1
        sizes = (last - first + 1, *begin.sizes)
        several = Copy(begin.source, begin.target, sizes, (step[0], *begin.source_strides), (step[1], *begin.target_strides))
        yield several if last > first else begin
        first = last + 1


def _distance(one: Copy, other: Copy) -> tuple[int, int]:
    return other.source - one.source, other.target - one.target


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


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a whole tensor is found: among the shards, if it lies there in one piece, or among what was copied."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    begin: int
    in_shards: bool


class Assembly:
    """Whole tensors out of the shards of all ranks.

    Args:
        tensors: in the order in which they are given.
    """

    def __init__(self, tensors: Iterable[Whole]) -> None:
        self._length = 0
        self._places: list[_Place] = []
        self._copies = merged([copy for tensor in tensors for copy in self._add(tensor)])

    def _add(self, tensor: Whole) -> Iterator[Copy]:
        """The copies that it needs."""
        count = math.prod(tensor.shape)
        in_shards = len(tensor.copies) == 1 and tensor.copies[0].form == ((count,), (1,), (1,))
        begin = tensor.copies[0].source if in_shards else self._length
        self._places.append(_Place(tensor.name, tensor.shape, strides_of(tensor.shape), begin, in_shards))
        if not in_shards:
            for copy in tensor.copies:
                yield Copy(copy.source, copy.target + self._length, *copy.form)
            self._length += count

    @torch.no_grad()
    def tensors(self, shards: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Names and whole tensors, contiguous.

        Args:
            shards: [ranks, elements of a rank's shards], fresh from ``torch.empty``; no more to be written to, as tensors may lie in it.
        """
        copied = torch.empty(self._length, dtype=shards.dtype, device=shards.device)
        for copy in self._copies:
            copy.run(shards, copied)
        return [
            (place.name, (shards if place.in_shards else copied).as_strided(place.shape, place.strides, place.begin))
            for place in self._places
        ]


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    return torch.empty(tuple(shape), device="meta").stride()


def in_buckets(items: Iterable[Item], size_of: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Neighbours that take at most ``BUCKET_BYTES`` together, or one that alone takes more; ``size_of`` gives bytes."""
    bucket: list[Item] = []
    taken = 0
    for item in items:
        size = size_of(item)
        if bucket and taken + size > BUCKET_BYTES:
            yield bucket
            bucket, taken = [], 0
        bucket.append(item)
        taken += size
    if bucket:
        yield bucket


class Arrival:
    """Whole tensors whose shards are on their way to this rank.

    Args:
        assembly: of the tensors.
        shards: [ranks, elements of a rank's shards], see :meth:`Assembly.tensors`.
        pending: the collective that brings them; None where they are there.
    """

    def __init__(self, assembly: Assembly, shards: torch.Tensor, pending: dist.Work | None) -> None:
        self._assembly = assembly
        self._shards = shards
        self._pending = pending

    def wait(self) -> None:
        """Until they are there."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Wait for them; names and tensors."""
        self.wait()
        return self._assembly.tensors(self._shards)


def one_ahead(arrivals: Iterable[Arrival]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of every arrival; while those of one are taken the next is on its way.

    Args:
        arrivals: each sets out when it is asked for.
    """
    setting_out = iter(arrivals)
    coming = next(setting_out, None)
    try:
        while coming is not None:
            present, coming = coming, next(setting_out, None)
            tensors = present.tensors()
            # neither the shards nor, at the end, the tensors are kept until the next but one sets out
            del present
            yield from tensors
            del tensors
    finally:
        if coming is not None:
            coming.wait()
