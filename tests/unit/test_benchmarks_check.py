"""The gate on ratios, and what is said of results: a planted delay fails, the same code passes, marked
results are named."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks import results_file
from benchmarks.baseline import differences, unusable_cases
from benchmarks.cases import CASES, Case
from benchmarks.change import FELL, GAINED, SAME, changes, joined, judged
from benchmarks.compare import LOOKS, check, compare
from benchmarks.marks import marks_of
from benchmarks.options import Options
from benchmarks.point import Metric, Point, sides
from benchmarks.runner import circumstances
from benchmarks.timing import Spent, spent_in_turn
from benchmarks.usage import measured_usage
from tests.tables import read_table
from tests.tiers import slow

TABLES = read_table("benchmarks_check.yaml")

HERE = __name__
DELAY = Path("delay")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "suite-cpu"


def measure(quick: bool) -> Iterator[Point]:
    """A case that sums numbers on both sides, and on the measured side burns what the file ``delay`` of the
    directory says besides."""
    planted = int(DELAY.read_text()) if DELAY.exists() else 0
    numbers = range(200_000)
    spent = spent_in_turn(
        {"ours": lambda: (sum(numbers), sum(range(planted))), "theirs": lambda: sum(numbers)}, repeats=9
    )
    yield Point({"numbers": len(numbers)}, sides("sum", spent["ours"], "the plain sum", spent["theirs"]))


@pytest.fixture
def summing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to work in, with the case ``summing`` known."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(CASES, "summing", Case("sums", HERE))
    return tmp_path


@slow
def test_a_planted_delay_fails_and_the_same_code_passes(
    summing: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["run", "summing", "--out", "base.json"]) == 0
    _widen(summing / "base.json", 0.15)  # a machine full of other tests must not decide
    assert command.main(["run", "summing", "--check", "base.json"]) == 0
    # wall seconds do not count where other programs run
    assert re.search("check: none of [12] ratios fell", capsys.readouterr().out)
    DELAY.write_text("200000")
    assert command.main(["run", "summing", "--check", "base.json"]) == 1
    said = capsys.readouterr().out
    assert "ratios fell" in said
    [row] = [line for line in said.splitlines() if "sum_cpu " in line and "FELL" in line]
    assert "numbers=200000" in row


def _widen(path: Path, spread: float) -> None:
    results = json.loads(path.read_text())
    for metric in results[0]["points"][0]["metrics"].values():
        metric["spread"] = spread
    path.write_text(json.dumps(results))


def summary(median: float, spread: float = 0.0, unit: str = "ratio to the bare step") -> dict[str, Any]:
    return {"unit": unit, "median": median, "min": median, "max": median, "repeats": 5, "spread": spread}


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    TABLES["a ratio is judged by the spread of the baseline"],
)
def test_a_ratio_is_judged_by_the_spread_of_the_baseline(
    before: dict[str, Any], after: dict[str, Any] | None, verdict: str
) -> None:
    assert judged("case", "point", "metric", before, after).verdict == verdict


def test_several_runs_of_a_baseline_say_how_far_runs_are_apart() -> None:
    apart = joined([summary(1.0, 0.02), summary(1.3, 0.04), summary(1.1)])
    assert (apart["median"], apart["spread"], apart["between"]) == (1.1, 0.04, pytest.approx(0.3 / 1.1))
    # three runs: 3.4 / 1.693 times what they are apart
    for median, verdict in ((1.70, SAME), (1.71, FELL), (0.7, GAINED)):
        assert judged("case", "point", "metric", apart, summary(median)).verdict == verdict
    runs = [result(wall=wall) for wall in (1.0, 1.2)]
    assert check(runs, [result(wall=1.4)])[0]
    assert not check(runs[1:], [result(wall=1.4)])[0]


def test_two_runs_that_are_near_by_chance_are_judged_by_what_the_others_of_the_case_are_apart() -> None:
    def of_case(*medians: float) -> dict[str, Any]:
        metrics = {f"ratio {place}": summary(median) for place, median in enumerate(medians)}
        return {"case": "case", "points": [{"parameters": {}, "metrics": metrics}]}

    apart = [of_case(1.0, 1.0, 1.0, 1.0, 1.0), of_case(1.0, 1.04, 1.04, 1.04, 1.9)]
    usual = 0.04 / 1.02
    for later, verdict in ((1 + 3.4 / 1.128 * usual - 1e-3, SAME), (1 + 3.4 / 1.128 * usual + 1e-3, FELL)):
        [first, *_] = changes(apart, [of_case(later, 1.0, 1.0, 1.0, 1.0)])
        assert (first.metric, first.verdict) == ("ratio 0", verdict), (
            "one that is far apart does not widen the others' bound"
        )
    [alone] = changes([of_case(1.0)], [of_case(1.06)])
    assert alone.verdict == FELL


def test_a_disturbance_passes_and_a_change_stays() -> None:
    asked: list[str] = []

    def again(wall: float) -> Callable[[Sequence[str]], list[dict[str, Any]]]:
        return lambda names: asked.extend(names) or [result(wall=wall)]  # type: ignore[func-returns-value]

    held, said = check([result(), result("calm")], [result(wall=1.3), result("calm")], again=again(1.0))
    assert (held, asked) == (True, ["made.up"])
    assert "1 more were bad once" in said
    asked.clear()
    assert not check([result()], [result(wall=1.3)], again=again(1.2))[0]
    assert asked == ["made.up"] * LOOKS
    walls = iter((1.2, 1.0))
    assert check([result()], [result(wall=1.3)], again=lambda names: [result(wall=next(walls))])[0]
    assert check([result()], [result()], again=again(9.0))[0]


def test_results_are_added_to_those_of_earlier_runs(tmp_path: Path) -> None:
    for out in (tmp_path / "all.json", tmp_path / "each"):
        results_file.write([result("one"), result("two")], out)
        results_file.write([result("one", wall=2.0)], out, results_file.read(out))
        steps = [
            (each["case"], each["points"][0]["metrics"]["step"]["median"]) for each in results_file.read(out)
        ]
        assert sorted(steps) == [("one", 1.0), ("one", 2.0), ("two", 1.0)]


def test_the_spread_is_that_of_the_quartiles() -> None:
    of_five = Metric.of("s", [1.0, 2.0, 3.0, 4.0, 100.0]).summary()
    assert of_five["spread"] == pytest.approx(2 / 3)
    assert Metric.of("s", [7.0]).summary()["spread"] == 0.0


def result(
    case: str = "made.up",
    *,
    commit: str = "a" * 40,
    others: float | None = 0.0,
    wall: float = 1.0,
    cpu: float = 1.0,
) -> dict[str, Any]:
    metrics = {
        "step": summary(wall),
        "step_cpu": summary(cpu, unit="ratio to CPU seconds of the bare step"),
        "size": summary(3.0, unit="s"),
    }
    surroundings = {"cpu": "a processor", "cores": 2, "load_before": 0.1, "load_after": 1.0, "others": others}
    point = {"parameters": {"ranks": 1}, "metrics": metrics}
    known = {
        "case": case,
        "about": "made up",
        "commit": commit,
        "environment": surroundings,
        "quick": False,
        "points": [point],
    }
    return {**known, "success": True, "error": None, "seconds": 1.0, "cpu_seconds": 1.0}


def test_cpu_seconds_decide_on_a_busy_machine() -> None:
    slower = result(wall=1.3)
    assert check([result()], [slower])[0] is False
    held, said = check([result()], [{**slower, "environment": {**slower["environment"], "others": 1.2}}])
    assert held
    assert "1 ratios of wall seconds did not count" in said
    assert check([result()], [result(wall=1.3, cpu=1.3, others=1.2)])[0] is False


def test_a_check_of_nothing_is_no_pass() -> None:
    held, said = check([result("one")], [result("other")])
    assert not held
    assert "0 ratios to compare" in said
    missing = {**result(), "points": []}
    assert check([result()], [missing])[0] is False
    assert "MISSING" in check([result()], [missing])[1]


@pytest.mark.parametrize(
    ("facts", "mark"),
    TABLES["what keeps a result from being quoted"],
)
def test_what_keeps_a_result_from_being_quoted(facts: dict[str, Any], mark: str | None) -> None:
    marks = marks_of({**result(), **facts})
    assert [mark in said for said in marks] == [True] if mark else not marks


def test_compare_names_marked_results_and_puts_changes_first() -> None:
    said = compare(
        [result("one"), result("two", commit="c" * 40 + "+changes")], [result("one"), result("two", cpu=1.5)]
    ).splitlines()
    assert said[2].split()[0] == "two" and said[2].endswith("FELL")
    assert any(line.startswith("not to be quoted: earlier two: the tree differed") for line in said)
    assert not any("size" in line.split() for line in said), "absolute numbers are no ratio"


def test_compare_reads_what_was_committed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["compare", str(RESULTS / "generation.json"), str(RESULTS)]) == 0
    assert "generation" in capsys.readouterr().out
    assert command.main(["compare", str(RESULTS.parent / "backends.json"), str(RESULTS)]) == 2
    assert "0 results of cases" in capsys.readouterr().err


def test_a_directory_takes_a_file_for_each_case(tmp_path: Path) -> None:
    results_file.write([result("one"), result("two")], tmp_path / "new" / "dir")
    assert sorted(path.name for path in (tmp_path / "new" / "dir").iterdir()) == ["one.json", "two.json"]
    assert [found["case"] for found in results_file.read(tmp_path / "new" / "dir")] == ["one", "two"]
    (tmp_path / "new" / "dir" / "broken.json").write_text("{")
    with pytest.raises(results_file.ResultsError, match=r"broken\.json is no JSON"):
        results_file.read(tmp_path / "new" / "dir")


def test_both_sides_are_timed_in_wall_and_in_cpu_seconds() -> None:
    spent = spent_in_turn(
        {"sleeps": lambda: time.sleep(0.05), "burns": lambda: sum(range(300_000))}, repeats=2
    )
    assert {name: (len(side.wall), len(side.cpu)) for name, side in spent.items()} == {
        "sleeps": (2, 2),
        "burns": (2, 2),
    }
    assert min(spent["sleeps"].wall) >= 0.05 > 5 * max(spent["sleeps"].cpu)
    metrics = sides("step", Spent([2.0], [6.0]), "the bare step", Spent([1.0], [2.0]))
    assert (metrics["step"].samples, metrics["step_cpu"].samples) == ((2.0,), (3.0,))


def test_cpu_seconds_of_children_count_also_of_those_that_outlive_their_parents(tmp_path: Path) -> None:
    burn = "import time\nwhile time.process_time() < 0.4: pass"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {burn!r}])"
    with measured_usage() as usage:
        subprocess.run([sys.executable, "-c", parent], check=True)
    assert 0.4 <= usage.cpu < 2.0
    assert usage.wall > 0.3
    assert usage.others is not None and usage.others >= 0.0


def test_cpu_seconds_of_children_count_whose_parent_ignores_their_end_but_not_those_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel tells them to nobody; Ray's raylet is such a parent."""
    monkeypatch.setattr("benchmarks.usage.LOOK_SECONDS", 0.05)
    burn = (
        "import time\nwhile time.process_time() < 0.6: pass\nprint(flush=True)\ninput()\nwhile "
        "time.process_time() < 0.9: pass"
    )
    parent = f"""
import signal, subprocess, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
subprocess.Popen([sys.executable, '-c', {burn!r}]).wait()
"""
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as before:
        assert before.stdout is not None
        before.stdout.readline()
        with measured_usage() as usage:
            before.communicate(b"\n")
    assert 0.1 < usage.cpu < 0.55


