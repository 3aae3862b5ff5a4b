"""Curves from metrics files, and the pictures drawn of them."""

from __future__ import annotations

import json
import math
import os
import random
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.errors import DataError
from megarl.observe.drawing import run_labels
from megarl.observe.metrics_file import read_metrics, stream_metrics
from megarl.observe.plots import compare_runs, plot_run
from megarl.observe.series import (
    Log,
    Series,
    collect_log,
    collect_series,
    mean_over_runs,
    running_mean,
    smoothing_window,
)
from megarl.observe.sinks import open_sinks
from tests.tiers import sampled, slow

pytest.importorskip("matplotlib")


def train(run_dir: Path, steps: int, reward: bool = True, seed: int = 0) -> Path:
    """Write the metrics of a made-up run."""
    random.seed(seed)
    with open_sinks({}, run_dir) as sinks:
        for step in range(1, steps + 1):
            metrics = {"loss": random.gauss(0, 1), "grad_norm": random.random()}
            if reward:
                metrics["reward"] = random.random()
            sinks.log(metrics, step, "train")
            sinks.log(
                {"train_s": 1.5, "generation_s": 2.0, "step_s": 3.75, "train/optimizer_s": 0.5},
                step,
                "timing",
            )
            if step % 5 == 0:
                sinks.log({"accuracy": random.random()} if reward else {"loss": 1.0}, step, "validation")
    return run_dir


def names(paths: list[Path]) -> list[str]:
    for path in paths:
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 5000
    return [path.name for path in paths]


@sampled(2)
@pytest.mark.parametrize("steps", [1, 2, 13, 131])
def test_grpo_run(tmp_path: Path, steps: int) -> None:
    paths = plot_run(train(tmp_path / "run", steps))
    assert names(paths) == ["reward.png", "loss.png", "timing.png"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "loss.png",
        "metrics.jsonl",
        "reward.png",
        "timing.png",
    ]


def test_sft_run_has_no_reward_picture(tmp_path: Path) -> None:
    assert names(plot_run(train(tmp_path, 7, reward=False))) == ["loss.png", "timing.png"]


def test_several_metrics_files_are_one_run(tmp_path: Path) -> None:
    train(tmp_path, 3)
    (tmp_path / "metrics.jsonl").rename(tmp_path / "metrics-0.jsonl")
    train(tmp_path, 2, seed=1)
    assert len(plot_run(str(tmp_path))) == 3


def test_directory_of_runs_is_plotted_run_by_run(tmp_path: Path) -> None:
    train(tmp_path / "grpo", 2)
    train(tmp_path / "sft", 2, reward=False)
    paths = plot_run(tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in paths] == [
        *("grpo/reward.png", "grpo/loss.png", "grpo/timing.png"),
        *("sft/loss.png", "sft/timing.png"),
    ]


def test_all_nan_and_single_values(tmp_path: Path) -> None:
    with open_sinks({}, tmp_path) as sinks:
        sinks.log({"loss": math.nan, "grad_norm": 2.0}, 1, "train")
    assert names(plot_run(tmp_path)) == ["loss.png"]


def test_nothing_to_draw_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no metrics\.jsonl"):
        plot_run(tmp_path)
    with pytest.raises(DataError, match=r"holds no metrics\.jsonl"):
        plot_run(tmp_path / "missing")
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(DataError, match=r"no reward, loss or timing \(0 other metrics\)"):
        plot_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 2, "other": 3}\n')
    with pytest.raises(DataError, match="no reward, loss or timing"):
        plot_run(tmp_path)


def test_compare_runs(tmp_path: Path) -> None:
    runs = [train(tmp_path / f"seed{seed}", 10 + 5 * seed, seed=seed) for seed in range(3)]
    assert names([compare_runs(runs, tmp_path / "new" / "seeds.png")]) == ["seeds.png"]
    assert names([compare_runs(runs[:1], tmp_path / "one.png")]) == ["one.png"]
    with pytest.raises(DataError, match="0 runs share none"):
        compare_runs([], tmp_path / "none.png")
    with pytest.raises(DataError, match="4 runs share none"):
        compare_runs([*runs, train(tmp_path / "sft", 3, reward=False)], tmp_path / "none.png")


