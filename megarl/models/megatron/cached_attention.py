"""What Megatron's attention lacks to decode rows that are padded on the left: a cache at one place, and rotation by each row's positions.

Megatron writes keys and values to a position that Python knows, and attends to what lies before it: each token has tensors of other shapes.
Here a step has fixed shapes: the position is a tensor, and a mask hides what the cache has not been given yet. Keys are rotated by the
positions of their own rows before they are cached; Megatron rotates all cached keys again in every pass.

Legend: b rows of a batch, n positions of a pass, P positions of the cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import _yarn_get_concentration_factor_from_config
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from megarl.models.megatron.rotary import rotate, rotation


class DecodedRows:
    """The rows that are being decoded, with their keys and values, and what all layers of a pass need to know of it.

    The cache and ``place`` stay where they are, also from one batch to the next: CUDA graphs have their addresses.

    Attributes:
        place: [1] int64, the last position that is cached, or is in this step.
        positions: [n, b] int64 of this pass: the positions of its tokens; those of padding are 0. One tensor for all layers of a pass, and
            a new one in each pass.
        row_lengths: [b] int64 while prompts are read that have padding on their left, their lengths; otherwise None.
    """

    def __init__(self) -> None:
        self.positions = torch.empty(0, dtype=torch.int64)
        self.row_lengths: torch.Tensor | None = None
        self.place = torch.empty(0, dtype=torch.int64)
        self._size = (0, 0)
        self._cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._prompts: _Prompts | None = None
        self._step: _Step | None = None

    def reserve(self, positions: int, rows: int, device: torch.device) -> None:
        """Begin a batch, whose cache has so many positions and rows. Batches have the same cache, which each layer makes when it
        first needs it."""
        if not self._cache:
            self._size, self.place = (positions, rows), torch.empty(1, dtype=torch.int64, device=device)
        assert self._size == (positions, rows), "one size for all batches"

    def read(self, lengths: torch.Tensor, width: int, *, padded: bool, end: int, first_row: int, prompt_of: torch.Tensor) -> None:
        """Begin a pass over prompts.

        Args:
            lengths: [p] int64, tokens of each prompt.
            width: of the pass, the longest prompt of it.
            padded: some prompt is shorter.
            end: position of the cache behind the prompts.
            first_row: of the batch, that these prompts are for.
            prompt_of: [r] int64, for which of the prompts each of the next r rows is.
        """
        self.positions = (lengths - width + torch.arange(width, device=lengths.device)[:, None]).clamp(min=0)
        self.row_lengths = lengths if padded else None
        self.place.fill_(end - 1)
        self._prompts, self._step = _Prompts(end, first_row, prompt_of), None

    def step(self, lengths: torch.Tensor, positions: int) -> None:
        """Begin a pass over one more token of the first b rows, at ``place``.

        Args:
            lengths: [b] int64, tokens of each row, that one among them.
            positions: of the cache that attention looks at; more than ``place``.
        """
        self.positions, self.row_lengths = lengths[None] - 1, None
        self._prompts, self._step = None, _Step(lengths, self.place, positions)

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cache keys [n, b, G, d] and values of a layer; return those that its queries attend to, [n or P, b, G, d]."""
        if layer not in self._cache:
            self._cache[layer] = (key.new_zeros(*self._size, *key.shape[2:]), value.new_zeros(*self._size, *value.shape[2:]))
        if self._prompts is not None:
            for cached, new in zip(self._cache[layer], (key, value), strict=True):
                self._prompts.write(cached, new)
            return key, value
        assert self._step is not None, "a pass has begun"
        keys, values = (cached[: self._step.positions, : key.shape[1]] for cached in self._cache[layer])
        keys.index_copy_(0, self._step.place, key)
        values.index_copy_(0, self._step.place, value)
        return keys, values

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """[b, 1, 1, P], what ``megarl.models.engine.attention.cached_attention`` adds to scores; None in a pass over prompts."""
        return None if self._step is None else self._step.mask(window, dtype)

    def keep(self, rows: torch.Tensor, end: int) -> None:
        """Go on with these rows [r] int64, in their order, of which ``end`` positions are cached."""
        for pair in self._cache.values():
            for cached in pair:
                cached[:end, : len(rows)] = cached[:end, rows]