def test_what_a_second_look_does_not_judge_stays_bad() -> None:
    baseline, slower = [result()], [result(wall=1.3, cpu=1.3)]
    good = result()
    without_step = {
        **good,
        "points": [{**good["points"][0], "metrics": {"step_cpu": good["points"][0]["metrics"]["step_cpu"]}}],
    }
    seconds = {
        "no such ratio any more": [without_step],
        "the case failed after its points": [{**good, "success": False}],
        "nothing was measured": [],
        "wall seconds beside other programs": [result(others=1.2)],
    }
    for what, second in seconds.items():
        held, said = check(baseline, slower, again=lambda _, second=second: second)
        assert not held, what
        assert "were not judged when their cases were measured again" in said, what
    assert check(baseline, slower, again=lambda _: [good])[0]


def test_a_ratio_counts_on_a_busy_machine_where_its_own_point_has_no_cpu_seconds() -> None:
    alone = {"parameters": {"ranks": 2}, "metrics": {"step": summary(1.0)}}
    before = result()
    before["points"].append(alone)
    after = result(wall=1.3, others=1.2)
    after["points"].append({**alone, "metrics": {"step": summary(1.3)}})
    held, said = check([before], [after])
    assert not held
    assert "1 of 2 ratios fell" in said and "1 ratios of wall seconds did not count" in said


