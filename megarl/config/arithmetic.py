"""Batch arithmetic: division of samples into global batches and micro-batches, and padding to multiples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# Trial division stops here. Only a typing error makes a batch or node count larger than its square.
_MOST_DIVISOR = 100_000


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Batch sizes of one training step. A sample is one row of the batch.

    Attributes:
        prompts: prompts per step.
        generations: samples per prompt; 1 without generation.
        global_batch_size: samples per optimizer step, over all ranks.
        data_parallel: number of data-parallel ranks.
        micro_batch_size: samples per forward pass on one rank.
        sequence_length: maximum tokens of a sample.
        token_budget: maximum tokens per micro-batch with packing or dynamic batching, otherwise 0.
        logprob_token_budget: ``token_budget`` of passes that only compute log-probabilities.
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
        """Samples per step, over all ranks."""
        return self.prompts * self.generations

    @property
    def global_batches(self) -> int:
        """Global batches, and so optimizer steps, per training step."""
        return self.samples // self.global_batch_size

    @property
    def samples_per_rank(self) -> int:
        """Samples of one global batch on one data-parallel rank."""
        return self.global_batch_size // self.data_parallel

    @property
    def micro_batches(self) -> int:
        """Forward passes per global batch on one rank; with a token budget only an upper bound, because the
        number then depends on the lengths."""
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
    """Return the divisors of ``number``, those with the smallest ratio to ``value`` first.

    If ``number`` exceeds 10^10 (a typing error), only divisors of at most 100,000 are returned.
    """
    low = [
        divisor for divisor in range(1, min(math.isqrt(number), _MOST_DIVISOR) + 1) if number % divisor == 0
    ]
    high = [number // divisor for divisor in low] if number <= _MOST_DIVISOR**2 else []
    nearest = min(max(value, 1), _MOST_DIVISOR**2)
    return sorted({*low, *high}, key=lambda divisor: abs(math.log(divisor / nearest)))


def multiples_near(number: int, value: int, count: int = 8) -> list[int]:
    """Return ``count`` multiples of ``number``: the smallest that is at least ``value``, then alternately
    the next larger and the next smaller ones."""
    first = max(-(-value // number), 1)
    factors = [factor for away in range(count) for factor in (first + away, first - away) if factor >= 1]
    return [factor * number for factor in dict.fromkeys(factors)][:count]


def each_of(key: str, values: Iterable[object]) -> tuple[Mapping[str, object], ...]:
    """Return one candidate fix per value, each of which sets ``key`` to that value
    (``Violation.candidates``)."""
    return tuple({key: value} for value in values)


def padded_vocabulary(vocab_size: int, tensor_parallel: int) -> int:
    """Return the number of embedding rows: the vocabulary size rounded up to a multiple of the
    tensor-parallel size."""
    return -(-vocab_size // tensor_parallel) * tensor_parallel


def sequence_share(tensor: int, context: int, sequence_parallel: bool) -> int:
    """Return the number of tokens by which a sequence's length must be divisible, so that all ranks get
    equal parts.

    Each context-parallel rank holds two chunks of a sequence, which the sequence-parallel ranks divide
    further.

    Args:
        tensor: tensor-parallel size.
        context: context-parallel size.
        sequence_parallel: tensor-parallel ranks also shard the sequence.
    """
    return (2 * context if context > 1 else 1) * (tensor if sequence_parallel else 1)
