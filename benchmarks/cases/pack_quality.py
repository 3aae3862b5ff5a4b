"""How many bins each packing algorithm uses, against the lower bound L2 that no packing can beat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.lengths import PROFILES, draw_lengths
from benchmarks.point import Metric, Point
from megarl.data.packing import PackingAlgorithm, get_packer, martello_toth_lower_bound


def measure(quick: bool) -> Iterator[Point]:
    """Profiles x number of sequences x tokens a bin (1, 2 and 4 times the longest sequence), repeated over draws of lengths."""
    counts = [64] if quick else [64, 512, 4096]
    repeats = 2 if quick else 5
    for profile_name, profile in PROFILES.items():
        for count in counts:
            for times in (1, 2, 4):
                drawn = [draw_lengths(profile, count, seed) for seed in range(repeats)]
                parameters: dict[str, int | str] = {"profile": profile_name, "sequences": count, "capacity": times * profile.longest}
                yield Point(parameters, _metrics(drawn, times * profile.longest))


def _metrics(drawn: Sequence[Sequence[int]], capacity: int) -> dict[str, Metric]:
    bounds = [martello_toth_lower_bound(lengths, capacity) for lengths in drawn]
    metrics = {}
    for algorithm in PackingAlgorithm:
        used = [_bins_used(algorithm, lengths, capacity) for lengths in drawn]
        assert all(bins >= bound for bins, bound in zip(used, bounds, strict=True)), f"{algorithm.value} beats a lower bound"
        metrics[algorithm.value] = Metric.ratio("the bound L2 (bins)", used, bounds)
        if algorithm is PackingAlgorithm.BEST_FIT_DECREASING:
            filled = [sum(lengths) / (bins * capacity) for lengths, bins in zip(drawn, used, strict=True)]
            metrics["best_fit_decreasing_filled"] = Metric.of("ratio to the tokens that the bins hold", filled)
    return metrics


def _bins_used(algorithm: PackingAlgorithm, lengths: Sequence[int], capacity: int) -> int:
    bins = get_packer(algorithm, capacity, seed=1).pack(lengths)
    assert sorted(index for members in bins for index in members) == list(range(len(lengths))), f"{algorithm.value} lost a sequence"
    assert all(sum(lengths[index] for index in members) <= capacity for members in bins), f"{algorithm.value} overfilled a bin"
    return len(bins)
