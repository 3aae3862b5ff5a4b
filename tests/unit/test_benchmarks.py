"""The benchmark runner: results of good, wrong, dead and endless cases; the shape of the JSON; the tools that
cases share."""

from __future__ import annotations

import json
import os
import signal
import statistics
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import runner
from benchmarks.cases import CASES, Case
from benchmarks.lengths import PROFILES, draw_lengths
from benchmarks.memory import MEBIBYTE, peak_of
from benchmarks.point import Metric, Point
from benchmarks.timing import in_turn
from tests.tiers import slow

HERE = __name__


def measure(quick: bool) -> Iterator[Point]:
    """A case whose numbers are known; the runner imports this module for it."""
    print("printed by a library")
    yield Point({"quick": int(quick)}, {"time": Metric.ratio("the other", [4.0, 9.0, 2.0], [2.0, 3.0, 2.0])})
    yield Point({"quick": int(quick), "name": "second"}, {"size": Metric.of("s", [0.5])})


def measured_by(body: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    """A case in a module of its own, importable in the runner's process."""
    name = f"case_{abs(hash(body))}"
    (directory / f"{name}.py").write_text(
        f"from benchmarks.point import Metric, Point\nimport os, time, signal\ndef measure(quick):\n{body}"
    )
    monkeypatch.syspath_prepend(directory)
    return Case("made up", name)


def test_a_result_holds_all_that_is_needed_to_read_it() -> None:
    result = runner.run_case("known", True, Case("numbers known before", HERE))
    assert json.loads(json.dumps(result)) == result
    assert result.keys() == {
        "case",
        "about",
        "commit",
        "environment",
        "quick",
        "options",
        "points",
        "success",
        "error",
        "seconds",
        "cpu_seconds",
    }
    assert result["environment"].keys() >= {
        "cpu",
        "cores",
        "python",
        "torch",
        "megatron-core",
        "device",
        "load_before",
        "load_after",
        "others",
    }
    assert (result["case"], result["quick"], result["success"], result["error"]) == (
        "known",
        True,
        True,
        None,
    )
    assert [point["parameters"] for point in result["points"]] == [
        {"quick": 1},
        {"quick": 1, "name": "second"},
    ]
    # 4/2, 9/3 and 2/2: ratios of pairs, not of the medians
    assert result["points"][0]["metrics"]["time"] == {
        "unit": "ratio to the other",
        "median": 2.0,
        "min": 1.0,
        "max": 3.0,
        "repeats": 3,
        "spread": 0.5,
    }


POINT = "    yield Point({'n': 1}, {'m': Metric.of('s', [1.0])})\n"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (POINT + "    assert 1 + 1 == 3, 'a fast wrong kernel'\n", "a fast wrong kernel"),
        (
            POINT + "    os.write(2, b'cry of a library')\n    os.kill(os.getpid(), signal.SIGKILL)\n",
            f"exit code -{int(signal.SIGKILL)}",
        ),
        (POINT + "    os.write(2, b'cry of a library')\n    os._exit(3)\n", "cry of a library"),
    ],
    ids=["wrong", "killed", "left"],
)
def test_a_case_that_fails_says_why_and_keeps_what_it_had(
    body: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = runner.run_case("bad", False, measured_by(body, tmp_path, monkeypatch))
    assert result["success"] is False
    assert reason in result["error"]
    assert len(result["points"]) == 1


def test_a_case_without_points_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = runner.run_case("empty", False, measured_by("    yield from ()\n", tmp_path, monkeypatch))
    assert (result["success"], result["error"]) == (False, "the case measured nothing")


@slow
def test_a_case_without_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "CASE_SECONDS", 3.0)
    monkeypatch.setattr(runner, "LAST_WORDS_SECONDS", 0.1)
    body = (
        f"    open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
        + POINT
        + "    time.sleep(3600)\n"
    )
    result = runner.run_case("endless", False, measured_by(body, tmp_path, monkeypatch))
    assert "no end after 3 s" in result["error"]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@slow
def test_the_command_writes_results_and_reports_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = Case("numbers known before", HERE)
    bad = measured_by("    raise ValueError('on purpose')\n    yield\n", tmp_path, monkeypatch)
    monkeypatch.setitem(CASES, "good", good)
    monkeypatch.setitem(CASES, "bad", bad)
    out = tmp_path / "new" / "results.json"
    assert command.main(["run", "good", "--quick", "--out", str(out)]) == 0
    assert [result["case"] for result in json.loads(out.read_text())] == ["good"]
    assert command.main(["run", "good", "bad", "--out", str(out)]) == 1
    assert [(result["case"], result["success"]) for result in json.loads(out.read_text())] == [
        ("good", True),
        ("bad", False),
    ]
    assert [path.name for path in out.parent.iterdir()] == ["results.json"]
    assert "on purpose" in capsys.readouterr().out


def test_an_unknown_case_is_named_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["run", "train.step", "train.stp"]) == 2
    message = capsys.readouterr().err
    assert "no such case: train.stp." in message
    assert all(name in message for name in CASES)


def test_every_case_is_listed_and_has_its_function(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["list"]) == 0
    listed = capsys.readouterr().out
    for name, case in CASES.items():
        assert f"{name} " in listed
        module = find_spec(case.module)
        assert module is not None and module.origin is not None
        assert f"def {case.function}(quick" in Path(module.origin).read_text(encoding="utf-8")


def test_actions_take_turns_and_warm_up_does_not_count() -> None:
    order: list[str] = []
    seconds = in_turn(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")}, repeats=3, warm_up=2, calls=2
    )
    assert order == list("aabb") * 5
    assert {name: len(samples) for name, samples in seconds.items()} == {"a": 3, "b": 3}


def test_a_metric_needs_samples_in_pairs() -> None:
    with pytest.raises(ValueError, match="0 samples"):
        Metric.of("s", [])
    with pytest.raises(ValueError, match="argument 2"):
        Metric.ratio("the other", [1.0, 2.0], [1.0])


@pytest.mark.parametrize("name", PROFILES)
def test_drawn_lengths_have_the_mean_and_the_cap_of_their_profile(name: str) -> None:
    profile = PROFILES[name]
    lengths = draw_lengths(profile, 2000, seed=7)
    assert statistics.mean(lengths) == pytest.approx(profile.mean, rel=0.01)
    assert min(lengths) >= 1
    assert max(lengths) <= profile.longest
    assert lengths == draw_lengths(profile, 2000, seed=7) != draw_lengths(profile, 2000, seed=8)


def test_the_kernel_sees_the_worst_moment_and_no_earlier_one() -> None:
    peak_of(lambda: torch.ones(64 * MEBIBYTE // 4))
    assert peak_of(lambda: torch.ones(16 * MEBIBYTE // 4)) == pytest.approx(16, abs=2)
    kept: list[torch.Tensor] = []

    def keep_and_use() -> None:
        kept.append(torch.ones(8 * MEBIBYTE // 4))
        torch.ones(24 * MEBIBYTE // 4)

    assert peak_of(keep_and_use) == pytest.approx(32, abs=2)
