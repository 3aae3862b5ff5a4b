"""Model input: how the tokens of a micro-batch lie in front of the model, and how its output returns to rows.

Legend: b rows of the micro-batch, S their length; n = 1 and T tokens when packed, otherwise n = b and T = S; t = T / context size, the part
of this context-parallel rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megarl.errors import BatchError
from megarl.models.engine.attention import SequenceLayout
from megarl.models.engine.context import ContextShare, gather_replicated
from megarl.models.engine.microbatches import MicroBatch, Shapes, round_up


@dataclass(frozen=True, slots=True)
class ModelInput:
    """A micro-batch as the model sees it.

    Attributes:
        micro_batch: the rows.
        tokens: [n, t] int64.
        positions: [n, t] int64, each counted from the beginning of its own sequence.
        targets: [n, t] int64, the token that follows in the same sequence; anything where none follows.
        layout: packed sequences and the ranks that share them.
        longest: the longest (padded) sequence, over all context-parallel ranks.
    """

    micro_batch: MicroBatch
    tokens: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    layout: SequenceLayout
    longest: int

    def to_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Return what belongs to ``targets``, [n, t], as rows [b, S-1]: entry i belongs to token i+1. Differentiable.

        All context-parallel ranks get all of it, and have to compute the same from it. Where a packed row is shorter than S, 0.
        """
        starts = self.layout.starts or (0, self.micro_batch.length)
        whole = gather_replicated(values.movedim(1, 0), starts, self.layout.context).movedim(0, 1)
        width = self.micro_batch.input_ids.shape[1]
        if self.layout.starts is None:
            return whole[:, : width - 1]
        rows = self.micro_batch.size
        begin = torch.tensor(starts[:rows], device=values.device)[:, None]
        end = torch.tensor(starts[1 : rows + 1], device=values.device)[:, None]
        index = begin + torch.arange(width - 1, device=values.device)[None]
        taken = whole[0].index_select(0, index.clamp(max=self.micro_batch.length - 1).flatten()).view(rows, width - 1)
        return taken.where(index < end, torch.zeros_like(taken))


def lay_out(micro_batch: MicroBatch, context: ContextShare, shapes: Shapes) -> ModelInput:
    """Rows as the model sees them, cut to this context-parallel rank's part.

    Raises:
        BatchError: the planned length does not hold the packed sequences.
    """
    ids = micro_batch.input_ids
    if micro_batch.packed:
        tokens, positions, targets, starts = _pack(micro_batch, shapes)
        longest = max(end - start for start, end in itertools.pairwise(starts))
        layout = SequenceLayout(starts, context)
    else:
        tokens, targets = ids, ids.roll(-1, dims=1)
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        longest, layout = ids.shape[1], SequenceLayout(None, context)
        starts = (0, longest)
    if context.size > 1:
        index = context.index(starts, ids.device)
        tokens, positions, targets = (tensor[:, index] for tensor in (tokens, positions, targets))
    return ModelInput(micro_batch, tokens, positions, targets, layout, longest)


def _pack(micro_batch: MicroBatch, shapes: Shapes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """Tokens, positions and targets [1, T], and where the sequences start; what is left over at the end is a sequence of its own."""
    ids, total = micro_batch.input_ids, micro_batch.length
    lengths = [round_up(length, shapes.packed_multiple) for length in micro_batch.data["input_lengths"].tolist()]
    filler = total - sum(lengths)
    if filler < 0:
        raise BatchError(f"packed micro-batch: {sum(lengths)} tokens of {len(lengths)} sequences do not fit into the planned {total}")
    starts = [0]
    for length in [*lengths, *([filler] if filler else [])]:
        starts.append(starts[-1] + length)

    def join(rows: torch.Tensor) -> torch.Tensor:
        padded = F.pad(rows, (0, max(0, max(lengths) - rows.shape[1])))
        pieces = [padded[row, :length] for row, length in enumerate(lengths)]
        return torch.cat([*pieces, ids.new_zeros(filler)])[None]

    positions = torch.cat([torch.arange(end - start) for start, end in itertools.pairwise(starts)])[None].to(ids.device)
    return join(ids), positions, join(ids.roll(-1, dims=1)), tuple(starts)


def lay_out_all(micro_batches: Sequence[MicroBatch], context: ContextShare, shapes: Shapes) -> list[ModelInput]:
    """``lay_out`` for each micro-batch."""
    return [lay_out(micro_batch, context, shapes) for micro_batch in micro_batches]
