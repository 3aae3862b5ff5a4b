"""The metrics file and the fan-out to TensorBoard and W&B."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import tempfile
import types
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.errors import ConfigError, DataError
from megarl.observe import metrics_file
from megarl.observe.metrics_file import FILE_NAME, MetricsFile, encoded, read_metrics, stream_metrics
from megarl.observe.sinks import MetricsFileSink, MetricSinks, open_sinks
from tests.full_disk import full_disk


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / FILE_NAME).read_text().splitlines()]


def test_rows_are_prefixed_and_readable_while_the_run_goes_on(tmp_path: Path) -> None:
    sinks = open_sinks({}, tmp_path / "deep" / "run")
    sinks.log(
        {"loss": 1.5, "tokens": 7, "ok": True, "note": "x", "nothing": None, "nested": {"a": 2}},
        step=3,
        prefix="train",
    )
    [row] = rows(tmp_path / "deep" / "run")
    assert row.pop("time") > 1.7e9
    names = {
        "train/loss": 1.5,
        "train/tokens": 7,
        "train/ok": True,
        "train/note": "x",
        "train/nothing": None,
        "train/nested/a": 2,
    }
    assert row == {"step": 3, **names}
    sinks.close()
    sinks.close()


def test_tensors_become_numbers_and_unusable_values_warn_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_sinks({}, tmp_path) as sinks:
        for step in (1, 2):
            metrics = {
                "loss": torch.tensor(0.5),
                "one": torch.tensor([[3]]),
                "many": torch.zeros(2),
                "list": [1, 2],
                "step": 99,
            }
            sinks.log(metrics, step)
    assert [{key: row[key] for key in row if key != "time"} for row in rows(tmp_path)] == [
        {"step": 1, "loss": 0.5, "one": 3},
        {"step": 2, "loss": 0.5, "one": 3},
    ]
    assert sum("many" in message for message in caplog.messages) == 1
    assert sum("list" in message for message in caplog.messages) == 1


def test_non_finite_numbers_are_null_and_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_sinks({}, tmp_path) as sinks:
        sinks.log({"loss": math.nan, "norm": -math.inf, "lr": 0.1}, 4, "train")
    text = (tmp_path / FILE_NAME).read_text()
    assert "NaN" not in text and "Infinity" not in text
    row = json.loads(text)
    assert row["train/loss"] is None and row["train/norm"] is None and row["train/lr"] == 0.1
    assert "train/loss = nan" in caplog.text and "step 4" in caplog.text


def test_resume_drops_later_steps_and_goes_on(tmp_path: Path) -> None:
    with open_sinks({}, tmp_path) as sinks:
        for step in range(1, 8):
            sinks.log({"loss": step}, step, "train")
            sinks.log({"step_s": step}, step, "timing")
    with open_sinks({}, tmp_path) as sinks:
        sinks.truncate_after(5)
        sinks.log({"loss": 60}, 6, "train")
    assert [row["step"] for row in rows(tmp_path)] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6]
    assert rows(tmp_path)[-1]["train/loss"] == 60
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_truncate_keeps_everything_when_nothing_is_later(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / FILE_NAME)
    file.append({"step": 2, "a": 1})
    inode = (tmp_path / FILE_NAME).stat().st_ino
    assert file.truncate_after(2) == 0
    assert (tmp_path / FILE_NAME).stat().st_ino == inode
    assert file.truncate_after(0) == 1
    assert (tmp_path / FILE_NAME).read_bytes() == b""


def test_failed_truncation_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = MetricsFile(tmp_path / FILE_NAME)
    # not the last ones: those are cut off in place
    for step in (1, 2, 1, 3):
        file.append({"step": step})
    before = (tmp_path / FILE_NAME).read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(metrics_file.os, "rename", fail)
        with pytest.raises(OSError, match="disk full"):
            file.truncate_after(1)
    assert (tmp_path / FILE_NAME).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


@pytest.mark.parametrize("cut", range(1, 12))
def test_half_written_last_line_of_a_killed_run_is_dropped(tmp_path: Path, cut: int) -> None:
    path = tmp_path / FILE_NAME
    file = MetricsFile(path)
    file.append({"step": 1})
    file.append({"step": 2})
    file.close()
    path.write_bytes(path.read_bytes()[:-cut])
    assert read_metrics(path)[0]["step"] == 1
    file = MetricsFile(path)
    file.append({"step": 3})
    assert [row["step"] for row in read_metrics(path)] == [1, 3]


def test_half_written_row_is_taken_back_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = MetricsFile(tmp_path / FILE_NAME)
    file.append({"step": 1})
    real_write, calls = os.write, []

    def full_disk(descriptor: int, content: bytes) -> int:
        calls.append(content)
        if len(calls) == 1:
            return real_write(descriptor, bytes(content)[:4])
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(metrics_file.os, "write", full_disk)
        with pytest.raises(OSError, match="no space"):
            file.append({"step": 2})
    file.append({"step": 3})
    assert [row["step"] for row in read_metrics(tmp_path / FILE_NAME)] == [1, 3]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 200)), min_size=1, max_size=12))
def test_rows_that_a_full_disk_did_not_take_are_written_later_in_order_and_once(
    steps: list[tuple[bool, int]],
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory)
        with open_sinks({}, run_dir) as sinks:
            for step, (is_full, room) in enumerate(steps, 1):
                with full_disk(run_dir, room) if is_full else nullcontext():
                    sinks.log({"loss": step / 7}, step)
                # whoever reads meanwhile sees whole rows, from the first on
                seen = [row["step"] for row in stream_metrics(run_dir / FILE_NAME)]
                assert seen == list(range(1, len(seen) + 1)) and (is_full or len(seen) == step)
        assert [row["step"] for row in rows(run_dir)] == list(range(1, len(steps) + 1))
        assert [row["loss"] for row in rows(run_dir)] == [step / 7 for step in range(1, len(steps) + 1)]


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 5)), min_size=1, max_size=20))
def test_a_run_that_goes_back_while_rows_wait_loses_none_and_has_none_twice(
    changes: list[tuple[bool, bool, int]],
) -> None:
    """As when workers are built anew: the rows of steps that come again go, in the file or not yet there, and
    the others wait on."""
    with tempfile.TemporaryDirectory() as directory:
        run_dir, expected, step = Path(directory), list[tuple[int, float]](), 0
        with open_sinks({}, run_dir) as sinks:
            for count, (is_full, goes_back, steps) in enumerate(changes):
                if goes_back:
                    step = max(step - steps, 0)
                    expected = [row for row in expected if row[0] <= step]
                else:
                    step += 1
                    expected.append((step, count / 7))
                with full_disk(run_dir, 10 * steps) if is_full else nullcontext():
                    sinks.truncate_after(step) if goes_back else sinks.log({"loss": count / 7}, step)
        assert [(row["step"], row["loss"]) for row in rows(run_dir)] == expected


def test_of_more_rows_than_are_kept_the_oldest_are_lost_and_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = MetricsFileSink(tmp_path, most_bytes=3 * len(encoded({"step": 1, "time": 1.5})))
    with MetricSinks([sink], clock=lambda: 1.5) as sinks:
        sinks.log({}, 1)
        with full_disk(tmp_path):
            for step in range(2, 8):
                sinks.log({}, step)
        assert "2 rows wait" not in caplog.text and "1 rows wait until it can be written" in caplog.text, (
            "the first time alone"
        )
        sinks.log({}, 8)
        assert [row["step"] for row in rows(tmp_path)] == [1, 6, 7, 8]
        assert "could be written again, with all rows that waited; 4 older ones" in caplog.text
        with full_disk(tmp_path):
            sinks.log({}, 9)
            sinks.close()
    assert "1 rows of metrics.jsonl are lost" in caplog.text


def test_a_resume_on_a_full_disk_leaves_no_row_twice(tmp_path: Path) -> None:
    with open_sinks({}, tmp_path) as sinks:
        for step in range(1, 6):
            sinks.log({"loss": step}, step)
    inode = (tmp_path / FILE_NAME).stat().st_ino
    with full_disk(tmp_path, 0), open_sinks({}, tmp_path) as sinks:
        # a new file would need room beside this one, and the row has that of those that go
        sinks.truncate_after(3)
        sinks.log({"loss": 40}, 4)
    assert (tmp_path / FILE_NAME).stat().st_ino == inode
    assert [(row["step"], row["loss"]) for row in rows(tmp_path)] == [(1, 1), (2, 2), (3, 3), (4, 40)]


def write_out_of_order(run_dir: Path) -> None:
    """A file whose later rows stand between others, so that a cut has to write it anew."""
    file = MetricsFile(run_dir / FILE_NAME)
    for step in (1, 3, 2, 4):
        file.append({"step": step})
    file.close()


def refuse_new_files(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        metrics_file.os, "rename", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )


def test_rows_wait_for_a_file_that_could_not_be_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose later rows stand between others has to be written anew."""
    write_out_of_order(tmp_path)
    with open_sinks({}, tmp_path) as sinks:
        with monkeypatch.context() as patch:
            refuse_new_files(patch)
            sinks.truncate_after(2)
            sinks.log({}, 3)
            assert [row["step"] for row in rows(tmp_path)] == [1, 3, 2, 4]
        sinks.log({}, 4)
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]


