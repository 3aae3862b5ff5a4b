"""Megatron attention that decodes left-padded rows, with ``DecodedRows`` as its cache and with rotation by
each row's positions.

Keys are rotated by the positions of their own rows before they are cached; Megatron itself rotates all cached
keys again in every pass.
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
    """A Megatron attention layer that stores its keys and values in ``DecodedRows`` while rows are decoded.

    Attributes:
        rows: the rows that are being decoded; set by ``decoding``.
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
        """Store keys and values in our cache, which replaces Megatron's own method; rotate nothing."""
        if inference_context is None:
            return query, key, value, rotary_pos_emb, self.attn_mask_type, None
        assert self.rows is not None, "inside of decoding()"
        return (
            query,
            *self.rows.store(self.layer_number, key, value),
            rotary_pos_emb,
            # Pass no mask of Megatron's: the core attention is causal, and leaves out each row's padding
            # itself.
            AttnMaskType.no_mask,
            None,
        )


class RowSelfAttention(CachesRows, SelfAttention):
    """Self-attention that rotates queries and keys itself (``megarl.models.megatron.rotary``), unless
    Transformer Engine's kernel does it, which needs no positions."""

    _angles: torch.Tensor | None = None
    _positions: torch.Tensor | None = None

    def forward(
        self, *arguments: Any, rotary_pos_emb: Any = None, packed_seq_params: Any = None, **options: Any
    ) -> Any:
        """Run the attention of ``SelfAttention``; ``packed_seq_params`` are ``PackedSequences``."""
        options["packed_seq_params"] = packed_seq_params
        if self.rows is None and self.config.apply_rope_fusion:
            return super().forward(*arguments, rotary_pos_emb=rotary_pos_emb, **options)
        self._angles = rotary_pos_emb[0] if isinstance(rotary_pos_emb, tuple) else rotary_pos_emb
        self._positions = None if packed_seq_params is None else packed_seq_params.positions
        try:
            # Pass None, so that Megatron-Core does not rotate again what get_query_key_value_tensors below
            # has rotated.
            return super().forward(*arguments, rotary_pos_emb=None, **options)
        finally:
            # Clear them after the pass, because the angles fit only one micro-batch's length.
            self._angles = self._positions = None

    def get_query_key_value_tensors(self, *arguments: Any, **options: Any) -> Any:
        """Return what ``SelfAttention`` returns, with query and key rotated unless the kernel rotates
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
    """Rotary angles [positions, 1, 1, d] of a model with latent attention. The model slices them by a run of
    cached positions, and gets the angles of each row's own positions."""

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
    """Make the attention of all stages decode rows, within the context.

    Args:
        stages: model chunks.
        rows: the rows, which are updated before each pass.
        portable: builds the core attention that replaces one which cannot leave padding out.
    """
    with contextlib.ExitStack() as stack:
        for attention in torch.nn.ModuleList(stages).modules():
            if isinstance(attention, RowSelfAttention | MLASelfAttention):
                # Replace Transformer Engine's core attention, which has no masks for rows.
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
                # Patch it once, because all layers of a stage share it.
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
