"""The tests' own tools: which parametrisations run, and references that are computed once."""

from __future__ import annotations

import fnmatch
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.algorithms.loss_functions import ClippedPGLossFn, NLLLoss
from tests import choice
from tests.dist.remembered import remembered, without_layout
from tests.models import policy_config

AXES = ([f"layout {number}" for number in range(20)], ["fixed", "dynamic", "packed"], ["alltoall", "allgather"], ["none", "aux", "seq"])


@pytest.mark.parametrize(
    "axes", [AXES, AXES[1:], ([0, 1], [0, 1], [0, 1]), (["alone"], ["a", "b"])], ids=["20x3x2x3", "3x2x3", "2x2x2", "1x2"]
)
def test_every_pair_of_values_is_among_few_rows(axes: tuple[list[Any], ...]) -> None:
    rows = choice.pairs_covered(*axes)
    assert len(set(rows)) == len(rows) and set(rows) <= set(itertools.product(*axes))
    for (one, left), (other, right) in itertools.combinations(enumerate(axes), 2):
        assert {(row[one], row[other]) for row in rows} == set(itertools.product(left, right))
    longest, second = sorted(map(len, axes))[:-3:-1]
    assert len(rows) <= longest * second + 2
    assert rows == choice.pairs_covered(*axes)


def test_what_is_not_chosen_is_slow_and_what_does_not_exist_is_refused() -> None:
    rows = list(itertools.product("ab", "cd"))
    parameters = choice.rest_is_slow([("a", "d")], iter(rows))
    assert [parameter.values for parameter in parameters] == rows
    assert [parameter.id for parameter in parameters if not parameter.marks] == ["a-d"]
    assert all(parameter.marks == (choice.slow,) for parameter in parameters if parameter.id != "a-d")
    with pytest.raises(ValueError, match="none of the cases"):
        choice.rest_is_slow([("a", "x")], rows)


MARKED = """
import pytest
newest = pytest.mark.newest_megatron
@newest
def test_whole(): ...
@newest(number=[1, 3], letter=["b"])
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("letter", "ab")
def test_some(number, letter): ...
def test_none(): ...
@pytest.mark.parametrize("number", [1, pytest.param(2, marks=newest)])
def test_one(number): ...
"""


def collected(directory: Path, source: str, *options: str) -> subprocess.CompletedProcess[str]:
    (directory / "conftest.py").write_text(Path(choice.__file__).with_name("conftest.py").read_text())
    (directory / "test_marked.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--strict-markers", "--collect-only", "-q", *options, "."]
    # options that the user gives to every pytest would change what this one prints
    surroundings = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    return subprocess.run(command, cwd=directory, env=surroundings, capture_output=True, text=True, check=False)


def test_the_second_run_takes_what_is_marked(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    names = [line.partition("::")[2] for line in collected(tmp_path, MARKED, "--newest-megatron").stdout.splitlines() if "::" in line]
    assert names == ["test_whole", "test_some[b-1]", "test_some[b-3]", "test_one[2]"]
    assert collected(tmp_path, MARKED).stdout.count("::") == 10


def test_a_mark_that_fits_no_case_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = collected(tmp_path, MARKED.replace('["b"]', '["c"]'), "--newest-megatron")
    assert done.returncode != 0
    assert "test_some" in done.stdout + done.stderr and "correct the mark" in done.stdout + done.stderr


def clipped(**changes: Any) -> ClippedPGLossFn:
    names = ("reference_policy_kl_penalty", "ratio_clip_min", "ratio_clip_max")
    flags = ("use_on_policy_kl_approximation", "use_importance_sampling_correction", "token_level_loss")
    return ClippedPGLossFn({**dict.fromkeys(names, 0.1), "ratio_clip_c": None, **dict.fromkeys(flags, True), **changes})


def test_a_reference_is_asked_again_for_anything_but_the_same() -> None:
    calls: list[Any] = []
    ask = remembered(lambda *arguments: calls.append(arguments) or len(calls))
    batch = {"ids": torch.tensor([1, 2]), "mask": torch.tensor([1.0, 0.0])}
    first = (Path("model"), {"clip": 0.5}, [batch], clipped())
    assert ask(*first) == 1
    assert ask(Path("model"), {"clip": 0.5}, [{key: value.clone() for key, value in batch.items()}], clipped()) == 1
    others: list[tuple[Any, ...]] = [
        (Path("other"), *first[1:]),
        (first[0], {"clip": 0.6}, *first[2:]),
        (*first[:2], [{**batch, "ids": torch.tensor([1, 3])}], first[3]),
        (*first[:2], [{**batch, "ids": torch.tensor([1, 2], dtype=torch.int32)}], first[3]),
        (*first[:2], [{**batch, "ids": torch.tensor([[1, 2]])}], first[3]),
        (*first[:2], [batch, batch], first[3]),
        (*first[:3], clipped(ratio_clip_min=0.3)),
        (*first[:3], clipped(token_level_loss=False)),
        (*first[:3], NLLLoss()),
    ]
    assert [ask(*other) for other in others] == list(range(2, len(others) + 2))
    assert ask(*first) == 1
    with pytest.raises(TypeError, match="a set among the arguments"):
        ask({1})


def test_no_layout_reaches_a_reference() -> None:
    many = policy_config("model", tp=2, sp=True, pp=2, cp=2, ep=2, etp=2, dispatcher="allgather", batching="packed", mbs=4, overlap=True)
    assert without_layout(many) == without_layout(policy_config("model"))
    for changes in ({"lr": 0.5}, {"temperature": 0.7}, {"aux": 0.1}, {"z": 0.1}, {"balancing": "aux_loss"}, {"freeze_router": True}):
        assert without_layout(policy_config("model", **changes)) != without_layout(policy_config("model")), changes


def test_pytest_passes_over_none_of_its_rooms(pytestconfig: pytest.Config) -> None:
    """Called without arguments; of itself it leaves out what is called dist."""
    rooms = [path.name for path in (Path(__file__).parents[1]).iterdir() if path.is_dir() and not path.name.startswith("__")]
    passed_over = [room for room in rooms if any(fnmatch.fnmatch(room, pattern) for pattern in pytestconfig.getini("norecursedirs"))]
    assert "dist" in rooms and not passed_over
