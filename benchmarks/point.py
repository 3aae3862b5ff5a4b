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
        unit: what the numbers are, and of what: ``ratio to the bare step``, ``s``.
        samples: one number a repeat, after warm-up.
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
        """Repeat by repeat, so that what slows the machine for a while slows both sides."""
        return Metric.of(
            f"ratio to {baseline}", [one / other for one, other in zip(measured, against, strict=True)]
        )

    def summary(self) -> dict[str, Any]:
        """Median, smallest, largest and number of the samples, and the distance of their quartiles over the
        median, ready for JSON."""
        middle = statistics.median(self.samples)
        # Quartiles need two samples. Inclusive ones stay among the samples, however few there are.
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
    """Return the ratios of wall and of CPU seconds of two things that took turns, and both things' seconds.

    Args:
        name: of the ratio of wall seconds; the others are made from it.
        ours: what is measured.
        other: what it is measured against, with its article: ``the bare step``.
        theirs: its seconds.
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
    """One setting of a case and what was measured there.

    Attributes:
        parameters: numbers and names that tell this point from the others of its case.
        metrics: by name.
        run: where it is a whole run, what the field publishes of one: the columns of
            ``benchmarks.whole_runs``.
    """

    parameters: Mapping[str, int | float | str]
    metrics: Mapping[str, Metric]
    run: Mapping[str, int | float | str] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Ready for JSON."""
        record: dict[str, Any] = {"parameters": dict(self.parameters)}
        record["metrics"] = {name: metric.summary() for name, metric in self.metrics.items()}
        return {**record, "run": dict(self.run)} if self.run else record
