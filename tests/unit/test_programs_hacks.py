"""Programs that want the reward of ``code`` without solving their task: none scores. Programs that solve
theirs score 1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megarl.rollout.programs import Limits, judge
from megarl.rollout.programs.process import fault_of_isolation
from megarl.rollout.programs.statements import reason_against
from tests.tables import read_table
from tests.tiers import sampled

pytestmark = pytest.mark.skipif(
    fault_of_isolation() is not None, reason=f"no sandbox here: {fault_of_isolation()}"
)
LIMITS = Limits(seconds=10.0)
# a test that does not end takes as long as it may
HASTY = Limits(seconds=1.0)


def score(code: str, tests: object, limits: Limits = LIMITS) -> float:
    return judge(f"```python\n{code}\n```", json.dumps(tests), limits)


ASSERTS = ["assert f(2) == 4", "assert f(3) == 9"]
CALLS = {"fn_name": "f", "inputs": [[2], [3]], "outputs": [4, 9]}
TEXT = {"inputs": ["2\n", "3\n"], "outputs": ["4\n", "9\n"]}
INSIDE = [f"class Mark: ...\n{statement}" for statement in ASSERTS]
"""Statements that are not evaluated outside."""

SEARCH = r"""
import gc, os, re, sys
def search():
    found = [str(sys.argv), str(dict(os.environ)), str(getattr(sys, "orig_argv", ""))]
    for number in range(3, 64):
        try:
            os.lseek(number, 0, 0)
            found.append(os.read(number, 1 << 20).decode("utf-8", "replace"))
        except OSError:
            pass
    for place in ("cmdline", "environ"):
        for process in ("self", "1", str(os.getppid())):
            try:
                found.append(open(f"/proc/{process}/{place}").read())
            except OSError:
                pass
    frame = sys._getframe()
    while frame:
        found += [str(frame.f_locals), str(frame.f_globals)]
        frame = frame.f_back
    found += [each for each in gc.get_objects() if isinstance(each, str)]
    tables = [each for each in gc.get_objects() if isinstance(each, dict)]
    found += [str(each) for each in tables if "statement" in each or "expected" in each]
    return "\n".join(found)
"""
FINDS = (
    SEARCH + "def answer():\n    "
    "found = [int(each) for each in re.findall(r'f\\(\\d\\) == (\\d+)', search())]\n    "
    "return found[-1] if found else -1\n"
)

PROGRAMS = read_table("program_hacks.yaml")
HACKS: dict[str, dict[str, Any]] = PROGRAMS["hacks"]


def written(program: str) -> str:
    """A program with the texts in it that many have."""
    return program.replace("# FINDS\n", FINDS).replace("# SEARCH\n", SEARCH)


ASKED_IN_PROCESS = {
    name
    for name in HACKS
    if "equal to all" in name
    or "by its word" in name
    or name in ("changes itself when it is written", "hears what is compiled")
    or name in ("patches errors", "patches exec and compile", "reads what is there when it is called")
}
"""What passes, or may, where a statement runs in the program's own process."""


@sampled(24, form=["asserts"])
@pytest.mark.parametrize("form", ["asserts", "calls", "text", "inside"])
@pytest.mark.parametrize("name", HACKS)
def test_no_program_scores_without_solving(name: str, form: str) -> None:
    if form == "inside" and name in ASKED_IN_PROCESS:
        pytest.skip("only evaluation outside can refuse it")
    if form == "calls" and name == "uses names that it never imports":
        pytest.skip("a function that is called finds these names imported, as tasks of LeetCode assume")
    tests = {"asserts": ASSERTS, "calls": CALLS, "text": TEXT, "inside": INSIDE}[form]
    share = judge(
        f"```python\n{written(HACKS[name]['program'])}\n```", json.dumps(tests), HASTY, partial=True
    )
    assert share == 0.0, "not even one of its tests may pass"


@sampled(4)
@pytest.mark.parametrize("name", [name for name, hack in HACKS.items() if hack["deceives"]])
def test_a_grader_that_looks_at_the_exit_code_is_deceived(name: str) -> None:
    """These are ways to be paid, where program and assert are one text."""
    text = written(HACKS[name]["program"]) + "\n" + ASSERTS[0]
    found = subprocess.run([sys.executable, "-c", text], capture_output=True, timeout=60, check=False)
    assert found.returncode == 0, found.stderr


@sampled(6)
@pytest.mark.parametrize("case", PROGRAMS["statements"], ids=str)
def test_no_object_answers_for_a_value(case: dict[str, Any]) -> None:
    statement, code = case["statement"], case["program"]
    assert reason_against(statement) is None
    if "ValueError" not in statement:
        assert score(code, [statement], HASTY) == 0.0
    if case["deceives"]:
        naive = subprocess.run(
            [sys.executable, "-c", f"{code}\n{statement}"], capture_output=True, timeout=60, check=False
        )
        assert naive.returncode == 0, naive.stderr


def test_the_data_file_is_not_there(tmp_path: Path) -> None:
    """Expected outputs lie on the disk of the run, where a program that is not shut in finds them."""
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps(TEXT))
    code = (
        "import json\ntests = "
        f"json.load(open({str(data)!r}))\nprint(tests['outputs'][tests['inputs'].index(input() + chr(10))])"
    )
    assert score(code, TEXT, Limits(10.0, isolated=False)) == 1.0
    assert score(code, TEXT) == 0.0
    memory = f"print('outputs' in open('/proc/{os.getpid()}/environ').read() or 4)"
    assert score(memory, TEXT) == 0.0


def test_truth_is_no_number() -> None:
    """In what functions return. In an assert Python's own == decides, for which True is 1."""
    code = "def f(x): return x > 0"
    assert score(code, {"fn_name": "f", "inputs": [[1]], "outputs": [1]}) == 0.0
    assert score(code, {"fn_name": "f", "inputs": [[1]], "outputs": [True]}) == 1.0
    assert score(code, ["assert f(1) == 1"]) == 1.0
    assert score(code, ["assert f(1) is True"]) == 1.0


SOLVES: dict[str, dict[str, Any]] = PROGRAMS["solve"]


@sampled(12)
@pytest.mark.parametrize("name", SOLVES)
def test_a_program_that_solves_its_task_scores(name: str) -> None:
    assert score(SOLVES[name]["program"], SOLVES[name]["tests"]) == 1.0
