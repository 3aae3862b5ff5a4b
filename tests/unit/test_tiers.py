"""The tests' own tools: which parametrisations run, and references that are computed once."""

from __future__ import annotations

import fnmatch
import itertools
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.algorithms.loss_functions import ClippedPGLossFn, NLLLoss
from tests import parts, tiers
from tests.dist.remembered import remembered, without_layout
from tests.models import policy_config
from tests.parts import GPU_STACK, ITS_TURN, NEXT, OF_NEWEST, PARTS, of_turn

ROOT = Path(__file__).parents[2]

AXES = {
    "layout": range(20),
    "batching": ["fixed", "dynamic", "packed"],
    "dispatcher": "ab",
    "balancing": ["none", "aux", "seq"],
}
SOME = {name: AXES[name] for name in ("batching", "dispatcher", "balancing")}


def product(axes: Mapping[str, Iterable[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


@pytest.mark.parametrize(
    "axes", [AXES, SOME, {"alone": [1], "two": "ab"}, {"one": "abc"}], ids=["20x3x2x3", "3x2x3", "1x2", "3"]
)
@pytest.mark.parametrize("seed", ["1", "2"])
def test_a_sample_covers_what_it_says(axes: Mapping[str, Sequence[Any]], seed: str) -> None:
    rows = product(axes)
    by_value = [rows[index] for index in tiers.sample(rows, "values", seed)]
    for name, values in axes.items():
        assert {row[name] for row in by_value} == set(values)
    assert len(by_value) <= max(map(len, axes.values())) + 3
    by_pair = [rows[index] for index in tiers.sample(rows, "pairs", seed)]
    for (one, left), (other, right) in itertools.combinations(axes.items(), 2):
        assert {(row[one], row[other]) for row in by_pair} == set(itertools.product(left, right))
    longest = sorted(map(len, axes.values()))[-2:]
    assert len(by_pair) <= math.prod(longest) + 4
    for number in (1, 2, 1000):
        assert len(tiers.sample(rows, number, seed)) == min(number, len(rows))
    for number in (2, 3):
        few = [rows[index] for index in tiers.sample(rows, number, seed)]
        for name, values in axes.items():
            assert len({row[name] for row in few}) == min(number, len(values)), (
                "no value twice while another is missing"
            )


def test_a_sample_is_the_same_for_a_seed_and_another_for_another() -> None:
    rows = product(AXES)
    samples = [frozenset(tiers.sample(rows, "values", str(seed))) for seed in range(20)]
    assert samples == [frozenset(tiers.sample(product(AXES), "values", str(seed))) for seed in range(20)]
    assert len(set(samples)) == 20
    # what one commit leaves out another one tries
    assert len(frozenset().union(*samples)) > 0.6 * len(rows)


def test_what_is_always_wanted_is_in_every_sample() -> None:
    rows = product(SOME)
    for seed in range(10):
        for cover in ("values", 4):
            chosen = [rows[index] for index in tiers.sample(rows, cover, str(seed), {"batching": ["packed"]})]
            assert sum(row["batching"] == "packed" for row in chosen) == 6
    with pytest.raises(ValueError, match=r"sampled\('value'\): 'values', 'pairs' or a number"):
        tiers.sampled("value")


MARKED = """
import pytest
from tests.tiers import newest_megatron as newest, sampled, slow
@newest
def test_whole(): ...
@newest(number=[1, 3], letter=["b"])
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("letter", "ab")
def test_some(number, letter): ...
def test_none(): ...
@pytest.mark.parametrize("number", [1, pytest.param(2, marks=newest)])
def test_one(number): ...
@slow
def test_slow(): ...
@sampled("values")
@pytest.mark.parametrize("number", [1, 2, pytest.param(3, marks=slow)])
@pytest.mark.parametrize("letter", "abc")
def test_sampled(number, letter): ...
"""


def collected(directory: Path, source: str, *options: str) -> tuple[list[str], str]:
    """Names of the tests that pytest would run, and what it printed, with ``source`` as a test file among the
    units."""
    room = directory / "tests" / "unit"
    room.mkdir(parents=True, exist_ok=True)
    for name in ("conftest.py", "tiers.py", "parts.py", "__init__.py"):
        shutil.copy(Path(tiers.__file__).with_name(name), room.parent / name)
    (directory / "pytest.ini").write_text("[pytest]\n")
    (room / "test_marked.py").write_text(source)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--strict-markers",
        "--collect-only",
        "-q",
        *options,
    ]
    # options that the user gives to every pytest would change what this one prints
    surroundings = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"} | {
        "PYTHONPATH": str(ROOT)
    }
    done = subprocess.run(
        command, cwd=directory, env=surroundings, capture_output=True, text=True, check=False
    )
    return [
        line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line
    ], done.stdout + done.stderr


def test_every_test_is_in_the_default_tier_or_in_one_part(tmp_path: Path) -> None:
    everything = collected(tmp_path, MARKED, "--all", "tests")[0]
    assert len(everything) == 20
    default = collected(tmp_path, MARKED, "tests")[0]
    assert len([name for name in default if name.startswith("test_sampled")]) == 3
    assert {"test_slow", "test_sampled[a-3]"}.isdisjoint(default)
    assert [name for name in default if not name.startswith("test_sampled")] == [*everything[:10]]
    assert sorted(default + collected(tmp_path, MARKED, "--part", "units", "tests")[0]) == sorted(everything)
    assert collected(tmp_path, MARKED, "--part", "distributed-1", "tests")[0] == []


def test_a_case_that_is_named_runs_in_whatever_tier_it_is(tmp_path: Path) -> None:
    named = ["tests/unit/test_marked.py::test_slow", "tests/unit/test_marked.py::test_sampled[a-3]"]
    assert collected(tmp_path, MARKED, *named)[0] == ["test_slow", "test_sampled[a-3]"]


@tiers.slow
def test_the_newest_megatron_takes_what_is_marked(tmp_path: Path) -> None:
    expected = ["test_whole", "test_some[b-1]", "test_some[b-3]", "test_one[2]"]
    assert collected(tmp_path, MARKED, "--part", "newest-converters", "tests")[0] == expected
    assert collected(tmp_path, MARKED, "--part", "newest-megatron", "tests")[0] == []


def test_a_mark_that_fits_no_case_is_an_error(tmp_path: Path) -> None:
    printed = collected(tmp_path, MARKED.replace('["b"]', '["c"]'), "--part", "newest-converters", "tests")[1]
    assert (
        "ERROR: no case has the values in the newest_megatron mark of tests/unit/test_marked.py::test_some; "
        "correct the mark"
    ) in printed


def test_every_file_of_tests_is_in_one_part_and_every_part_has_files() -> None:
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if path.parent.name != "gpu"]
    for path in files:
        tiers.part_of(path)
    for name, part in PARTS.items():
        own = [path for path in files if part.needs in OF_NEWEST or tiers.part_of(path).files == part.files]
        assert any(map(part.has, own)), name
        first, every = part.share
        own = (part.files, part.needs, part.variables)
        alike = sorted(
            other.share for other in PARTS.values() if (other.files, other.needs, other.variables) == own
        )
        assert alike == [(number, every) for number in range(every)] and (first, every) in alike, name


