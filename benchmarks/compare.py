"""Comparison of two runs of the benchmarks, and the gate that fails if a ratio fell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.baseline import unusable_cases
from benchmarks.change import BAD, FELL, MISSING, SAME, Change, changes
from benchmarks.marks import is_loaded, marks_of
from benchmarks.tables import number, share, table

Result = Mapping[str, Any]
HEAD = ("case", "point", "ratio", "before", "after", "worse by", "allowed", "verdict")


def compare(before: Sequence[Result], after: Sequence[Result]) -> str:
    """Return a table of every ratio that both runs have, changed ones first, and the results that are
    marked."""
    found = sorted(changes(before, after), key=lambda change: change.verdict == SAME)
    if not found:
        return "nothing to compare: no case of the one is in the other"
    return "\n".join([table(HEAD, [_row(change) for change in found]), *_notes(before, after)])


LOOKS = 2
"""Number of times that bad ratios are measured again."""


def check(
    baseline: Sequence[Result],
    measured: Sequence[Result],
    *,
    narrowed: bool = False,
    again: Callable[[Sequence[str]], Sequence[Result]] | None = None,
) -> tuple[bool, str]:
    """Return whether no ratio fell, and a text that names the ratios that did.

    If one run of a baseline of several runs was disturbed, or ran other code, the bounds are too wide. The
    case then has no verdict and does not pass. A bad ratio stays bad unless a repeated measurement finds it
    good: of 609 ratios of unchanged code 21 were bad once, and 4 of these again.

    Args:
        baseline: results to compare with, of one run or of several.
        measured: results of this run.
        narrowed: the command line selected only some points of the cases, so the other points are not
            missing.
        again: measures the cases of these names again if some ratio is bad, and once more for ratios that are
            still bad; a ratio that is good then passes.
    """
    measured_cases = {result["case"] for result in measured}
    unusable = sorted(measured_cases & unusable_cases(baseline).keys())
    usable = [result for result in baseline if result["case"] not in unusable]
    gating, left_out = _gating(usable, measured, narrowed)
    bad = [change for change in gating if change.verdict in BAD]
    notes = _notes(baseline, measured)
    if left_out:
        notes.append(
            f"{left_out} ratios of wall seconds did not count: other programs ran, and CPU seconds decide"
        )
    for _ in range(LOOKS if again is not None else 0):
        if bad:
            assert again is not None
            bad, more = _still_bad(
                bad, usable, again(list(dict.fromkeys(change.case for change in bad))), narrowed
            )
            notes += more
    not_judged = f"; not judged: {', '.join(unusable)}, whose baseline cannot be used" if unusable else ""
    if bad:
        lines = [
            f"check: {len(bad)} of {len(gating)} ratios fell{not_judged}",
            table(HEAD, [_row(change) for change in bad]),
        ]
        return False, "\n".join([*lines, *notes])
    if unusable:
        return False, "\n".join([f"check: none of {len(gating)} ratios fell{not_judged}", *notes])
    if not gating:
        return False, "\n".join(
            ["check: 0 ratios to compare. Fix: a baseline of the same cases and sizes", *notes]
        )
    return True, "\n".join([f"check: none of {len(gating)} ratios fell", *notes])


def _still_bad(
    bad: Sequence[Change], baseline: Sequence[Result], second: Sequence[Result], narrowed: bool
) -> tuple[list[Change], list[str]]:
    """Return the bad ratios that the repeated measurement did not find good, and notes on all bad ratios."""
    failed = {result["case"] for result in second if not result.get("success", True)}
    judged = {
        _key(change): change.verdict
        for change in _gating(baseline, second, narrowed)[0]
        if change.verdict != MISSING and change.case not in failed
    }
    # A ratio that was not measured again has not been found good, so it stays bad.
    still = [change for change in bad if judged.get(_key(change), MISSING) in BAD]
    notes = [f"{len(bad) - len(still)} more were bad once, and not when their cases were measured again"]
    unjudged = sum(_key(change) not in judged for change in still)
    if unjudged:
        reasons = "the case failed, has no such ratio any more, or ran beside other programs"
        notes.append(
            f"{unjudged} of them were not judged when their cases were measured again ({reasons}), and stay "
            "bad"
        )
    return still, notes


def _gating(
    baseline: Sequence[Result], measured: Sequence[Result], narrowed: bool
) -> tuple[list[Change], int]:
    """Return the ratios that count, and the number of those that do not count because other programs ran."""
    found = [change for change in changes(baseline, measured) if not (narrowed and change.verdict == MISSING)]
    busy = {result["case"] for result in (*baseline, *measured) if is_loaded(result)}
    left_out = {_key(change) for change in found if change.case in busy and _has_twin(change, found)}
    return [change for change in found if _key(change) not in left_out], len(left_out)


def _key(change: Change) -> tuple[str, str, str]:
    return change.case, change.point, change.metric


def _has_twin(change: Change, found: Sequence[Change]) -> bool:
    """Return whether the same ratio also exists in CPU seconds."""
    return any(
        other.metric == f"{change.metric}_cpu" and other.case == change.case and other.point == change.point
        for other in found
    )


def _row(change: Change) -> tuple[str, ...]:
    after = "-" if change.after is None else _with_spread(change.after)
    shift = "-" if change.after is None else share(change.shift)
    verdict = change.verdict.upper() if change.verdict in (FELL, MISSING) else change.verdict
    return (
        change.case,
        change.point,
        change.metric,
        _with_spread(change.before),
        after,
        shift,
        share(change.allowed),
        verdict,
    )


def _with_spread(summary: Mapping[str, Any]) -> str:
    return f"{number(summary['median'])} ({100 * summary['spread']:.0f} %)"


def _notes(before: Sequence[Result], after: Sequence[Result]) -> list[str]:
    """Return why results may not be quoted, one line per result, and an explanation of the numbers in
    parentheses."""
    marked = [
        f"not to be quoted: {which} {result['case']}: {'; '.join(marks)}"
        for which, results in (("earlier", before), ("later", after))
        for result in results
        if (marks := marks_of(result))
    ]
    unusable = [
        (
            f"baseline cannot be used: {case}: {'; '.join(faults)}. Fix: measure the case into another "
            "--out, "
            "or take that run out of its file"
        )
        for case, faults in unusable_cases(before).items()
        if case in {result["case"] for result in after}
    ]
    return ["in brackets: distance of the quartiles of the repeats, of the median", *marked, *unusable]
