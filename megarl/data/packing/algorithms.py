"""Packing algorithms: they distribute sequences over bins of a maximum capacity."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from enum import Enum

from megarl.data.packing.fitting import (
    Bin,
    best_fit,
    first_fit,
    grow_by_splitting,
    longest_first,
    split_evenly,
    split_in_order,
    spread,
)
from megarl.data.packing.metrics import PackingMetrics
from megarl.errors import PackingError


class PackingAlgorithm(Enum):
    """Packing algorithms by their configuration value."""

    CONCATENATIVE = "concatenative"
    FIRST_FIT_DECREASING = "first_fit_decreasing"
    FIRST_FIT_SHUFFLE = "first_fit_shuffle"
    MODIFIED_FIRST_FIT_DECREASING = "modified_first_fit_decreasing"
    BEST_FIT_DECREASING = "best_fit_decreasing"


DEFAULT_PACKING_ALGORITHM = PackingAlgorithm.BEST_FIT_DECREASING


class SequencePacker(ABC):
    """Base class of packers, which pack sequences into bins of at most ``bin_capacity`` tokens.

    Args:
        bin_capacity: maximum tokens per bin.
        collect_metrics: collect statistics of every ``pack`` call in ``metrics``.
        min_bin_count: minimum number of bins (default 0).
        bin_count_multiple: the number of bins is a multiple of this (default 1).

    Raises:
        PackingError: ``min_bin_count`` is negative, or ``bin_count_multiple`` is not positive.
    """

    def __init__(
        self,
        bin_capacity: int,
        collect_metrics: bool = False,
        min_bin_count: int | None = None,
        bin_count_multiple: int | None = None,
    ) -> None:
        if min_bin_count is not None and min_bin_count < 0:
            raise PackingError(
                f"min_bin_count must be nonnegative, got {min_bin_count}; write 0 for no minimum"
            )
        if bin_count_multiple is not None and bin_count_multiple < 1:
            raise PackingError(
                f"bin_count_multiple must be positive, got {bin_count_multiple}; write 1 to allow any "
                "number of bins"
            )
        self.bin_capacity = bin_capacity
        self.min_bin_count = min_bin_count or 0
        self.bin_count_multiple = bin_count_multiple or 1
        self.collect_metrics = collect_metrics
        self.metrics: PackingMetrics | None = PackingMetrics() if collect_metrics else None

    def pack(self, sequence_lengths: Sequence[int]) -> list[list[int]]:
        """Distribute sequences over bins.

        Args:
            sequence_lengths: lengths in tokens.

        Returns:
            Lists of indices into ``sequence_lengths``. Each index occurs once, and no bin is empty or above
            the capacity. There are at least ``min_bin_count`` bins, and their number is a multiple of
            ``bin_count_multiple``.

        Raises:
            PackingError: a length is negative or above the capacity, or there are fewer sequences than bins
                to fill.
        """
        lengths = list(map(int, sequence_lengths))
        self._validate(lengths)
        bins = self._pack_implementation(lengths)
        wanted = self._wanted_bin_count(len(bins), len(lengths))
        if wanted > len(bins):
            bins = self._grow(bins, wanted, lengths)
        if self.metrics is not None:
            self.metrics.update(lengths, bins, self.bin_capacity)
        return bins

    def compute_metrics(
        self, sequence_lengths: Sequence[int], bins: Sequence[Sequence[int]]
    ) -> dict[str, float]:
        """Return the statistics of one packing (see ``PackingMetrics``) without storing them."""
        return PackingMetrics().calculate_stats_only(sequence_lengths, bins, self.bin_capacity)

    def get_aggregated_metrics(self) -> dict[str, float]:
        """Return the statistics of all packings so far; empty unless ``collect_metrics`` is set."""
        return self.metrics.get_aggregated_stats() if self.metrics is not None else {}

    def reset_metrics(self) -> None:
        """Clear the statistics collected so far."""
        if self.metrics is not None:
            self.metrics.reset()

    @abstractmethod
    def _pack_implementation(self, lengths: list[int]) -> list[Bin]:
        """Pack validated lengths, without regard to the required number of bins."""

    def _validate(self, lengths: Sequence[int]) -> None:
        if self.bin_capacity <= 0:
            raise PackingError(
                f"bin_capacity = {self.bin_capacity} must be positive; give the number of tokens a bin may "
                "hold"
            )
        for index, length in enumerate(lengths):
            if length > self.bin_capacity:
                raise PackingError(
                    f"sequence {index} has length {length}, which exceeds bin_capacity = "
                    f"{self.bin_capacity}; "
                    f"raise the tokens per micro-batch to at least {max(lengths)} or shorten the sequences"
                )
            if length < 0:
                raise PackingError(
                    f"sequence {index} has length {length}, lengths must not be negative; check the input "
                    "lengths"
                )

    def _wanted_bin_count(self, bin_count: int, sequence_count: int) -> int:
        at_least = max(bin_count, self.min_bin_count)
        wanted = -(-at_least // self.bin_count_multiple) * self.bin_count_multiple
        if wanted > sequence_count:
            raise PackingError(
                f"Cannot create {wanted} bins with only {sequence_count} sequences, each bin must hold at "
                "least one. "
                f"Give more sequences, or lower min_bin_count ({self.min_bin_count}) or bin_count_multiple "
                f"({self.bin_count_multiple})"
            )
        return wanted

    def _grow(self, bins: list[Bin], wanted: int, lengths: list[int]) -> list[Bin]:
        # Try even spreading first: splitting leaves nearly empty bins, and a micro-batch takes as long as its
        # slowest rank.
        evenly = spread(lengths, wanted, self.bin_capacity)
        return evenly if evenly is not None else grow_by_splitting(bins, wanted, lengths, split_evenly)


class ConcatenativePacker(SequencePacker):
    """Fills bins in input order, and opens a new one if the next sequence does not fit. O(n)."""

    def _pack_implementation(self, lengths: list[int]) -> list[Bin]:
        bins: list[Bin] = []
        # Below 0, so that a first sequence of length 0 also opens a bin.
        room = -1
        for index, length in enumerate(lengths):
            if length > room:
                bins.append([])
                room = self.bin_capacity
            bins[-1].append(index)
            room -= length
        return bins

    def _grow(self, bins: list[Bin], wanted: int, lengths: list[int]) -> list[Bin]:
        # Restore input order, which this algorithm promises.
        return sorted(grow_by_splitting(bins, wanted, lengths, split_in_order))


class FirstFitPacker(SequencePacker):
    """Puts each sequence into the first bin with enough free capacity. O(n log n). Subclasses choose the
    order of the sequences; here it is the input order."""

    def _order(self, lengths: list[int]) -> list[int]:
        return list(range(len(lengths)))

    def _pack_implementation(self, lengths: list[int]) -> list[Bin]:
        return first_fit(lengths, self._order(lengths), self.bin_capacity)


class FirstFitDecreasingPacker(FirstFitPacker):
    """First fit, longest sequences first. Uses at most 11/9 of the optimal number of bins plus 6/9 (Dosa
    2007)."""

    def _order(self, lengths: list[int]) -> list[int]:
        return longest_first(lengths)


class FirstFitShufflePacker(FirstFitPacker):
    """First fit in a random order, which mixes long and short sequences.

    Args:
        seed: seed of the order, which is then the same in every ``pack`` call; None uses Python's global
            ``random``.
    """

    def __init__(
        self,
        bin_capacity: int,
        collect_metrics: bool = False,
        min_bin_count: int | None = None,
        bin_count_multiple: int | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(bin_capacity, collect_metrics, min_bin_count, bin_count_multiple)
        self.seed = seed

    def _order(self, lengths: list[int]) -> list[int]:
        order = list(range(len(lengths)))
        if self.seed is None:
            random.shuffle(order)
        else:
            random.Random(self.seed).shuffle(order)
        return order


class BestFitDecreasingPacker(SequencePacker):
    """Puts each sequence, longest first, into the fullest bin with enough free capacity. O(n log n). This is
    the default, because its bins are as full as those of slower algorithms."""

    def _pack_implementation(self, lengths: list[int]) -> list[Bin]:
        return best_fit(lengths, longest_first(lengths), self.bin_capacity)


class ModifiedFirstFitDecreasingPacker(SequencePacker):
    """Modified first fit decreasing (Johnson and Garey, *A 71/60 theorem for bin packing*, 1985). Lengths
    must be positive.

    Each sequence longer than half a bin gets its own bin. Then sequences longer than a third, and pairs of
    sequences longer than a sixth, are added where they fit, then any that fit. The rest is packed into new
    bins by first fit decreasing.
    """

    def _validate(self, lengths: Sequence[int]) -> None:
        super()._validate(lengths)
        for index, length in enumerate(lengths):
            if length <= 0:
                raise PackingError(
                    f"sequence {index} has length {length}, this algorithm needs lengths of at least 1; "
                    "drop empty sequences"
                )

    def _pack_implementation(self, lengths: list[int]) -> list[Bin]:
        shortest_first = sorted(range(len(lengths)), key=lengths.__getitem__)
        capacity = self.bin_capacity
        sizes = [lengths[index] for index in shortest_first]
        # Lengths are integers, so comparing with the floor of a fraction is exact.
        sixth, third, half = (bisect_right(sizes, capacity // parts) for parts in (6, 3, 2))
        # half = 0 needs its own case: a slice would count the stop -1 from the end.
        large = shortest_first[: half - 1 : -1] if half else shortest_first[::-1]
        bins: list[Bin] = [[index] for index in large]
        room = [capacity - lengths[index] for index in large]
        medium = _SortedPool(shortest_first[third:half], lengths)
        small = _SortedPool(shortest_first[sixth:third], lengths)
        tiny = _SortedPool(shortest_first[:sixth], lengths)

        def place(number: int, index: int) -> None:
            bins[number].append(index)
            room[number] -= lengths[index]

        # As in the paper: forwards through the bins for medium sequences, backwards for small ones.
        without_medium: list[int] = []
        for number in range(len(bins)):
            if medium.fits(room[number]):
                place(number, medium.pop_largest_within(room[number]))
            else:
                without_medium.append(number)
        for number in reversed(without_medium):
            if small.two_fit(room[number]):
                place(number, small.pop_smallest())
                place(number, small.pop_largest_within(room[number]))
        # This order keeps the pool sorted.
        rest = _SortedPool(tiny.members + small.members + medium.members, lengths)
        for number in range(len(bins)):
            while rest.fits(room[number]):
                place(number, rest.pop_largest_within(room[number]))
        return bins + first_fit(lengths, rest.members[::-1], capacity)


class _SortedPool:
    """Sequences that are not packed yet, shortest first."""

    def __init__(self, members: list[int], lengths: Sequence[int]) -> None:
        self.members = members
        self._sizes = [lengths[index] for index in members]

    def fits(self, room: int) -> bool:
        return bool(self._sizes) and self._sizes[0] <= room

    def two_fit(self, room: int) -> bool:
        return len(self._sizes) >= 2 and self._sizes[0] + self._sizes[1] <= room

    def pop_smallest(self) -> int:
        return self._pop(0)

    def pop_largest_within(self, room: int) -> int:
        return self._pop(bisect_right(self._sizes, room) - 1)

    def _pop(self, place: int) -> int:
        self._sizes.pop(place)
        return self.members.pop(place)


_PACKERS: dict[PackingAlgorithm, type[SequencePacker]] = {
    PackingAlgorithm.CONCATENATIVE: ConcatenativePacker,
    PackingAlgorithm.FIRST_FIT_DECREASING: FirstFitDecreasingPacker,
    PackingAlgorithm.FIRST_FIT_SHUFFLE: FirstFitShufflePacker,
    PackingAlgorithm.MODIFIED_FIRST_FIT_DECREASING: ModifiedFirstFitDecreasingPacker,
    PackingAlgorithm.BEST_FIT_DECREASING: BestFitDecreasingPacker,
}


def get_packer(
    algorithm: PackingAlgorithm | str,
    bin_capacity: int,
    collect_metrics: bool = False,
    min_bin_count: int | None = None,
    bin_count_multiple: int | None = None,
    seed: int | None = None,
) -> SequencePacker:
    """Build a packer.

    Args:
        algorithm: a ``PackingAlgorithm`` or its name in any case.
        bin_capacity, collect_metrics, min_bin_count, bin_count_multiple: see ``SequencePacker``.
        seed: see ``FirstFitShufflePacker``; other algorithms are deterministic and ignore it.

    Raises:
        PackingError: there is no such algorithm, or an argument is out of range.
    """
    if not isinstance(algorithm, PackingAlgorithm):
        try:
            algorithm = PackingAlgorithm[str(algorithm).upper()]
        except KeyError:
            known = ", ".join(member.value for member in PackingAlgorithm)
            raise PackingError(f"Unknown packing algorithm {algorithm!r}; choose one of: {known}") from None
    if algorithm is PackingAlgorithm.FIRST_FIT_SHUFFLE:
        return FirstFitShufflePacker(bin_capacity, collect_metrics, min_bin_count, bin_count_multiple, seed)
    return _PACKERS[algorithm](bin_capacity, collect_metrics, min_bin_count, bin_count_multiple)