def test_a_cut_that_could_not_be_made_is_not_forgotten_for_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_out_of_order(tmp_path)
    with open_sinks({}, tmp_path) as sinks:
        with monkeypatch.context() as patch:
            refuse_new_files(patch)
            sinks.truncate_after(2)
            sinks.log({"loss": 30}, 3)
            sinks.log({"loss": 40}, 4)
            sinks.truncate_after(3)
        sinks.log({"loss": 41}, 4)
    assert [(row["step"], row.get("loss")) for row in rows(tmp_path)] == [
        (1, None),
        (2, None),
        (3, 30),
        (4, 41),
    ]


@pytest.mark.parametrize("content", [b"", b"\n", b'{"step": 1, "a'], ids=["empty", "blank", "half a row"])
def test_a_file_before_its_first_whole_row_has_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    assert list(stream_metrics(tmp_path / FILE_NAME)) == []


def test_reading_reports_missing_empty_and_broken_files(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    with pytest.raises(DataError, match="cannot be read"):
        read_metrics(path)
    path.write_text("\n")
    with pytest.raises(DataError, match="0 rows"):
        read_metrics(path)
    path.write_text('{"step": 1}\n{"step": }\n{"step": 3}\n')
    with pytest.raises(DataError, match="line 2"):
        read_metrics(path)


class FlakySink:
    """Fails at the given calls."""

    name = "flaky"

    def __init__(self, failing_calls: set[int]) -> None:
        self.failing_calls = failing_calls
        self.calls = 0
        self.seen: list[int] = []

    def write(self, row: Mapping[str, Any]) -> None:
        self.calls += 1
        if self.calls in self.failing_calls:
            raise ConnectionError("service is down")
        self.seen.append(row["step"])

    def truncate_after(self, step: int) -> None:
        raise ValueError("cannot")

    def close(self) -> None:
        raise ValueError("cannot close")


def test_failing_sink_stops_neither_training_nor_other_sinks(caplog: pytest.LogCaptureFixture) -> None:
    flaky, healthy = FlakySink({2, 3, 4, 6}), FlakySink(set())
    healthy.name = "healthy"
    sinks = MetricSinks([flaky, healthy])
    for step in range(1, 8):
        sinks.log({"loss": 1.0}, step)
    assert flaky.seen == [1, 5, 7]
    assert healthy.seen == list(range(1, 8))
    assert sum("flaky failed in write" in message for message in caplog.messages) == 2
    sinks.truncate_after(3)
    sinks.close()


def test_unwritable_run_directory_does_not_stop_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run").write_text("a file where the directory should be")
    with open_sinks({}, tmp_path / "run") as sinks:
        sinks.log({"loss": 1.0}, 1)
    assert "cannot be opened" in caplog.text


def test_tensorboard_holds_the_numbers_and_hides_repeated_steps(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    config = {"tensorboard_enabled": True, "tensorboard": {"log_dir": None}}
    with open_sinks(config, tmp_path) as sinks:
        for step in (1, 2, 3):
            sinks.log({"loss": float(step), "note": "text"}, step, "train")
    with open_sinks(config, tmp_path) as sinks:
        sinks.truncate_after(1)
        sinks.log({"loss": 20.0}, 2, "train")
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1.0), (2, 20.0)]


