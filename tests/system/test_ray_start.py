"""A real Ray whose raylet never answers, and one that runs when the data are refused: an error in time, and no process left."""

from __future__ import annotations

import json
import logging
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from megarl.distributed import ray_runtime
from megarl.errors import DeadlineError
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
    assert local is not None and list(local.directory.glob("session_*/logs")), "the logs that the message names"
    assert "waiting at most 12 s for its processes (gcs_server, raylet" in caplog.text
    assert "trying once more, with new processes" in caplog.text
    # the keeper of its directory ends with this process
    assert [words for words in marked(mark) if "ray" in words and "ray_keeper" not in words] == []
    ray_runtime.init_ray(num_cpus=2)
    assert ray.cluster_resources()["CPU"] == 2
    shutil.rmtree(local.private)


@slow
def test_nothing_runs_after_data_are_refused(tmp_path: Path) -> None:
    """Ray has been started by then; the workers have not."""
    material = make_material(tmp_path / "material", teach=False)
    data = tmp_path / "broken.jsonl"
    data.write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n{broken\n")
    launches = Launches()
    try:
        launch = launches.start(write_config(tmp_path / "run.yaml", "grpo", material), tmp_path / "run", [f"data.train.path={data}"])
        seen: set[str] = set()
        while launch.process.poll() is None:
            seen.update(launch.processes().values())
            launch.stay(0.05)
        assert launch.finish() == 2
        assert str(data) in launch.output() and "Traceback" not in launch.output()
        assert any("raylet" in words for words in seen) and not any("WorkerShell" in words for words in seen)
    finally:
        launches.close()
