"""Changes between results of a case: each ratio is compared with a bound from the spread of earlier repeats
and runs.

For one ratio, with medians m, the shift towards the worse is::

    shift = m_after / m_before - 1      if less is better (times, memory)
    shift = m_before / m_after - 1      if more is better (speeds)

The spread of repeats is the distance between their quartiles divided by their median. If there are several
earlier runs of a case, m_before is the median of their medians, spread_before is the largest of their
spreads, and *between* is the distance between their largest and smallest medians, divided by m_before. The
last one is needed because each process has another memory layout, which the repeats within one process do not
show. A few runs may be close to one another by chance. So *between* is multiplied by REACH / d, with d the
mean range of that many normal numbers of deviation 1 (Tippett, 1925). The upper quartile of *between* over
the ratios of the case, *usual*, applies to all of these ratios. A ratio

* *fell* when shift > max(FLOOR, TIMES * spread_before, REACH / d * between, REACH / d * usual), and *gained*
  when the shift the other way is as large;
* is *unsteady* when spread_after exceeds spread_before by more than that bound, whatever its median: some
  repeats stalled.

For normally distributed repeats TIMES * spread is 2.7 standard deviations of one repeat, and REACH / d *
between is on average REACH standard deviations of one run. The later run's own spread widens no bound, so a
noisy run cannot pass by being noisy. Absolute numbers never count, because they depend on the machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FLOOR = 0.05
TIMES = 2.0
REACH = 3.4
# These are the mean ranges of two to six normally distributed numbers with deviation 1; for more than six
# numbers, the range of six is used.
_MEAN_RANGES = (1.128, 1.693, 2.059, 2.326, 2.534)
FELL, UNSTEADY, GAINED, SAME, MISSING = "fell", "unsteady", "gained", "same", "missing"
BAD = (FELL, UNSTEADY, MISSING)

Result = Mapping[str, Any]
Summary = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Change:
    """One ratio, before and after.

    Attributes:
        case, point, metric: names of the ratio.
        before, after: summaries; ``after`` is None if the ratio was not measured again.
        shift: relative change towards the worse.
        allowed: largest shift, and largest growth of the spread.
        verdict: one of the words defined in the module's docstring, ``same`` or ``missing``.
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
    """Return whether a ratio's unit is one of speeds; all other ratios are of times, bytes or bins."""
    return "speed" in unit or "a second" in unit or "filled" in unit


def name_of(parameters: Mapping[str, Any]) -> str:
    """Return a point's parameters as text."""
    return " ".join(f"{name}={value}" for name, value in parameters.items())


def changes(before: Sequence[Result], after: Sequence[Result]) -> Iterator[Change]:
    """Yield every ratio of ``before`` whose case is in ``after``, in the order of ``before``. All earlier
    results of a case count, but only the last later one."""
    later = {result["case"]: result for result in after}
    for case in dict.fromkeys(result["case"] for result in before):
        if case in later:
            yield from _of_case([result for result in before if result["case"] == case], later[case])


def _of_case(runs: Sequence[Result], after: Result) -> Iterator[Change]:
    summaries: dict[tuple[str, str], list[Summary]] = {}
    for run in runs:
        for point in run["points"]:
            for metric, summary in point["metrics"].items():
                # A median of 0 cannot be divided by.
                if summary["unit"].startswith("ratio to ") and summary["median"] > 0:
                    summaries.setdefault((name_of(point["parameters"]), metric), []).append(summary)
    points = {name_of(point["parameters"]): point["metrics"] for point in after["points"]}
    before = {key: joined(of_runs) for key, of_runs in summaries.items()}
    distances = [summary["between"] for summary in before.values() if "between" in summary]
    usual = statistics.quantiles(distances, n=4, method="inclusive")[2] if len(distances) > 1 else 0.0
    for (name, metric), summary in before.items():
        yield judged(after["case"], name, metric, summary, points.get(name, {}).get(metric), usual)


def joined(runs: Sequence[Summary]) -> Summary:
    """Return one summary of the summaries of several runs, with the distance ``between`` them that the module
    defines."""
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
    """Return the change of one ratio with its verdict.

    Args:
        case, point, metric: names of the ratio.
        before: summary of the earlier repeats and runs.
        after: summary of the later run; None if it does not have the ratio.
        usual: upper quartile of *between* over the ratios of this case.
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
