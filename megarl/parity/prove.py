"""The proof that the fuzzer sees: every known fault is put in, and has to be caught."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from megarl.errors import ConfigError
from megarl.models.engine.precision import dtype_of
from megarl.parity.case import MILD_EPSILON, PRECISIONS, Case, idle_fields
from megarl.parity.draw import Drawer
from megarl.parity.faults.mutations import MUTATIONS
from megarl.parity.faults.patching import Mutation
from megarl.parity.lines import words_of
from megarl.parity.progress import CaseProgress
from megarl.parity.runner import CaseOutcome, CaseRunner

CASES_EACH = 2
"""Cases of a fault in float32; one of each of its losses where it is to be seen in several."""
DRAWS = 400
ACCEPTED = ("caught", "below noise", "no feature")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict: what became of a fault on one backend.

    Attributes:
        name: the fault.
        needs: what its cases have at least.
        backend: the backend.
        precision: ``float32`` or ``16 bit``.
        state: ``caught``, ``survived``, ``crashed``, ``below noise`` where 16 bit alone makes a difference as large as the fault,
            ``no feature`` where the backend or 16 bit has none that the fault could be in, or ``no case`` where none was drawn, which
            shows nothing.
        cases: the cases it was put in.
        detail: what gave it away, or the case in which nothing did.
    """

    name: str
    needs: str
    backend: str
    precision: str
    state: str
    cases: int
    detail: str


def prove(runner: CaseRunner, drawer: Drawer, seed: int, console: Console, faults: Collection[str], file: Path | None = None) -> int:
    """Put the named faults into cases on which they must be seen: in float32 into each loss that they are to be seen in, into the first on
    every backend and into each further one on one of them in turn; in 16 bit into the first.

    Returns:
        0 when all are caught, otherwise 1.
    """
    planned = [
        (name, needs, backend, half)
        for half in (False, True)
        for name in faults
        for needs, backends in _places(MUTATIONS[name], half)
        for backend in backends
        if backend in drawer.backends and drawer.fixed.get("precision", PRECISIONS[half]) in _precisions(backend, half)
    ]
    verdicts = []
    with CaseProgress(len(planned), console, "faults") as progress:
        for name, needs, backend, half in planned:
            verdict = _judge(runner, drawer, name, needs, backend, seed, half)
            verdicts.append(verdict)
            _write(verdicts, file)
            if verdict.state not in ACCEPTED:
                progress.say(f"{verdict.state.upper()} {name} on {backend} ({needs}): {verdict.detail}", "bold red")
            progress.advance(verdict.state not in ACCEPTED)
    _show(verdicts, console)
    return 0 if all(verdict.state in ACCEPTED for verdict in verdicts) else 1


def _write(verdicts: Sequence[Verdict], file: Path | None) -> None:
    """After each verdict: a whole proof takes long, and one that was ended has shown what it has."""
    if file is not None:
        rows = [{"mutation": verdict.name, **asdict(verdict)} for verdict in verdicts]
        file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def _places(fault: Mutation, half: bool) -> Iterator[tuple[str, Sequence[str]]]:
    """What the cases of a fault need, and the backends that they are run on."""
    for number, needs in enumerate(fault.each_need[: 1 if half else None]):
        yield needs, fault.backends if number == 0 else [fault.backends[number % len(fault.backends)]]


def _precisions(backend: str, half: bool) -> tuple[str, ...]:
    return PRECISIONS[:1] if not half else PRECISIONS[1:2] if backend == "fsdp1" else PRECISIONS[1:]


