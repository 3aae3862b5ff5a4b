"""How Hugging Face tensors come out of the shards of neighbouring parameters.

Where every row comes from is ``shard_layout``'s word, which is what weights are read by too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from converters.errors import ConversionError
from converters.mapping.layouts import ShardLayout, shard_layout
from converters.mapping.rule import Kind, Rule
from converters.model_config.architecture import Architecture
from megarl.models.engine.assembly import Assembly, Whole
from megarl.weight_sync.copies import Copy


def assembly_of(rules: Sequence[Rule], shapes: Sequence[Sequence[int]], ranks: int, architecture: Architecture) -> Assembly:
    """The Hugging Face tensors of parameters whose shards lie one after the other, the same way on all ranks.

    Args:
        rules: of the parameters.
        shapes: of a shard of each, the same on all ranks.
        ranks: that have shards.
        architecture: the model.

    Raises:
        ConversionError: the shards do not have the shapes that the architecture asks for.
    """
    return Assembly(_wholes(rules, shapes, ranks, architecture))


def _wholes(rules: Sequence[Rule], shapes: Sequence[Sequence[int]], ranks: int, architecture: Architecture) -> Iterator[Whole]:
    lengths = [math.prod(shape) for shape in shapes]
    of_rank = sum(lengths)
    position = 0
    for rule, shape, length in zip(rules, shapes, lengths, strict=True):
        if rule.emits:
            layouts = _layouts(rule, tuple(shape), ranks, architecture)
            for number, part in enumerate(rule.parts):
                begins = range(position, position + len(layouts) * of_rank, of_rank)
                places = zip(layouts, begins, strict=True)
                yield Whole(
                    part.name, part.shape, tuple(copy for layout, begin in places for copy in _copies(layout, number, part.shape, begin))
                )
        position += length


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
                yield Copy.run_of(span.length * inner, begin + position * inner, span.start * inner)
            else:
                sizes = (layout.shape[0], span.length)
                yield Copy(begin + position, span.start, sizes, (layout.shape[1], 1), (whole[1], 1))
        position += span.length