def test_later_rows_win_and_gaps_stay_gaps() -> None:
    rows = [
        {"step": 3, "a": 1.0},
        {"step": 1, "a": 2, "b": None},
        {"step": 3, "a": 5.0, "c": "x", "d": True},
        {"step": 4, "a": math.inf},
    ]
    assert collect_series(rows) == {"a": Series((1, 3), (2.0, 5.0))}
    assert Series((1, 3), (2.0, 5.0)).on([0, 1, 2, 3]) == [0.0, 2.0, 0.0, 5.0]


@given(st.lists(st.floats(-100, 100), max_size=40), st.integers(0, 8).map(lambda half: 2 * half + 1))
def test_running_mean_equals_a_plain_loop(values: list[float], window: int) -> None:
    expected = []
    for centre in range(len(values)):
        total, count = 0.0, 0
        for index, value in enumerate(values):
            if abs(index - centre) <= window // 2:
                total, count = total + value, count + 1
        expected.append(total / count)
    assert running_mean(values, window) == pytest.approx(expected)


def test_smoothing_window_is_odd_and_off_for_short_runs() -> None:
    windows = {count: smoothing_window(count) for count in (0, 1, 9, 10, 40, 200, 10_000)}
    assert windows == {0: 1, 1: 1, 9: 1, 10: 3, 40: 5, 200: 21, 10_000: 51}


def test_mean_over_runs_uses_common_steps_only() -> None:
    curves = [Series((1, 2, 3), (1.0, 2.0, 3.0)), Series((2, 3, 4), (4.0, 6.0, 8.0))]
    assert mean_over_runs(curves) == Series((2, 3), (3.0, 4.5))
    assert mean_over_runs([]) == Series((), ())


def test_labels_tell_runs_of_one_name_apart() -> None:
    assert list(run_labels(["a/x", "b/y"]).values()) == ["x", "y"]
    assert list(run_labels(["a/seed-1/grpo", "a/seed-2/grpo"]).values()) == ["seed-1/grpo", "seed-2/grpo"]
    assert list(run_labels(["same/run"]).values()) == ["run"]


def test_every_label_can_be_drawn() -> None:
    # matplotlib leaves what begins with an underscore out of legends
    assert list(run_labels(["a/_x", "a/y"]).values()) == ["a/_x", "a/y"]
    assert list(run_labels([os.fsdecode(b"a/x\xff")]).values()) == ["x\ufffd"]


@sampled(1)
@pytest.mark.parametrize("name", ["lr_$LR_seed_$SEED_{a}", r"a$\frac$b"], ids=["variables", "a command"])
def test_dollar_signs_in_the_name_of_a_run_begin_no_formula(tmp_path: Path, name: str) -> None:
    run = train(tmp_path / name, 12)
    assert len(plot_run(run)) == 3
    compare_runs([run, train(tmp_path / "other", 12)], tmp_path / "both.png")


def test_a_number_beyond_all_floats_is_a_gap() -> None:
    assert collect_series([{"step": 1, "a": 10**400}, {"step": 2, "a": 1}]) == {"a": Series((2,), (1.0,))}


def test_what_is_not_finite_at_the_end_is_named_with_the_step_since_which() -> None:
    rows = [
        {"step": 1, "a": None, "b": 1.0, "c": math.nan, "d": 1.0, "e": "text", "f": True, "g": [1]},
        {"step": 2, "a": 1.0, "b": math.inf, "c": None, "d": 1.0, "e": None, "time": 5.0},
        {"step": 3, "a": None, "b": None, "d": 2.0, "e": "text", "time": 7},
    ]
    log = collect_log(rows)
    assert log.not_finite == {"c": 1, "b": 2, "e": 2, "a": 3} and log.last_time == 7.0
    assert collect_log([]) == Log({}, {}, None)


@slow
def test_a_long_run_is_not_held_in_memory_row_by_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    row = {f"train/metric_{number}": 0.5 for number in range(20)}
    with path.open("w") as stream:
        stream.writelines(json.dumps({"step": step, "time": 1.5, **row}) + "\n" for step in range(4000))
    peaks = []
    for read in (read_metrics, stream_metrics):
        tracemalloc.start()
        series = collect_log(read(path)).series
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert len(series) == 20 and all(len(curve.steps) == 4000 for curve in series.values())
    assert peaks[1] < peaks[0] / 2
