"""Results that a case returns: points, each a set of parameters with its metrics."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.timing import Spent


@dataclass(frozen=True, slots=True)
class Metric:
    """One measured quantity.

    Attributes:
        unit: unit of the samples and, for a ratio, what it is divided by: ``ratio to the bare step``, ``s``.
        samples: one number per repeat, after warm-up.
    """

    unit: str
    samples: tuple[float, ...]

    @staticmethod
    def of(unit: str, samples: Sequence[float]) -> Metric:
        """Return a metric of at least one sample."""
        if not samples:
            raise ValueError(f"a metric in {unit!r} has 0 samples: at least 1 is needed; raise the repeats")
        return Metric(unit, tuple(float(sample) for sample in samples))

    @staticmethod
    def ratio(baseline: str, measured: Sequence[float], against: Sequence[float]) -> Metric:
        """Return the ratio of each repeat, so that a temporary slowdown of the machine affects both sides."""
        return Metric.of(
            f"ratio to {baseline}", [one / other for one, other in zip(measured, against, strict=True)]
        )

    def summary(self) -> dict[str, Any]:
        """Return the median, smallest, largest and number of the samples, and the distance of their quartiles
        divided by the median, ready for JSON."""
        middle = statistics.median(self.samples)
        # Quartiles require two samples. The inclusive method stays within the range of the samples, however
        # few there are.
        lower, _, upper = (
            statistics.quantiles(self.samples, method="inclusive") if len(self.samples) > 1 else [middle] * 3
        )
        return {
            "unit": self.unit,
            "median": middle,
            "min": min(self.samples),
            "max": max(self.samples),
            "repeats": len(self.samples),
            "spread": (upper - lower) / abs(middle) if middle else 0.0,
        }


def sides(name: str, ours: Spent, other: str, theirs: Spent) -> dict[str, Metric]:
    """Return the ratios of wall and of CPU seconds of two things that were measured alternately, and the
    seconds of both.

    Args:
        name: name of the ratio of wall seconds; the other names are derived from it.
        ours: seconds of the thing that is measured.
        other: name of the baseline, with its article: ``the bare step``.
        theirs: seconds of the baseline.
    """
    return {
        name: Metric.ratio(other, ours.wall, theirs.wall),
        f"{name}_cpu": Metric.ratio(f"CPU seconds of {other}", ours.cpu, theirs.cpu),
        f"{name}_seconds": Metric.of("s", ours.wall),
        f"{name}_cpu_seconds": Metric.of("CPU s", ours.cpu),
        f"{name}_against_seconds": Metric.of(f"s of {other}", theirs.wall),
        f"{name}_against_cpu_seconds": Metric.of(f"CPU s of {other}", theirs.cpu),
    }


@dataclass(frozen=True, slots=True)
class Point:
    """One setting of a case, and its measurements.

    Attributes:
        parameters: numbers and names that distinguish this point from the others of its case.
        metrics: metrics by name.
        run: for a whole run, the columns of ``benchmarks.whole_runs`` that the field publishes.
    """

    parameters: Mapping[str, int | float | str]
    metrics: Mapping[str, Metric]
    run: Mapping[str, int | float | str] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Return the point as a dictionary, ready for JSON."""
        record: dict[str, Any] = {"parameters": dict(self.parameters)}
        record["metrics"] = {name: metric.summary() for name, metric in self.metrics.items()}
        return {**record, "run": dict(self.run)} if self.run else record
