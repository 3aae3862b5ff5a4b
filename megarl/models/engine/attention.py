"""Portable attention, for backends and cases without a fused kernel.

It is causal and supports any combination of grouped-query heads, a sliding window, packed sequences and
context parallelism. On a CUDA device in 16 bit, the cases that would need a mask or many calls (packed
sequences, windows, gathered keys of context-parallel ranks) take one call of a FlashAttention kernel if there
is one; this path is untested. Elsewhere attention is computed sequence by sequence.

Shapes: B batch, S query length, K key length, H query heads, G key-value heads, D head dimension.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from megarl.distributed.device import sent_to
from megarl.models.engine.context import ContextShare, gather_shared
from megarl.models.engine.partial_attention import takes_flash
from megarl.models.engine.ring_attention import ring_attention

Kernel = Callable[..., Any]


@functools.cache
def varlen_kernel() -> Kernel | None:
    """Return ``torch.nn.attention.varlen.varlen_attn`` if torch's version supports windows and a scale (2.11
    and later), otherwise None.

    The kernel always accepts grouped-query heads. From torch 2.12 on the function has an argument that must
    enable them, which is set here.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    # Inspect the signature, not the version: nightly builds and forks have the features earlier.
    known = inspect.signature(varlen_attn).parameters
    if not {"scale", "window_size"} <= known.keys():
        return None
    return functools.partial(varlen_attn, enable_gqa=True) if "enable_gqa" in known else varlen_attn


def serves(query: torch.Tensor) -> bool:
    """Return whether ``varlen_kernel`` exists and accepts tensors of this dtype and device."""
    return takes_flash(query) and varlen_kernel() is not None


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of consecutive queries, each with the keys that it sees, in the form that a variable-length kernel
    expects.

    Attributes:
        queries, keys: [N + 1] int32, the first position of each run; the last entry is the end.
        longest_queries, longest_keys: length of the longest run of queries and of keys.
        order: [K] int64, indices that select the keys of all runs one after another; None if the keys are
            already in this order.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    longest_queries: int
    longest_keys: int
    order: torch.Tensor | None = None


