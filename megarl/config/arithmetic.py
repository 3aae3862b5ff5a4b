"""Batch arithmetic: how samples are divided into global batches and micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_MOST_DIVISOR = 100_000


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Batch sizes of one step.

    Attributes:
        prompts: prompts per step.
        generations: responses per prompt; 1 without generation.
        global_batch_size: samples per optimizer step.
        data_parallel: number of data-parallel ranks.
        micro_batch_size: samples per forward pass on one rank.
        sequence_length: longest sequence in tokens.
        token_budget: tokens per micro-batch if micro-batches are formed by tokens, otherwise 0.
        logprob_token_budget: like ``token_budget``, for the computation of log-probabilities.
    """

    prompts: int
    generations: int
    global_batch_size: int
    data_parallel: int
    micro_batch_size: int
    sequence_length: int
    token_budget: int = 0
    logprob_token_budget: int = 0

    @property
    def samples(self) -> int:
        """Samples per step."""
        return self.prompts * self.generations

    @property
    def global_batches(self) -> int:
        """Optimizer steps per step of the algorithm."""
        return self.samples // self.global_batch_size

    @property
    def samples_per_rank(self) -> int:
        """Samples of a global batch on one data-parallel rank."""
        return self.global_batch_size // self.data_parallel

    @property
    def micro_batches(self) -> int:
        """Forward passes per global batch on one rank; an upper bound if micro-batches are formed by
        tokens."""
        return self.samples_per_rank if self.token_budget else self.samples_per_rank // self.micro_batch_size

    @property
    def tokens_per_micro_batch(self) -> int:
        """Maximum number of tokens in a forward pass, padding included."""
        return self.token_budget or self.micro_batch_size * self.sequence_length

    @property
    def tokens_per_step(self) -> int:
        """Maximum number of tokens in a step over all ranks, padding included."""
        return self.samples * self.sequence_length


def divisors_near(number: int, value: int) -> list[int]:
    """Return the divisors of ``number`` (at least 1), sorted by how close their ratio to ``value`` is
    to 1. Of a number that no run has, such as one with a digit too many, only the small ones."""
    low = [
        divisor for divisor in range(1, min(math.isqrt(number), _MOST_DIVISOR) + 1) if number % divisor == 0
    ]
    high = [number // divisor for divisor in low] if number <= _MOST_DIVISOR**2 else []
    nearest = min(max(value, 1), _MOST_DIVISOR**2)
    return sorted({*low, *high}, key=lambda divisor: abs(math.log(divisor / nearest)))


def multiples_near(number: int, value: int, count: int = 8) -> list[int]:
    """Return ``count`` multiples of ``number``: the first one at or above ``value``, then alternately larger
    and smaller ones."""
    first = max(-(-value // number), 1)
    factors = [factor for away in range(count) for factor in (first + away, first - away) if factor >= 1]
    return [factor * number for factor in dict.fromkeys(factors)][:count]


def each_of(key: str, values: Iterable[object]) -> tuple[Mapping[str, object], ...]:
    """Return candidate fixes of a violation, each of which sets the key to one of the values."""
    return tuple({key: value} for value in values)


def padded_vocabulary(vocab_size: int, tensor_parallel: int) -> int:
    """Return the number of embedding rows: the vocabulary size, rounded up to a multiple of the
    tensor-parallel size."""
    return -(-vocab_size // tensor_parallel) * tensor_parallel


def sequence_share(tensor: int, context: int, sequence_parallel: bool) -> int:
    """Return the number that must divide a sequence's length, so that all ranks that share it get equal
    parts.

    Each context-parallel rank holds two chunks, and the sequence-parallel ranks divide these.
    """
    return (2 * context if context > 1 else 1) * (tensor if sequence_parallel else 1)
