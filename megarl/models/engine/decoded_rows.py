"""A KV cache of fixed size for decoding, with prompts padded on the left.

A growing cache would change the tensor shapes in each step. Here a decoding step has fixed shapes: the
position to write to is a tensor, and a mask hides the positions that have not been written yet. So a step can
be captured in a CUDA graph (``megarl.models.engine.graphs``).

Shapes: b rows of a batch, n positions of a forward pass, P positions of the cache.
"""

from __future__ import annotations

import torch

from megarl.models.engine.graphs import Graphs

FEWEST_POSITIONS = 256
"""Minimum number of cache positions that attention reads in a step of fixed shapes. The number is doubled
when these positions are full. There is one graph per size and number of rows, and less than half of the
positions are read in vain."""


class DecodedRows:
    """The rows being decoded: their KV cache, and the data of the current forward pass that all layers need.

    The cache and ``place`` are never reallocated, not even for the next batch, because CUDA graphs contain
    their addresses.

    Args:
        graphs: runs the decoding steps.
        device: device of the model.

    Attributes:
        fixed: decoding steps have fixed shapes. True even if this rank has stopped capturing graphs, because
            other ranks may still capture, and wait for this rank in the same collectives.
        count: number of rows of the batch.
        place: [1] int64, the last position that is cached or belongs to this step.
        positions: [n, b] int64, the positions of this pass's tokens; padding has position 0. All layers of a
            pass share one tensor, and each pass has a new one.
        row_lengths: [b] int64, the prompt lengths in a pass over prompts padded on the left; otherwise None.
    """

    def __init__(self, graphs: Graphs, device: torch.device) -> None:
        self.fixed = graphs.capture is not None or device.type != "cpu"
        self.count = self._end = 0
        self.positions = torch.empty(0, dtype=torch.int64)
        self.row_lengths: torch.Tensor | None = None
        # A tensor, not a number: a captured step must read its position from memory.
        self.place = torch.empty(1, dtype=torch.int64, device=device)
        self._size = (0, 0)
        self._cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._states: dict[int, tuple[torch.Tensor, ...]] = {}
        self._prompts: _Prompts | None = None
        self._step: _Step | None = None

    def reserve(self, positions: int, rows: int) -> None:
        """Start a batch whose cache has ``positions`` x ``rows`` entries. All batches share one cache, which
        each layer allocates at its first ``store``."""
        assert not self._cache or self._size == (positions, rows), "one size for all batches"
        self._size, self.count = (positions, rows), 0

    def read(self, lengths: torch.Tensor, width: int, prompt_of: torch.Tensor, end: int) -> None:
        """Begin a forward pass over prompts.

        Args:
            lengths: [p] int64 on the CPU, number of tokens of each prompt.
            width: length of the longest prompt of the pass.
            prompt_of: [r] int64, index of the prompt of each of the next r rows.
            end: position of the cache after the prompts.
        """
        on_device = lengths.to(self.place.device)
        self.positions = (on_device - width + torch.arange(width, device=on_device.device)[:, None]).clamp(
            min=0
        )
        # Without padding, attention needs no row lengths, and so no mask. ``lengths`` is on the host, so this
        # comparison does not wait for the device.
        self.row_lengths = on_device if bool((lengths < width).any()) else None
        # Write in place, because CUDA graphs contain the address of this tensor.
        self.place.fill_(end - 1)
        self._prompts, self._step = _Prompts(end, self.count, prompt_of), None
        self.count, self._end = self.count + len(prompt_of), end

    def advance(self) -> int:
        """Advance to the next position. Return how many cache positions attention must read in a step
        there."""
        self._end += 1
        self.place.add_(1)
        if not self.fixed:
            return self._end
        # Round up to a power of two: the number of graphs then grows with the logarithm of the response
        # length.
        return min(max(FEWEST_POSITIONS, 1 << (self._end - 1).bit_length()), self._size[0])

    def step(self, lengths: torch.Tensor, positions: int) -> None:
        """Begin a forward pass over one more token of each of the first b rows, at position ``place``.

        Args:
            lengths: [b] int64, number of tokens of each row, including the new one.
            positions: number of cache positions that attention reads, from ``advance``.
        """
        self.positions, self.row_lengths = lengths[None] - 1, None
        self._prompts, self._step = None, _Step(lengths, self.place, positions)

    @property
    def is_step(self) -> bool:
        """True if this pass is over one more token of each row; False if it is over prompts."""
        return self._step is not None

    def store(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's new keys and values [n, b, G, d] to the cache. Return the keys and values that the
        queries of this pass attend to, [n or P, b, G, d]."""
        if layer not in self._cache:
            # Zero the cache: masked values are multiplied by 0, and NaN in uninitialized memory would stay
            # NaN.
            self._cache[layer] = (
                key.new_zeros(*self._size, *key.shape[2:]),
                value.new_zeros(*self._size, *value.shape[2:]),
            )
        if self._prompts is not None:
            for cached, new in zip(self._cache[layer], (key, value), strict=True):
                self._prompts.write(cached, new)
            # Nothing has been cached before a prompt, so its queries attend only to the keys of this pass.
            return key, value
        assert self._step is not None, "a pass has begun"
        keys, values = (cached[: self._step.positions, : key.shape[1]] for cached in self._cache[layer])
        # index_copy_ reads the position from a tensor. A graph would capture a slice's position as a
        # constant.
        keys.index_copy_(0, self._step.place, key)
        values.index_copy_(0, self._step.place, value)
        return keys, values

    def store_states(self, layer: int, *states: torch.Tensor) -> None:
        """Store the recurrent states of a layer without keys and values. Each is [p, ...] over the prompts of
        this pass, and is copied to all rows of its prompt."""
        assert self._prompts is not None, "a pass over prompts"
        if layer not in self._states:
            self._states[layer] = tuple(state.new_zeros(self._size[1], *state.shape[1:]) for state in states)
        for kept, new in zip(self._states[layer], states, strict=True):
            self._prompts.write_rows(kept, new)

    def states(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Return a layer's recurrent states, [b, ...] over the rows of the batch. Decoding steps update them
        in place."""
        return tuple(kept[: self.count] for kept in self._states[layer])

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the mask [b, 1, 1, P] for ``megarl.models.engine.attention.cached_attention``; None in a
        pass over prompts."""
        return None if self._step is None else self._step.mask(window, dtype)

    def keep(self, rows: torch.Tensor) -> None:
        """Keep only the rows with the given indices [r] int64, in this order."""
        self.count = len(rows)
        for pair in self._cache.values():
            for cached in pair:
                # Indexing with a tensor copies the right side first, so no row is overwritten before it is
                # read.
                cached[: self._end, : self.count] = cached[: self._end, rows]
        for states in self._states.values():
            for kept in states:
                kept[: self.count] = kept[rows]


class _Prompts:
    """The region of the cache that a pass over prompts writes to; see ``DecodedRows.read``."""

    def __init__(self, end: int, first_row: int, prompt_of: torch.Tensor) -> None:
        self._end, self._first, self._prompt_of = end, first_row, prompt_of

    def write(self, cached: torch.Tensor, new: torch.Tensor) -> None:
        rows = slice(self._first, self._first + len(self._prompt_of))
        cached[self._end - new.shape[0] : self._end, rows] = new[:, self._prompt_of]

    def write_rows(self, kept: torch.Tensor, new: torch.Tensor) -> None:
        kept[self._first : self._first + len(self._prompt_of)] = new[self._prompt_of]


class _Step:
    """A forward pass over one token per row; see ``DecodedRows.step``."""

    def __init__(self, lengths: torch.Tensor, place: torch.Tensor, positions: int) -> None:
        self.place, self.positions = place, positions
        self._lengths = lengths
        self._masks: dict[tuple[int | None, torch.dtype], torch.Tensor] = {}

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return the mask for a sliding window. It is computed once and shared by all layers with this
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
