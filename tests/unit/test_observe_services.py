"""MLflow, Trackio and sinks of the user's own: the real packages where they are installed, stand-ins for what
a server does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from megarl.config.rules.run import sinks_are_known
from megarl.config.rules.view import View
from megarl.errors import ConfigError
from megarl.observe import services
from megarl.observe.metrics_file import read_metrics
from megarl.observe.sinks import open_sinks

CONFIG = {
    "seed": 3,
    "policy": {"optimizer": {"lr": 1e-4}, "model_name": "x" * 9000},
    "env_vars": {"HF_TOKEN": "abc"},
}

TWO_LAUNCHES = """
import json, sys
from megarl.observe.sinks import open_sinks
section, run_dir, config = json.loads(sys.argv[1])
for steps in ([1, 2, 3], [3, 4]):
    with open_sinks(section, run_dir, config) as sinks:
        sinks.truncate_after(steps[0] - 1)
        for step in steps:
            sinks.log({"loss": 1 / step, "note": "text", "whole": True, "bad": float("nan")}, step, "train")
"""
"""The second one goes on from a checkpoint of step 2."""


def launch_twice(section: dict[str, Any], tmp_path: Path, read: str) -> Any:
    """What ``read`` prints as JSON after two launches of a run, in a process of its own, since both packages
    keep settings of a process."""
    asked = json.dumps([section, str(tmp_path / "run"), CONFIG])
    variables = {
        **os.environ,
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-c", TWO_LAUNCHES + read, asked]
    done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "failed in" not in done.stderr and "cannot be opened" not in done.stderr, done.stderr
    [found] = [line for line in done.stdout.splitlines() if line.startswith("[")]
    return json.loads(found)


def test_mlflow_keeps_one_run_over_two_launches(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    section = {
        "mlflow_enabled": True,
        "mlflow": {"experiment_name": "sums", "run_name": "first", "tracking_uri": store},
    }
    read = """
from mlflow import MlflowClient
client = MlflowClient(section["mlflow"]["tracking_uri"])
[run] = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
points = [[each.step, each.value] for each in client.get_metric_history(run.info.run_id, "train/loss")]
print(json.dumps([run.info.run_name, run.info.status, run.data.params, sorted(run.data.metrics), points]))
"""
    name, status, params, metrics, points = launch_twice(section, tmp_path, read)
    assert (name, status) == ("first", "FINISHED")
    assert metrics == ["train/bad", "train/loss", "train/whole"]
    assert sorted(points) == [[1, 1.0], [2, 0.5], [3, 1 / 3], [3, 1 / 3], [4, 0.25]]
    assert params["policy.optimizer.lr"] == "0.0001" and params["env_vars.HF_TOKEN"] == "***"


def test_trackio_keeps_one_run_over_two_launches(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    read = """
from trackio.sqlite_storage import SQLiteStorage
[run] = SQLiteStorage.get_runs("sums")
rows = SQLiteStorage.get_logs("sums", run)
print(json.dumps([run, [[row["step"], row["train/loss"], row["train/note"]] for row in rows]]))
"""
    section = {"trackio_enabled": True, "trackio": {"project": "sums", "name": "first", "group": None}}
    name, rows = launch_twice(section, tmp_path, read)
    assert name == f"first-{(tmp_path / 'run' / 'trackio_run_id').read_text().strip()}"
    assert sorted(rows) == [
        [1, 1.0, "text"],
        [2, 0.5, "text"],
        [3, 1 / 3, "text"],
        [3, 1 / 3, "text"],
        [4, 0.25, "text"],
    ]


@pytest.mark.parametrize("service", ["wandb", "mlflow", "trackio"])
def test_a_missing_package_is_named_with_its_line(
    service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, service, None)
    with pytest.raises(
        ConfigError, match=rf"logger\.{service}_enabled = True.*Fix: pip install {service}, or set logger"
    ):
        open_sinks({f"{service}_enabled": True, service: {"project": "p", "experiment_name": "e"}}, tmp_path)


class NotFoundError(Exception):
    error_code = "RESOURCE_DOES_NOT_EXIST"


class Server:
    """A stand-in for MLflow's client that records what is sent, and answers when it is let."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.answers, self.fault = threading.Event(), None
        self.runs: set[str] = set()
        self.answers.set()

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return "0"

    def create_run(self, experiment_id: str, run_name: str | None) -> Any:
        self.runs.add(run_id := f"run-{len(self.calls)}")
        self.calls.append(("made", run_id))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id))

    def update_run(self, run_id: str, status: str) -> None:
        if run_id not in self.runs:
            raise NotFoundError(run_id)
        self.calls.append((status, run_id))

    def set_terminated(self, run_id: str) -> None:
        self.calls.append(("ended", run_id))

    def log_batch(self, run_id: str, metrics: list[Any] = [], params: list[Any] = []) -> None:  # noqa: B006
        self.answers.wait()
        if self.fault is not None:
            raise self.fault
        # MLflow's own bound.
        assert len(metrics) <= 1000, (
            f"A batch logging request can contain at most 1000 metrics: {len(metrics)}"
        )
        self.calls += [("metric", each) for each in metrics]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made, module = Server(), types.ModuleType("mlflow")
    kinds = types.SimpleNamespace(Metric=lambda *values: values, Param=lambda *values: values)
    module.MlflowClient, module.entities = lambda tracking_uri: made, kinds  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return made


SECTION = {"mlflow_enabled": True, "mlflow": {"experiment_name": "e"}}


