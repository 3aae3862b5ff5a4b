"""Portable attention: one function that every backend calls when it has no fused kernel of its own.

It is causal, with grouped-query heads, a sliding window, packed sequences and context parallelism in any
combination. Shapes: B batch, S query length, K key length, H query heads, G key-value heads, D head
dimension. On a CUDA device, in 16 bit, every case that would need a mask or many calls (packed sequences,
windows, gathered keys of context-parallel ranks) uses one call of a FlashAttention kernel if there is one,
which has not been run yet; elsewhere attention is computed sequence by sequence.
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
    """Return ``torch.nn.attention.varlen.varlen_attn`` if this torch has it with windows and a scale (from
    2.11 on), otherwise None.

    Its kernel accepts grouped-query heads in any case; from 2.12 on the function requires an argument that
    enables them.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    # Ask the signature, not the version: nightly builds and forks have the features earlier.
    known = inspect.signature(varlen_attn).parameters
    if not {"scale", "window_size"} <= known.keys():
        return None
    return functools.partial(varlen_attn, enable_gqa=True) if "enable_gqa" in known else varlen_attn


def serves(query: torch.Tensor) -> bool:
    """Return whether there is a ``varlen_kernel`` that accepts tensors like this one."""
    return takes_flash(query) and varlen_kernel() is not None


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of queries, each with the keys that it sees, in the form that a kernel expects.

    Attributes:
        queries, keys: [N + 1] int32, the first position of each run; the last entry is the end.
        longest_queries, longest_keys: length of the longest run of each.
        order: [K] int64, the keys of all runs, concatenated; None if they are already in that order.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    longest_queries: int
    longest_keys: int
    order: torch.Tensor | None = None


# Cached, because every layer of a micro-batch asks for the same offsets, and row shapes repeat.
@functools.lru_cache(maxsize=32)
def offsets(starts: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return ``starts`` as [N + 1] int32 on the device, without making the host wait."""
    return sent_to(torch.tensor(starts, dtype=torch.int32), device)


@functools.lru_cache(maxsize=32)
def runs_of(starts: tuple[int, ...], rows: int, rank: int, size: int, device: torch.device) -> Runs:
    """Return the runs of context-parallel rank ``rank`` of ``size``, for rows in which sequences begin at
    ``starts``, whose last entry is the end."""
    pieces = _pieces(starts, ContextShare(rank, size))
    queries = [asked.stop - asked.start for asked, _ in pieces] * rows
    keys = [held.stop - held.start for _, held in pieces] * rows
    order = None
    if size > 1:
        seen = torch.cat([torch.arange(piece.start, piece.stop) for _, piece in pieces])
        # Each run of queries sees its sequence from the start, so that keys of the beginning are copied
        # several times.
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
    """Compute causal attention of runs of queries, each over its own keys; the queries are the last positions
    of the keys.

    Args:
        query: [B, H, S, D].
        key, value: [B, G, K, D].
        runs: runs of the queries and keys of all rows, concatenated.
        kernel: called like ``varlen_attn``.
        scale: factor of the scores; ``1/sqrt(D)`` when None.
        window: a query sees itself and the ``window - 1`` positions before it; None for all before it.

    Returns:
        [B, H, S, D].
    """
    asked, keys, values = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    if runs.order is not None:
        keys, values = keys.index_select(0, runs.order), values.index_select(0, runs.order)
    # Query and key of the same position are both at the end of their run: the kernel aligns a causal mask and
    # a window with the last query and key.
    mixed: torch.Tensor = kernel(
        asked,
        keys,
        values,
        runs.queries,
        runs.keys,
        runs.longest_queries,
        runs.longest_keys,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
    )
    return mixed.unflatten(0, (query.shape[0], query.shape[2])).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """Layout of sequences along the sequence dimension that attention sees.

    Attributes:
        starts: first position of each packed sequence, counted over all context-parallel ranks; the last
            entry is the end. None when each batch row is one sequence.
        context: the ranks that share every sequence.
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
    """Compute causal attention in which the queries are the *last* S of K positions (all of them when
    training, a few when decoding with a cache).

    Args:
        query: [B, H, S, D].
        key: [B, G, K, D], K >= S; G divides H (grouped-query attention).
        value: [B, G, K, D].
        scale: factor of the scores; ``1/sqrt(D)`` when None.
        window: a query sees itself and the ``window - 1`` positions before it; None for all before it.
        sinks: [H] logits, one per head, that take part in every softmax next to the scores and have no value;
            None for none.
        row_lengths: [B] int64, the number of last positions of each row that are not padding on the left; a
            padded position is seen only by itself. A length may exceed the number of keys. None for no
            padding.

    Returns:
        [B, H, S, D] in the dtype of ``query``.
    """
    queries, keys = query.shape[2], key.shape[2]
    if sinks is not None:
        return _with_sinks(
            query, key, value, scale, sinks, _seen(queries, keys, window, row_lengths, query.device)
        )
    # A window that holds all keys needs no mask, and without a mask the fast kernel is used.
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
    # Use a mask, though it rules FlashAttention out: scaled_dot_product_attention knows neither windows nor
    # padding.
    mask = _seen(queries, keys, window, row_lengths, query.device)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)


