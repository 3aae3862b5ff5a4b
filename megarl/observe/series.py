"""Curves over training steps, built from the rows of a metrics file. Pure Python."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True, slots=True)
class Series:
    """One metric over a run: ``values[i]`` belongs to ``steps[i]``. Steps are strictly ascending, and values
    are finite."""

    steps: tuple[int, ...]
    values: tuple[float, ...]

    def on(self, steps: Sequence[int]) -> list[float]:
        """Return the values at ``steps``, with 0 for steps where the metric was not logged."""
        known = dict(zip(self.steps, self.values, strict=True))
        return [known.get(step, 0.0) for step in steps]


@dataclass(frozen=True, slots=True)
class Log:
    """The metrics of a run, read from its rows.

    Attributes:
        series: every numeric metric as a curve.
        not_finite: metrics whose newest value is null, NaN or infinite, each with the step at which this
            began.
        last_time: unix seconds of the last row; None if the row has no time.
    """

    series: Mapping[str, Series]
    not_finite: Mapping[str, int]
    last_time: float | None


def collect_series(rows: Iterable[Mapping[str, Any]]) -> dict[str, Series]:
    """Return every numeric metric of the rows as a curve.

    If two rows give the same metric for the same step, the later row wins. Null, NaN and infinite values are
    gaps.
    """
    return dict(collect_log(rows).series)


def collect_log(rows: Iterable[Mapping[str, Any]]) -> Log:
    """Collect the curves of the rows, and the information that is not in curves. The rows are read once, one
    by one, and only their numbers are kept."""
    points: dict[str, tuple[list[int], list[float]]] = {}
    not_finite: dict[str, int] = {}
    last_time: float | None = None
    for row in rows:
        step = row["step"]
        last_time = _finite(row.get("time"))
        for name, value in row.items():
            if (
                name in ("step", "time")
                or isinstance(value, bool)
                or not isinstance(value, int | float | None)
            ):
                continue
            number = _finite(value)
            if number is None:
                not_finite.setdefault(name, step)
                continue
            not_finite.pop(name, None)
            steps, values = points.setdefault(name, ([], []))
            steps.append(step)
            values.append(number)
    same: dict[tuple[int, ...], tuple[int, ...]] = {}
    # Remove the points one by one, so that a long run's points are never in memory twice.
    series = {name: _series(*points.pop(name), same) for name in list(points)}
    return Log(series, not_finite, last_time)


def _finite(value: Any) -> float | None:
    """Convert a value to a finite float; return None if that is not possible."""
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _series(
    steps: Sequence[int], values: Sequence[float], same: dict[tuple[int, ...], tuple[int, ...]]
) -> Series:
    """Build a curve from points in file order. Metrics with equal steps share one tuple of steps."""
    # A resumed run may write a step again; the dict keeps the later row of it.
    if any(later <= earlier for earlier, later in pairwise(steps)):
        return _sorted_series(dict(zip(steps, values, strict=True)))
    kept = tuple(steps)
    return Series(same.setdefault(kept, kept), tuple(values))


def smoothing_window(count: int) -> int:
    """Return the window, in points, of a running mean over ``count`` points: an odd number of about a tenth
    of them, 3 to 51, or 1 (no smoothing) below 10 points."""
    # Make the number odd, so that each side has equally many points.
    return 1 if count < 10 else min(max(count // 10 | 1, 3), 51)


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Return for each value the mean of it and its ``window // 2`` neighbours on either side (fewer at both
    ends).

    The mean is centred, so that the smooth curve does not lag behind its points.
    """
    reach = window // 2
    means = []
    for index in range(len(values)):
        group = values[max(index - reach, 0) : index + reach + 1]
        means.append(math.fsum(group) / len(group))
    return means


def thinned(curve: Series, parts: int) -> tuple[list[float], list[float], list[float], list[float]]:
    """Downsample a curve into ``parts`` equal bins, and return each bin's mean step and its mean, minimum and
    maximum value."""
    steps, means, lowest, highest = [], [], [], []
    bounds = [len(curve.steps) * index // parts for index in range(parts + 1)]
    for low, high in pairwise(bounds):
        values = curve.values[low:high]
        if values:
            steps.append(sum(curve.steps[low:high]) / len(values))
            means.append(math.fsum(values) / len(values))
            lowest.append(min(values))
            highest.append(max(values))
    return steps, means, lowest, highest


def mean_over_runs(curves: Sequence[Series]) -> Series:
    """Return the mean of several runs' curves at the steps that all of them have."""
    by_run = [dict(zip(curve.steps, curve.values, strict=True)) for curve in curves]
    common = set.intersection(*map(set, by_run)) if by_run else set()
    return _sorted_series({step: math.fsum(run[step] for run in by_run) / len(by_run) for step in common})


def _sorted_series(points: Mapping[int, float]) -> Series:
    steps = tuple(sorted(points))
    return Series(steps, tuple(points[step] for step in steps))