def _judge(runner: CaseRunner, drawer: Drawer, name: str, needs: str, backend: str, seed: int, half: bool) -> Verdict:
    fault, precision = MUTATIONS[name], "16 bit" if half else "float32"
    fixed = {"backend": backend, **words_of(needs)}

    def verdict(state: str, cases: int, detail: str) -> Verdict:
        return Verdict(name, needs, backend, precision, state, cases, detail)

    if idle_fields(replace(Case(), **fixed)) or (half and not can_be_in_16_bit(fixed)):
        return verdict("no feature", 0, "the backend, or 16 bit, has no such feature")
    most = CASES_EACH if len(fault.each_need) == 1 else 1
    tried, seen, drowned = 0, "", ""
    for case in _fitting(drawer, fixed, fault, seed, half):
        clean, outcome = runner.run(case), runner.run(case, name)
        tried += 1
        if clean.timed_out or outcome.timed_out:
            return verdict("no answer", tried, f'give it longer (--job-seconds): megarl parity --case "{case}"')
        if not clean.passes:
            return verdict("crashed", tried, f'fails without the fault: megarl parity --case "{case}"')
        if outcome.passes and half and not _above_noise(clean, runner.run(replace(case, precision="float32", wide=False), name)):
            drowned = f'megarl parity --mutate {name} --case "{case}"'
        elif outcome.passes or outcome.error:
            state = "crashed" if outcome.error else "survived"
            why = f" ({outcome.summary()[0]})" if outcome.error else ""
            return verdict(state, tried, f'megarl parity --mutate {name} --case "{case}"{why}')
        else:
            seen = _given_away(outcome)
        if tried == most or (seen and half):
            break
    state = "caught" if seen else "below noise" if drowned else "no case"
    return verdict(state, tried, seen or drowned or "no drawn case has the feature")


def can_be_in_16_bit(fixed: Mapping[str, Any]) -> bool:
    """Whether what a fault needs can be there in 16 bit: top-k and top-p cannot."""
    return not replace(Case(), **fixed).filters


def _fitting(drawer: Drawer, fixed: Mapping[str, Any], fault: Mutation, seed: int, half: bool) -> Iterator[Case]:
    """Cases in which the fault must be seen; none where the rules refuse all."""
    types = _precisions(str(fixed["backend"]), half)
    # a fault is to be seen, which measured bounds are wide for
    by_type = [drawer.narrowed({"precision": name, "eps": MILD_EPSILON, **fixed, **drawer.fixed}) for name in types]
    for number in range(DRAWS):
        try:
            case = by_type[number % len(types)].draw(seed, number)
        except ConfigError:
            return
        if fault.applies(case):
            yield case


def _above_noise(clean: CaseOutcome, in_float32: CaseOutcome) -> bool:
    """Whether what a fault does in float32 is for some quantity more than twice what 16 bit may differ by; the same fault in 16 bit then
    leaves it out of bounds, whatever the rounding.

    Weights are rounded once more when they are exported, which can undo a difference of up to one step of their type.
    """
    if in_float32.error:
        return True
    effects = {found.what: found.error for found in in_float32.differences}
    step = torch.finfo(dtype_of(clean.case.precision, "precision")).eps
    steps = {found.what: step if found.kind == "weights" else 0.0 for found in clean.differences}
    return any(effects.get(found.what, 0.0) > 2 * found.bound + steps[found.what] for found in clean.differences)


def _given_away(outcome: CaseOutcome) -> str:
    """The kinds of quantities that were out of bounds."""
    kinds = [found.kind for found in outcome.mismatches]
    return ", ".join(f"{kind} ({kinds.count(kind)})" for kind in dict.fromkeys(sorted(kinds)))


def _show(verdicts: list[Verdict], console: Console) -> None:
    table = Table(title="known faults")
    for column in ("fault", "in", "backend", "precision", "verdict", "seen in"):
        table.add_column(column)
    for verdict in verdicts:
        style = {"caught": "green", "below noise": "dim", "no feature": "dim"}.get(verdict.state, "bold red")
        seen = verdict.detail if verdict.state == "caught" else MUTATIONS[verdict.name].what
        table.add_row(verdict.name, verdict.needs, verdict.backend, verdict.precision, verdict.state, seen, style=style)
    console.print(table)
    caught = sum(verdict.state == "caught" for verdict in verdicts)
    drowned = sum(verdict.state == "below noise" for verdict in verdicts)
    judged = sum(verdict.state != "no feature" for verdict in verdicts)
    below = f"{drowned} are smaller than the noise of 16 bit, " if drowned else ""
    without = sum(verdict.state == "no case" for verdict in verdicts)
    console.print(f"{caught} of {judged} faults caught; {below}{without} have no case", style="bold")
