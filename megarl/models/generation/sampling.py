"""Choosing the next token. Every random number is a function of the row's own seed, so that what is drawn does not depend on the layout,
on the micro-batch a row is in, or on its neighbours.

Legend: b rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How to sample.

    Attributes:
        greedy: take the most likely token (the lowest index on a tie) and ignore top-k and top-p.
        temperature: logits are divided by it; log-probabilities are those of the divided logits, before top-k and top-p.
        top_k: keep this many most likely tokens (all that tie with the last of them); None keeps all.
        top_p: keep the smallest set of most likely tokens with at least this probability; 1 keeps all.
    """

    greedy: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0


def uniform_numbers(seeds: Sequence[int], count: int) -> torch.Tensor:
    """[len(seeds), count] float64 in [0, 1): row r is the Philox stream (Salmon et al., SC'11) of ``seeds[r]``."""
    rows = [np.random.Generator(np.random.Philox(key=int(seed) % 2**64)).random(count) for seed in seeds]
    return torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, count, dtype=torch.float64)


def choose_tokens(logits: torch.Tensor, uniforms: torch.Tensor, settings: SamplingSettings) -> tuple[torch.Tensor, torch.Tensor]:
    """The next token of each row and its log-probability.

    Args:
        logits: [b, V] over the true vocabulary.
        uniforms: [b] float64 in [0, 1), one number a row; not read when greedy.
        settings: how to sample.

    Returns:
        tokens [b] int64; log-probabilities [b] float32 under the temperature-scaled distribution over the whole vocabulary.
    """
    scaled = logits.float() / settings.temperature
    logprobs = torch.log_softmax(scaled, dim=-1)
    tokens = logits.argmax(dim=-1) if settings.greedy else _inverse_transform(_filtered(logprobs.double().exp(), settings), uniforms)
    return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)


def _filtered(probabilities: torch.Tensor, settings: SamplingSettings) -> torch.Tensor:
    """[b, V] float64 with zeros where top-k or top-p leaves a token out; rows need not sum to 1."""
    if settings.top_k is not None and settings.top_k < probabilities.shape[-1]:
        smallest_kept = probabilities.topk(settings.top_k, dim=-1).values[:, -1:]
        probabilities = probabilities.where(probabilities >= smallest_kept, torch.zeros_like(probabilities))
    if settings.top_p < 1.0:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        ordered = ordered / ordered.sum(dim=-1, keepdim=True)
        before = ordered.cumsum(dim=-1) - ordered
        kept = ordered.where(before < settings.top_p, torch.zeros_like(ordered))
        probabilities = torch.zeros_like(probabilities).scatter_(1, order, kept)
    return probabilities


def _inverse_transform(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """[b] int64: the token at which the cumulative distribution first exceeds the row's uniform number."""
    cumulative = probabilities.cumsum(dim=-1)
    threshold = uniforms.to(cumulative.device)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, threshold, right=True).squeeze(1)
    # rounding may put the threshold on the very end: the last token that can be drawn is the answer there
    last = (probabilities > 0).long().mul(torch.arange(probabilities.shape[-1], device=probabilities.device)).amax(dim=-1)
    return torch.minimum(tokens, last)
