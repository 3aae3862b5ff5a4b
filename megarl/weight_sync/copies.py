"""Copies between two flat tensors, and how many of them become few.

Copies of one form at equal distances (the groups of query heads, the ranks, the experts of a layer) become a single one with one more
dimension, so that there are few however many tensors there are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


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

    @classmethod
    def run_of(cls, count: int, source: int, target: int) -> Copy:
        """``count`` elements that lie one after another, there and here."""
        return cls(source, target, (count,), (1,), (1,))

    @property
    def form(self) -> tuple[tuple[int, ...], ...]:
        """All but the places."""
        return self.sizes, self.source_strides, self.target_strides

    def run(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy; both tensors without gaps, of any shape."""
        there = source.as_strided(self.sizes, self.source_strides, source.storage_offset() + self.source)
        target.as_strided(self.sizes, self.target_strides, target.storage_offset() + self.target).copy_(there)


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
