"""The layout in which a micro-batch's tokens enter the model, and the rearrangement of the model's output to
rows.

The host computes all positions from lengths that it knows, for all micro-batches of a global batch, and
copies them to the device at once. So no micro-batch makes the host wait for the device.

Shapes: b rows of the micro-batch, S their length. Packed: n = 1 row of T tokens; otherwise n = b and T = S. t
= T / context size, the positions of this context-parallel rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from megarl.distributed.device import sent_to
from megarl.errors import BatchError
from megarl.models.engine.attention import SequenceLayout
from megarl.models.engine.context import ContextShare, gather_replicated
from megarl.models.engine.microbatches import MicroBatch, Shapes, round_up


@dataclass(frozen=True, slots=True)
class Places:
    """Positions of a packed micro-batch's rows in the packed row.

    Attributes:
        begin, end: [b] int64, positions counted over all context-parallel ranks. ``end`` includes the row's
            padding.
    """

    begin: torch.Tensor
    end: torch.Tensor


@dataclass(frozen=True, slots=True)
class ModelInput:
    """A micro-batch in the form in which it enters the model.

    Attributes:
        micro_batch: the rows.
        tokens: [n, t] int64.
        positions: [n, t] int64, position of each token in its own sequence.
        targets: [n, t] int64, the next token of the same sequence; arbitrary if there is none.
        layout: packed sequences, and the context-parallel ranks that share them.
        longest: length of the longest padded sequence, over all context-parallel ranks.
        places: where the rows are in the packed row; None if not packed.
        scored: [k] int64, ascending, the positions whose targets are scored, as indices into the flattened
            [n, t]; None for all.
        sources: [2t] int64, for the tokens and then for their targets, the index in the flattened rows [b, S
            + 1], in which each row is followed by one extra element; None if not packed.
    """

    micro_batch: MicroBatch
    tokens: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    layout: SequenceLayout
    longest: int
    places: Places | None = None
    scored: torch.Tensor | None = None
    sources: torch.Tensor | None = None

    def of_tokens(self, rows: torch.Tensor) -> torch.Tensor:
        """Rearrange row values [b, S, ...] into the layout of ``tokens``, [n, t, ...]. Positions without a
        token are 0."""
        if self.sources is not None:
            # Append a 0 to each row, for positions that belong to no row.
            followed = F.pad(rows, [0, 0] * (rows.ndim - 2) + [0, 1])
            return followed.flatten(0, 1).index_select(0, self.sources[: self.tokens.numel()])[None]
        context = self.layout.context
        return (
            rows
            if context.size == 1
            else rows.index_select(1, context.index((0, self.micro_batch.length), rows.device))
        )

    def spread(self, values: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
        """Scatter values [k, ...] to the positions ``index`` of [n, t, ...], with 0 elsewhere. Without an
        index, the values are those of all positions. Differentiable."""
        shape = (*self.targets.shape, *values.shape[1:])
        if index is None:
            return values.view(shape)
        # index_copy is deterministic here, because the indices are distinct.
        return (
            values.new_zeros(self.targets.numel(), *values.shape[1:]).index_copy(0, index, values).view(shape)
        )

    def to_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Rearrange values of ``targets``, [n, t, ...], into rows [b, S-1, ...]. Entry i belongs to token
        i+1. Differentiable.

        All context-parallel ranks get the full rows, and must compute the same loss from them. Entries beyond
        a packed row that is shorter than S are 0.
        """
        return self._rows(values, self.micro_batch.input_ids.shape[1] - 1)

    def to_token_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Rearrange values of ``tokens``, [n, t, ...], into rows [b, S, ...]. Entry i belongs to token i; see
        ``to_rows``."""
        return self._rows(values, self.micro_batch.input_ids.shape[1])

    def _rows(self, values: torch.Tensor, width: int) -> torch.Tensor:
        starts = self.layout.starts or (0, self.micro_batch.length)
        # Every context-parallel rank needs the full rows, because losses normalize and compare entire
        # responses.
        whole = gather_replicated(values.movedim(1, 0), starts, self.layout.context).movedim(0, 1)
        if self.places is None:
            return whole[:, :width]
        index = self.places.begin[:, None] + torch.arange(width, device=values.device)
        # Clamp indices beyond the end of the last row. Their values are replaced by 0 below.
        taken = (
            whole[0]
            .index_select(0, index.clamp(max=self.micro_batch.length - 1).flatten())
            .view(*index.shape, *whole.shape[2:])
        )
        inside = index < self.places.end[:, None]
        inside = inside if taken.ndim == 2 else inside[..., None]
        return taken.where(inside, torch.zeros_like(taken))


def lay_out(micro_batch: MicroBatch, context: ContextShare, shapes: Shapes) -> ModelInput:
    """Arrange the rows of a micro-batch for the model, and select the positions of this context-parallel
    rank.

    Raises:
        BatchError: the packed sequences are longer than the planned length.
    """
    return lay_out_all([micro_batch], context, shapes)[0]


def lay_out_all(
    micro_batches: Sequence[MicroBatch], context: ContextShare, shapes: Shapes
) -> list[ModelInput]:
    """Call ``lay_out`` for several micro-batches, with one copy of all indices to the device."""
    plans, scored = [], []
    numbers: list[np.ndarray] = []
    for micro_batch in micro_batches:
        plan = _planned(micro_batch, context, shapes) if micro_batch.packed else None
        places = _scored(micro_batch, plan, context)
        plans.append(plan)
        scored.append(places)
        numbers += [] if plan is None else plan.arrays
        numbers += [] if places is None else [places]
    device = micro_batches[0].input_ids.device if micro_batches else torch.device("cpu")
    sent = iter(
        sent_to(torch.from_numpy(np.concatenate(numbers)), device).split(list(map(len, numbers)))
        if numbers
        else ()
    )
    inputs = []
    # ``sent`` yields the arrays in the order of ``numbers``: a micro-batch's plan first, then its scored
    # positions.
    for micro_batch, plan, places in zip(micro_batches, plans, scored, strict=True):
        laid = (
            _rows_as_they_are(micro_batch, context)
            if plan is None
            else _packed(micro_batch, context, plan, sent)
        )
        inputs.append(laid if places is None else replace(laid, scored=next(sent)))
    return inputs


@dataclass(frozen=True, slots=True)
class _Plan:
    """The layout of a packed micro-batch, computed on the host.

    Attributes:
        starts: first position of each sequence, counted over all context-parallel ranks. Unused positions at
            the end form one more sequence.
        arrays: the int64 arrays ``ModelInput.sources`` [2t], ``ModelInput.positions`` [t], ``Places.begin``
            [b] and ``Places.end`` [b].
    """

    starts: tuple[int, ...]
    arrays: tuple[np.ndarray, ...]


def _planned(micro_batch: MicroBatch, context: ContextShare, shapes: Shapes) -> _Plan:
    rows, width = micro_batch.input_ids.shape
    rooms = [round_up(length, shapes.packed_multiple) for length in micro_batch.lengths]
    filler = micro_batch.length - sum(rooms)
    if filler < 0:
        raise BatchError(
            f"packed micro-batch: {sum(rooms)} tokens of {rows} sequences do not fit into the planned "
            f"{micro_batch.length}"
        )
    starts = (0, *itertools.accumulate([*rooms, *([filler] if filler else [])]))
    begins = np.array(starts[:-1], dtype=np.int64)
    # Vectorized in numpy, because this runs on the host between two steps of the device.
    sequence = np.repeat(np.arange(len(begins)), np.diff(starts))
    column = np.arange(starts[-1]) - begins[sequence]
    is_token = (column < width) & (sequence < rows)
    # The target of the last column is column 0 of the same row, as with ``roll`` below. It is never scored.
    token, target = (
        np.where(is_token, sequence * (width + 1) + place, width) for place in (column, (column + 1) % width)
    )
    if context.size > 1:
        here = context.index(starts).numpy()
        token, target, column = token[here], target[here], column[here]
    return _Plan(
        starts,
        (
            np.concatenate((token, target)),
            column,
            begins[:rows],
            np.array(starts[1 : rows + 1], dtype=np.int64),
        ),
    )


def _scored(micro_batch: MicroBatch, plan: _Plan | None, context: ContextShare) -> np.ndarray | None:
    """Return ``ModelInput.scored``, [k] int64; None if all tokens are scored."""
    wanted = micro_batch.wanted
    if wanted is None:
        return None
    # Position i predicts token i+1, and the last position predicts nothing.
    predicts = np.pad(wanted[:, 1:], ((0, 0), (0, 1)))
    if plan is None:
        here = predicts if context.size == 1 else predicts[:, context.index((0, micro_batch.length)).numpy()]
    else:
        # Append one element to each row, because the plan's indices assume it.
        tokens = plan.arrays[0][: len(plan.arrays[1])]
        here = np.pad(predicts, ((0, 0), (0, 1))).ravel()[tokens]
    return np.flatnonzero(here)


def _packed(
    micro_batch: MicroBatch, context: ContextShare, plan: _Plan, sent: Iterator[torch.Tensor]
) -> ModelInput:
    """Build the input of a packed micro-batch. ``sent`` yields the arrays of its plan as tensors on the
    device."""
    at, positions, begin, end = (next(sent) for _ in plan.arrays)
    tokens, targets = F.pad(micro_batch.input_ids, (0, 1)).flatten().index_select(0, at).view(2, 1, -1)
    longest = max(end - start for start, end in itertools.pairwise(plan.starts))
    layout = SequenceLayout(plan.starts, context)
    return ModelInput(
        micro_batch, tokens, positions[None], targets, layout, longest, Places(begin, end), sources=at
    )


def _rows_as_they_are(micro_batch: MicroBatch, context: ContextShare) -> ModelInput:
    ids = micro_batch.input_ids
    length = ids.shape[1]
    positions = torch.arange(length, device=ids.device).expand_as(ids)
    # Roll the ids to get targets of the same shape. Slicing would require slicing the logits too, which
    # copies the largest tensor of the pass.
    tokens, targets = ids, ids.roll(-1, dims=1)
    if context.size > 1:
        index = context.index((0, length), ids.device)
        tokens, positions, targets = (tensor[:, index] for tensor in (tokens, positions, targets))
    return ModelInput(micro_batch, tokens, positions, targets, SequenceLayout(None, context), length)
