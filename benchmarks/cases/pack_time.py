"""What best-fit decreasing costs, against sorting the same lengths: sorting is the least that any "decreasing" algorithm does."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from benchmarks.lengths import PROFILES, draw_lengths
from benchmarks.point import Metric, Point
from benchmarks.timing import in_turn
from megarl.data.packing import PackingAlgorithm, get_packer

LARGEST_QUADRATIC = 4096


def measure(quick: bool) -> Iterator[Point]:
    """Two profiles x number of sequences. First-fit decreasing, which is quadratic, is timed up to ``LARGEST_QUADRATIC`` sequences."""
    repeats = 3 if quick else 7
    for profile in ("short", "reasoning-4k"):
        for count in [512, 1024] if quick else [512, 4096, 16_384, 65_536]:
            yield Point({"profile": profile, "sequences": count}, _metrics(profile, count, repeats))


def _metrics(profile_name: str, count: int, repeats: int) -> dict[str, Metric]:
    profile = PROFILES[profile_name]
    lengths = draw_lengths(profile, count, seed=count)
    chosen = [PackingAlgorithm.BEST_FIT_DECREASING]
    if count <= LARGEST_QUADRATIC:
        chosen.append(PackingAlgorithm.FIRST_FIT_DECREASING)
    packers = {algorithm.value: get_packer(algorithm, profile.longest) for algorithm in chosen}
    actions = {name: partial(packer.pack, lengths) for name, packer in packers.items()}
    seconds = in_turn({"sorted": partial(sorted, lengths), **actions}, repeats=repeats, calls=5 if count <= 512 else 1)
    metrics = {name: Metric.ratio("sorted()", seconds[name], seconds["sorted"]) for name in packers}
    metrics["best_fit_decreasing_a_sequence"] = Metric.of("ns", [1e9 * value / count for value in seconds["best_fit_decreasing"]])
    return metrics
