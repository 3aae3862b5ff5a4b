"""How whole Hugging Face tensors come out of the shards of many parameters at once, with few copies however many tensors there are.

Where every row comes from is :func:`converters.layouts.shard_layout`'s word. Here it becomes copies between two flat tensors, and copies of
one form at equal distances (the groups of query heads, the ranks, the experts of a layer) become a single one with one more dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from converters.architecture import Architecture
from converters.errors import ConversionError
from converters.layouts import ShardLayout, shard_layout
from converters.rule import Kind, Rule


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
class _Place:
    """Where a whole tensor is found: among the shards, if it lies there in one piece, or among what was copied."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    begin: int
    in_shards: bool


class Assembly:
    """The whole tensors of neighbouring parameters.

    Args:
        rules: of the parameters.
        shapes: of a shard of each, the same on all ranks.
        ranks: that have shards.
        architecture: the model.

    Raises:
        ConversionError: the shards do not have the shapes that the architecture asks for.
    """

    def __init__(self, rules: Sequence[Rule], shapes: Sequence[Sequence[int]], ranks: int, architecture: Architecture) -> None:
        self._length = 0
        self._places: list[_Place] = []
        copies: list[Copy] = []
        lengths = [math.prod(shape) for shape in shapes]
        position = 0
        for rule, shape, length in zip(rules, shapes, lengths, strict=True):
            if rule.emits:
                layouts = _layouts(rule, tuple(shape), ranks, architecture)
                copies += self._add(rule, layouts, range(position, position + ranks * sum(lengths), sum(lengths)))
            position += length
        self._copies = merged(copies)

    def _add(self, rule: Rule, layouts: Sequence[ShardLayout], begins: Sequence[int]) -> Iterator[Copy]:
        """The copies that one parameter's tensors need.

        Args:
            rule: of the parameter.
            layouts: of its shards, by rank.
            begins: of its shards among all shards.
        """
        for number, part in enumerate(rule.parts):
            count = math.prod(part.shape)
            copies = [copy for layout, begin in zip(layouts, begins, strict=False) for copy in _copies(layout, number, part.shape, begin)]
            whole = len(copies) == 1 and copies[0].sizes == (count,)
            strides = torch.empty(part.shape, device="meta").stride()
            self._places.append(_Place(part.name, part.shape, strides, copies[0].source if whole else self._length, whole))
            if not whole:
                for copy in copies:
                    yield Copy(copy.source, copy.target + self._length, *copy.form)
                self._length += count

    @property
    def names(self) -> list[str]:
        """Of the tensors, in their order."""
        return [place.name for place in self._places]

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


def _layouts(rule: Rule, shape: tuple[int, ...], ranks: int, architecture: Architecture) -> list[ShardLayout]:
    """Of the shards that have to be read: all, or one where every rank has the same."""
    padded = shape[0] * ranks if rule.kind is Kind.VOCAB else 0
    layouts = [shard_layout(rule, architecture.head_dim, rank, ranks, padded) for rank in range(ranks)]
    for rank, layout in enumerate(layouts):
        if layout.shape != shape:
            raise ConversionError(
                f"{rule.megatron_name}: the shard of rank {rank} is {list(shape)}, expected {list(layout.shape)}",
                "build the model from the architecture that its weights are exported for",
            )
    return layouts[:1] if rule.kind is Kind.REPLICATED else layouts


def _copies(layout: ShardLayout, number: int, whole: Sequence[int], begin: int) -> Iterator[Copy]:
    """What of part ``number``, of shape ``whole``, lies in one shard that begins at ``begin``."""
    position = 0
    for span in layout.spans:
        if span.part == number and span.length:
            if layout.axis == 0 or span.length == layout.shape[1] == whole[1]:
                inner = math.prod(whole[1:]) if layout.axis == 0 else whole[0]
                yield Copy(begin + position * inner, span.start * inner, (span.length * inner,), (1,), (1,))
            else:
                sizes = (layout.shape[0], span.length)
                yield Copy(begin + position, span.start, sizes, (layout.shape[1], 1), (whole[1], 1))
        position += span.length
