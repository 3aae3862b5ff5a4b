"""Building blocks of the packers: a lower bound on the number of bins, first fit, best fit, even spreading,
and splitting of bins."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from megarl.errors import PackingError

Bin = list[int]
"""Indices into the list of sequence lengths."""
Split = Callable[[Bin, Sequence[int]], tuple[Bin, Bin]]


def longest_first(lengths: Sequence[int]) -> list[int]:
    """Return indices sorted by decreasing length. Equal lengths keep their order."""
    return sorted(range(len(lengths)), key=lambda index: -lengths[index])


def first_fit(lengths: Sequence[int], order: Sequence[int], capacity: int) -> list[Bin]:
    """Put each sequence, in the given order, into the lowest-numbered bin with enough free capacity. O(n log
    n).

    The leaves of a binary tree are the bins' free capacities, and each inner node is the maximum of its
    children. Bins that are not opened yet are leaves with full capacity to the right of the opened ones, so
    the same search also opens bins.

    Args:
        lengths: lengths in tokens, none above ``capacity``.
        order: indices into ``lengths``.
        capacity: maximum tokens per bin.
    """
    if not order:
        return []
    leaves = 1 << (len(order) - 1).bit_length()
    room = [capacity] * (2 * leaves)
    bins: list[Bin] = []
    for index in order:
        length = lengths[index]
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < length:
                node += 1
        room[node] -= length
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(index)
        while node > 1:
            node //= 2
            largest = max(room[2 * node], room[2 * node + 1])
            if room[node] == largest:
                # The maximum of this node is unchanged, and so are those of all nodes above it.
                break
            room[node] = largest
    return bins


def best_fit(lengths: Sequence[int], order: Iterable[int], capacity: int) -> list[Bin]:
    """Put each sequence, in the given order, into the fullest bin with enough free capacity, or the
    lowest-numbered among equally full ones. The bin is found by bisection in a sorted list."""
    bins: list[Bin] = []
    room_and_bin: list[tuple[int, int]] = []
    for index in order:
        length = lengths[index]
        # -1 precedes every bin number, so that a bin with exactly this free capacity is found too.
        place = bisect_left(room_and_bin, (length, -1))
        if place == len(room_and_bin):
            room, number = capacity, len(bins)
            bins.append([])
        else:
            room, number = room_and_bin.pop(place)
        bins[number].append(index)
        insort(room_and_bin, (room - length, number))
    return bins


def spread(lengths: Sequence[int], bin_count: int, capacity: int) -> list[Bin] | None:
    """Spread sequences evenly over exactly ``bin_count`` bins: longest first, each into the emptiest bin
    (Graham's LPT rule).

    Returns:
        The bins, or None if the rule would exceed the capacity. No bin is empty if there are at least
        ``bin_count`` sequences of positive length.
    """
    load_count_bin = [(0, 0, number) for number in range(bin_count)]
    bins: list[Bin] = [[] for _ in range(bin_count)]
    for index in longest_first(lengths):
        load, count, number = load_count_bin[0]
        if load + lengths[index] > capacity:
            return None
        bins[number].append(index)
        # The count breaks ties, so that sequences of length 0 are spread over all bins.
        heapq.heapreplace(load_count_bin, (load + lengths[index], count + 1, number))
    return bins


def split_evenly(members: Bin, lengths: Sequence[int]) -> tuple[Bin, Bin]:
    """Split a bin of two or more sequences into two non-empty bins of nearly equal load."""
    halves: tuple[Bin, Bin] = ([], [])
    loads = [0, 0]
    for index in sorted(members, key=lambda member: -lengths[member]):
        # The number of members breaks ties; otherwise sequences of length 0 would leave one half empty.
        lighter = 0 if (loads[0], len(halves[0])) <= (loads[1], len(halves[1])) else 1
        halves[lighter].append(index)
        loads[lighter] += lengths[index]
    return halves


def load_of(members: Sequence[int], lengths: Sequence[int]) -> int:
    """Return the tokens of a bin's sequences."""
    return sum(lengths[index] for index in members)


def split_in_order(members: Bin, lengths: Sequence[int]) -> tuple[Bin, Bin]:
    """Split a bin of two or more sequences at the point closest to equal loads, without reordering them.
    Neither part is empty."""
    total = load_of(members, lengths)
    best_cut, best_gap, left = 1, total, 0
    for cut in range(1, len(members)):
        left += lengths[members[cut - 1]]
        gap = abs(total - 2 * left)
        if gap < best_gap:
            best_cut, best_gap = cut, gap
    return members[:best_cut], members[best_cut:]


def grow_by_splitting(bins: Sequence[Bin], bin_count: int, lengths: Sequence[int], split: Split) -> list[Bin]:
    """Split bins until there are ``bin_count``. Each time, the bin whose smaller half is largest is split,
    which avoids nearly empty bins.

    ``bin_count`` must not exceed the number of sequences.
    """
    single: list[Bin] = []
    splittable: list[tuple[int, int, Bin, tuple[Bin, Bin]]] = []

    def offer(members: Bin, tie_break: int) -> None:
        if len(members) < 2:
            single.append(members)
            return
        halves = split(members, lengths)
        smaller = min(load_of(half, lengths) for half in halves)
        # Every tie break is different, so that the heap never compares the members.
        heapq.heappush(splittable, (-smaller, tie_break, members, halves))

    for number, members in enumerate(bins):
        offer(members, number)
    for number in range(len(bins), bin_count):
        _, _, _, (left, right) = heapq.heappop(splittable)
        offer(left, 2 * number)
        offer(right, 2 * number + 1)
    return single + [members for _, _, members, _ in sorted(splittable, key=lambda entry: entry[1])]


def martello_toth_lower_bound(sequence_lengths: Sequence[int], bin_capacity: int) -> int:
    """Return the lower bound L2 of Martello and Toth on the number of bins (*Knapsack Problems*, 1990,
    section 8.3). O(n log n).

    For a threshold k, each item longer than ``capacity - k`` needs a bin that it shares with no item of
    length k or more. Each other item longer than half a bin needs a bin as well. Items of length k up to half
    a bin that do not fit into the free capacity of the latter bins need further ones. The bound is the
    maximum over all k; only lengths that occur need to be tried.

    Args:
        sequence_lengths: lengths in tokens, each from 0 to ``bin_capacity``.
        bin_capacity: maximum tokens per bin.

    Raises:
        PackingError: the capacity is not positive, or a length is outside ``[0, bin_capacity]``.
    """
    if bin_capacity <= 0:
        raise PackingError(
            f"bin_capacity = {bin_capacity} must be positive; give the number of tokens a bin may hold"
        )
    ascending = sorted(sequence_lengths)
    if not ascending or ascending[-1] == 0:
        return 0
    if ascending[0] < 0 or ascending[-1] > bin_capacity:
        raise PackingError(
            f"sequence lengths run from {ascending[0]} to {ascending[-1]}, outside [0, bin_capacity = "
            f"{bin_capacity}]; "
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

    return max(map(bound_at, {0, *ascending[:first_above_half]}))
