"""Megatron attention for decoding left-padded rows, with ``DecodedRows`` as its key-value cache and rotation
by each row's positions.

Keys are rotated before they are cached; Megatron itself would rotate all cached keys again in every pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    _yarn_get_concentration_factor_from_config,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from megarl.models.engine.decoded_rows import DecodedRows
from megarl.models.megatron.gated_delta import GatedDeltaMixer
from megarl.models.megatron.rotary import rotate, rotation


class CachesRows:
    """Mixin for a Megatron attention layer that stores keys and values in ``DecodedRows`` during decoding.

    Attributes:
        rows: the rows being decoded, set by ``decoding``; None in training.
    """

    rows: DecodedRows | None = None
    layer_number: int

    def _adjust_key_value_for_inference(
        self,
        inference_context: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rotary_pos_emb: Any,
        *others: Any,
    ) -> tuple[Any, ...]:
        """Store keys and values in our cache instead of Megatron's, without rotating them."""
        if inference_context is None:
            return query, key, value, rotary_pos_emb, self.attn_mask_type, None
        assert self.rows is not None, "inside of decoding()"
        return (
            query,
            *self.rows.store(self.layer_number, key, value),
            rotary_pos_emb,
            # The core attention is causal and excludes each row's padding itself.
            AttnMaskType.no_mask,
            None,
        )


class RowSelfAttention(CachesRows, SelfAttention):
    """Self-attention that rotates queries and keys itself (``megarl.models.megatron.rotary``), unless
    Transformer Engine's fused kernel does so, which needs no positions."""

    _angles: torch.Tensor | None = None
    _positions: torch.Tensor | None = None

    def forward(
        self, *arguments: Any, rotary_pos_emb: Any = None, packed_seq_params: Any = None, **options: Any
    ) -> Any:
        """Run ``SelfAttention`` with megarl's rotation; ``packed_seq_params`` must be ``PackedSequences`` or
        None."""
        options["packed_seq_params"] = packed_seq_params
        if self.rows is None and self.config.apply_rope_fusion:
            return super().forward(*arguments, rotary_pos_emb=rotary_pos_emb, **options)
        self._angles = rotary_pos_emb[0] if isinstance(rotary_pos_emb, tuple) else rotary_pos_emb
        self._positions = None if packed_seq_params is None else packed_seq_params.positions
        try:
            # Pass None, because get_query_key_value_tensors below rotates; Megatron-Core would rotate again.
            return super().forward(*arguments, rotary_pos_emb=None, **options)
        finally:
            # Clear them, because they belong to this micro-batch only.
            self._angles = self._positions = None

    def get_query_key_value_tensors(self, *arguments: Any, **options: Any) -> Any:
        """Return the tensors of ``SelfAttention``, with query and key rotated unless the fused kernel rotates
        them."""
        found = super().get_query_key_value_tensors(*arguments, **options)
        if self._angles is None:
            return found
        query, key, *others = found
        positions = self._positions if self.rows is None else self.rows.positions
        by = rotation(
            self._angles, positions, query.dtype, _yarn_get_concentration_factor_from_config(self.config)
        )
        return (rotate(query, by), rotate(key, by), *others)


class _AnglesOfRows:
    """Rotary angles [positions, 1, 1, d] for latent attention while decoding: a slice of cached positions
    returns the angles at each row's own positions."""

    def __init__(self, angles: torch.Tensor, rows: DecodedRows) -> None:
        self._angles, self._rows = angles, rows

    def __getitem__(self, run: slice) -> torch.Tensor:
        assert run.stop - run.start == len(self._rows.positions), "of this pass"
        return self._angles[self._rows.positions].squeeze(2)


def _of_rows(rotary: Callable[..., Any], rows: DecodedRows) -> Callable[..., Any]:
    def forward(*arguments: Any, **options: Any) -> Any:
        found = rotary(*arguments, **options)
        return (
            (_AnglesOfRows(found[0], rows), *found[1:])
            if isinstance(found, tuple)
            else _AnglesOfRows(found, rows)
        )

    return forward


@contextlib.contextmanager
def decoding(
    stages: Sequence[torch.nn.Module], rows: DecodedRows, portable: Callable[[Any], torch.nn.Module]
) -> Iterator[None]:
    """Within the context, make the attention layers of all chunks decode ``rows``.

    Args:
        stages: model chunks.
        rows: the rows; the caller updates them before each pass.
        portable: builds a core attention to replace one that cannot mask padding.
    """
    with contextlib.ExitStack() as stack:
        for attention in torch.nn.ModuleList(stages).modules():
            if isinstance(attention, RowSelfAttention | MLASelfAttention):
                # Transformer Engine's core attention has no per-row masks.
                if not hasattr(attention.core_attention, "rows"):
                    stack.enter_context(_replaced(attention, portable(attention)))
                for part in (attention, attention.core_attention):
                    part.rows = rows
                    stack.callback(setattr, part, "rows", None)
            elif isinstance(attention, GatedDeltaMixer):
                attention.rows = rows
                stack.callback(setattr, attention, "rows", None)
            if isinstance(attention, MLASelfAttention):
                rotary = attention.rotary_pos_emb
                # Patch it once, because all layers of a chunk share it.
                if "forward" not in vars(rotary):
                    rotary.forward = _of_rows(type(rotary).forward.__get__(rotary), rows)
                    stack.callback(delattr, rotary, "forward")
        yield


@contextlib.contextmanager
def _replaced(attention: Any, core: torch.nn.Module) -> Iterator[None]:
    own = attention.core_attention
    attention.core_attention = core
    try:
        yield
    finally:
        attention.core_attention = own
