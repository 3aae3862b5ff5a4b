"""Distribution of packed bins over shards such that all shards have equal work, in total and in each
micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.errors import PackingError

DEFAULT_ATTENTION_CROSSOVER_LENGTH = 24576
"""Sequence length in tokens at which causal attention costs as much as the other matmuls: 12 times the hidden
size, here for a hidden size of 2048."""


def sequence_cost(length: int, attention_crossover_length: int = DEFAULT_ATTENTION_CROSSOVER_LENGTH) -> int:
    """Return the relative forward and backward cost of a sequence, in arbitrary units.

    A transformer layer takes about ``24 h^2 s`` FLOPs for matmuls and ``2 h s^2`` for causal attention
    (Narayanan et al. 2021, appendix, halved for the causal mask). This is proportional to ``s (12 h + s)``,
    and ``12 h`` is the crossover length.
    """
    return length * (attention_crossover_length + length)


def deal_bins(costs: Sequence[int], shards: int) -> list[int]:
    """Order bins such that dealing them round-robin gives all shards equal work.

    The costliest ``shards`` bins form the first round, and so on, because the bins of a round run at the same
    time on different shards and should cost the same. Within a round, the costliest bin goes to the shard
    with the least work so far. Ties keep the input order.

    Args:
        costs: cost of each bin; their number must be a multiple of ``shards``.
        shards: number of data-parallel shards.

    Returns:
        A permutation of bin indices; the bin at position p belongs to shard ``p % shards``.

    Raises:
        PackingError: the number of bins is not a multiple of ``shards``.
    """
    if shards < 1 or len(costs) % shards:
        raise PackingError(
            f"{len(costs)} bins cannot be dealt evenly to shards = {shards}; pack with bin_count_multiple "
            "equal to the number of shards"
        )
    # sorted is stable, so that bins of equal cost keep their order, also in a resumed run.
    costliest_first = sorted(range(len(costs)), key=lambda bin_number: -costs[bin_number])
    work = [0] * shards
    dealt = [0] * len(costs)
    for start in range(0, len(costs), shards):
        least_work_first = sorted(range(shards), key=work.__getitem__)
        for shard, bin_number in zip(least_work_first, costliest_first[start : start + shards], strict=True):
            work[shard] += costs[bin_number]
            dealt[start + shard] = bin_number
    return dealt
