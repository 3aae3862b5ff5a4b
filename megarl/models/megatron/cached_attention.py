"""What Megatron's attention lacks to decode rows that are padded on the left, and not to rotate all cached keys again for each token.

Megatron keeps keys as they are before their rotation, and rotates the whole cache at every pass, by one position for all rows. While rows
are decoded, keys are rotated by the positions of their own rows before they are kept.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor_from_config
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from megarl.models.megatron.rotary import rotate, rotation


@dataclass
class DecodedRows:
    """The rows that are being decoded.

    Attributes:
        lengths: [b] int64, of each row its tokens up to the last one of this pass.
        are_padded: some row has padding on its left.
    """

    lengths: torch.Tensor
    are_padded: bool

    def positions(self, new: int) -> torch.Tensor:
        """[new, b] int64: the positions of the newest tokens; those of padding are 0. All layers of a pass get the same tensor."""
        return _newest(self.lengths, new)


@functools.lru_cache(maxsize=2)
def _newest(lengths: torch.Tensor, new: int) -> torch.Tensor:
    return (lengths - new + torch.arange(new, device=lengths.device)[:, None]).clamp(min=0)


class RowSelfAttention(SelfAttention):
    """Self-attention that rotates queries and keys itself (``megarl.models.megatron.rotary``), but for the kernel of Transformer Engine,
    which has to be told nothing of positions.

    Attributes:
        rows: that are being decoded; set by ``decoding``.
    """

    rows: DecodedRows | None = None
    _angles: torch.Tensor | None = None
    _positions: torch.Tensor | None = None

    def forward(self, *arguments: Any, rotary_pos_emb: Any = None, packed_seq_params: Any = None, **options: Any) -> Any:
        """See ``SelfAttention``; ``packed_seq_params`` are ``PackedSequences``."""
        options["packed_seq_params"] = packed_seq_params
        if self.rows is None and self.config.apply_rope_fusion:
            return super().forward(*arguments, rotary_pos_emb=rotary_pos_emb, **options)
        self._angles = rotary_pos_emb[0] if isinstance(rotary_pos_emb, tuple) else rotary_pos_emb
        self._positions = None if packed_seq_params is None else packed_seq_params.positions
        try:
            return super().forward(*arguments, rotary_pos_emb=None, **options)
        finally:
            self._angles = self._positions = None

    def get_query_key_value_tensors(self, *arguments: Any, **options: Any) -> Any:
        """See ``SelfAttention``."""
        found = super().get_query_key_value_tensors(*arguments, **options)
        if self._angles is None:
            return found
        query, key, *others = found
        positions = self._positions if self.rows is None else self.rows.positions(query.shape[0])
        by = rotation(self._angles, positions, query.dtype, _yarn_get_concentration_factor_from_config(self.config))
        return (rotate(query, by), rotate(key, by), *others)


class _AnglesOfRows:
    """Rotary angles [positions, 1, 1, d] of a model with latent attention, which takes those of a run of cached positions: of each row its
    own."""

    def __init__(self, angles: torch.Tensor, rows: DecodedRows) -> None:
        self._angles, self._rows = angles, rows

    def __getitem__(self, run: slice) -> torch.Tensor:
        return self._angles[self._rows.positions(run.stop - run.start)].squeeze(2)


def _of_rows(rotary: Callable[..., Any], rows: DecodedRows) -> Callable[..., Any]:
    def forward(*arguments: Any, **options: Any) -> Any:
        found = rotary(*arguments, **options)
        return (_AnglesOfRows(found[0], rows), *found[1:]) if isinstance(found, tuple) else _AnglesOfRows(found, rows)

    return forward


@contextlib.contextmanager
def decoding(stages: Sequence[torch.nn.Module], portable: Callable[[Any], torch.nn.Module]) -> Iterator[DecodedRows]:
    """Let the attention of all stages decode rows, which are set before each pass.

    Args:
        stages: model chunks.
        portable: makes the core attention for an attention layer that has another one, which cannot leave padding out.
    """
    rows = DecodedRows(torch.empty(0, dtype=torch.int64), are_padded=False)
    with contextlib.ExitStack() as stack:
        for attention in (module for stage in stages for module in stage.modules()):
            if isinstance(attention, RowSelfAttention | MLASelfAttention):
                if not hasattr(attention.core_attention, "rows"):
                    stack.enter_context(_replaced(attention, portable(attention)))
                attention.core_attention.rows = rows
                stack.callback(setattr, attention.core_attention, "rows", None)
            if isinstance(attention, RowSelfAttention):
                attention.rows = rows
                stack.callback(setattr, attention, "rows", None)
            elif isinstance(attention, MLASelfAttention):
                rotary = attention.rotary_pos_emb
                # one for all layers of a stage
                if "forward" not in vars(rotary):
                    rotary.forward = _of_rows(type(rotary).forward.__get__(rotary), rows)
                    stack.callback(delattr, rotary, "forward")
        yield rows


@contextlib.contextmanager
def _replaced(attention: Any, core: torch.nn.Module) -> Iterator[None]:
    own = attention.core_attention
    attention.core_attention = core
    try:
        yield
    finally:
        attention.core_attention = own
