"""Metrics as curves over the training steps, built from the rows of a metrics file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.observe.metrics_file import MetricRow


@dataclass(frozen=True, slots=True)
class Series:
    """Values of one metric: ``values[i]`` was logged at ``steps[i]``. Steps are strictly ascending; values
    are finite."""

    steps: tuple[int, ...]
    values: tuple[float, ...]

    def on(self, steps: Sequence[int]) -> list[float]:
        """Return the values at some steps, with 0 where the metric was not logged."""
        known = dict(zip(self.steps, self.values, strict=True))
        return [known.get(step, 0.0) for step in steps]


@dataclass(frozen=True, slots=True)
class Log:
    """All metrics of a run.

    Attributes:
        series: numeric metrics by name.
        not_finite: metrics whose newest value is null, NaN or infinite -> step since which this is so.
        last_time: unix seconds of the last row; None if it has no time.
    """

    series: Mapping[str, Series]
    not_finite: Mapping[str, int]
    last_time: float | None


def collect_series(rows: Iterable[MetricRow]) -> dict[str, Series]:
    """Return the numeric metrics of the rows as curves. Later rows of a step win; null, NaN and infinite
    values are omitted."""
    return dict(collect_log(rows).series)


def collect_log(rows: Iterable[MetricRow]) -> Log:
    """Collect the curves and further facts from the rows. The rows are read once and not kept."""
    points: dict[str, tuple[list[int], list[float]]] = {}
    not_finite: dict[str, int] = {}
    last_time: float | None = None
    for row in rows:
        step = row["step"]
        last_time = _finite(row.get("time"))
        for name, value in row.items():
            if (
                # bool is a subclass of int, but is not a metric.
                name in ("step", "time")
                or isinstance(value, bool)
                or not isinstance(value, int | float | None)
            ):
                continue
            number = _finite(value)
            if number is None:
                not_finite.setdefault(name, step)
                continue
            # A finite value ends an earlier period without one.
            not_finite.pop(name, None)
            steps, values = points.setdefault(name, ([], []))
            steps.append(step)
            values.append(number)
    same: dict[tuple[int, ...], tuple[int, ...]] = {}
    # Pop the points, so that a long run's points are not in memory twice.
    series = {name: _series(*points.pop(name), same) for name in list(points)}
    return Log(series, not_finite, last_time)


def _finite(value: object) -> float | None:
    """Return a value as a finite float, or None."""
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _series(
    steps: Sequence[int], values: Sequence[float], same: dict[tuple[int, ...], tuple[int, ...]]
) -> Series:
    """Build a curve from points in file order. Curves with equal steps share one tuple, to save memory.

    Args:
        steps: step of each point.
        values: value of each point.
        same: tuples of steps that earlier curves use.
    """
    # A resumed run may log a step again; the dict keeps the later value.
    if any(later <= earlier for earlier, later in pairwise(steps)):
        return _sorted_series(dict(zip(steps, values, strict=True)))
    # Share the tuple: most metrics are logged at every step, and a long run has hundreds of them.
    kept = tuple(steps)
    return Series(same.setdefault(kept, kept), tuple(values))


def smoothing_window(count: int) -> int:
    """Return the window of the running mean for ``count`` points: about a tenth, odd, from 3 to 51; 1 (no
    smoothing) for fewer than 10 points."""
    # An odd window has equally many points on both sides.
    return 1 if count < 10 else min(max(count // 10 | 1, 3), 51)


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Return the centred running mean: each value is averaged with ``window // 2`` neighbours on either side
    (fewer at the ends). A trailing mean would lag behind the curve."""
    reach = window // 2
    means = []
    for index in range(len(values)):
        group = values[max(index - reach, 0) : index + reach + 1]
        means.append(math.fsum(group) / len(group))
    return means


def thinned(curve: Series, parts: int) -> tuple[list[float], list[float], list[float], list[float]]:
    """Downsample a curve to ``parts`` bins with equally many points. Return the mean step, mean, minimum and
    maximum of each bin."""
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
    """Return the mean of several curves at the steps that all of them have."""
    by_run = [dict(zip(curve.steps, curve.values, strict=True)) for curve in curves]
    common = set.intersection(*map(set, by_run)) if by_run else set()
    return _sorted_series({step: math.fsum(run[step] for run in by_run) / len(by_run) for step in common})


def _sorted_series(points: Mapping[int, float]) -> Series:
    steps = tuple(sorted(points))
    return Series(steps, tuple(points[step] for step in steps))
