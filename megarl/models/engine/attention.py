"""Portable attention: one function that every backend calls when it has no fused kernel of its own.

Causal, with grouped-query heads, a sliding window, packed sequences and context parallelism in any combination. Shapes: B batch, S query
length, K key length, H query heads, G key-value heads, D head dimension. Packed 16-bit sequences on a CUDA device go through one call of a
FlashAttention kernel where there is one; elsewhere attention is computed sequence by sequence.
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

from megarl.models.engine.context import ContextShare, gather_shared
from megarl.models.engine.ring_attention import ring_attention

Kernel = Callable[..., Any]
HALF = (torch.bfloat16, torch.float16)


@functools.cache
def varlen_kernel() -> Kernel | None:
    """``torch.nn.attention.varlen.varlen_attn``, where this torch has it with grouped-query heads and windows; otherwise None."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    return varlen_attn if {"scale", "window_size", "enable_gqa"} <= known.keys() else None


def serves(query: torch.Tensor) -> bool:
    """Whether the kernel takes tensors like this one."""
    return query.is_cuda and query.dtype in HALF and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256 and varlen_kernel() is not None


def varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    pieces: Sequence[tuple[slice, slice]],
    kernel: Kernel,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of runs of queries, each over its own keys, of which the queries are the last.

    Args:
        query: [1, H, S, D].
        key, value: [1, G, K, D].
        pieces: queries, which follow one another without gaps, and the keys that they see.
        kernel: called like ``varlen_attn``.
        scale: factor of the scores; ``1/sqrt(D)`` when None.
        window: a query sees itself and the ``window - 1`` positions before it; None for all before it.

    Returns:
        [1, H, S, D].
    """
    asked = [piece.stop - piece.start for piece, _ in pieces]
    seen = [piece.stop - piece.start for _, piece in pieces]
    key, value = (_laid_end_to_end(tensor, [piece for _, piece in pieces]) for tensor in (key, value))
    # at the ends of both a query meets its own key: the kernel aligns a causal mask and a window with the last query and key
    mixed: torch.Tensor = kernel(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        _offsets(asked, query.device),
        _offsets(seen, query.device),
        max(asked),
        max(seen),
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return mixed.transpose(0, 1)[None]


def _laid_end_to_end(tensor: torch.Tensor, slices: Sequence[slice]) -> torch.Tensor:
    """The slices of dimension 2 behind one another; the tensor itself when that is what they are."""
    end_to_end = all(one.stop == other.start for one, other in itertools.pairwise(slices))
    if end_to_end and slices[0].start == 0 and slices[-1].stop == tensor.shape[2]:
        return tensor
    return torch.cat([tensor[:, :, piece] for piece in slices], dim=2)


def _offsets(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """[N + 1] int32: where each run begins; the last entry is the end."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class SequenceLayout:
    """Sequence layout: how sequences lie in the sequence dimension that attention sees.

    Attributes:
        starts: where each packed sequence begins, counted over all context-parallel ranks; the last entry is the end. None when each batch
            row is one sequence.
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
    """Causal attention in which the queries are the *last* S of K positions (all of them when training, a few when decoding with a cache).

    Args:
        query: [B, H, S, D].
        key: [B, G, K, D], K >= S; G divides H (grouped-query attention).
        value: [B, G, K, D].
        scale: factor of the scores; ``1/sqrt(D)`` when None.
        window: a query sees itself and the ``window - 1`` positions before it; None for all before it.
        sinks: [H] logits, one a head, that take their share of every softmax beside the scores and have no value; None for none.
        row_lengths: [B] int64, of each row its last positions that are no padding on the left, which nothing but itself sees; a row may
            have more of them than there are keys. None for no padding.

    Returns:
        [B, H, S, D] in the dtype of ``query``.
    """
    queries, keys = query.shape[2], key.shape[2]
    if sinks is not None:
        return _with_sinks(query, key, value, scale, window, sinks, row_lengths)
    grouped = query.shape[1] != key.shape[1]
    narrow = window is not None and window < keys
    if queries == keys and not narrow and row_lengths is None:
        return scaled_dot_product_attention(query, key, value, is_causal=queries > 1, scale=scale, enable_gqa=grouped)
    mask = None
    if queries > 1 or narrow or row_lengths is not None:
        mask = _seen(queries, keys, window if narrow else None, row_lengths, query.device)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)


def _seen(queries: int, keys: int, window: int | None, row_lengths: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Which keys a query sees: [queries, keys] bool, or with padding [B, 1, queries, keys]."""
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(diagonal=keys - queries)
    if window is not None:
        mask = mask.triu(diagonal=keys - queries - window + 1)
    if row_lengths is None:
        return mask
    is_real = torch.arange(keys, device=device) >= keys - row_lengths[:, None]
    # a softmax over nothing would be no number
    itself = torch.ones_like(mask).tril(diagonal=keys - queries).triu(diagonal=keys - queries)
    return (mask & is_real[:, None, None]) | itself


