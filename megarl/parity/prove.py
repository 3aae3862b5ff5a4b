"""The proof that the fuzzer sees: every known fault is put in, and has to be caught."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megarl.errors import ConfigError
from megarl.parity.case import Case, idle_fields, words_of
from megarl.parity.draw import Drawer
from megarl.parity.mutations import MUTATIONS
from megarl.parity.progress import CaseProgress
from megarl.parity.runner import CaseRunner, Outcome

CASES_EACH = 2
DRAWS = 400


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a fault on one backend.

    Attributes:
        name: the fault.
        backend: the backend.
        state: ``caught``, ``survived``, ``crashed``, or ``no case`` where the rules refuse every case that has the feature.
        cases: the cases it was put in.
        detail: what gave it away, or the case in which nothing did.
    """

    name: str
    backend: str
    state: str
    cases: int
    detail: str


def prove(runner: CaseRunner, drawer: Drawer, seed: int, console: Console, file: Path | None = None) -> int:
    """Put every known fault into cases on which it must be seen. Returns 0 when all are caught, otherwise 1."""
    pairs = [(name, backend) for name, fault in MUTATIONS.items() for backend in fault.backends if backend in drawer.backends]
    verdicts = []
    with CaseProgress(len(pairs), console, "faults") as progress:
        for name, backend in pairs:
            verdict = _judge(runner, drawer, name, backend, seed)
            verdicts.append(verdict)
            if verdict.state not in ("caught", "no case"):
                progress.say(f"{verdict.state.upper()} {name} on {backend}: {verdict.detail}", "bold red")
            progress.advance(verdict.state not in ("caught", "no case"))
    _show(verdicts, console)
    if file is not None:
        rows = [{"mutation": v.name, "backend": v.backend, "state": v.state, "cases": v.cases, "detail": v.detail} for v in verdicts]
        file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0 if all(verdict.state in ("caught", "no case") for verdict in verdicts) else 1


def _judge(runner: CaseRunner, drawer: Drawer, name: str, backend: str, seed: int) -> Verdict:
    fault = MUTATIONS[name]
    fixed = {"backend": backend, **words_of(fault.needs)}
    if idle_fields(replace(Case(), **fixed)):
        return Verdict(name, backend, "no case", 0, "the backend has no such feature")
    fitting = drawer.narrowed(fixed)
    tried, seen = 0, ""
    for number in range(DRAWS):
        try:
            case = fitting.draw(seed, number)
        except ConfigError as error:
            return Verdict(name, backend, "no case", 0, str(error))
        if not fault.applies(case):
            continue
        clean, outcome = runner.run(case), runner.run(case, name)
        tried += 1
        if not clean.passes:
            return Verdict(name, backend, "crashed", tried, f'fails without the fault: megarl parity --case "{case}"')
        if outcome.passes or outcome.error:
            state = "crashed" if outcome.error else "survived"
            why = f" ({outcome.summary()[0]})" if outcome.error else ""
            return Verdict(name, backend, state, tried, f'megarl parity --mutate {name} --case "{case}"{why}')
        seen = _given_away(outcome)
        if tried == CASES_EACH:
            break
    return Verdict(name, backend, "caught" if tried else "no case", tried, seen or "no drawn case has the feature")


def _given_away(outcome: Outcome) -> str:
    """The kinds of quantities that were out of bounds."""
    kinds = [found.kind for found in outcome.mismatches]
    return ", ".join(f"{kind} ({kinds.count(kind)})" for kind in dict.fromkeys(sorted(kinds)))


def _show(verdicts: list[Verdict], console: Console) -> None:
    table = Table(title="known faults")
    for column in ("fault", "backend", "verdict", "seen in"):
        table.add_column(column)
    for verdict in verdicts:
        style = {"caught": "green", "no case": "dim"}.get(verdict.state, "bold red")
        seen = verdict.detail if verdict.state == "caught" else MUTATIONS[verdict.name].what
        table.add_row(verdict.name, verdict.backend, verdict.state, seen, style=style)
    console.print(table)
    caught = sum(verdict.state == "caught" for verdict in verdicts)
    judged = sum(verdict.state != "no case" for verdict in verdicts)
    console.print(f"{caught} of {judged} faults caught; {len(verdicts) - judged} have no case yet", style="bold")
