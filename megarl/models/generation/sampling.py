"""Sampling of the next token. Every random number is a function of the row's own seed, so that the sampled
tokens do not depend on the layout, on the row's micro-batch, or on its neighbours.

Legend: b rows, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from megarl.config.generation import GenerationConfig
from megarl.key import defaults_of


def seed_of(text: str) -> int:
    """Return a seed in [0, 2**63), the hash of ``text``."""
    # Use a hash that a resumed run reproduces: hash() differs from process to process.
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def seeds_of_call(seed: int, call: int, rows: int) -> torch.Tensor:
    """Return seeds [rows] int64 for a batch without seeds: a function of ``seed`` and of the number of the
    call, independent of the sizes of earlier batches."""
    # Philox can start at any counter, whose lowest word counts the numbers within a call. If that word
    # counted calls, each call would repeat the numbers of the previous call, four rows on.
    generator = np.random.Generator(np.random.Philox(key=seed, counter=call << 64))
    return torch.from_numpy(generator.integers(0, 2**62, size=rows))


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """The distribution that tokens are sampled from, and that training scores them by.

    Attributes:
        greedy: take the most likely token (the lowest index on a tie) and ignore top-k and top-p.
        temperature: logits are divided by it.
        top_k: keep this many most likely tokens; None keeps all.
        top_p: of the tokens that top-k keeps, keep the smallest set of most likely ones with at least this
            share of their probability; 1 keeps all.

    Tokens that tie with the last one kept stay as well.
    """

    greedy: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    @classmethod
    def of(cls, config: Mapping[str, Any] | None, *, greedy: bool = False) -> SamplingSettings:
        """Read the settings of a generation configuration; without one, tokens are sampled from the model's
        own distribution."""
        given = {**defaults_of(GenerationConfig), **(config or {})}
        return cls(
            greedy,
            float(given["temperature"]),
            given["top_k"],
            1.0 if given["top_p"] is None else float(given["top_p"]),
        )

    def keeps_all(self, size: int) -> bool:
        """Return whether each of ``size`` tokens can be sampled."""
        return (self.top_k is None or self.top_k >= size) and self.top_p >= 1.0


MODEL_ITSELF = SamplingSettings()
"""Settings that sample tokens from the model's own distribution."""


def uniform_numbers(seeds: Sequence[int], count: int) -> torch.Tensor:
    """Return uniform numbers [len(seeds), count] float64 in [0, 1): row r is the Philox stream (Salmon et
    al., SC'11) of ``seeds[r]``."""
    # Use numpy's Philox, because the streams of torch's generators differ between CPU and CUDA.
    rows = [np.random.Generator(np.random.Philox(key=int(seed) % 2**64)).random(count) for seed in seeds]
    return torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, count, dtype=torch.float64)


