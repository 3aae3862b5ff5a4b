"""The mutator makes the mutants that it says, each one change, and the tables that plant them fit the code.
Few are planted here."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.parity.case import BACKENDS
from megarl.parity.faults import changed_functions
from megarl.parity.prove import cases_of
from tests.mutations import EQUIVALENT, MODULES, MUTANTS, fault_of, mutants, parity_faults
from tests.mutations.mutator import ROOT, mutants_in, mutants_of, sampled_mutants
from tests.mutations.table import TABLE
from tests.tables import read_table
from tests.tiers import slow

TABLES = read_table("mutations.yaml")


@pytest.mark.parametrize(
    ("line", "expected"),
    TABLES["the mutants of a line"],
)
def test_the_mutants_of_a_line(line: str, expected: list[str]) -> None:
    found = [mutant.new for mutant in mutants_in(f"def f(a, b, c, d=1):\n    {line}\n")]
    assert sorted(found) == sorted(expected)


def test_a_refusal_has_no_mutants_and_a_module_has_those_of_its_functions_alone() -> None:
    source = (
        "A = 1 + 1\nclass C:\n    b = 1 + 1\n    def f(self):\n        if self.b < 1:\n            "
        "raise ValueError('é' + str(1 - 1))\n"
    )
    assert list(mutants_in(source)) == []
    within = f"{source}        def g(x):\n            é = 'é'; return x - self.b\n        return g\n"
    assert [str(mutant) for mutant in mutants_in(within)] == [
        "C.f: é = 'é'; return x - self.b -> é = 'é'; return x + self.b",
        "C.f: é = 'é'; return x - self.b -> é = 'é'; return x",
    ]


def test_a_mutant_of_one_of_two_equal_lines_says_which() -> None:
    source = "def f(a):\n    return a + 1\ndef g(a):\n    return a + 1\n"
    texts = [source.replace(*mutant.text) for mutant in mutants_in(source)]
    assert len(set(texts)) == len(texts) == 6 and all(
        source.count(mutant.text[0]) == 1 for mutant in mutants_in(source)
    )


@pytest.mark.parametrize("module", MODULES)
def test_every_mutant_of_a_module_compiles_and_is_another_program(module: str) -> None:
    path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
    source, found = path.read_text(encoding="utf-8"), mutants_of(module)
    assert len(found) >= 10
    original = ast.dump(ast.parse(source))
    for mutant in sampled_mutants(module, 40, 1).values():
        assert source.count(mutant.text[0]) == 1, mutant
        assert ast.dump(ast.parse(source.replace(*mutant.text))) != original, mutant


def test_modules_name_tests_and_cases_that_there_are() -> None:
    for module, seen in MODULES.items():
        assert bool(seen.tests) != bool(seen.cases), module
        assert all((ROOT / "tests" / "unit" / f"test_{stem}.py").is_file() for stem in seen.tests)
    faults = parity_faults(0)
    assert len(faults) > len(TABLE) / 4
    for name, fault in faults.items():
        assert cases_of(fault, BACKENDS, 8, 0, {}), name


def test_every_excused_mutant_is_one() -> None:
    known = [mutant for module in MODULES for mutant in mutants_of(module)]
    assert EQUIVALENT.keys() <= {mutant.change for mutant in known} and all(EQUIVALENT.values())
    for module, seen in MODULES.items():
        assert all(
            any(mutant.place.startswith(begin) for mutant in mutants_of(module)) for begin in seen.without
        ), module


def test_a_sample_depends_on_its_seed_alone() -> None:
    module = next(iter(MODULES))
    one, other = (sampled_mutants(module, MUTANTS, seed) for seed in (0, 1))
    assert one == sampled_mutants(module, MUTANTS, 0) != other and len(one) == len(other) == MUTANTS
    assert all(mutants_of(module)[number] == mutant for number, mutant in one.items())


@pytest.mark.parametrize("name", TABLE)
def test_a_row_fits_its_file_and_names_tests_that_there_are(name: str) -> None:
    """What it changes stands in its file once; code that was rewritten would otherwise keep a fault that
    nobody can put in."""
    row = TABLE[name]
    assert (ROOT / row.file).read_text().count(row.old) == 1 and row.old != row.new
    assert row.tests or row.cases
    assert all((ROOT / "tests" / path).is_file() for path in row.tests)
    if row.cases:
        fault = fault_of(row)
        assert changed_functions(fault, importlib.import_module(fault.module))


@slow
def test_the_command_plants_in_memory_and_in_a_copy_and_says_what_saw_it(tmp_path: Path) -> None:
    names = [
        "observe: extremes are added",
        "data: packing spreads over too few bins",
        "megarl.data.packing.algorithms",
    ]
    before = subprocess.run(
        ["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    command = [sys.executable, "-m", "tests.mutations", *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert all(any(f"{name}: tests/unit/test_" in line for line in lines) for name in names[:2]), (
        done.stdout + done.stderr
    )
    drawn = mutants(names[2], 0)
    # some are left out, which nobody can see
    assert {name for name in drawn if any(f"{name} " in line for line in lines)} == drawn.keys()
    assert len(drawn) > MUTANTS // 2
    assert (
        before
        == subprocess.run(
            ["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
    )
