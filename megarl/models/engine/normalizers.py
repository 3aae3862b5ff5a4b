"""Normalizers over the global batch. Every loss divides by them, so that losses and gradients of
micro-batches and ranks can simply be summed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megarl.distributed.parcels import Columns
from megarl.models.engine.groups import ParallelGroups


@dataclass(frozen=True, slots=True)
class Normalizers:
    """Counts over the whole global batch, as 0-d float32 tensors.

    Attributes:
        valid_sequences: sum of ``sample_mask``. If a row is only a segment of a response (the batch has
            ``response_tokens``), it counts as its fraction of the response's tokens, so that a response
            counts once.
        valid_tokens: sum of ``token_mask[:, 1:] * sample_mask``; without a token mask, ``valid_sequences``
            times the batch's sequence length.
    """

    valid_sequences: torch.Tensor
    valid_tokens: torch.Tensor


def global_normalizers(data: Columns, groups: ParallelGroups) -> Normalizers:
    """Compute the normalizers of a global batch from this data-parallel rank's rows. Collective over the
    data-parallel group.

    Pass the caller's data, before a backend pads it: padding must not change the sequence length, and so the
    loss.
    """
    # Count in float64, because float32 is not exact above 16.7 million tokens.
    sample_mask = data["sample_mask"].to(torch.float64)
    sequences = sample_mask.sum()
    tokens = sequences * data["input_ids"].shape[1]
    if "token_mask" in data:
        # Skip column 0, because no position predicts the first token.
        counts = data["token_mask"][:, 1:].to(torch.float64) * sample_mask[:, None]
        tokens = counts.sum()
        if "response_tokens" in data:
            sequences = (counts.sum(dim=1) / data["response_tokens"].clamp(min=1)).sum()
    totals = groups.sum_over_data(torch.stack([sequences, tokens]))
    return Normalizers(totals[0].float(), totals[1].float())
