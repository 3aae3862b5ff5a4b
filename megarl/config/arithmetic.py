"""Arithmetic of batches: how samples become global batches and micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The batches of one step.

    Attributes:
        prompts: prompts a step.
        generations: answers a prompt; 1 without generation.
        global_batch_size: samples an optimizer step.
        data_parallel: data-parallel ranks.
        micro_batch_size: samples a forward pass on one of them.
        sequence_length: longest sequence in tokens.
        token_budget: tokens a micro-batch where micro-batches are formed by tokens, otherwise 0.
        logprob_token_budget: the same when log-probabilities are computed.
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
        """Samples a step."""
        return self.prompts * self.generations

    @property
    def global_batches(self) -> int:
        """Optimizer steps a step of the algorithm."""
        return self.samples // self.global_batch_size

    @property
    def samples_per_rank(self) -> int:
        """Samples of a global batch on one data-parallel rank."""
        return self.global_batch_size // self.data_parallel

    @property
    def micro_batches(self) -> int:
        """Forward passes of a global batch on one rank; by tokens, the most that there can be."""
        return self.samples_per_rank if self.token_budget else self.samples_per_rank // self.micro_batch_size

    @property
    def tokens_per_micro_batch(self) -> int:
        """Most tokens of a forward pass, padding included."""
        return self.token_budget or self.micro_batch_size * self.sequence_length

    @property
    def tokens_per_step(self) -> int:
        """Most tokens of a step over all ranks, padding included."""
        return self.samples * self.sequence_length


def divisors_near(number: int, value: int) -> list[int]:
    """Return the divisors of a number of at least 1, those of the least ratio to a value first."""
    low = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted(
        {*low, *(number // divisor for divisor in low)},
        key=lambda divisor: abs(math.log(divisor / max(value, 1))),
    )


def multiples_near(number: int, value: int, count: int = 8) -> list[int]:
    """Return some multiples of a number, from the one that is not below a value upwards and downwards in
    turn."""
    first = max(-(-value // number), 1)
    factors = [factor for away in range(count) for factor in (first + away, first - away) if factor >= 1]
    return [factor * number for factor in dict.fromkeys(factors)][:count]


def each_of(key: str, values: Iterable[object]) -> tuple[Mapping[str, object], ...]:
    """Return candidates of a violation: one key, and a value in each."""
    return tuple({key: value} for value in values)


def padded_vocabulary(vocab_size: int, tensor_parallel: int) -> int:
    """Return rows of the embedding: the vocabulary rounded up to a multiple of the tensor-parallel size."""
    return -(-vocab_size // tensor_parallel) * tensor_parallel


def sequence_share(tensor: int, context: int, sequence_parallel: bool) -> int:
    """Return what a sequence's length must be a multiple of, so that every rank that shares it gets an equal
    part.

    Context-parallel ranks hold two chunks each; sequence-parallel ranks divide what is left.
    """
    return (2 * context if context > 1 else 1) * (tensor if sequence_parallel else 1)
