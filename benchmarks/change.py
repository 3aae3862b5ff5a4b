"""What changed between two results of a case: ratio by ratio, each against a bound that comes from the spread of the earlier repeats.

For one ratio, with medians m, the shift in the direction that is worse is::

    shift = m_after / m_before - 1      where less is better (times, memory)
    shift = m_before / m_after - 1      where more is better (speeds)

The spread of repeats is the distance between their quartiles over their median. A ratio

* *fell* when shift > max(FLOOR, TIMES * spread_before), and *gained* when the shift the other way is as large;
* is *unsteady* when spread_after > spread_before + max(FLOOR, TIMES * spread_before), whatever its median: a stall in some repeats.

For normally scattered repeats TIMES * spread is 2.7 standard deviations of one repeat. The later run's own spread widens no bound, so a
noisy run cannot pass by being noisy. Absolute numbers never count: they belong to their machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FLOOR = 0.05
TIMES = 2.0
FELL, UNSTEADY, GAINED, SAME, MISSING = "fell", "unsteady", "gained", "same", "missing"
BAD = (FELL, UNSTEADY, MISSING)

Result = Mapping[str, Any]
Summary = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Change:
    """One ratio, before and after.

    Attributes:
        case, point, metric: which.
        before, after: summaries; ``after`` is None where it was not measured again.
        shift: in the direction that is worse.
        allowed: largest shift, and largest growth of the spread.
        verdict: one of the words above.
    """

    case: str
    point: str
    metric: str
    before: Summary
    after: Summary | None
    shift: float
    allowed: float
    verdict: str


def larger_is_better(unit: str) -> bool:
    """A ratio of speeds says so in its unit; all others are of times, bytes or bins."""
    return "speed" in unit or "a second" in unit or "filled" in unit


def spread_of(summary: Summary) -> float:
    """Of the repeats, relative to their median. Earlier results lack it: of normally scattered repeats it is less than half their range."""
    if "spread" in summary:
        return float(summary["spread"])
    return (summary["max"] - summary["min"]) / abs(summary["median"]) / 2 if summary["median"] else 0.0


def name_of(parameters: Mapping[str, Any]) -> str:
    """A point's parameters in words."""
    return " ".join(f"{name}={value}" for name, value in parameters.items())


def changes(before: Sequence[Result], after: Sequence[Result]) -> Iterator[Change]:
    """Every ratio of ``before`` whose case is in ``after``, in its order. The last result of a case counts."""
    later = {result["case"]: result for result in after}
    for result in {result["case"]: result for result in before}.values():
        if result["case"] in later:
            yield from _of_case(result, later[result["case"]])


def _of_case(before: Result, after: Result) -> Iterator[Change]:
    points = {name_of(point["parameters"]): point["metrics"] for point in after["points"]}
    for point in before["points"]:
        name = name_of(point["parameters"])
        for metric, summary in point["metrics"].items():
            if summary["unit"].startswith("ratio to ") and summary["median"] > 0:
                yield judged(before["case"], name, metric, summary, points.get(name, {}).get(metric))


def judged(case: str, point: str, metric: str, before: Summary, after: Summary | None) -> Change:
    """The verdict on one ratio."""
    spread = spread_of(before)
    allowed = max(FLOOR, TIMES * spread)
    if after is None or after["median"] <= 0:
        return Change(case, point, metric, before, None, 0.0, allowed, MISSING)
    quotient = after["median"] / before["median"]
    worse, better = (1 / quotient, quotient) if larger_is_better(before["unit"]) else (quotient, 1 / quotient)
    verdict = SAME
    if worse - 1 > allowed:
        verdict = FELL
    elif spread_of(after) > spread + allowed:
        verdict = UNSTEADY
    elif better - 1 > allowed:
        verdict = GAINED
    return Change(case, point, metric, before, after, worse - 1, allowed, verdict)