class _Prompts:
    """Where a pass over prompts writes to; see ``DecodedRows.read``."""

    def __init__(self, end: int, first_row: int, prompt_of: torch.Tensor) -> None:
        self._end, self._first, self._prompt_of = end, first_row, prompt_of

    def write(self, cached: torch.Tensor, new: torch.Tensor) -> None:
        rows = slice(self._first, self._first + len(self._prompt_of))
        cached[self._end - new.shape[0] : self._end, rows] = new[:, self._prompt_of]


class _Step:
    """A pass over one token a row; see ``DecodedRows.step``."""

    def __init__(self, lengths: torch.Tensor, place: torch.Tensor, positions: int) -> None:
        self.place, self.positions = place, positions
        self._lengths = lengths
        self._masks: dict[tuple[int | None, torch.dtype], torch.Tensor] = {}

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Made once for all layers of the pass that have one window."""
        if (window, dtype) not in self._masks:
            back = self.place - torch.arange(self.positions, device=self.place.device)
            seen = self._lengths if window is None else self._lengths.clamp(max=window)
            hidden = (back < 0) | (back >= seen[:, None])
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
            self._masks[window, dtype] = mask[:, None, None]
        return self._masks[window, dtype]


class CachesRows:
    """An attention layer of Megatron whose keys and values go to ``DecodedRows`` while rows are decoded.

    Attributes:
        rows: that are being decoded; set by ``decoding``.
    """

    rows: DecodedRows | None = None
    layer_number: int

    def _adjust_key_value_for_inference(
        self, inference_context: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rotary_pos_emb: Any, *others: Any
    ) -> tuple[Any, ...]:
        """In the place of Megatron's own: the same, but for the cache; it rotates nothing."""
        if inference_context is None:
            return query, key, value, rotary_pos_emb, self.attn_mask_type, None
        assert self.rows is not None, "inside of decoding()"
        return query, *self.rows.store(self.layer_number, key, value), rotary_pos_emb, AttnMaskType.no_mask, None


class RowSelfAttention(CachesRows, SelfAttention):
    """Self-attention that rotates queries and keys itself (``megarl.models.megatron.rotary``), but for the kernel of Transformer Engine,
    which has to be told nothing of positions."""

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
        positions = self._positions if self.rows is None else self.rows.positions
        by = rotation(self._angles, positions, query.dtype, _yarn_get_concentration_factor_from_config(self.config))
        return (rotate(query, by), rotate(key, by), *others)


class _AnglesOfRows:
    """Rotary angles [positions, 1, 1, d] of a model with latent attention, which takes those of a run of cached positions: of each row its
    own."""

    def __init__(self, angles: torch.Tensor, rows: DecodedRows) -> None:
        self._angles, self._rows = angles, rows

    def __getitem__(self, run: slice) -> torch.Tensor:
        assert run.stop - run.start == len(self._rows.positions), "of this pass"
        return self._angles[self._rows.positions].squeeze(2)


def _of_rows(rotary: Callable[..., Any], rows: DecodedRows) -> Callable[..., Any]:
    def forward(*arguments: Any, **options: Any) -> Any:
        found = rotary(*arguments, **options)
        return (_AnglesOfRows(found[0], rows), *found[1:]) if isinstance(found, tuple) else _AnglesOfRows(found, rows)

    return forward


@contextlib.contextmanager
def decoding(stages: Sequence[torch.nn.Module], portable: Callable[[Any], torch.nn.Module]) -> Iterator[DecodedRows]:
    """Let the attention of all stages decode rows, which are told of each pass before it.

    Args:
        stages: model chunks.
        portable: makes the core attention for an attention layer that has another one, which cannot leave padding out.
    """
    rows = DecodedRows()
    with contextlib.ExitStack() as stack:
        for attention in (module for stage in stages for module in stage.modules()):
            if isinstance(attention, RowSelfAttention | MLASelfAttention):
                if not hasattr(attention.core_attention, "rows"):
                    stack.enter_context(_replaced(attention, portable(attention)))
                for part in (attention, attention.core_attention):
                    part.rows = rows
                    stack.callback(setattr, part, "rows", None)
            if isinstance(attention, MLASelfAttention):
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
