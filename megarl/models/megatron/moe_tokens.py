"""Which tokens count when routers are balanced: the real ones, with the sequences that they belong to."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megarl.models.engine.groups import ParallelGroups
from megarl.models.engine.model_input import ModelInput
from megarl.models.megatron.moe_record import Census


def _counted_lengths(model_input: ModelInput) -> torch.Tensor:
    """[b] int64: real tokens of each row; 0 for rows whose ``sample_mask`` is 0."""
    data = model_input.micro_batch.data
    lengths = data["input_lengths"].to(torch.int64)
    return lengths.where(data["sample_mask"] != 0, 0) if "sample_mask" in data else lengths


def sequence_numbers(model_input: ModelInput) -> torch.Tensor:
    """[n, t] int64: for each token of this context-parallel rank the row that it belongs to, -1 for padding and dropped samples."""
    micro_batch, device = model_input.micro_batch, model_input.tokens.device
    lengths, total = _counted_lengths(model_input).to(device), micro_batch.length
    rows = torch.arange(micro_batch.size, device=device)
    starts = model_input.layout.starts
    if starts is None:
        inside = torch.arange(total, device=device) < lengths[:, None]
        numbers = rows[:, None].where(inside, -1)
    else:
        begin = torch.tensor(starts[: micro_batch.size], device=device)
        position = torch.arange(total, device=device)
        row = torch.searchsorted(begin, position, right=True) - 1
        numbers = row.where(position - begin[row] < lengths[row], -1)[None]
    context = model_input.layout.context
    return numbers[:, context.index(starts or (0, total), device)] if context.size > 1 else numbers


def take_census(inputs: Sequence[ModelInput], groups: ParallelGroups) -> Census:
    """Sizes of the global batch of which ``inputs`` are this data-parallel rank's share. A collective over the data-parallel group."""
    lengths = [_counted_lengths(model_input) for model_input in inputs]
    figures = torch.stack([torch.stack([row.sum(), (row > 0).sum()]) for row in lengths]).sum(0).double()
    tokens, sequences = groups.sum_over_data(figures).tolist()
    return Census(tokens, sequences, max(model_input.micro_batch.size for model_input in inputs))
