"""Distribution of packed bins over shards so that shards have equal work, in total and micro-batch by
micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.errors import PackingError

DEFAULT_ATTENTION_CROSSOVER_LENGTH = 24576
"""Sequence length in tokens at which causal attention costs as much as the matrix multiplications: 12 x
hidden size, here 2048."""


def sequence_cost(length: int, attention_crossover_length: int = DEFAULT_ATTENTION_CROSSOVER_LENGTH) -> int:
    """Return the relative forward-and-backward cost of one sequence, in arbitrary units.

    A transformer layer spends about ``24 h^2 s`` FLOPs on matrix multiplications and ``2 h s^2`` on causal
    attention (Narayanan et al. 2021, appendix, halved for the causal mask), which is proportional to ``12 h s
    + s^2``; ``12 h`` is the crossover length.
    """
    return length * (attention_crossover_length + length)


def deal_bins(costs: Sequence[int], shards: int) -> list[int]:
    """Order bins so that distributing them round-robin gives every shard equal work.

    Bins are taken in rounds of ``shards`` from the costliest down, so that the bins of one round, which run
    at the same time on different shards, cost about the same; within a round the costliest bin goes to the
    shard with the least work so far. Ties keep input order.

    Args:
        costs: cost of each bin; their number must be a multiple of ``shards``.
        shards: number of data-parallel shards.

    Returns:
        A permutation of bin numbers; the bin at position p belongs to shard ``p % shards``.

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
