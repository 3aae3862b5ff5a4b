"""Sampling of the next token. All random numbers of a row come from the row's own seed, so the sampled tokens
depend neither on the parallel layout nor on the other rows of the batch.

Shapes: b rows, V vocabulary.
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
    """Return a seed in [0, 2**63): a hash of ``text``."""
    # Not hash(), which differs between processes: a resumed run must get the same seeds.
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def seeds_of_call(seed: int, call: int, rows: int) -> torch.Tensor:
    """Return seeds [rows] int64 for a batch without seeds. They depend on ``seed`` and the number of the
    call, not on the sizes of earlier batches."""
    # Put the call's number into the second word of Philox's counter. The lowest word counts within a call,
    # four numbers at a time: if it counted calls, a call would repeat the previous call's numbers from the
    # fifth on.
    generator = np.random.Generator(np.random.Philox(key=seed, counter=call << 64))
    return torch.from_numpy(generator.integers(0, 2**62, size=rows))


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """The distribution from which tokens are sampled, and under which training scores them.

    Attributes:
        greedy: take the most likely token (the lowest id of equally likely ones); ignores top-k and top-p.
        temperature: divisor of the logits.
        top_k: number of most likely tokens to keep; None keeps all.
        top_p: of the tokens that top-k keeps, keep the smallest set of most likely ones whose probability is
            at least this fraction; 1 keeps all.

    Tokens that are as likely as the last one kept are kept too.
    """

    greedy: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    @classmethod
    def of(cls, config: Mapping[str, Any] | None, *, greedy: bool = False) -> SamplingSettings:
        """Read the settings from a generation configuration. Without one, the settings are those of the
        model's own distribution."""
        given = {**defaults_of(GenerationConfig), **(config or {})}
        return cls(
            greedy,
            float(given["temperature"]),
            given["top_k"],
            1.0 if given["top_p"] is None else float(given["top_p"]),
        )

    def keeps_all(self, size: int) -> bool:
        """Return whether top-k and top-p keep all tokens of a vocabulary of ``size`` tokens."""
        return (self.top_k is None or self.top_k >= size) and self.top_p >= 1.0


MODEL_ITSELF = SamplingSettings()
"""Settings of the model's own distribution: temperature 1, no top-k, no top-p."""


def uniform_numbers(seeds: Sequence[int], count: int) -> torch.Tensor:
    """Return uniform random numbers [len(seeds), count] float64 in [0, 1). Row r is the Philox stream (Salmon
    et al., SC'11) of ``seeds[r]``."""
    # numpy's Philox, because torch's generators give different numbers on CPU and CUDA.
    rows = [np.random.Generator(np.random.Philox(key=int(seed) % 2**64)).random(count) for seed in seeds]
    return torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, count, dtype=torch.float64)