@pytest.mark.parametrize(
    ("spoiled", "why"),
    [
        ({"others": 1.2}, "run 1 of 3: other programs kept 1.20 cores busy"),
        ({"commit": "a" * 40 + "+changes"}, "run 1 of 3: the tree differed from its commit"),
        ({"commit": "b" * 40}, f"run 2 differs from run 1: commit: {'b' * 40} earlier, {'a' * 40} now"),
    ],
)
def test_each_run_of_a_baseline_must_be_undisturbed_and_of_one_code(
    spoiled: dict[str, Any], why: str
) -> None:
    """The spoiled run is far off, so that it widens the bound over what fell; the last run, which alone was
    looked at once, is good."""
    baseline = [result(wall=1.6, cpu=1.6, **spoiled), result(), result(), result("other")]
    held, said = check(baseline, [result(wall=1.3, cpu=1.3), result("other")])
    assert not held
    assert "none of 2 ratios fell; not judged: made.up, whose baseline cannot be used" in said
    assert "baseline cannot be used: made.up" in said and why in said and "Fix: " in said
    assert check(baseline, [result("other")])[0], "a case that is not measured does not matter"
    assert why in compare(baseline, [result()])
    assert not check(baseline[1:], [result(wall=1.3, cpu=1.3), result("other")])[0]
    assert check(baseline[1:], [result(), result("other")])[0]