def _of_one_query(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Compute attention of one query per row, with the heads of a group as queries of the group's keys. No
    kernel that takes a mask takes groups, and without a mask the kernel would repeat the keys."""
    # With one query per row, the heads of a group can be passed as queries, because all of them see the same
    # keys.
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
    """Compute attention of one query per row over a cache, with a mask of the positions that the query sees,
    so that no shape depends on how full the cache is.

    Args:
        query: [B, H, 1, D].
        key: [B, G, K, D].
        value: [B, G, K, V]; V may differ from D.
        mask: [B, 1, 1, K] of the dtype of ``query``: 0 where a key is seen, minus infinity elsewhere; each
            row sees at least one key.
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


# Cached, because every layer of a pass asks for the same mask. This mask is small; that of a whole prompt is
# not cached, because it would keep its memory.
@functools.lru_cache(maxsize=2)
def _seen_by_last(
    keys: int, window: int | None, row_lengths: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    return _seen(1, keys, window, row_lengths, device)


def _seen(
    queries: int, keys: int, window: int | None, row_lengths: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """Return the mask of the keys that each query sees: [queries, keys] bool, or with padding [B, 1, queries,
    keys]."""
    # Align the mask with the last query and the last key: torch's is_causal would align it with the first
    # ones.
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
    """Compute attention with the sinks as one more key, in front of the others, which every query sees and
    whose value is zero.

    One more element of queries and keys gives that key its score: the head's logit times 1, and 0 for the
    other keys.

    Args:
        query, key, value, scale, sinks: as in ``causal_attention``.
        mask: mask of the other keys, either bool or added to scores; broadcast to [B, H, S, K].
    """
    batch, heads, queries, width = query.shape
    groups = key.shape[1]
    scale = width**-0.5 if scale is None else scale
    # Divide by the scale, because attention multiplies all scores by it.
    logits = (sinks / scale).to(query.dtype).view(1, heads, 1, 1).expand(batch, heads, queries, 1)
    # The sink has 1 in the added element and 0 elsewhere, so that the score is the query's added element
    # alone.
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
        query: [B, H, s, D], this context rank's part; packed sequences have B = 1.
        key: [B, G, s, D]; with a key-value cache there are more positions than queries, and the queries are
            the last ones.
        value: [B, G, s, V]; V may differ from D.
        layout: packed sequences and context parallelism. Packed lengths, and without packing the row length,
            are multiples of 2 * context size.
        scale, window, sinks, row_lengths: as in ``causal_attention``. Sinks cannot be combined with a ring of
            context-parallel ranks, nor padding on the left with packed sequences or context parallelism.

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
    # The variable-length kernel can express neither sinks, which have no position, nor padding on the left,
    # which is not a run.
    kernel = varlen_kernel() if sinks is None and row_lengths is None and serves(query) else None
    # Without a mask torch's own attention uses a fast kernel too, so that plain rows take this one only for a
    # window.
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
    """Return the first position of each sequence in the sequence dimension, over all context-parallel ranks;
    the last entry is the end."""
    return layout.starts or (0, query.shape[2] * layout.context.size)


def _parts(tensor: torch.Tensor, slices: Sequence[slice]) -> Sequence[torch.Tensor]:
    """Return slices of dimension 2. If the slices cover the dimension in order, the tensor is split, so that
    its gradient is concatenated once; each single slice would get a gradient of the full size."""
    end_to_end = all(one.stop == other.start for one, other in itertools.pairwise(slices))
    if end_to_end and slices[0].start == 0 and slices[-1].stop == tensor.shape[2]:
        return tensor.split([piece.stop - piece.start for piece in slices], dim=2)
    return [tensor[:, :, piece] for piece in slices]


def _of_equal_widths(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, attend: Kernel
) -> torch.Tensor:
    """Call an attention function that requires keys and values of one width: the narrower ones are padded
    with zeros, which change no score, and the zeros in the result are dropped."""
    keys, values = key.shape[3], value.shape[3]
    wide = max(keys, values)
    # Scale by the true width of the keys, not by the padded width.
    query, key, value = (pad(tensor, (0, wide - tensor.shape[3])) for tensor in (query, key, value))
    mixed: torch.Tensor = attend(query, key, value, scale=keys**-0.5 if scale is None else scale)
    return mixed[..., :values]


def _pieces(starts: tuple[int, ...], context: ContextShare) -> list[tuple[slice, slice]]:
    """Return for each run of this rank's queries its slice of the queries, and the slice of the keys of its
    sequence up to the run's end."""
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
    """Gather keys and values [B, G, s, D] of every rank into [B, G, S, D] in order, both in one
    collective."""
    # Put the sequence first, where gather_shared joins parts, and stack keys and values into one collective.
    both = torch.stack([key, value]).movedim(3, 0)
    whole = gather_shared(both, starts, context).movedim(0, 3)
    return whole[0], whole[1]