def test_steps_do_not_wait_for_mlflow(tmp_path: Path, server: Server) -> None:
    with open_sinks(SECTION, tmp_path) as sinks:
        server.answers.clear()
        for step in (1, 2, 3):
            sinks.log({"loss": float(step)}, step)
        assert [kind for kind, _ in server.calls] == ["made"]
        assert [row["loss"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1.0, 2.0, 3.0]
        server.answers.set()
    assert [(kind, each[1] if kind == "metric" else each) for kind, each in server.calls[1:]] == [
        *(("metric", float(step)) for step in (1, 2, 3)),
        ("ended", "run-0"),
    ]


def test_a_row_of_more_metrics_than_mlflow_takes_at_once_is_sent_whole(
    tmp_path: Path, server: Server
) -> None:
    row = {f"by_task/{number}": float(number) for number in range(2001)}
    with open_sinks(SECTION, tmp_path) as sinks:
        sinks.log(row, 1)
    assert [each[:2] for kind, each in server.calls if kind == "metric"] == list(row.items())


def test_a_server_that_never_answers_does_not_keep_the_run(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(services, "_LAST_ROWS_S", 0.01)
    with open_sinks(SECTION, tmp_path) as sinks:
        server.answers.clear()
        sinks.log({"loss": 1.0}, 1)
    server.answers.set()
    assert "MLflow failed in close (TimeoutError" in caplog.text


def test_what_mlflow_refuses_is_said_once_and_training_goes_on(
    tmp_path: Path, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with open_sinks(SECTION, tmp_path) as sinks:
        server.fault = OSError("no space there")
        sinks.log({"loss": 1.0}, 1)
    assert caplog.text.count("no space there") == 1
    assert len(list(read_metrics(tmp_path / "metrics.jsonl"))) == 1


def test_an_mlflow_run_that_was_deleted_is_made_again(
    tmp_path: Path, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    for deleted in (False, True, False):
        server.runs = set() if deleted else server.runs
        open_sinks(SECTION, tmp_path).close()
    assert [kind for kind, _ in server.calls] == ["made", "ended", "made", "ended", "RUNNING", "ended"]
    assert "MLflow no longer has run run-0" in caplog.text


OWN = """
from megarl.observe.sinks import Sink

class Lines(Sink):
    def __init__(self, log_dir, run_config):
        self.file = log_dir / "lines.txt"
        self.file.write_text(f"made with {run_config}\\n")

    def write(self, row):
        row.pop("time")
        with self.file.open("a") as out:
            out.write(f"{row}\\n")

    def truncate_after(self, step):
        with self.file.open("a") as out:
            out.write(f"after {step}\\n")

class Ends(Lines):
    def write(self, row):
        raise SystemExit("the end")

class NotMade(Lines):
    def __init__(self, log_dir, run_config):
        raise OSError("no device")

class NoWrite:
    def __init__(self, log_dir, run_config): ...
    def truncate_after(self, step): ...
    def close(self): ...

class OtherArguments(Lines):
    def __init__(self, settings): ...

class NoArguments:
    def write(self, row): ...
    def truncate_after(self, step): ...
    def close(self): ...

class OtherRow(Lines):
    def write(self, row, step): ...

def function(log_dir, run_config): ...
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return file


def test_own_sinks_get_every_row_and_cannot_end_a_run(
    tmp_path: Path, own: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = [f"{own}:{name}" for name in ("NotMade", "Ends", "Lines")]
    with open_sinks({"sinks": paths}, tmp_path, {"api_key": "abc", "seed": 3}) as sinks:
        sinks.truncate_after(4)
        sinks.log({"loss": 0.5}, 5, "train")
        sinks.log({"loss": 0.25}, 6, "train")
    assert (tmp_path / "lines.txt").read_text().splitlines() == [
        *("made with {'api_key': '***', 'seed': 3}", "after 4", "after 4"),
        *("{'step': 5, 'train/loss': 0.5}", "{'step': 6, 'train/loss': 0.25}"),
    ]
    rows = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert [row["train/loss"] for row in rows] == [0.5, 0.25] and "time" in rows[0], (
        "what a sink changes is its own"
    )
    assert "NotMade cannot be opened (OSError: no device)" in caplog.text
    assert caplog.text.count("own.py:Ends failed in write (SystemExit: the end)") == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Lines", None),
        ("NoWrite", "it lacks write"),
        ("function", "it is function, not a class"),
        (
            "OtherArguments",
            r"OtherArguments cannot be called with (log_dir, run_config): too many positional arguments",
        ),
        (
            "NoArguments",
            r"NoArguments cannot be called with (log_dir, run_config): too many positional arguments",
        ),
        ("OtherRow", "write cannot be called with (self, row): missing a required argument: 'step'"),
        ("Liens", "own.py has no Liens"),
    ],
)
def test_own_sinks_are_checked_before_anything_starts(own: Path, name: str, said: str | None) -> None:
    found = list(sinks_are_known(View({"logger": {"sinks": [f"{own}:{name}"]}})))
    if said is None:
        assert not found
        return
    [violation] = found
    assert violation.key == "logger.sinks" and said in str(violation) and "Fix: " in str(violation)


def test_a_sink_is_named_once(own: Path) -> None:
    [violation] = sinks_are_known(View({"logger": {"sinks": [f"{own}:Lines"] * 2}}))
    assert "would receive every row twice" in str(violation)