def choose_tokens(
    logits: torch.Tensor, uniforms: torch.Tensor, settings: SamplingSettings
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample the next token of each row.

    Args:
        logits: [b, V], without padding of the vocabulary.
        uniforms: [b] float64 in [0, 1), one random number per row; not used when greedy.
        settings: the sampling settings.

    Returns:
        Tokens [b] int64, and their log-probabilities [b] float32 under the distribution from which they were
        sampled. For greedy tokens, this is the distribution with only the temperature applied.
    """
    # Convert to float32 before dividing, as training does. Otherwise rounding would make other logits equal,
    # and top-k would keep other tokens.
    scaled = logits.float() if settings.temperature == 1.0 else logits.float() / settings.temperature
    if not settings.greedy and not settings.keeps_all(scaled.shape[-1]):
        scaled = scaled.masked_fill(scaled < smallest_kept(scaled, settings)[:, None], -torch.inf)
    logprobs = torch.log_softmax(scaled, dim=-1)
    # torch.multinomial has one generator for all rows, but here each row has its own random number.
    tokens = logits.argmax(dim=-1) if settings.greedy else _inverse_transform(logprobs.exp(), uniforms)
    return tokens, logprobs.gather(1, tokens[:, None]).squeeze(1)


def smallest_kept(scaled: torch.Tensor, settings: SamplingSettings) -> torch.Tensor:
    """Return the lowest logit of each row that is kept by top-k and then top-p (Holtzman et al., ICLR 2020).

    Args:
        scaled: [b, V] float32 logits, already divided by the temperature, in any order of tokens. Missing
            tokens are minus infinity.
        settings: the sampling settings.

    Returns:
        [b] float32. Tokens with at least this logit are kept.
    """
    if settings.top_k is not None and settings.top_k < scaled.shape[-1]:
        ordered = scaled.topk(settings.top_k, dim=-1).values
    else:
        ordered = scaled.sort(dim=-1, descending=True).values
    if settings.top_p >= 1.0:
        return ordered[:, -1]
    # Sum in float64: over 100,000 tokens, a float32 sum depends on the order of addition, and so would the
    # set of kept tokens.
    probabilities = ordered.softmax(dim=-1, dtype=torch.float64)
    before = running_sum(probabilities) - probabilities
    # Always keep the first token, even if a row is NaN.
    last = (before < settings.top_p).sum(dim=-1, keepdim=True).sub_(1).clamp_(min=0)
    return ordered.gather(1, last).squeeze(1)


def running_sum(values: torch.Tensor) -> torch.Tensor:
    """Return the inclusive cumulative sum of each row, [b, n] float64. Values must not be negative.

    On a CUDA device, the order in which torch's ``cumsum`` adds may change from run to run, and it raises an
    error if deterministic algorithms are required. In that case the sum is computed in blocks.
    """
    return (
        sum_in_blocks(values)
        if values.is_cuda and torch.are_deterministic_algorithms_enabled()
        else values.cumsum(dim=-1)
    )


def sum_in_blocks(values: torch.Tensor, width: int = 512) -> torch.Tensor:
    """Compute ``running_sum`` by matmuls with triangular matrices of ones, within blocks and over blocks.
    These always add in the same order."""
    rows, columns = values.shape
    blocks = F.pad(values, (0, -columns % width)).view(rows, -1, width)
    within = blocks @ torch.ones(width, width, dtype=values.dtype, device=values.device).triu()
    count = within.shape[1]
    before = within[..., -1] @ torch.ones(count, count, dtype=values.dtype, device=values.device).triu(
        diagonal=1
    )
    # Rounding may put the start of a block below the end of the previous one. The running maximum keeps the
    # sum monotonic.
    return (within + before[..., None]).view(rows, -1)[:, :columns].cummax(dim=-1).values


BLOCK = 256
"""Number of tokens in a block of the vocabulary. Probabilities are summed per block first, so that only the
sums of all blocks and the tokens of one block are needed in float64."""


def _inverse_transform(probabilities: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Return the token [b] int64 at which each row's cumulative distribution first exceeds the row's uniform
    number. ``probabilities`` are [b, V] float32."""
    blocks = F.pad(probabilities, (0, -probabilities.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    sums = blocks.sum(-1).double()
    cumulative = running_sum(sums)
    threshold = uniforms.to(cumulative.device)[:, None] * cumulative[:, -1:]
    block = _first_above(cumulative, threshold, sums)
    inside = blocks.gather(1, block[..., None].expand(-1, 1, BLOCK)).squeeze(1).double()
    rest = threshold - (cumulative - sums).gather(1, block)
    tokens = (block * BLOCK + _first_above(running_sum(inside), rest, inside)).squeeze(1)
    # Clamp, so that a row of NaN gets a valid token id. It is rejected later because its log-probability is
    # NaN.
    return tokens.clamp(max=probabilities.shape[-1] - 1)


def _first_above(cumulative: torch.Tensor, threshold: torch.Tensor, parts: torch.Tensor) -> torch.Tensor:
    """Return the first index [b, 1] int64 at which ``cumulative`` [b, n], the running sum of ``parts``,
    exceeds the threshold [b, 1].

    If rounding puts the threshold at the end of the sum or beyond, this is the index of the last part that is
    not zero.
    """
    found = torch.searchsorted(cumulative, threshold, right=True)
    after_last = (parts > 0).flip(-1).byte().argmax(dim=-1, keepdim=True)
    return torch.minimum(found, parts.shape[-1] - 1 - after_last)
