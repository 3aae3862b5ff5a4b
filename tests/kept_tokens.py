"""Log-probabilities among the tokens that top-k and top-p keep, by a loop."""

from __future__ import annotations

import torch

from megarl.models.generation.sampling import SamplingSettings


def expected_logprobs(logits: torch.Tensor, targets: torch.Tensor, sampling: SamplingSettings) -> torch.Tensor:
    """[T] float64 from float64 logits [T, V], differentiable; a target counts as kept."""
    rows = zip(logits / sampling.temperature, targets.tolist(), strict=True)
    return torch.stack([row[target] - row[sorted(_kept(row.tolist(), sampling) | {target})].logsumexp(0) for row, target in rows])


def _kept(scaled: list[float], sampling: SamplingSettings) -> set[int]:
    weights = torch.tensor(scaled, dtype=torch.float64).softmax(0).tolist()
    ranked = sorted(range(len(weights)), key=lambda token: -weights[token])[: sampling.top_k]
    mass, before, kept = sum(weights[token] for token in ranked), 0.0, set()
    for token in ranked:
        if before < sampling.top_p:
            kept.add(token)
        before += weights[token] / mass
    return kept
