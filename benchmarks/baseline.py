"""Baselines of several runs: which runs may be joined, and which cases of a baseline cannot be used.

Several runs of a case show how far runs of the same code differ, which widens the bound on a ratio
(``benchmarks.change``). All runs must therefore have the same commit, machine and options, and no run may
have been disturbed. Otherwise the bound would also cover these differences.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from benchmarks.marks import disturbances_of, of_no_commit

Result = Mapping[str, Any]
MOMENTARY = ("load_before", "load_after", "others")
"""Facts of an environment that differ between runs on the same machine."""


def unusable_cases(baseline: Sequence[Result]) -> dict[str, list[str]]:
    """Return for each unusable case the reasons why its runs cannot be used as a baseline. Usable cases, and
    cases with a single run, are left out."""
    runs: dict[str, list[Result]] = {}
    for result in baseline:
        runs.setdefault(result["case"], []).append(result)
    return {case: faults for case, of_case in runs.items() if (faults := _faults(of_case))}


def refusal(earlier: Sequence[Result], now: Result, cases: Collection[str]) -> str:
    """Return the reasons why a run cannot be joined to earlier ones, one per line; empty if it can.

    Args:
        earlier: results that are already stored.
        now: the facts of this run: commit, environment, quick, options.
        cases: the cases that this run measures; earlier results of other cases are ignored.
    """
    reasons: dict[str, list[str]] = {}
    for result in earlier:
        if result["case"] not in cases:
            continue
        for reason in (*differences(result, now), *_of_no_commit(now)):
            of_cases = reasons.setdefault(reason, [])
            if result["case"] not in of_cases:
                of_cases.append(result["case"])
    return "\n".join(f"  {reason} ({', '.join(of_cases)})" for reason, of_cases in reasons.items())


def differences(earlier: Result, later: Result) -> list[str]:
    """Describe the differences of code, sizes, options, versions and machine between two runs; empty if there
    are none."""
    before, after = _facts(earlier), _facts(later)
    names = dict.fromkeys((*before, *after))
    pairs = ((name, before.get(name, "absent"), after.get(name, "absent")) for name in names)
    return [f"{name}: {one} earlier, {other} now" for name, one, other in pairs if one != other]


def _facts(result: Result) -> dict[str, str]:
    chosen = {f"--{name}": value for name, value in result.get("options", {}).items()}
    environment = {
        name: value for name, value in result.get("environment", {}).items() if name not in MOMENTARY
    }
    facts = {
        "commit": result.get("commit", "unknown"),
        "--quick": bool(result.get("quick")),
        **chosen,
        **environment,
    }
    return {name: str(value) for name, value in facts.items()}


def _of_no_commit(result: Result) -> list[str]:
    return [f"{why}, so that nobody knows whether it is the same code" for why in of_no_commit(result)]


def _faults(runs: Sequence[Result]) -> list[str]:
    """Return why the runs of one case cannot form a baseline; empty if they can."""
    if len(runs) == 1:
        return []
    numbered = list(enumerate(runs, 1))
    disturbed = [
        f"run {number} of {len(runs)}: {why}" for number, run in numbered for why in disturbances_of(run)
    ]
    different = [
        f"run {number} differs from run 1: {why}"
        for number, run in numbered
        for why in differences(runs[0], run)
    ]
    return [*disturbed, *different]