def choose_tokens(
    logits: torch.Tensor, uniforms: torch.Tensor, settings: SamplingSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the next token of each row, and return the tokens and their log-probabilities.

    Args:
        logits: [b, V] over the true vocabulary.
        uniforms: [b] float64 in [0, 1), one number per row; not read when greedy.
        settings: the sampling settings.

    Returns:
        tokens [b] int64; log-probabilities [b] float32 under the distribution that the tokens were sampled
        from. For greedy tokens this distribution uses only the temperature.
    """
    # Convert to float32 before dividing, as training does: rounding would otherwise create different ties.
    scaled = logits.float() if settings.temperature == 1.0 else logits.float() / settings.temperature
    if not settings.greedy and not settings.keeps_all(scaled.shape[-1]):
        scaled = scaled.masked_fill(scaled < smallest_kept(scaled, settings)[:, None], -torch.inf)
    logprobs = torch.log_softmax(scaled, dim=-1)
    # Use one uniform number per row: torch.multinomial has one generator for all rows.
    tokens = logits.argmax(dim=-1) if settings.greedy else _inverse_transform(logprobs.exp(), uniforms)
    return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)


def smallest_kept(scaled: torch.Tensor, settings: SamplingSettings) -> torch.Tensor:
    """Return the lowest logit that top-k, and then top-p (Holtzman et al., ICLR 2020), keep in each row.

    Args:
        scaled: [b, V] float32 logits, already divided by the temperature, in any order of tokens; minus
            infinity for a missing token.
        settings: the sampling settings.

    Returns:
        [b] float32: tokens with at least this logit are kept.
    """
    if settings.top_k is not None and settings.top_k < scaled.shape[-1]:
        ordered = scaled.topk(settings.top_k, dim=-1).values
    else:
        ordered = scaled.sort(dim=-1, descending=True).values
    if settings.top_p >= 1.0:
        return ordered[:, -1]
    # Sum in float64: over 100,000 tokens, float32 sums would decide differently depending on the order of
    # addition.
    probabilities = ordered.softmax(dim=-1, dtype=torch.float64)
    before = running_sum(probabilities) - probabilities
    # Nothing precedes the first token, which is kept even if a row is NaN.
    last = (before < settings.top_p).sum(dim=-1, keepdim=True).sub_(1).clamp_(min=0)
    return ordered.gather(1, last).squeeze(1)


def running_sum(values: torch.Tensor) -> torch.Tensor:
    """Return the inclusive cumulative sum of each row, [b, n] float64, of non-negative values.

    On a CUDA device torch adds in an order that may change from run to run, and raises an error if
    deterministic algorithms are required; then the sum is computed in blocks.
    """
    return (
        sum_in_blocks(values)
        if values.is_cuda and torch.are_deterministic_algorithms_enabled()
        else values.cumsum(dim=-1)
    )


def sum_in_blocks(values: torch.Tensor, width: int = 512) -> torch.Tensor:
    """Return ``running_sum``, computed by products with a triangle of ones, which always add in the same
    order: within blocks, and over the preceding blocks."""
    rows, columns = values.shape
    blocks = F.pad(values, (0, -columns % width)).view(rows, -1, width)
    within = blocks @ torch.ones(width, width, dtype=values.dtype, device=values.device).triu()
    count = within.shape[1]
    before = within[..., -1] @ torch.ones(count, count, dtype=values.dtype, device=values.device).triu(
        diagonal=1
    )
    # Take the running maximum, because rounding may put the start of a block below the end of the previous
    # one.
    return (within + before[..., None]).view(rows, -1)[:, :columns].cummax(dim=-1).values


BLOCK = 256
"""Number of tokens in a block whose probabilities are summed first, so that only the sums of the vocabulary's
blocks, and one block, are needed in float64."""


def _inverse_transform(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return the tokens [b] int64 at which each row's cumulative distribution, of ``probabilities`` [b, V]
    float32, first exceeds its uniform number."""
    blocks = F.pad(probabilities, (0, -probabilities.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    sums = blocks.sum(-1).double()
    cumulative = running_sum(sums)
    threshold = uniforms.to(cumulative.device)[:, None] * cumulative[:, -1:]
    block = _first_above(cumulative, threshold, sums)
    inside = blocks.gather(1, block[..., None].expand(-1, 1, BLOCK)).squeeze(1).double()
    rest = threshold - (cumulative - sums).gather(1, block)
    tokens = (block * BLOCK + _first_above(running_sum(inside), rest, inside)).squeeze(1)
    # Clamp the index, because a row of NaN must not get an invalid token; it is refused when its
    # log-probability is read.
    return tokens.clamp(max=probabilities.shape[-1] - 1)


def _first_above(cumulative: torch.Tensor, threshold: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    """Return the first index [b, 1] int64 at which ``cumulative`` [b, n], the running sum of ``parts``,
    exceeds the threshold [b, 1].

    Rounding may put the threshold at the end of the sum or beyond it; then the index is that of the last part
    that is not zero.
    """
    found = torch.searchsorted(cumulative, threshold, right=True)
    after_last = (parts > 0).flip(-1).byte().argmax(dim=-1, keepdim=True)
    return torch.minimum(found, parts.shape[-1] - 1 - after_last)
