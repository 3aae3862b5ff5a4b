"""Log-probabilities and entropies among the tokens that top-k and top-p keep, by a loop."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.models.generation.sampling import SamplingSettings


def expected_logprobs(logits: Tensor, targets: Tensor, sampling: SamplingSettings) -> Tensor:
    """[T] float64 from float64 logits [T, V], differentiable; a target counts as kept."""
    rows = zip(logits / sampling.temperature, targets.tolist(), strict=True)
    return torch.stack(
        [
            row[target] - row[sorted(_kept(row.tolist(), sampling) | {target})].logsumexp(0)
            for row, target in rows
        ]
    )


def expected_entropies(logits: Tensor, targets: Tensor, sampling: SamplingSettings) -> Tensor:
    """[T] float64, differentiable, of the same distributions; a token of minus infinity has no part."""
    found = []
    for row, target in zip(logits / sampling.temperature, targets.tolist(), strict=True):
        values = row[sorted(_kept(row.tolist(), sampling) | {target})]
        shares = (values - values.detach().max()).exp()
        found.append(
            -torch.stack([share * share.log() for share in shares / shares.sum() if share > 0]).sum()
        )
    return torch.stack(found)


def _kept(scaled: list[float], sampling: SamplingSettings) -> set[int]:
    weights = torch.tensor(scaled, dtype=torch.float64).softmax(0).tolist()
    ranked = sorted(range(len(weights)), key=lambda token: -weights[token])[: sampling.top_k]
    mass, before, kept = sum(weights[token] for token in ranked), 0.0, set()
    for token in ranked:
        if before < sampling.top_p:
            kept.add(token)
        before += weights[token] / mass
    return kept