def test_failed_runs_and_other_circumstances_spoil_a_baseline_and_the_load_does_not() -> None:
    assert unusable_cases([result()] * 2) == {}
    assert unusable_cases([{**result(), "quick": True}] * 2) == {}, (
        "small sizes in all runs are the same sizes"
    )
    later = result()
    later["environment"] = {**later["environment"], "load_before": 0.9, "others": 0.1}
    assert unusable_cases([result(), later]) == {}
    assert "run 2 of 2: failed" in unusable_cases([result(), {**result(), "success": False}])["made.up"]
    for changed, why in (
        ({"quick": True}, "--quick: False earlier, True now"),
        ({"options": {"tokens": "(128,)"}}, "--tokens: absent earlier, (128,) now"),
        ({"environment": {**result()["environment"], "torch": "9.9"}}, "torch: absent earlier, 9.9 now"),
        (
            {"environment": {**result()["environment"], "cpu": "another"}},
            "cpu: a processor earlier, another now",
        ),
    ):
        assert why in differences(result(), {**result(), **changed})
        assert any(why in fault for fault in unusable_cases([result(), {**result(), **changed}])["made.up"])


@pytest.fixture
def at_once(summing: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of ``summing``, where cases have known numbers and take no time."""

    def run_cases(names: Sequence[str], quick: bool, options: Options) -> Iterator[dict[str, Any]]:
        yield from ({**result(name), **circumstances(quick, options)} for name in names)

    monkeypatch.setattr(command, "run_cases", run_cases)
    return summing


@pytest.mark.parametrize("out", ["base.json", "base"])
def test_runs_join_a_baseline_of_the_same_circumstances_only(
    out: str, at_once: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commit = ["c" * 40]
    monkeypatch.setattr("benchmarks.environment.commit", lambda: commit[0])
    joining = ["run", "summing", "--out", out, "--add"]
    assert command.main(["run", "summing", "--add"]) == 2
    assert "no --out" in capsys.readouterr().err
    if out == "base":
        (at_once / out).mkdir()
    assert command.main(joining) == 0
    assert "this run is its first" in capsys.readouterr().out
    assert command.main(joining) == 0
    assert "1 earlier results" in capsys.readouterr().out
    for other, choice, why in (
        ("d" * 40, [], f"commit: {'c' * 40} earlier, {'d' * 40} now (summing)"),
        ("c" * 40 + "+changes", [], "the tree differed from its commit"),
        ("c" * 40, ["--quick"], "--quick: False earlier, True now (summing)"),
    ):
        commit[0] = other
        assert command.main([*joining, *choice]) == 2
        said = capsys.readouterr().err
        assert why in said and "Fix: " in said
    commit[0] = "c" * 40
    monkeypatch.setattr("benchmarks.environment._processor", lambda: "another processor")
    assert command.main(joining) == 2
    assert "another processor now" in capsys.readouterr().err
    assert len(results_file.read(at_once / out)) == 2, "refused runs are not measured"
    monkeypatch.setitem(CASES, "summing.too", Case("sums", HERE))
    assert command.main(["run", "summing.too", "--out", out, "--add"]) == 0, (
        "the first run of a case joins nothing"
    )


def test_a_tree_that_changes_while_a_case_runs_adds_nothing(
    at_once: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commits = iter(["c" * 40, "c" * 40, "c" * 40 + "+changes"])
    monkeypatch.setattr("benchmarks.environment.commit", lambda: next(commits))
    joining = ["run", "summing", "--out", "base", "--add"]
    assert command.main(joining) == 0
    assert command.main(joining) == 1
    assert "summing: not added to base" in capsys.readouterr().err
    assert len(results_file.read(at_once / "base")) == 1
