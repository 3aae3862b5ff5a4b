"""A real Ray whose processes hang, are killed or are stopped while it starts or ends, and one that runs when
the data are refused: an error in time, and no process left."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from megarl.distributed import ray_runtime
from megarl.distributed.ray_watch import CONTROL
from megarl.errors import DeadlineError
from megarl.observe.launches import read_launches
from tests.system.whole_runs import Launches, make_material, write_config
from tests.tiers import slow

MARK = "MEGARL_MARK_OF_TEST"


@pytest.fixture
def no_ray() -> Iterator[None]:
    ray.shutdown()
    yield
    ray.shutdown()


def marked(value: str) -> list[str]:
    """Command lines of the processes that were started with the mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == value:
                found.append(" ".join(process.cmdline()) or process.name())
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


@slow
@pytest.mark.usefixtures("no_ray")
def test_a_raylet_that_hangs_is_told_of_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hanging = tmp_path / "raylet"
    hanging.write_text("#!/bin/sh\nexec sleep 600\n")
    hanging.chmod(0o755)
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr("ray._private.services.RAYLET_EXECUTABLE", str(hanging))
        patch.setattr(ray_runtime, "INIT_SECONDS", 12.0)
        patch.setattr(ray_runtime, "TOLD_AFTER_SECONDS", 3.0)
        with pytest.raises(DeadlineError, match=r"a local Ray with 2 slots did not start .* Fix: "):
            ray_runtime.init_ray(num_cpus=2)
    local = ray_runtime._Local.present
    assert local is not None and list(local.directory.glob("session_*/logs")), (
        "the logs that the message names"
    )
    assert "waiting at most 12 s for its processes (gcs_server, raylet" in caplog.text
    assert "trying once more, with new processes" in caplog.text
    # the keeper of its directory ends with this process
    assert [words for words in marked(mark) if "ray" in words and "ray_keeper" not in words] == []
    ray_runtime.init_ray(num_cpus=2)
    assert ray.cluster_resources()["CPU"] == 2
    shutil.rmtree(local.private)


@slow
def test_a_control_process_that_is_killed_while_ray_starts_ends_the_launch_with_a_word(
    tmp_path: Path,
) -> None:
    """Ray itself would wait for it for a minute, in C++, and then end the driver with exit code 1."""
    material = make_material(tmp_path / "material", teach=False)
    launches = Launches()
    try:
        launch = launches.start(write_config(tmp_path / "run.yaml", "grpo", material), tmp_path / "run")
        found: dict[str, int] = {}

        def starts() -> bool:
            found.update(
                {os.path.basename(words.split(" ")[0]): pid for pid, words in launch.processes().items()}
            )
            return {"gcs_server", "raylet"} <= found.keys()

        launch.await_moment(starts)
        os.kill(found["gcs_server"], signal.SIGKILL)
        assert launch.finish() == 4, launch.output()
        assert f"while Ray started: {CONTROL}, process {found['gcs_server']}, is gone" in launch.output()
        [recorded] = read_launches(launch.run_dir)
        assert (recorded.outcome or "").startswith(
            "WorkerLostError: while Ray started"
        ) and recorded.first_step is None
        assert recorded.end is not None and recorded.end - recorded.start < ray_runtime.INIT_SECONDS
        launch.await_moment(
            lambda: (
                not any("raylet" in words or "gcs_server" in words for words in launch.processes().values())
            )
        )
    finally:
        launches.close()


ENDS = """
import os, signal, sys
import psutil
from megarl.distributed import ray_runtime
from megarl.distributed.ray_watch import CONTROL
ray_runtime.SHUTDOWN_SECONDS = 2.0
ray_runtime.init_ray(num_cpus=1)
[process] = [child for child in psutil.Process().children(recursive=True) if child.name() == sys.argv[1]]
process.send_signal(signal.SIGSTOP)
ray_runtime.shutdown_ray()
print("ended")
"""


@slow
@pytest.mark.parametrize("stopped", ["gcs_server", "raylet"])
def test_a_ray_with_a_stopped_process_can_be_shut_down(stopped: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``ray.shutdown`` waits for it without an end; a run that is over would never exit."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    done = subprocess.run([sys.executable, "-c", ENDS, stopped], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.endswith("ended\n"), done.stderr
    assert "Ray has not shut down after 2 s; its processes are killed" in done.stderr
    assert marked(mark) == []


@slow
def test_nothing_runs_after_data_are_refused(tmp_path: Path) -> None:
    """Ray has been started by then; the workers have not."""
    material = make_material(tmp_path / "material", teach=False)
    data = tmp_path / "broken.jsonl"
    data.write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n{broken\n")
    launches = Launches()
    try:
        launch = launches.start(
            write_config(tmp_path / "run.yaml", "grpo", material),
            tmp_path / "run",
            [f"data.train.path={data}"],
        )
        seen: set[str] = set()
        while launch.process.poll() is None:
            seen.update(launch.processes().values())
            launch.stay(0.05)
        assert launch.finish() == 2
        assert str(data) in launch.output() and "Traceback" not in launch.output()
        assert any("raylet" in words for words in seen) and not any("WorkerShell" in words for words in seen)
    finally:
        launches.close()