def test_missing_package_is_told_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"logger\.wandb_enabled = True.*Fix: pip install wandb"):
        open_sinks({"wandb_enabled": True, "wandb": {"project": "p"}}, tmp_path)


def test_wandb_run_is_continued_and_gets_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B needs its service, so a recorder stands in for the package."""
    started: list[dict[str, Any]] = []
    logged: list[tuple[dict[str, Any], int]] = []

    class Run:
        def log(self, row: dict[str, Any], step: int) -> None:
            logged.append((row, step))

        def finish(self) -> None:
            logged.append(({}, -1))

    def init(**keywords: Any) -> Run:
        started.append(keywords)
        return Run()

    module = types.ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    config = {
        "wandb_enabled": True,
        "wandb": {"project": "p", "name": None},
        "log_dir": str(tmp_path / "elsewhere"),
    }
    for _ in range(2):
        with open_sinks(config, tmp_path, {"env_vars": {"HF_TOKEN": "abc"}, "seed": 3}) as sinks:
            sinks.log({"loss": 0.25}, 7, "train")
    assert logged == [({"train/loss": 0.25}, 7), ({}, -1)] * 2
    assert started[0] == started[1]
    assert started[0]["project"] == "p" and "name" not in started[0] and started[0]["resume"] == "allow"
    assert started[0]["config"] == {"env_vars": {"HF_TOKEN": "***"}, "seed": 3}
    assert rows(tmp_path)[0]["train/loss"] == 0.25


def test_samples_are_a_table_that_goes_with_the_row_at_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is made beside the steps and may come late: W&B refuses what is of an earlier step than the last
    row."""
    logged: list[tuple[dict[str, Any], int | None, bool | None]] = []

    def log(row: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        logged.append((row, step, commit))

    class Table:
        def __init__(self, columns: list[str], data: list[list[Any]], allow_mixed_types: bool) -> None:
            self.columns, self.data = columns, data
            assert allow_mixed_types

    module = types.ModuleType("wandb")
    module.Table = Table  # type: ignore[attr-defined]
    module.init = lambda **_: types.SimpleNamespace(log=log, finish=lambda: None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    samples = [
        {"answer": "one", "mismatch": "inf", "prompt_ids": [1, 2], "rewards": {"right": 1.0}},
        {"answer": "two", "mismatch": 0.5, "prompt_ids": [3], "rewards": {"right": 0.0, "form": None}},
    ]
    with open_sinks({"wandb_enabled": True}, tmp_path) as sinks:
        sinks.log({"loss": 1.0}, 4)
        sinks.log_samples("train", 3, samples)
        del module.Table
        sinks.log_samples("train", 4, samples)
    [first, (row, step, commit)] = logged
    assert (
        first == ({"loss": 1.0}, 4, None)
        and list(row) == ["samples/train"]
        and (step, commit) == (None, False)
    )
    table = row["samples/train"]
    assert table.columns == ["answer", "mismatch", "reward/right", "reward/form"]
    assert table.data == [["one", "inf", 1.0, None], ["two", 0.5, 0.0, None]]
    assert "failed in write_samples" in caplog.text
    assert [set(row) for row in rows(tmp_path)] == [{"step", "time", "loss"}], (
        "the file of metrics takes none"
    )


def test_a_service_that_cannot_start_does_not_stop_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def init(**_: Any) -> None:
        raise TimeoutError("no network")

    module = types.ModuleType("wandb")
    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    with caplog.at_level(logging.WARNING), open_sinks({"wandb_enabled": True}, tmp_path) as sinks:
        sinks.log({"loss": 1.0}, 1)
    assert "no network" in caplog.text
    assert len(rows(tmp_path)) == 1


@pytest.mark.parametrize("after", ["a row", "a cut"])
@pytest.mark.parametrize("what", ["removed", "replaced", "replaced and torn"])
def test_a_file_that_somebody_takes_away_is_missed(
    after: str, what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    with open_sinks({}, tmp_path) as sinks:
        for step in (1, 2, 3):
            sinks.log({"loss": 0.5}, step)
        if what == "removed":
            path.unlink()
        else:
            other = tmp_path / "other"
            other.write_text('{"step": 1}\n{"step": 3}\n' + ('{"step"' if "torn" in what else ""))
            other.replace(path)
        if after == "a cut":
            sinks.truncate_after(2)
        sinks.log({"loss": 0.5}, 4)
    kept = [1, 2, 3] if what == "removed" else [1, 3]
    assert [row["step"] for row in read_metrics(path)] == [
        *(step for step in kept if after == "a row" or step <= 2),
        4,
    ]
    word = "was removed" if what == "removed" else "was replaced by another file"
    assert caplog.text.count(f"{path} {word} during the run") == 1
    assert sorted(each.name for each in tmp_path.iterdir()) == ["metrics.jsonl"]
