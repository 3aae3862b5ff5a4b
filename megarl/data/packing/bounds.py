"""Lower bounds on the number of bins that any packing needs."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from megarl.errors import PackingError


def martello_toth_lower_bound(sequence_lengths: Sequence[int], bin_capacity: int) -> int:
    """The bound L2 of Martello and Toth (*Knapsack Problems*, 1990, section 8.3): no packing uses fewer bins.

    For a threshold k the items longer than ``capacity - k`` need a bin each and share it with nothing of length k or more, the other items
    longer than half a bin need a bin each, and what the items of length k up to half a bin leave over after filling those bins needs more
    bins. The bound is the best over all k; only lengths that occur need to be tried. Takes O(n log n).

    Args:
        sequence_lengths: lengths in tokens, each from 0 to ``bin_capacity``.
        bin_capacity: tokens a bin holds.

    Raises:
        PackingError: the capacity is not positive, or a length is outside ``[0, bin_capacity]``.
    """
    if bin_capacity <= 0:
        raise PackingError(f"bin_capacity = {bin_capacity} must be positive; give the number of tokens a bin may hold")
    ascending = sorted(sequence_lengths)
    if not ascending or ascending[-1] == 0:
        return 0
    if ascending[0] < 0 or ascending[-1] > bin_capacity:
        raise PackingError(
            f"sequence lengths run from {ascending[0]} to {ascending[-1]}, outside [0, bin_capacity = {bin_capacity}]; "
            "raise the capacity or leave those sequences out"
        )
    total_up_to = [0, *accumulate(ascending)]
    first_above_half = bisect_right(ascending, bin_capacity // 2)
    above_half = len(ascending) - first_above_half

    def bound_at(threshold: int) -> int:
        first_alone = max(first_above_half, bisect_right(ascending, bin_capacity - threshold))
        first_small = bisect_left(ascending, threshold)
        shared_bins = first_alone - first_above_half
        room = shared_bins * bin_capacity - (total_up_to[first_alone] - total_up_to[first_above_half])
        small_tokens = total_up_to[first_above_half] - total_up_to[first_small]
        return above_half + max(0, -(-(small_tokens - room) // bin_capacity))

    return max(bound_at(threshold) for threshold in {0, *ascending[:first_above_half]})
