"""Two runs of the benchmarks side by side, and the gate that fails when a ratio fell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.change import BAD, FELL, MISSING, SAME, Change, changes, spread_of
from benchmarks.marks import is_loaded, marks_of
from benchmarks.tables import number, share, table

Result = Mapping[str, Any]
HEAD = ("case", "point", "ratio", "before", "after", "worse by", "allowed", "verdict")


def compare(before: Sequence[Result], after: Sequence[Result]) -> str:
    """Every ratio that both have, what changed first, and which results are marked."""
    found = sorted(changes(before, after), key=lambda change: change.verdict == SAME)
    if not found:
        return "nothing to compare: no case of the one is in the other"
    return "\n".join([table(HEAD, [_row(change) for change in found]), *_notes(before, after)])


def check(
    baseline: Sequence[Result],
    measured: Sequence[Result],
    *,
    narrowed: bool = False,
    again: Callable[[Sequence[str]], Sequence[Result]] | None = None,
) -> tuple[bool, str]:
    """Whether no ratio fell, and a text that says which did.

    Args:
        baseline: results to hold on to, of one run or of several.
        measured: results of this run.
        narrowed: the command line asked for some points of the cases only, so that others are not missing.
        again: measures the cases of these names once more, if some ratio is bad; then a ratio fell only where it is bad both times.
    """
    gating, left_out = _gating(baseline, measured, narrowed)
    bad = [change for change in gating if change.verdict in BAD]
    notes = _notes(baseline, measured)
    if left_out:
        notes.append(f"{left_out} ratios of wall seconds did not count: other programs ran, and CPU seconds decide")
    if not gating:
        return False, "\n".join(["check: 0 ratios to compare. Fix: a baseline of the same cases and sizes", *notes])
    if bad and again is not None:
        once = len(bad)
        second = _gating(baseline, again(list(dict.fromkeys(change.case for change in bad))), narrowed)[0]
        still_bad = {_key(change) for change in second if change.verdict in BAD}
        bad = [change for change in bad if _key(change) in still_bad]
        notes.append(f"{once - len(bad)} more were bad once, and not when their cases were measured again")
    if bad:
        return False, "\n".join([f"check: {len(bad)} of {len(gating)} ratios fell", table(HEAD, [_row(change) for change in bad]), *notes])
    return True, "\n".join([f"check: none of {len(gating)} ratios fell", *notes])


def _gating(baseline: Sequence[Result], measured: Sequence[Result], narrowed: bool) -> tuple[list[Change], int]:
    """The ratios that count, and how many do not because other programs ran."""
    known = {result["case"]: result for result in baseline}
    found = [change for change in changes(baseline, measured) if not (narrowed and change.verdict == MISSING)]
    busy = {result["case"] for result in measured if is_loaded(result) or is_loaded(known.get(result["case"], {"case": ""}))}
    left_out = {(change.case, change.metric) for change in found if change.case in busy and _has_twin(change, found)}
    return [change for change in found if (change.case, change.metric) not in left_out], len(left_out)


def _key(change: Change) -> tuple[str, str, str]:
    return change.case, change.point, change.metric


def _has_twin(change: Change, found: Sequence[Change]) -> bool:
    """Whether the same is there in CPU seconds."""
    return any(other.metric == f"{change.metric}_cpu" and other.case == change.case and other.point == change.point for other in found)


def _row(change: Change) -> tuple[str, ...]:
    after = "-" if change.after is None else _with_spread(change.after)
    shift = "-" if change.after is None else share(change.shift)
    verdict = change.verdict.upper() if change.verdict in (FELL, MISSING) else change.verdict
    return change.case, change.point, change.metric, _with_spread(change.before), after, shift, share(change.allowed), verdict


def _with_spread(summary: Mapping[str, Any]) -> str:
    return f"{number(summary['median'])} ({100 * spread_of(summary):.0f} %)"


def _notes(before: Sequence[Result], after: Sequence[Result]) -> list[str]:
    """What keeps results from being quoted, a line a result; the numbers in brackets explained."""
    marked = [
        f"not to be quoted: {which} {result['case']}: {'; '.join(marks)}"
        for which, results in (("earlier", before), ("later", after))
        for result in results
        if (marks := marks_of(result))
    ]
    return ["in brackets: distance of the quartiles of the repeats, of the median", *marked]
