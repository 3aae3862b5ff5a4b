"""Choosing the next token. Every random number is a function of the row's own seed, so that what is drawn does not depend on the layout,
on the micro-batch a row is in, or on its neighbours.

Legend: b rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megarl.key import defaults_of
from megarl.models.generation.interfaces import GenerationConfig


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """The distribution that tokens are drawn from, and that training scores them by.

    Attributes:
        greedy: take the most likely token (the lowest index on a tie) and ignore top-k and top-p.
        temperature: logits are divided by it.
        top_k: keep this many most likely tokens; None keeps all.
        top_p: of those, keep the smallest set of most likely ones with at least this share of their probability; 1 keeps all.

    Tokens that tie with the last one kept stay as well.
    """

    greedy: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    @classmethod
    def of(cls, config: Mapping[str, Any] | None, *, greedy: bool = False) -> SamplingSettings:
        """Those of a generation configuration; without one, tokens are drawn from the model's own distribution."""
        given = {**defaults_of(GenerationConfig), **(config or {})}
        return cls(greedy, float(given["temperature"]), given["top_k"], 1.0 if given["top_p"] is None else float(given["top_p"]))

    def keeps_all(self, size: int) -> bool:
        """Whether every one of ``size`` tokens can be drawn."""
        return (self.top_k is None or self.top_k >= size) and self.top_p >= 1.0


MODEL_ITSELF = SamplingSettings()
"""Tokens are drawn from the model's own distribution."""


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
        tokens [b] int64; log-probabilities [b] float32 under the distribution that they were drawn from; greedy ones under that of the
        temperature alone.
    """
    scaled = logits.float() / settings.temperature
    if not settings.greedy and not settings.keeps_all(scaled.shape[-1]):
        scaled = scaled.masked_fill(scaled < smallest_kept(scaled, settings)[:, None], -torch.inf)
    logprobs = torch.log_softmax(scaled, dim=-1)
    tokens = logits.argmax(dim=-1) if settings.greedy else _inverse_transform(logprobs.double().exp(), uniforms)
    return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)


def smallest_kept(scaled: torch.Tensor, settings: SamplingSettings) -> torch.Tensor:
    """Return what top-k, and then top-p (Holtzman et al., ICLR 2020), leave of a distribution.

    Args:
        scaled: [b, V] float32 logits, already divided by the temperature, in any order of tokens; minus infinity where there is none.
        settings: how to sample.

    Returns:
        [b] float32: tokens with at least this logit are kept.
    """
    if settings.top_k is not None and settings.top_k < scaled.shape[-1]:
        ordered = scaled.topk(settings.top_k, dim=-1).values
    else:
        ordered = scaled.sort(dim=-1, descending=True).values
    if settings.top_p >= 1.0:
        return ordered[:, -1]
    probabilities = ordered.softmax(dim=-1, dtype=torch.float64)
    before = probabilities.cumsum(dim=-1) - probabilities
    # none is before the first, which stays even where a row is not a number
    last = (before < settings.top_p).sum(dim=-1, keepdim=True).sub_(1).clamp_(min=0)
    return ordered.gather(1, last).squeeze(1)


def _inverse_transform(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """[b] int64: the token at which the cumulative distribution first exceeds the row's uniform number."""
    cumulative = probabilities.cumsum(dim=-1)
    threshold = uniforms.to(cumulative.device)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, threshold, right=True).squeeze(1)
    # rounding may put the threshold on the very end: the last token that can be drawn is the answer there
    after_last = (probabilities > 0).flip(-1).byte().argmax(dim=-1)
    return torch.minimum(tokens, probabilities.shape[-1] - 1 - after_last)
