"""Registers the engine's attention with transformers as attention implementation ``megarl``.

The layout of the sequences is passed as ``model(sequence_layout=...)``. transformers forwards this keyword to
every attention call, also when a layer is recomputed in the backward pass. No mask is ever created:
transformers creates none for an implementation without a mask function. Padding is on the right only, where
causality hides it from every real token.
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
# Attention features that some models request beyond scale and window. Silently ignoring one would compute a
# different model.
_UNKNOWN_FEATURES = ("softcap", "s_aux", "position_bias", "head_mask")

_default: list[SequenceLayout] = [ROWS]


@contextlib.contextmanager
def default_layout(layout: SequenceLayout) -> Iterator[None]:
    """Within the context, make ``layout`` the default of ``sequence_layout``, in all threads of this
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
    """Compute attention with the signature that transformers calls.

    Args:
        module: the attention layer.
        query: [n, H, t, D] for this rank's heads and part of the sequence.
        key: [n, G, k, D]; k is t, or larger with a key-value cache, where the queries are the last t
            positions.
        value: [n, G, k, D].
        attention_mask: must be None.
        dropout: must be 0.
        scaling: factor of the scores.
        sliding_window: number of positions that a query attends to, including its own; None for all earlier
            positions.
        sequence_layout: packed sequences and context parallelism; None for the default, one sequence per row
            unless ``default_layout`` changes it.
        row_lengths: [n] int64, each row's number of positions without left padding (``causal_attention``);
            generation only.
        decoded_rows: rows whose cache supplies keys and values; generation only.
        others: other keywords of transformers.

    Returns:
        The attention output [n, t, H, D], and None in place of attention weights.

    Raises:
        ModelError: the model requests an unsupported attention feature.
    """
    _refuse_unknown(module, attention_mask, dropout, others)
    mask = None if decoded_rows is None else decoded_rows.mask(sliding_window, query.dtype)
    if mask is not None and decoded_rows is not None:
        if sliding_window is not None and not decoded_rows.fixed:
            # Drop keys before the window: they cost time and select other kernels with other rounding.
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
    module: torch.nn.Module, mask: torch.Tensor | None, dropout: float, others: dict[str, object]
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
