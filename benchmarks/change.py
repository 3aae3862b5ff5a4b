"""Changes between results of a case: ratio by ratio, each against a bound from the spread of earlier repeats
and runs.

For one ratio, with medians m, the shift in the direction that is worse is::

    shift = m_after / m_before - 1      where less is better (times, memory)
    shift = m_before / m_after - 1      where more is better (speeds)

The spread of repeats is the distance between their quartiles over their median. Where there are several
earlier runs of a case, m_before is the median of their medians, spread_before the largest of their spreads,
and *between* the distance of the largest and the smallest of their medians over m_before: memory lies
elsewhere in each process, which no repeat within one shows. Few runs may be near one another by chance. So
*between* counts REACH / d times, with d the mean range of that many normal numbers of deviation 1 (Tippett,
1925), and what three quarters of the ratios of the case are apart, *usual*, counts for all of them. A ratio

* *fell* when shift > max(FLOOR, TIMES * spread_before, REACH / d * between, REACH / d * usual), and *gained*
  when the shift the other way is as large;
* is *unsteady* when spread_after is larger than spread_before by more than that bound, whatever its median: a
  stall in some repeats.

For normally scattered repeats TIMES * spread is 2.7 standard deviations of one repeat, and REACH / d *
between on average REACH of one run. The later run's own spread widens no bound, so a noisy run cannot pass by
being noisy. Absolute numbers never count: they belong to their machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FLOOR = 0.05
TIMES = 2.0
REACH = 3.4
# Of two to six normal numbers of deviation 1; more are taken for six.
_MEAN_RANGES = (1.128, 1.693, 2.059, 2.326, 2.534)
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


def name_of(parameters: Mapping[str, Any]) -> str:
    """Return a point's parameters in words."""
    return " ".join(f"{name}={value}" for name, value in parameters.items())


def changes(before: Sequence[Result], after: Sequence[Result]) -> Iterator[Change]:
    """Yield every ratio of ``before`` whose case is in ``after``, in its order. All earlier results of a case
    count, and the last later one."""
    later = {result["case"]: result for result in after}
    for case in dict.fromkeys(result["case"] for result in before):
        if case in later:
            yield from _of_case([result for result in before if result["case"] == case], later[case])


def _of_case(runs: Sequence[Result], after: Result) -> Iterator[Change]:
    summaries: dict[tuple[str, str], list[Summary]] = {}
    for run in runs:
        for point in run["points"]:
            for metric, summary in point["metrics"].items():
                # A median of 0 has no quotient.
                if summary["unit"].startswith("ratio to ") and summary["median"] > 0:
                    summaries.setdefault((name_of(point["parameters"]), metric), []).append(summary)
    points = {name_of(point["parameters"]): point["metrics"] for point in after["points"]}
    before = {key: joined(of_runs) for key, of_runs in summaries.items()}
    distances = [summary["between"] for summary in before.values() if "between" in summary]
    usual = statistics.quantiles(distances, n=4, method="inclusive")[2] if len(distances) > 1 else 0.0
    for (name, metric), summary in before.items():
        yield judged(after["case"], name, metric, summary, points.get(name, {}).get(metric), usual)


def joined(runs: Sequence[Summary]) -> Summary:
    """One summary of those of several runs, with what lies ``between`` them; see the module."""
    if len(runs) == 1:
        return runs[0]
    medians = [run["median"] for run in runs]
    middle = statistics.median(medians)
    return {
        **runs[-1],
        "median": middle,
        "min": min(run["min"] for run in runs),
        "max": max(run["max"] for run in runs),
        "spread": max(run["spread"] for run in runs),
        "between": (max(medians) - min(medians)) / middle,
        "runs": len(runs),
    }


def judged(
    case: str, point: str, metric: str, before: Summary, after: Summary | None, usual: float = 0.0
) -> Change:
    """Return the verdict on one ratio.

    Args:
        case, point, metric: which.
        before: of the earlier repeats and runs.
        after: of the later run; None where it has none.
        usual: what earlier runs of ratios of this case are apart.
    """
    spread = before["spread"]
    reach = REACH / _MEAN_RANGES[min(before.get("runs", 2) - 2, len(_MEAN_RANGES) - 1)]
    allowed = max(FLOOR, TIMES * spread, reach * before.get("between", 0.0), reach * usual)
    if after is None or after["median"] <= 0:
        return Change(case, point, metric, before, None, 0.0, allowed, MISSING)
    quotient = after["median"] / before["median"]
    worse, better = (1 / quotient, quotient) if larger_is_better(before["unit"]) else (quotient, 1 / quotient)
    verdict = SAME
    if worse - 1 > allowed:
        verdict = FELL
    elif after["spread"] > spread + allowed:
        verdict = UNSTEADY
    elif better - 1 > allowed:
        verdict = GAINED
    return Change(case, point, metric, before, after, worse - 1, allowed, verdict)
