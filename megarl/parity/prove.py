"""Mutation test of the comparison: each planted fault must be detected in its cases."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from megarl.models.engine.precision import dtype_of
from megarl.observe.progress import Phase, ProgressConsole
from megarl.parity.case import Case, Fields, idle_fields
from megarl.parity.faults import Fault
from megarl.parity.lines import words_of
from megarl.parity.runner import CaseOutcome, CaseRunner

LINE_SECONDS = 20.0
"""Seconds between two progress lines when no terminal shows live progress."""
CAUGHT, SURVIVED, BELOW_NOISE, NO_ANSWER, BROKEN = (
    "caught",
    "survived",
    "below noise",
    "no answer",
    "fails without the fault",
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of planting a fault in one case.

    Attributes:
        name: name of the fault.
        case: line of the case.
        state: ``caught`` or ``survived``; ``below noise`` if the fault has no larger effect than 16-bit
            rounding; ``no answer`` if the case without the fault timed out; ``fails without the fault`` if
            the case fails anyway. The last two prove nothing.
        detail: kinds of quantities that were out of bounds, or the error that ended the workers.
    """

    name: str
    case: str
    state: str
    detail: str = ""


def cases_of(fault: Fault, backends: Sequence[str], max_world: int, seed: int, fixed: Fields) -> list[Case]:
    """Return the cases of a fault: every case line on every backend that has all the features of the line.

    Args:
        fault: the fault.
        backends: backends to use for lines that do not name one.
        max_world: largest number of ranks; larger cases are skipped.
        seed: seed for lines that do not name one.
        fixed: field values that override those of every case.
    """
    cases = []
    for line in fault.cases:
        for backend in backends:
            case = replace(Case(), **{"backend": backend, "seed": seed, **words_of(line), **fixed})
            if case.backend == backend and case.world <= max_world and not idle_fields(case):
                cases.append(case)
    return cases


def prove(
    runner: CaseRunner,
    faults: Mapping[str, Fault],
    cases: Mapping[str, Sequence[Case]],
    console: Console,
    file: Path | None = None,
) -> int:
    """Plant faults in their cases, and print which ones the comparison detects.

    A fault with a kind must be detected in each of its cases by a quantity of that kind. A fault without a
    kind must be detected in one of its cases, by any quantity or by a failure of the workers.

    Args:
        runner: runs the cases.
        faults: faults by name.
        cases: cases of each fault, by its name; may be empty.
        console: receives progress and verdicts.
        file: JSON file for the verdicts, rewritten after each case; None for none.

    Returns:
        Exit code: 0 if at least one fault was planted and all planted faults were detected, otherwise 1.
    """
    # Group by case: the run without a fault is the same for all faults of a case.
    plan: dict[Case, list[str]] = {}
    for name in faults:
        for case in cases[name]:
            plan.setdefault(case, []).append(name)
    verdicts: list[Verdict] = []
    seen: set[str] = set()
    progress = ProgressConsole(console, LINE_SECONDS)
    with progress.phase(Phase("planted faults", "cases", len(plan)), is_told=False) as shown:
        for case, names in plan.items():
            wanted = {name: faults[name] for name in names if faults[name].kind or name not in seen}
            given = _verdicts(runner, case, wanted)
            verdicts += given
            for verdict in given:
                if verdict.state == CAUGHT:
                    seen.add(verdict.name)
                elif faults[verdict.name].kind and verdict.state != BELOW_NOISE:
                    progress.say(
                        f'{verdict.state.upper()}: megarl parity --mutate {verdict.name} --case "{case}"',
                        "bold red",
                    )
            shown.advance()
            # After each case, so that an aborted run keeps its verdicts.
            if file is not None:
                file.write_text(json.dumps(list(map(asdict, verdicts)), indent=1) + "\n", encoding="utf-8")
    return _report(verdicts, faults, console)


