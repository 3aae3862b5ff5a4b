"""The global normalisers of a batch, by which every loss divides, so that losses and gradients are plain
sums."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megarl.models.engine.groups import ParallelGroups


@dataclass(frozen=True, slots=True)
class Normalizers:
    """Counts over the whole global batch, 0-d float32 tensors.

    Attributes:
        valid_sequences: sum of ``sample_mask``. A row that is a segment of a response, with its
            ``response_tokens``, counts as its share of the response's tokens, so that each response counts
            once.
        valid_tokens: sum of ``token_mask[:, 1:] * sample_mask``; without a token mask, valid sequences times
            the batch's sequence length.
    """

    valid_sequences: torch.Tensor
    valid_tokens: torch.Tensor


def global_normalizers(data: Mapping[str, Any], groups: ParallelGroups) -> Normalizers:
    """Compute the normalisers of the global batch of which ``data`` is this data-parallel rank's share. A
    collective over the data-parallel group. The sequence length is that of the caller's data, before any
    padding by the backend, which must not change a loss."""
    # Count in float64, because float32 cannot count above 16.7 million tokens exactly.
    sample_mask = data["sample_mask"].to(torch.float64)
    sequences = sample_mask.sum()
    tokens = sequences * data["input_ids"].shape[1]
    if "token_mask" in data:
        # Count from the second column on, because nothing predicts the first token.
        counts = data["token_mask"][:, 1:].to(torch.float64) * sample_mask[:, None]
        tokens = counts.sum()
        if "response_tokens" in data:
            sequences = (counts.sum(dim=1) / data["response_tokens"].clamp(min=1)).sum()
    totals = groups.sum_over_data(torch.stack([sequences, tokens]))
    return Normalizers(totals[0].float(), totals[1].float())
