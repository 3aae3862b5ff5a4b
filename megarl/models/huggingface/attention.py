"""The engine's attention as an attention implementation of transformers, under the name ``megarl``.

The layout of sequences travels as the keyword argument ``sequence_layout`` through ``model(**kwargs)``, as
transformers hands unknown keywords on to every attention call; so it is there again when a layer is
recomputed in the backward pass. No mask is ever made: transformers leaves that out for an implementation it
has no mask function for, and sequences are padded on the right only, so that a causal mask hides the padding
from every real token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AttentionInterface

from megarl.errors import ModelError
from megarl.models.engine.attention import ROWS, SequenceLayout, attention, cached_attention, causal_attention
from megarl.models.engine.decoded_rows import DecodedRows

IMPLEMENTATION = "megarl"
# what some models ask of their attention beyond scale and window; leaving it out in silence would compute
# another model
_UNKNOWN_FEATURES = ("softcap", "s_aux", "position_bias", "head_mask")

_default: list[SequenceLayout] = [ROWS]


@contextlib.contextmanager
def default_layout(layout: SequenceLayout) -> Iterator[None]:
    """Inside, attention takes ``layout`` wherever no ``sequence_layout`` is passed, in all threads of this
    process."""
    _default.append(layout)
    try:
        yield
    finally:
        _default.pop()


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    sequence_layout: SequenceLayout | None = None,
    row_lengths: torch.Tensor | None = None,
    decoded_rows: DecodedRows | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it.

    Args:
        module: the attention layer.
        query: [n, H, t, D], this rank's heads and context share.
        key: [n, G, k, D]; k is t, or more with a key-value cache, of which the queries are the last.
        value: [n, G, k, D].
        attention_mask: must be None.
        dropout: must be 0.
        scaling: factor of the scores.
        sliding_window: positions that a query sees, itself among them; None for all before it.
        sequence_layout: packed sequences and context parallelism; rows that are sequences when None.
        row_lengths: [n] int64, of each row its positions that are no padding on the left
            (``causal_attention``); only when generating.
        decoded_rows: whose cache keys and values are of; only when generating.
        others: further keywords of transformers.

    Returns:
        [n, t, H, D], and no attention weights.

    Raises:
        ModelError: the model asks for attention that this is not.
    """
    _refuse_unknown(module, attention_mask, dropout, others)
    mask = None if decoded_rows is None else decoded_rows.mask(sliding_window, query.dtype)
    if mask is not None and decoded_rows is not None:
        if sliding_window is not None and not decoded_rows.fixed:
            # what is before the window costs time, and other kernels' rounding, for nothing
            key, value, mask = (
                key[:, :, -sliding_window:],
                value[:, :, -sliding_window:],
                mask[..., -sliding_window:],
            )
        mixed = cached_attention(query, key, value, mask, scale=scaling)
    elif key.shape[2] > query.shape[2] or row_lengths is not None or decoded_rows is not None:
        row_lengths = row_lengths if decoded_rows is None else decoded_rows.row_lengths
        mixed = causal_attention(query, key, value, scaling, sliding_window, row_lengths=row_lengths)
    else:
        mixed = attention(
            query, key, value, sequence_layout or _default[-1], scale=scaling, window=sliding_window
        )
    return mixed.transpose(1, 2), None


def _refuse_unknown(
    module: torch.nn.Module, mask: torch.Tensor | None, dropout: float, others: dict[str, Any]
) -> None:
    asked = [name for name in _UNKNOWN_FEATURES if others.get(name) is not None]
    if others.get("is_causal", True) is False or not getattr(module, "is_causal", True):
        asked.append("is_causal=False")
    if mask is not None:
        asked.append("attention_mask")
    if dropout:
        asked.append(f"attention_dropout = {dropout}")
    if asked:
        raise ModelError(
            f"{type(module).__name__} asks for {', '.join(asked)}, which the causal attention of this "
            "backend does not have; "
            "choose a model without it, or set it to null (attention_dropout: 0) in the model's config.json"
        )


AttentionInterface.register(IMPLEMENTATION, attention_forward)
