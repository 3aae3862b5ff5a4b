"""Keys and values of the rows being decoded, padded on the left, in a cache that is allocated once.

A library's own cache grows with each token, so that the tensors of each step have other shapes. Here a step
has fixed shapes: the position that it writes to is a tensor, and a mask hides the positions of the cache that
have not been written yet. So a step can be recorded (``megarl.models.engine.graphs``).

Legend: b rows of a batch, n positions of a pass, P positions of the cache.
"""

from __future__ import annotations

import torch

from megarl.models.engine.graphs import Graphs

FEWEST_POSITIONS = 256
"""Minimum number of cache positions that attention reads in steps of fixed shapes. The number doubles each
time the positions are full: each size is recorded once per number of rows, and less than half of the
positions are read for nothing."""


class DecodedRows:
    """The rows being decoded, with their keys and values, and what all layers of a pass need to know about
    the pass.

    The cache and ``place`` are never reallocated, not even for the next batch, because CUDA graphs hold their
    addresses.

    Args:
        graphs: runs the steps.
        device: device of the model.

    Attributes:
        fixed: steps have fixed shapes. True also on a device that no longer records, because other ranks may
            still record and wait for this one in the same collectives.
        count: number of rows of the batch.
        place: [1] int64, the last position that is cached or belongs to this step.
        positions: [n, b] int64, the positions of this pass's tokens; those of padding are 0. All layers of a
            pass share one tensor, and each pass has a new one.
        row_lengths: [b] int64, the lengths of prompts while prompts padded on the left are read; otherwise
            None.
    """

    def __init__(self, graphs: Graphs, device: torch.device) -> None:
        self.fixed = graphs.capture is not None or device.type != "cpu"
        self.count = self._end = 0
        self.positions = torch.empty(0, dtype=torch.int64)
        self.row_lengths: torch.Tensor | None = None
        # A tensor, not a number: a recorded step reads from memory which position to write to.
        self.place = torch.empty(1, dtype=torch.int64, device=device)
        self._size = (0, 0)
        self._cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._states: dict[int, tuple[torch.Tensor, ...]] = {}
        self._prompts: _Prompts | None = None
        self._step: _Step | None = None

    def reserve(self, positions: int, rows: int) -> None:
        """Start a batch whose cache has ``positions`` x ``rows`` entries. All batches use the same cache,
        which each layer allocates when it first stores something."""
        assert not self._cache or self._size == (positions, rows), "one size for all batches"
        self._size, self.count = (positions, rows), 0

    def read(self, lengths: torch.Tensor, width: int, prompt_of: torch.Tensor, end: int) -> None:
        """Begin a pass over prompts.

        Args:
            lengths: [p] int64 on the CPU, tokens of each prompt.
            width: length of the longest prompt of the pass.
            prompt_of: [r] int64, the index of the prompt that each of the next r rows has.
            end: position of the cache after the prompts.
        """
        on_device = lengths.to(self.place.device)
        self.positions = (on_device - width + torch.arange(width, device=on_device.device)[:, None]).clamp(
            min=0
        )
        # Compare on the host, where the lengths are. Without padding, attention needs no row lengths and so
        # no mask.
        self.row_lengths = on_device if bool((lengths < width).any()) else None
        self.place.fill_(end - 1)
        self._prompts, self._step = _Prompts(end, self.count, prompt_of), None
        self.count, self._end = self.count + len(prompt_of), end

    def advance(self) -> int:
        """Advance to the next position; return how many positions of the cache a step at this position
        reads."""
        self._end += 1
        self.place.add_(1)
        if not self.fixed:
            return self._end
        # Round up to powers of two, so that the number of graphs grows only with the logarithm of the longest
        # response.
        return min(max(FEWEST_POSITIONS, 1 << (self._end - 1).bit_length()), self._size[0])

    def step(self, lengths: torch.Tensor, positions: int) -> None:
        """Begin a pass over one more token of the first b rows, at ``place``.

        Args:
            lengths: [b] int64, tokens of each row, including the new one.
            positions: number of cache positions that attention reads, from ``advance``.
        """
        self.positions, self.row_lengths = lengths[None] - 1, None
        self._prompts, self._step = None, _Step(lengths, self.place, positions)

    @property
    def is_step(self) -> bool:
        """True if this pass reads one more token of each row; False if it reads prompts."""
        return self._step is not None

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cache keys [n, b, G, d] and values of a layer; return the keys and values that the pass's queries
        attend to, [n or P, b, G, d]."""
        if layer not in self._cache:
            # Fill the cache with zeros: masked entries are still multiplied by 0, and NaN in unwritten memory
            # would stay NaN.
            self._cache[layer] = (
                key.new_zeros(*self._size, *key.shape[2:]),
                value.new_zeros(*self._size, *value.shape[2:]),
            )
        if self._prompts is not None:
            for cached, new in zip(self._cache[layer], (key, value), strict=True):
                self._prompts.write(cached, new)
            # In a pass over prompts, queries attend to the pass itself, because nothing has been cached
            # before it.
            return key, value
        assert self._step is not None, "a pass has begun"
        keys, values = (cached[: self._step.positions, : key.shape[1]] for cached in self._cache[layer])
        # Use index_copy_ with a tensor as index: a graph would record a slice with the position of this step.
        keys.index_copy_(0, self._step.place, key)
        values.index_copy_(0, self._step.place, value)
        return keys, values

    def store_states(self, layer: int, *states: torch.Tensor) -> None:
        """Store the states of a layer that has no keys and values, each [p, ...] over the prompts of this
        pass, for all rows of each prompt."""
        assert self._prompts is not None, "a pass over prompts"
        if layer not in self._states:
            self._states[layer] = tuple(state.new_zeros(self._size[1], *state.shape[1:]) for state in states)
        for kept, new in zip(self._states[layer], states, strict=True):
            self._prompts.write_rows(kept, new)

    def states(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Return a layer's state tensors, [b, ...] over the batch's rows, which each decoding step updates in
        place."""
        return tuple(kept[: self.count] for kept in self._states[layer])

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the mask [b, 1, 1, P] that ``megarl.models.engine.attention.cached_attention`` adds to
        scores; None in a pass over prompts."""
        return None if self._step is None else self._step.mask(window, dtype)

    def keep(self, rows: torch.Tensor) -> None:
        """Keep only the given rows [r] int64 of the batch, in their order."""
        self.count = len(rows)
        for pair in self._cache.values():
            for cached in pair:
                # Indexing copies the right side before anything is written, so that rows cannot overwrite
                # each other.
                cached[: self._end, : self.count] = cached[: self._end, rows]
        for states in self._states.values():
            for kept in states:
                kept[: self.count] = kept[rows]


class _Prompts:
    """The part of the cache that a pass over prompts writes to; see ``DecodedRows.read``."""

    def __init__(self, end: int, first_row: int, prompt_of: torch.Tensor) -> None:
        self._end, self._first, self._prompt_of = end, first_row, prompt_of

    def write(self, cached: torch.Tensor, new: torch.Tensor) -> None:
        rows = slice(self._first, self._first + len(self._prompt_of))
        cached[self._end - new.shape[0] : self._end, rows] = new[:, self._prompt_of]

    def write_rows(self, kept: torch.Tensor, new: torch.Tensor) -> None:
        kept[self._first : self._first + len(self._prompt_of)] = new[self._prompt_of]


class _Step:
    """A pass over one token per row; see ``DecodedRows.step``."""

    def __init__(self, lengths: torch.Tensor, place: torch.Tensor, positions: int) -> None:
        self.place, self.positions = place, positions
        self._lengths = lengths
        self._masks: dict[tuple[int | None, torch.dtype], torch.Tensor] = {}

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return the mask for a window, which is computed once for all layers of the pass that share the
        window."""
        if (window, dtype) not in self._masks:
            back = self.place - torch.arange(self.positions, device=self.place.device)
            seen = self._lengths if window is None else self._lengths.clamp(max=window)
            hidden = (back < 0) | (back >= seen[:, None])
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(
                hidden, -torch.inf
            )
            self._masks[window, dtype] = mask[:, None, None]
        return self._masks[window, dtype]