def test_every_part_has_its_turn() -> None:
    for number in (0, 233):
        command = [sys.executable, "-m", "tests.parts", "--turn", str(number)]
        turn = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        assert turn == of_turn(number)
    turns = [of_turn(number) for number in range(3 * len(PARTS))]
    assert set(turns) == {name for name, part in PARTS.items() if part.needs != NEXT} and turns[
        ::ITS_TURN
    ] == [GPU_STACK] * len(PARTS)


def test_a_part_that_passed_is_noted_with_its_commit_unless_something_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()

    notes = tmp_path / "tests" / parts.PASSED.name
    notes.parent.mkdir()
    (tmp_path / "code.py").write_text("1\n")
    monkeypatch.setattr(parts, "TESTS", notes.parent)
    monkeypatch.setattr(parts, "PASSED", notes)
    parts.note_pass("ppo")
    assert not notes.exists()  # there is no repository
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    first = git("rev-parse", "--short", "HEAD")
    parts.note_pass("vllm-1")
    parts.note_pass("ppo")
    git("add", ".")
    git("commit", "-qm", "two")
    parts.note_pass("ppo")
    (tmp_path / "code.py").write_text("2\n")
    parts.note_pass("launch")
    assert parts.ages()[-2:] == [("vllm-1", first, 1), ("ppo", git("rev-parse", "--short", "HEAD"), 0)]
    assert parts.ages()[0][1:] == ("", None) and set(parts.passed()) == {"ppo", "vllm-1"}


def clipped(**changes: Any) -> ClippedPGLossFn:
    names = ("reference_policy_kl_penalty", "ratio_clip_min", "ratio_clip_max")
    flags = ("use_on_policy_kl_approximation", "use_importance_sampling_correction", "token_level_loss")
    return ClippedPGLossFn(
        {**dict.fromkeys(names, 0.1), "ratio_clip_c": None, **dict.fromkeys(flags, True), **changes}
    )


def test_a_reference_is_asked_again_for_anything_but_the_same() -> None:
    calls: list[Any] = []
    ask = remembered(lambda *arguments: calls.append(arguments) or len(calls))
    batch = {"ids": torch.tensor([1, 2]), "mask": torch.tensor([1.0, 0.0])}
    first = (Path("model"), {"clip": 0.5}, [batch], clipped())
    assert ask(*first) == 1
    assert (
        ask(Path("model"), {"clip": 0.5}, [{key: value.clone() for key, value in batch.items()}], clipped())
        == 1
    )
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
    many = policy_config(
        "model",
        tp=2,
        sp=True,
        pp=2,
        cp=2,
        ep=2,
        etp=2,
        dispatcher="allgather",
        batching="packed",
        mbs=4,
        overlap=True,
    )
    assert without_layout(many) == without_layout(policy_config("model"))
    for changes in (
        {"lr": 0.5},
        {"temperature": 0.7},
        {"aux": 0.1},
        {"z": 0.1},
        {"balancing": "aux_loss"},
        {"freeze_router": True},
    ):
        assert without_layout(policy_config("model", **changes)) != without_layout(policy_config("model")), (
            changes
        )


def test_pytest_passes_over_none_of_its_rooms(pytestconfig: pytest.Config) -> None:
    """Called without arguments; of itself it leaves out what is called dist."""
    rooms = [
        path.name
        for path in (Path(__file__).parents[1]).iterdir()
        if path.is_dir() and not path.name.startswith("__")
    ]
    passed_over = [
        room
        for room in rooms
        if any(fnmatch.fnmatch(room, pattern) for pattern in pytestconfig.getini("norecursedirs"))
    ]
    assert "dist" in rooms and not passed_over