# Cached, because all layers of a micro-batch use the same offsets, and row shapes repeat.
@functools.lru_cache(maxsize=32)
def offsets(starts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return ``starts`` as an int32 tensor [N + 1] on the device, without making the host wait for the
    copy."""
    return sent_to(torch.tensor(starts, dtype=torch.int32), device)


@functools.lru_cache(maxsize=32)
def runs_of(starts: tuple[int, ...], rows: int, rank: int, size: int, device: torch.device) -> Runs:
    """Return the runs of one context-parallel rank.

    Args:
        starts: first position of each sequence in a row; the last entry is the end of the row.
        rows: number of rows, all with these sequences.
        rank, size: index of the context-parallel rank, and number of ranks.
        device: device of the result.
    """
    pieces = _pieces(starts, ContextShare(rank, size))
    queries = [asked.stop - asked.start for asked, _ in pieces] * rows
    keys = [held.stop - held.start for _, held in pieces] * rows
    order = None
    if size > 1:
        seen = torch.cat([torch.arange(piece.start, piece.stop) for _, piece in pieces])
        # Each run of queries sees its sequence from the start, so the first keys of a sequence occur in
        # several runs, and are copied for each.
        order = sent_to((torch.arange(rows)[:, None] * starts[-1] + seen).flatten(), device)
    ends_of_queries = offsets((0, *itertools.accumulate(queries)), device)
    ends_of_keys = offsets((0, *itertools.accumulate(keys)), device)
    return Runs(ends_of_queries, ends_of_keys, max(queries), max(keys), order)


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    runs: Runs,
    kernel: Kernel,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Compute causal attention of runs of queries, each over its own keys. The queries of a run are the last
    positions of its keys.

    Args:
        query: [B, H, S, D].
        key, value: [B, G, K, D].
        runs: runs of the queries and keys of all rows, concatenated.
        kernel: a function with the signature of ``varlen_attn``.
        scale: factor of the scores; ``1/sqrt(D)`` when None.
        window: a query sees itself and the ``window - 1`` positions before it; None for all before it.

    Returns:
        [B, H, S, D].
    """
    asked, keys, values = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    if runs.order is not None:
        keys, values = keys.index_select(0, runs.order), values.index_select(0, runs.order)
    # The kernel aligns a causal mask and a window with the last query and the last key of a run. This is
    # correct here, because both have the same position.
    mixed: torch.Tensor = kernel(
        asked,
        keys,
        values,
        runs.queries,
        runs.keys,
        runs.longest_queries,
        runs.longest_keys,
        scale=scale,
        # Number of positions that a query sees on its left (-1 for all) and on its right.
        window_size=(-1 if window is None else window - 1, 0),
    )
    return mixed.unflatten(0, (query.shape[0], query.shape[2])).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """Positions of the sequences in the sequence dimension, and its split over context-parallel ranks.

    Attributes:
        starts: first position of each packed sequence, counted over all context-parallel ranks; the last
            entry is the end. None if each batch row is one sequence.
        context: the context-parallel ranks that share every sequence.
    """

    starts: tuple[int, ...] | None = None
    context: ContextShare = field(default_factory=ContextShare)


ROWS = SequenceLayout()


def causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    row_lengths: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention in which the S queries are the *last* of the K positions: all of them in
    training, few of them when decoding with a KV cache.

    Args:
        query: [B, H, S, D].
        key: [B, G, K, D], K >= S; G divides H (grouped-query attention).
        value: [B, G, K, D].
        scale: factor of the scores; ``1/sqrt(D)`` when None.
        window: a query sees itself and the ``window - 1`` positions before it; None for all before it.
        sinks: [H], one extra logit per head that is part of every softmax but has no value; None for no
            sinks.
        row_lengths: [B] int64, the number of positions of each row after its padding on the left. A padded
            position is seen only by itself. A length may exceed the number of keys. None for no padding.

    Returns:
        [B, H, S, D] in the dtype of ``query``.
    """
    queries, keys = query.shape[2], key.shape[2]
    if sinks is not None:
        return _with_sinks(
            query, key, value, scale, sinks, _seen(queries, keys, window, row_lengths, query.device)
        )
    # A window over all keys needs no mask, and only without a mask is the fast kernel used.
    narrow = window is not None and window < keys
    if queries == 1:
        mask = (
            _seen_by_last(keys, window, row_lengths, query.device)
            if narrow or row_lengths is not None
            else None
        )
        return _of_one_query(query, key, value, scale, mask)
    grouped = query.shape[1] != key.shape[1]
    if queries == keys and not narrow and row_lengths is None:
        return scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=grouped
        )
    # A mask rules FlashAttention out, but scaled_dot_product_attention has no other way to express windows
    # and padding.
    mask = _seen(queries, keys, window, row_lengths, query.device)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)


def _of_one_query(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Compute attention of one query per row. The query heads of a group are passed as queries of the group's
    only key head.

    Otherwise no kernel would serve: kernels with a mask do not accept grouped-query heads, and without a mask
    the kernel would copy the keys for every query head.
    """
    # All query heads of a group see the same keys, because there is one query per row.
    each = query.unflatten(1, (key.shape[1], -1)).squeeze(3)
    return (
        scaled_dot_product_attention(each, key, value, attn_mask=mask, scale=scale).flatten(1, 2).unsqueeze(2)
    )


def cached_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    *,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention of one query per row over a KV cache. A mask selects the positions that the query
    sees, so tensor shapes do not depend on how full the cache is.

    Args:
        query: [B, H, 1, D].
        key: [B, G, K, D].
        value: [B, G, K, V]; V may differ from D.
        mask: [B, 1, 1, K] in the dtype of ``query``: 0 where a key is seen, minus infinity elsewhere. Each
            row must see at least one key.
        scale: factor of the scores; ``1/sqrt(D)`` when None.
        sinks: as in ``causal_attention``.

    Returns:
        [B, H, 1, V] in the dtype of ``query``.
    """
    if value.shape[3] != key.shape[3]:
        return _of_equal_widths(
            query, key, value, scale, functools.partial(cached_attention, mask=mask, sinks=sinks)
        )
    if sinks is not None:
        return _with_sinks(query, key, value, scale, sinks, mask)
    return _of_one_query(query, key, value, scale, mask)


# Cached, because all layers of a pass use the same mask. The masks of full prompts are too large to keep.
@functools.lru_cache(maxsize=2)
def _seen_by_last(
    keys: int, window: int | None, row_lengths: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    return _seen(1, keys, window, row_lengths, device)


def _seen(
    queries: int, keys: int, window: int | None, row_lengths: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """Return a mask that is True where a query sees a key: [queries, keys] bool, or [B, 1, queries, keys]
    with padding."""
    # Align the mask with the last query and the last key. torch's is_causal aligns with the first ones.
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(diagonal=keys - queries)
    if window is not None:
        mask = mask.triu(diagonal=keys - queries - window + 1)
    if row_lengths is None:
        return mask
    is_real = torch.arange(keys, device=device) >= keys - row_lengths[:, None]
    # Let padding see itself: a softmax over no keys would be NaN.
    itself = torch.ones_like(mask).tril(diagonal=keys - queries).triu(diagonal=keys - queries)
    return (mask & is_real[:, None, None]) | itself


def _with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    sinks: torch.Tensor,
    mask: torch.Tensor,
) -> torch.Tensor:
    """Compute attention with sinks as one more key, in front of the others, that every query sees and whose
    value is zero.

    The head dimension grows by one element, which gives that key its score: the query contains the head's
    logit there, the sink's key 1, and all other keys 0.

    Args:
        query, key, value, scale, sinks: as in ``causal_attention``.
        mask: mask of the other keys, either bool or added to the scores; broadcasts to [B, H, S, K].
    """
    batch, heads, queries, width = query.shape
    groups = key.shape[1]
    scale = width**-0.5 if scale is None else scale
    # Divide by the scale, because attention multiplies all scores by it.
    logits = (sinks / scale).to(query.dtype).view(1, heads, 1, 1).expand(batch, heads, queries, 1)
    # The sink's key is 1 in the added element and 0 elsewhere, so its score is the query's added element.
    sink = pad(key.new_ones(1), (width, 0))
    key = torch.cat([sink.expand(batch, groups, 1, -1), pad(key, (0, 1))], dim=2)
    mixed = scaled_dot_product_attention(
        torch.cat([query, logits], dim=3),
        key,
        pad(value, (0, 1, 1, 0)),
        attn_mask=pad(mask, (1, 0), value=mask.dtype == torch.bool),
        scale=scale,
        enable_gqa=heads != groups,
    )
    return mixed[..., :-1]


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: SequenceLayout = ROWS,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    row_lengths: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention inside every sequence of ``layout``.

    Args:
        query: [B, H, s, D], this context-parallel rank's shard; packed sequences have B = 1.
        key: [B, G, s, D]. With a KV cache there are more keys than queries, and the queries are the last
            positions.
        value: [B, G, s, V]; V may differ from D.
        layout: packed sequences and context parallelism. The length of each packed sequence, or of a row
            without packing, is a multiple of 2 * context size.
        scale, window, sinks, row_lengths: as in ``causal_attention``. Sinks cannot be combined with ring
            attention, and padding on the left can be combined neither with packing nor with context
            parallelism.

    Returns:
        [B, H, s, V], for this rank's queries.
    """
    if value.shape[3] != key.shape[3]:
        same = functools.partial(
            attention, layout=layout, window=window, sinks=sinks, row_lengths=row_lengths
        )
        return _of_equal_widths(query, key, value, scale, same)
    context = layout.context
    if context.size > 1 and context.ring:
        assert sinks is None, "refused where the model is built"
        return ring_attention(query, key, value, _starts(query, layout), context, scale, window)
    if context.size > 1:
        key, value = _whole_keys_and_values(key, value, _starts(query, layout), context)
    plain = layout.starts is None and context.size == 1
    assert plain or row_lengths is None, "rows that are decoded are whole"
    # The variable-length kernel supports neither sinks, which have no position, nor padding on the left,
    # which belongs to no run.
    kernel = varlen_kernel() if sinks is None and row_lengths is None and serves(query) else None
    # For plain rows torch's own attention is as fast, unless it needs a mask for a window.
    if kernel is not None and (not plain or (window is not None and window < key.shape[2] == query.shape[2])):
        runs = runs_of(_starts(query, layout), query.shape[0], context.rank, context.size, query.device)
        return varlen_attention(query, key, value, runs, kernel, scale=scale, window=window)
    if plain:
        return causal_attention(query, key, value, scale, window, sinks, row_lengths)
    of_queries, of_keys = zip(*_pieces(_starts(query, layout), context), strict=True)
    parts = zip(_parts(query, of_queries), _parts(key, of_keys), _parts(value, of_keys), strict=True)
    return torch.cat(
        [causal_attention(asked, held, carried, scale, window, sinks) for asked, held, carried in parts],
        dim=2,
    )


def _starts(query: torch.Tensor, layout: SequenceLayout) -> tuple[int, ...]:
    """Return the first position of each sequence, counted over all context-parallel ranks. The last entry is
    the end."""
    return layout.starts or (0, query.shape[2] * layout.context.size)


def _parts(tensor: torch.Tensor, slices: Sequence[slice]) -> Sequence[torch.Tensor]:
    """Return slices of dimension 2. If they cover the dimension in order, use ``split``, whose backward pass
    concatenates the gradients once. A single slice would produce a gradient of the full size."""
    end_to_end = all(one.stop == other.start for one, other in itertools.pairwise(slices))
    if end_to_end and slices[0].start == 0 and slices[-1].stop == tensor.shape[2]:
        return tensor.split([piece.stop - piece.start for piece in slices], dim=2)
    return [tensor[:, :, piece] for piece in slices]


def _of_equal_widths(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, attend: Kernel
) -> torch.Tensor:
    """Call an attention function that requires equal head dimensions of keys and values. The narrower tensor
    is padded with zeros, which change no score, and the padding is removed from the result."""
    keys, values = key.shape[3], value.shape[3]
    wide = max(keys, values)
    # The default scale depends on the unpadded width of the keys.
    query, key, value = (pad(tensor, (0, wide - tensor.shape[3])) for tensor in (query, key, value))
    mixed: torch.Tensor = attend(query, key, value, scale=keys**-0.5 if scale is None else scale)
    return mixed[..., :values]


def _pieces(starts: tuple[int, ...], context: ContextShare) -> list[tuple[slice, slice]]:
    """Return, for each run of this rank's queries, its slice of the queries and the slice of the keys that it
    sees: its sequence up to the run's end."""
    pieces, done = [], 0
    for start, end in itertools.pairwise(starts):
        for first, last in context.chunks(start, end):
            if last > first:
                pieces.append((slice(done, done + last - first), slice(start, last)))
            done += last - first
    return pieces


def _whole_keys_and_values(
    key: torch.Tensor, value: torch.Tensor, starts: tuple[int, ...], context: ContextShare
) -> tuple[torch.Tensor, torch.Tensor]:
    """All-gather the keys and values [B, G, s, D] of all context-parallel ranks into [B, G, S, D], both in
    one collective."""
    # gather_shared concatenates in the first dimension, so move the sequence there. Stack keys and values, so
    # that one collective is enough.
    both = torch.stack([key, value]).movedim(3, 0)
    whole = gather_shared(both, starts, context).movedim(0, 3)
    return whole[0], whole[1]
