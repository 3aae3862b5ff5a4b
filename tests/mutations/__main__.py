"""Plant faults and run the tests that have to see them, each until the first failure.

    python -m tests.mutations                  the rows of the table that name tests, and mutants of every
                                               module that names some
    python -m tests.mutations NAME ...         rows and modules by name
    python -m tests.mutations --all NAME ...   against all tests of the files, not the default tier alone

A fault that unit tests have to see is planted in a forked process that has imported them. What is not seen
there, because a test starts programs of its own, and any other row is put into a copy of the tree. No file of
the working tree is written. Those that cases of ``megarl parity`` have to show are planted by ``megarl parity
--prove``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import hypothesis
import pytest

from megarl.errors import ConfigError
from megarl.parity.faults import Fault, changed_functions, planted
from tests.mutations import MODULES, fault_of, mutants
from tests.mutations.mutator import ROOT
from tests.mutations.table import TABLE, Row
from tests.tiers import SEED_VARIABLE

SECONDS = 600.0
"""How long the tests of a row may take in memory; a fault that makes them wait for longer is seen."""
PASSED = "passed"


class _FirstFailure:
    """A plug-in of pytest that notes the first failure."""

    name = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.name = self.name or (report.nodeid if report.failed else "")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.name = self.name or (report.nodeid if report.failed else "")


def prepare(tests: Sequence[str]) -> None:
    """Import test files, for forked processes to have them; examples that fail are not made smaller there."""
    importlib.import_module("tests.unit.conftest")
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile(
        "mutations", deadline=None, database=None, derandomize=True, phases=phases
    )
    hypothesis.settings.load_profile("mutations")
    for path in tests:
        importlib.import_module(f"tests.{path.removesuffix('.py').replace('/', '.')}")


def seen_in_memory(
    fault: Fault | None, tests: Sequence[str], everything: bool, seconds: float = SECONDS
) -> str | None:
    """Return the first test that fails with a fault, in a forked process, or that they take longer than some
    seconds; None if none does.

    Raises:
        RuntimeError: the tests did not run.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        _run_and_end(fault, tests, everything, writing)
    os.close(writing)
    with open(reading, encoding="utf-8") as answer:
        has_answered = bool(select.select([answer], [], [], seconds)[0])
        told = answer.read() if has_answered else f"no answer in {seconds:.0f} s"
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if told.startswith("!"):
        raise RuntimeError(f"{', '.join(tests)}: {told[1:]}")
    return None if told == PASSED else told or "the process died"


def _run_and_end(fault: Fault | None, tests: Sequence[str], everything: bool, writing: int) -> None:
    """Run tests in this process, write to a pipe what was seen, and wait for the end."""
    first = _FirstFailure()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    options = ["-x", "-p", "no:cacheprovider", "-p", "no:xdist", *(["--all"] if everything else [])]
    try:
        with planted(fault):
            code = pytest.main([*options, *(f"tests/{path}" for path in tests)], plugins=[first])
        told = first.name or (PASSED if code == pytest.ExitCode.OK else f"!pytest ended with {code!r}")
    except BaseException as error:
        told = f"!{error!r}"
    os.write(writing, told.encode())
    os.close(writing)
    signal.pause()


def seen_in_copy(name: str, row: Row, everything: bool) -> str | None:
    """Return the first test that fails in a copy of the tree with a row in it, and why, as pytest says it;
    None if none does.

    Raises:
        RuntimeError: the tests did not run, or the row does not fit the file any more.
    """
    with tempfile.TemporaryDirectory(prefix="megarl-mutation-") as directory:
        tree = Path(directory) / "tree"
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        for path in filter(None, listed.split("\0")):
            if (ROOT / path).is_file():
                (tree / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / path, tree / path)
        text = (tree / row.file).read_text()
        if text.count(row.old) != 1:
            raise RuntimeError(
                f"{name}: {row.old!r} stands {text.count(row.old)} times in {row.file}, once is wanted"
            )
        (tree / row.file).write_text(text.replace(row.old, row.new))
        variables = {**os.environ, "PYTHONPATH": str(tree), "COLUMNS": "300"}
        chosen = [f"tests/{path}" for path in row.tests]
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-p",
            "no:cacheprovider",
            *(["--all"] if everything else []),
            *chosen,
        ]
        done = subprocess.run(command, cwd=tree, env=variables, capture_output=True, text=True, check=False)
    failed = [
        line.partition(" ")[2] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))
    ]
    if done.returncode == 1 and failed:
        return failed[0]
    if done.returncode == 0:
        return None
    raise RuntimeError(
        f"{name}: pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    )


def seen(name: str, row: Row, everything: bool) -> str | None:
    """Return the first test that fails with a row, in memory where that is possible, or else in a copy of the
    tree; None if none does."""
    if row.file.endswith(".py") and all(path.startswith("unit/") for path in row.tests):
        fault = fault_of(row)
        try:
            changed_functions(fault, importlib.import_module(fault.module))
        except (ConfigError, ImportError):  # in no function, or of a package that is not installed
            return seen_in_copy(name, row, everything)
        prepare(row.tests)
        found = seen_in_memory(fault, row.tests, everything)
        if found is not None:
            return found
    return seen_in_copy(name, row, everything)


def verdicts(names: Sequence[str], seed: int, everything: bool) -> Iterator[tuple[str, str | None]]:
    """Plant rows, and drawn mutants of modules; each with the first test that fails, None if none does.

    Raises:
        RuntimeError: tests did not run, or fail without a fault.
    """
    for name in names:
        if name in TABLE:
            yield name, seen(name, TABLE[name], everything)
            continue
        tests = [f"unit/test_{stem}.py" for stem in MODULES[name].tests]
        prepare(tests)
        started = time.monotonic()
        if (failed := seen_in_memory(None, tests, everything)) is not None:
            raise RuntimeError(f"{name}: {failed} fails without a fault")
        most = 60 + 10 * (time.monotonic() - started)
        for label, mutant in mutants(name, seed).items():
            yield f"{label} {mutant}", seen_in_memory(Fault(name, *mutant.text), tests, everything, most)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print each fault with the test that saw it; the exit code is 1 when one survives."""
    known = [name for name, row in TABLE.items() if row.tests] + [
        name for name, each in MODULES.items() if each.tests
    ]
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--all", action="store_true", help="against everything, not the default tier alone")
    parser.add_argument("--seed", type=int, default=0, help="of the mutants that are drawn (default 0)")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="rows of the table and modules (default: all)"
    )
    chosen = parser.parse_args(arguments)
    if strange := set(chosen.names) - set(known):
        parser.error(
            f"{', '.join(sorted(strange))}: no row with tests, and no module; the names are "
            f"{', '.join(known)}"
        )
    os.environ.setdefault(SEED_VARIABLE, "0")
    survived: list[str] = []
    planted_count, started = 0, time.monotonic()
    for name, found in verdicts(chosen.names or known, chosen.seed, chosen.all):
        planted_count += 1
        survived += [] if found else [name]
        print(f"{time.monotonic() - started:5.0f} s  {name}: {found or 'SURVIVES'}", flush=True)
        started = time.monotonic()
    print(
        f"{planted_count - len(survived)} of {planted_count} "
        f"seen{''.join(f'{chr(10)}survives: {name}' for name in survived)}"
    )
    return int(bool(survived))


if __name__ == "__main__":
    sys.exit(main())
