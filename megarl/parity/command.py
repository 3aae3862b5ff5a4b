"""Implementation of ``megarl parity``: run random cases or one given case, or prove that planted faults are
detected."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypedDict

from rich.console import Console

from megarl.distributed.leftovers import claim
from megarl.errors import ConfigError
from megarl.observe.progress import Phase, ProgressConsole
from megarl.parity.case import BACKENDS, Case
from megarl.parity.coverage import Coverage
from megarl.parity.draw import Drawer
from megarl.parity.faults import Fault, faults_named, known_faults
from megarl.parity.lines import parse, words_of
from megarl.parity.models import ModelShelf
from megarl.parity.pool import WorkerPool
from megarl.parity.prove import LINE_SECONDS, cases_of, prove
from megarl.parity.runner import CaseOutcome, CaseRunner
from megarl.parity.shrink import shrink

JOB_SECONDS = 120


@dataclass(frozen=True, slots=True)
class Options:
    """Command line of ``megarl parity``.

    Attributes:
        cases: number of random cases.
        seed: seed of the random cases.
        backends: backends to test; empty for all.
        max_world: maximum number of ranks.
        case: line of a case to run instead of random ones.
        mutate: fault to plant in the workers. With ``prove`` also a kind of quantity or a module, which
            selects all its faults.
        prove: plant all faults, or those that ``mutate`` selects, and fail if one is not detected.
        json: file for the results.
        only: ``key=value`` words that every random case has, and every case of a proof in addition to its
            own.
        job_seconds: timeout of a case's workers.
    """

    cases: int = 100
    seed: int = 0
    backends: Sequence[str] = ()
    max_world: int = 8
    case: str | None = None
    mutate: str | None = None
    prove: bool = False
    json: Path | None = None
    only: str = ""
    job_seconds: float = JOB_SECONDS


class Failure(TypedDict):
    """A failing case and the smallest one that fails in its place, as lines, and what is wrong in both."""

    case: str
    smallest: str
    mismatches: list[str]
    smallest_mismatches: list[str]


@dataclass
class Results:
    """Cases of a run and their results.

    Attributes:
        passed: number of cases that passed.
        failures: the failing cases.
        late: lines of the cases whose workers timed out.
        worst: kind of quantity -> (largest error, its case); separate for float32, float32 with measured
            bounds, and 16 bit.
        coverage: features of the cases that passed.
    """

    passed: int = 0
    failures: list[Failure] = field(default_factory=list)
    late: list[str] = field(default_factory=list)
    worst: dict[str, tuple[float, str]] = field(default_factory=dict)
    coverage: Coverage = field(default_factory=Coverage)

    def add(self, outcome: CaseOutcome) -> None:
        """Count a case that passed."""
        self.passed += 1
        self.coverage.add(outcome.case)
        for found in outcome.differences:
            kind = found.kind + _with_measured_bounds(outcome.case)
            if found.error > self.worst.get(kind, (-1.0, ""))[0]:
                self.worst[kind] = (found.error, str(outcome.case))


def _with_measured_bounds(case: Case) -> str:
    if case.precision != "float32":
        return " in 16 bit"
    return " with measured bounds" if case.has_measured_bounds else ""


def run(options: Options, console: Console | None = None) -> int:
    """Run the command. Return 0 if everything agrees (with ``prove``: if every fault is detected), else 1.

    Raises:
        ConfigError: the case or the mutation is invalid.
    """
    console = console or Console(highlight=False)
    # Hundreds of workers are built, and their log messages would hide the results.
    logging.getLogger("megarl").setLevel(logging.WARNING)
    given = parse(options.case) if options.case is not None else None
    fixed = words_of(options.only)
    faults = _faults(options)
    with (
        tempfile.TemporaryDirectory(prefix="megarl-parity-") as directory,
        WorkerPool(options.job_seconds) as pool,
    ):
        claim(Path(directory))
        shelf = ModelShelf(Path(directory))
        runner = CaseRunner(shelf, pool)
        backends = options.backends or BACKENDS
        if options.prove and given is None:
            cases = {
                name: cases_of(fault, backends, options.max_world, options.seed, fixed)
                for name, fault in faults.items()
            }
            return prove(runner, faults, cases, console, options.json)
        fault = next(iter(faults.values()), None)
        if given is not None:
            return _one(runner, given, fault, options, console)
        return _many(runner, Drawer(shelf, backends, options.max_world, fixed), fault, options, console)


def _faults(options: Options) -> Mapping[str, Fault]:
    """Return the faults that the command line selects.

    Raises:
        ConfigError: the fault does not exist, or several are selected although a case can have only one.
    """
    if options.mutate is None:
        return known_faults(options.seed) if options.prove else {}
    found = faults_named(options.mutate, options.seed)
    if not options.prove and len(found) > 1:
        raise ConfigError(
            f"--mutate {options.mutate}: {len(found)} faults, but a case can have only one; name "
            "it, or add --prove"
        )
    return found


def _one(runner: CaseRunner, case: Case, fault: Fault | None, options: Options, console: Console) -> int:
    outcome = runner.run(case, fault)
    # Errors of different quantities are comparable only relative to their bounds.
    worst = sorted(outcome.differences, key=lambda found: -found.error / found.bound)[:5]
    for line in (
        [f"agrees: {len(outcome.differences)} quantities; largest errors:", *map(str, worst)]
        if outcome.passes
        else outcome.summary(20)
    ):
        console.print(line, soft_wrap=True, markup=False)
    if outcome.error:
        console.print(outcome.error, soft_wrap=True, markup=False)
    console.print(f"{case}  {outcome.seconds:.1f} s", soft_wrap=True, markup=False)
    _write(
        options.json,
        {
            "case": str(case),
            "passes": outcome.passes,
            "differences": list(map(asdict, outcome.differences)),
        },
    )
    return 0 if outcome.passes else 1


def _many(runner: CaseRunner, drawer: Drawer, fault: Fault | None, options: Options, console: Console) -> int:
    results, progress = Results(), ProgressConsole(console, LINE_SECONDS)
    with progress.phase(Phase("parity", "cases", options.cases), is_told=False) as shown:
        for number in range(options.cases):
            case = drawer.draw(options.seed, number)
            outcome = runner.run(case, fault)
            if outcome.passes:
                results.add(outcome)
            # A timeout on a busy machine is no mismatch, and shrinking the case would wait for many more.
            elif outcome.timed_out:
                results.late.append(str(case))
                progress.say(f"NO RESULT in {options.job_seconds:g} s: {case}", "bold yellow")
            else:
                results.failures.append(_failure(runner, outcome, fault, options, progress))
            shown.advance()
            shown.detail = f"{shown.done - results.passed} failed" if results.passed < shown.done else ""
    _report(results, drawer, options, console)
    return 1 if results.failures or results.late else 0


def _failure(
    runner: CaseRunner, outcome: CaseOutcome, fault: Fault | None, options: Options, progress: ProgressConsole
) -> Failure:
    """Print a failure, shrink the case to the smallest one that still fails, and print how to reproduce it.
    Return a record for the JSON file."""
    progress.say(f"FAILED {outcome.case}", "bold red")
    for line in outcome.summary():
        progress.say(f"  {line}", "")
    smallest = shrink(outcome.case, lambda case: not runner.run(case, fault).passes, runner.possible)
    # ``shrink`` returns only the case, so run it again for its mismatches.
    again = runner.run(smallest, fault)
    progress.say(
        f'  smallest: megarl parity --case "{smallest}"'
        + (f" --mutate {options.mutate}" if options.mutate else ""),
        "bold",
    )
    for line in again.summary():
        progress.say(f"  {line}", "")
    return {
        "case": str(outcome.case),
        "smallest": str(smallest),
        "mismatches": outcome.summary(20),
        "smallest_mismatches": again.summary(20),
    }


def _report(results: Results, drawer: Drawer, options: Options, console: Console) -> None:
    results.coverage.show(console)
    if drawer.refusals:
        often = ", ".join(f"{key} ({count})" for key, count in drawer.refusals.most_common(6))
        console.print(f"sampled again because the rules of configurations refuse: {often}", soft_wrap=True)
    for kind, (error, _) in sorted(results.worst.items()):
        console.print(f"largest relative error of {kind}: {error:.1e}")
    total = results.passed + len(results.failures) + len(results.late)
    console.print(
        f"{results.passed} of {total} cases agree with plain transformers (seed {options.seed})", style="bold"
    )
    if results.late:
        console.print(
            f"{len(results.late)} gave no result in {options.job_seconds:g} s, which is not a "
            "mismatch: give them more time (--job-seconds)"
        )
    _write(
        options.json,
        {
            "seed": options.seed,
            "cases": total,
            "passed": results.passed,
            "failures": results.failures,
            "no_answer": results.late,
            "worst": {kind: {"error": error, "case": case} for kind, (error, case) in results.worst.items()},
            "refused": dict(drawer.refusals),
            **results.coverage.to_json(),
        },
    )


def _write(path: Path | None, content: Mapping[str, object]) -> None:
    if path is not None:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
