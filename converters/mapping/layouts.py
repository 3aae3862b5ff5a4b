"""Layouts of tensor-parallel shards: the origin of every row, in pure arithmetic, for both reading and
writing.

A shard is described as a list of spans, each a run of rows (or columns) of one full Hugging Face tensor, in
the shard's order. Reading copies the spans into the shard; writing copies them out of it. Since both use the
same description, they are inverse by construction.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from converters.errors import ConversionError
from converters.mapping.rule import Kind, Rule


@dataclass(frozen=True, slots=True)
class Span:
    """Indices ``start`` to ``stop`` along the sharded axis of part number ``part`` of the rule. In the shard
    they start at index ``position``."""

    part: int
    start: int
    stop: int
    position: int = 0

    @property
    def length(self) -> int:
        """Number of indices."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Layout of one rank's shard.

    Attributes:
        shape: shape of the shard, including padding.
        axis: axis along which the spans are concatenated.
        spans: spans from the first index on; the indices after them are padding.
    """

    shape: tuple[int, ...]
    axis: int
    spans: tuple[Span, ...]

    @property
    def padding(self) -> int:
        """Number of indices at the end of the axis that come from no tensor."""
        return self.shape[self.axis] - sum(span.length for span in self.spans)


# Cache the result: every range of rows that is read needs it, and a fused parameter has thousands of spans.
@lru_cache(maxsize=4096)
def runs_of(rule: Rule, head_dim: int, padded_vocab: int) -> tuple[Span, ...]:
    """Return the origin of every row of the whole, unsharded parameter, in the order of its rows.

    Args:
        rule: rule of the parameter.
        head_dim: width of one attention head; used only by ``Kind.QKV``.
        padded_vocab: rows of the padded embedding; used only by ``Kind.VOCAB``. Rows after the runs are
            padding.
    """
    if rule.kind is Kind.ROW:  # It is sharded by columns, so its rows are those of its tensor.
        return (Span(0, 0, rule.parts[0].shape[0]),)
    return shard_layout(rule, head_dim, 0, 1, padded_vocab).spans


def padded_vocab_size(vocab_size: int, tp_size: int, divisible_by: int = 1) -> int:
    """Return the smallest multiple of ``divisible_by * tp_size`` that holds the vocabulary (the rule of
    Megatron-LM, whose default is 128)."""
    multiple = divisible_by * tp_size
    return -(-vocab_size // multiple) * multiple


def shard_layout(rule: Rule, head_dim: int, tp_rank: int, tp_size: int, padded_vocab: int) -> ShardLayout:
    """Return the layout of one tensor-parallel rank's shard.

    Args:
        rule: rule of the parameter.
        head_dim: width of one attention head; used only by ``Kind.QKV``.
        tp_rank: 0 to tp_size - 1.
        tp_size: tensor-parallel size.
        padded_vocab: rows of the padded embedding over all ranks; used only by ``Kind.VOCAB``.

    Raises:
        ConversionError: the parameter cannot be split into that number of equal parts.
    """
    if not 0 <= tp_rank < tp_size:
        raise ConversionError(
            f"tensor-parallel rank {tp_rank} of {tp_size} does not exist", "give a rank from 0 to size - 1"
        )
    first = rule.parts[0].shape
    if rule.kind is Kind.REPLICATED:
        return ShardLayout(first, 0, (Span(0, 0, first[0]),))
    if rule.kind is Kind.ROW:
        start, stop = _cut(rule, first[1], tp_rank, tp_size)
        return ShardLayout((first[0], stop - start), 1, (Span(0, start, stop),))
    if rule.kind is Kind.VOCAB:
        return _vocab_layout(rule, tp_rank, tp_size, padded_vocab)
    if rule.kind in (Kind.QKV, Kind.GROUPED):
        start, stop = _cut(rule, rule.rows, tp_rank, tp_size)
        spans = _group_spans(rule) if rule.kind is Kind.GROUPED else _qkv_spans(rule, head_dim)
        return ShardLayout((stop - start, *first[1:]), 0, tuple(_clip(spans, start, stop)))
    parts: list[Span] = []
    position = 0
    for index, part in enumerate(rule.parts):
        parts.append(Span(index, *_cut(rule, part.shape[0], tp_rank, tp_size), position))
        position += parts[-1].length
    return ShardLayout((position, *first[1:]), 0, tuple(parts))


def _cut(rule: Rule, length: int, tp_rank: int, tp_size: int) -> tuple[int, int]:
    """Return start and stop of one of ``tp_size`` equal parts of ``length``."""
    if length % tp_size:
        raise ConversionError(
            f"{rule.megatron_name}: {length} rows or columns cannot be cut into {tp_size} equal parts",
            f"choose a tensor-parallel size that divides {length}",
        )
    share = length // tp_size
    return tp_rank * share, (tp_rank + 1) * share


def _vocab_layout(rule: Rule, tp_rank: int, tp_size: int, padded_vocab: int) -> ShardLayout:
    vocab, *rest = rule.parts[0].shape
    if padded_vocab < vocab:
        raise ConversionError(
            f"{rule.megatron_name}: padded vocabulary {padded_vocab} is smaller than the vocabulary {vocab}",
            f"pad to {padded_vocab_size(vocab, tp_size)} or more",
        )
    start, stop = _cut(rule, padded_vocab, tp_rank, tp_size)
    # The shard of a rank may consist of padding only.
    spans = (Span(0, start, min(stop, vocab)),) if start < vocab else ()
    return ShardLayout((stop - start, *rest), 0, spans)


def _qkv_spans(rule: Rule, head_dim: int) -> Iterator[Span]:
    """Yield the spans of the full fused tensor: for each key-value group its query heads, its key head, its
    value head."""
    query, key, _ = (part.shape[0] for part in rule.parts)
    groups = key // head_dim
    per_group = query // groups
    for group in range(groups):
        yield Span(0, group * per_group, (group + 1) * per_group)
        yield Span(1, group * head_dim, (group + 1) * head_dim)
        yield Span(2, group * head_dim, (group + 1) * head_dim)


def _group_spans(rule: Rule) -> Iterator[Span]:
    """Yield the spans of the full tensor, one group after another."""
    for group in range(rule.groups):
        for rows in rule.group_rows:
            start = rows.start + group * rows.stride
            yield Span(rows.part, start, start + rows.count)


def _clip(spans: Iterator[Span], start: int, stop: int) -> Iterator[Span]:
    """Yield the part of consecutive spans between the positions ``start`` and ``stop``, which may split a
    head."""
    position = 0
    for span in spans:
        low, high = max(start, position), min(stop, position + span.length)
        if low < high:
            yield Span(span.part, span.start + low - position, span.start + high - position, low - start)
        position += span.length
