"""What a case hands back: points, each a set of parameters with its metrics."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


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
        """A metric of at least one sample."""
        if not samples:
            raise ValueError(f"a metric in {unit!r} has 0 samples: at least 1 is needed; raise the repeats")
        return Metric(unit, tuple(float(sample) for sample in samples))

    @staticmethod
    def ratio(baseline: str, measured: Sequence[float], against: Sequence[float]) -> Metric:
        """Repeat by repeat, so that what slows the machine for a while slows both sides."""
        return Metric.of(f"ratio to {baseline}", [one / other for one, other in zip(measured, against, strict=True)])

    def summary(self) -> dict[str, Any]:
        """Median, smallest, largest and number of the samples, ready for JSON."""
        return {
            "unit": self.unit,
            "median": statistics.median(self.samples),
            "min": min(self.samples),
            "max": max(self.samples),
            "repeats": len(self.samples),
        }


@dataclass(frozen=True, slots=True)
class Point:
    """One setting of a case and what was measured there.

    Attributes:
        parameters: numbers and names that tell this point from the others of its case.
        metrics: by name.
    """

    parameters: Mapping[str, int | float | str]
    metrics: Mapping[str, Metric]

    def record(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"parameters": dict(self.parameters), "metrics": {name: metric.summary() for name, metric in self.metrics.items()}}
