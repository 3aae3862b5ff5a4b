"""Layout of tensor-parallel shards: the origin of each row, as pure arithmetic.

A shard is a list of spans in order; each span is a range of rows (or columns) of one full Hugging Face
tensor. Reading copies the spans into the shard, and writing copies them out, so both are inverse by
construction.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from converters.errors import ConversionError
from converters.mapping.rule import Kind, Rule


@dataclass(frozen=True, slots=True)
class Span:
    """A range of rows or columns of a Hugging Face tensor.

    Attributes:
        part: index of the tensor in the rule's parts.
        start, stop: range along the sharded axis of the full tensor.
        position: index in the shard at which the range begins.
    """

    part: int
    start: int
    stop: int
    position: int = 0

    @property
    def length(self) -> int:
        """Number of rows or columns."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Layout of a rank's shard.

    Attributes:
        shape: shape of the shard, with padding.
        axis: sharded axis.
        spans: spans from the first index on; the rest is padding.
    """

    shape: tuple[int, ...]
    axis: int
    spans: tuple[Span, ...]

    @property
    def padding(self) -> int:
        """Number of rows or columns at the end that are padding."""
        return self.shape[self.axis] - sum(span.length for span in self.spans)


# Cached, because every read needs it, and a fused parameter has thousands of spans.
@lru_cache(maxsize=4096)
def runs_of(rule: Rule, head_dim: int, padded_vocab: int) -> tuple[Span, ...]:
    """Return the origin of each row of a full, unsharded parameter, in order.

    Args:
        rule: rule of the parameter.
        head_dim: width of an attention head; for ``Kind.QKV``.
        padded_vocab: rows of the padded embedding; for ``Kind.VOCAB``. Rows after the spans are padding.
    """
    if rule.kind is Kind.ROW:  # Sharded by columns, so its rows are those of its tensor.
        return (Span(0, 0, rule.parts[0].shape[0]),)
    return shard_layout(rule, head_dim, 0, 1, padded_vocab).spans


def padded_vocab_size(vocab_size: int, tp_size: int, divisible_by: int = 1) -> int:
    """Return the vocabulary size, rounded up to a multiple of ``divisible_by * tp_size``, as Megatron-LM does
    (with 128 by default)."""
    multiple = divisible_by * tp_size
    return -(-vocab_size // multiple) * multiple


def shard_layout(rule: Rule, head_dim: int, tp_rank: int, tp_size: int, padded_vocab: int) -> ShardLayout:
    """Return the layout of a tensor-parallel rank's shard.

    Args:
        rule: rule of the parameter.
        head_dim: width of an attention head; for ``Kind.QKV``.
        tp_rank: rank, from 0 to ``tp_size - 1``.
        tp_size: tensor-parallel size.
        padded_vocab: rows of the padded embedding over all ranks; for ``Kind.VOCAB``.

    Raises:
        ConversionError: the parameter cannot be divided equally.
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
    """Return (start, stop) of a rank's equal share of ``length``."""
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
    # A shard may consist of padding only.
    spans = (Span(0, start, min(stop, vocab)),) if start < vocab else ()
    return ShardLayout((stop - start, *rest), 0, spans)


def _qkv_spans(rule: Rule, head_dim: int) -> Iterator[Span]:
    """Yield the spans of a full fused QKV tensor: for each key-value group its query heads, key head and
    value head."""
    query, key, _ = (part.shape[0] for part in rule.parts)
    groups = key // head_dim
    per_group = query // groups
    # Megatron-Core interleaves the rows of queries, key and value by query group.
    for group in range(groups):
        yield Span(0, group * per_group, (group + 1) * per_group)
        yield Span(1, group * head_dim, (group + 1) * head_dim)
        yield Span(2, group * head_dim, (group + 1) * head_dim)


def _group_spans(rule: Rule) -> Iterator[Span]:
    """Yield the spans of a full tensor, group by group."""
    for group in range(rule.groups):
        for rows in rule.group_rows:
            start = rows.start + group * rows.stride
            yield Span(rows.part, start, start + rows.count)


def _clip(spans: Iterator[Span], start: int, stop: int) -> Iterator[Span]:
    """Yield the sections of consecutive spans between two positions; heads may be split."""
    position = 0
    for span in spans:
        low, high = max(start, position), min(stop, position + span.length)
        if low < high:
            yield Span(span.part, span.start + low - position, span.start + high - position, low - start)
        position += span.length
