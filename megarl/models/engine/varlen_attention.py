"""Packed sequences in one call of a FlashAttention kernel, where there is one: 16-bit tensors on a CUDA device.

Elsewhere the engine's attention goes from sequence to sequence.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

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