def _with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    window: int | None,
    sinks: torch.Tensor,
    row_lengths: torch.Tensor | None,
) -> torch.Tensor:
    """The sinks as one more key, in front of the others, which every query sees and whose value is zero.

    One more element of queries and keys gives that key its score: the head's logit times 1, and 0 for the other keys.
    """
    batch, heads, queries, width = query.shape
    groups, keys = key.shape[1:3]
    scale = width**-0.5 if scale is None else scale
    logits = (sinks / scale).to(query.dtype).view(1, heads, 1, 1).expand(batch, heads, queries, 1)
    sink = torch.nn.functional.one_hot(torch.tensor([width], device=key.device), width + 1).to(key.dtype)
    key = torch.cat([sink.view(1, 1, 1, -1).expand(batch, groups, 1, -1), pad(key, (0, 1))], dim=2)
    mixed = scaled_dot_product_attention(
        torch.cat([query, logits], dim=3),
        key,
        pad(value, (0, 1, 1, 0)),
        attn_mask=pad(_seen(queries, keys, window, row_lengths, query.device), (1, 0), value=True),
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
    """Causal attention inside every sequence of ``layout``.

    Args:
        query: [B, H, s, D], this context rank's part; packed sequences have B = 1.
        key: [B, G, s, D]; with a key-value cache more positions than queries, which are the last.
        value: [B, G, s, V]; V may be another width than D.
        layout: packed sequences and context parallelism. Packed lengths, and without packing the row length, are multiples of
            2 * context size.
        scale, window, sinks, row_lengths: as in ``causal_attention``; sinks do not go with a ring of context-parallel ranks, and padding on
            the left neither with packed sequences nor with context parallelism.

    Returns:
        [B, H, s, V], the part of the queries.
    """
    if value.shape[3] != key.shape[3]:
        return _of_equal_widths(query, key, value, layout, scale=scale, window=window, sinks=sinks, row_lengths=row_lengths)
    context = layout.context
    if layout.starts is None and context.size == 1:
        return causal_attention(query, key, value, scale, window, sinks, row_lengths)
    assert row_lengths is None, "rows that are decoded are whole"
    starts = layout.starts or (0, query.shape[2] * context.size)
    if context.size > 1 and context.ring:
        assert sinks is None, "refused where the model is built"
        return ring_attention(query, key, value, starts, context, scale, window)
    if context.size > 1:
        key, value = _whole_keys_and_values(key, value, starts, context)
    pieces = _pieces(starts, context)
    kernel = varlen_kernel() if layout.starts is not None and sinks is None and serves(query) else None
    if kernel is not None:
        return varlen_attention(query, key, value, pieces, kernel, scale=scale, window=window)
    return torch.cat(
        [causal_attention(query[:, :, here], key[:, :, seen], value[:, :, seen], scale, window, sinks) for here, seen in pieces], dim=2
    )


def _of_equal_widths(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: SequenceLayout,
    *,
    scale: float | None,
    window: int | None,
    sinks: torch.Tensor | None,
    row_lengths: torch.Tensor | None,
) -> torch.Tensor:
    """Attention whose kernels want keys and values of one width: the narrower ones are filled up with zeros, which change no score and give
    zeros that are cut off."""
    keys, values = key.shape[3], value.shape[3]
    wide = max(keys, values)
    query, key, value = (pad(tensor, (0, wide - tensor.shape[3])) for tensor in (query, key, value))
    scale = keys**-0.5 if scale is None else scale
    mixed = attention(query, key, value, layout, scale=scale, window=window, sinks=sinks, row_lengths=row_lengths)
    return mixed[..., :values]


def _pieces(starts: tuple[int, ...], context: ContextShare) -> list[tuple[slice, slice]]:
    """Return for each run of this rank's queries: where it stands here, and the keys of its sequence up to its end."""
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
    """[B, G, s, D] of every rank to [B, G, S, D] in order, both in one collective."""
    both = torch.stack([key, value]).movedim(3, 0)
    whole = gather_shared(both, starts, context).movedim(0, 3)
    return whole[0], whole[1]