def _verdicts(runner: CaseRunner, case: Case, faults: Mapping[str, Fault]) -> list[Verdict]:
    """Return the verdicts of faults in a case, after one run without a fault; empty if the case cannot
    run."""
    if not faults or not runner.possible(case):
        return []
    clean = runner.run(case)
    return [_judge(runner, name, fault, clean) for name, fault in faults.items()]


def _judge(runner: CaseRunner, name: str, fault: Fault, clean: CaseOutcome) -> Verdict:
    case = clean.case
    if clean.timed_out or not clean.passes:
        return Verdict(name, str(case), NO_ANSWER if clean.timed_out else BROKEN, clean.summary()[0])
    outcome = runner.run(case, fault)
    if outcome.error:
        # Workers that crash or hang show the fault without a comparison, so this proves nothing about the
        # comparison of the fault's kind.
        return Verdict(name, str(case), SURVIVED if fault.kind else CAUGHT, outcome.summary()[0])
    kinds = [found.kind for found in outcome.mismatches]
    detail = ", ".join(f"{kind} ({kinds.count(kind)})" for kind in sorted(set(kinds)))
    if kinds and fault.kind in ("", *kinds):
        return Verdict(name, str(case), CAUGHT, detail)
    # 16-bit rounding may hide a small fault. Its effect in float32 decides whether it should have been
    # detected.
    in_float32 = replace(case, precision="float32", wide=False)
    if case.half and not is_above_noise(clean, runner.run(in_float32, fault)):
        return Verdict(name, str(case), BELOW_NOISE)
    return Verdict(name, str(case), SURVIVED, detail)


def is_above_noise(clean: CaseOutcome, in_float32: CaseOutcome) -> bool:
    """Return True if, for some quantity, the effect of a fault in float32 is more than twice the 16-bit
    bound, so that rounding cannot hide it.

    Exported weights are rounded once more, which can undo a difference of up to one unit in the last place of
    their dtype. So their effect must exceed the bound by that much.
    """
    if in_float32.error:
        return True
    effects = {found.what: found.error for found in in_float32.differences}
    step = torch.finfo(dtype_of(clean.case.precision, "precision")).eps
    for found in clean.differences:
        room = 2 * found.bound + (step if found.kind == "weights" else 0.0)
        if effects.get(found.what, 0.0) > room:
            return True
    return False


def _report(verdicts: Sequence[Verdict], faults: Mapping[str, Fault], console: Console) -> int:
    """Print the verdicts and the surviving faults; return the exit code."""
    by_name: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        by_name.setdefault(verdict.name, []).append(verdict)
    caught = set[str]()
    table = Table(title="planted faults")
    for column in ("fault", "cases", "verdict", "seen in"):
        table.add_column(column, overflow="fold")
    for name, given in by_name.items():
        states = ", ".join(dict.fromkeys(verdict.state for verdict in given if verdict.state))
        details = ", ".join(dict.fromkeys(verdict.detail for verdict in given if verdict.detail))
        if _is_caught(faults[name], given):
            caught.add(name)
        table.add_row(name, str(len(given)), states, details, style="green" if name in caught else "bold red")
    console.print(table)
    console.print(f"{len(caught)} of {len(by_name)} faults caught, in {len(verdicts)} cases", style="bold")
    without = [name for name in faults if name not in by_name]
    if without:
        console.print(
            f"{len(without)} have no case that these arguments allow: {', '.join(without)}", soft_wrap=True
        )
    for name in by_name:
        if name not in caught:
            old, new = (" ".join(text.split()) for text in (faults[name].old, faults[name].new))
            console.print(f"survives: {name}: {old} -> {new}", soft_wrap=True, markup=False)
    return 0 if by_name and len(caught) == len(by_name) else 1


def _is_caught(fault: Fault, given: Sequence[Verdict]) -> bool:
    if not fault.kind:
        return any(verdict.state == CAUGHT for verdict in given)
    return all(verdict.state in (CAUGHT, BELOW_NOISE) for verdict in given)
