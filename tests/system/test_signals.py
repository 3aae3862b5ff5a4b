"""Real signals to real runs: a group that is told to end, Ctrl-C, a terminal that closes, a killed driver, a
killed Ray, a time limit.

All of it is in the part ``signals``.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import stat
import subprocess
import threading
import time
from pathlib import Path

import pytest

from megarl.checkpoint.manifest import verify
from megarl.errors import WorkerLostError
from megarl.observe.launches import read_launches
from megarl.run.stopping import INTERRUPTED, STOPPED
from tests.faults.workers import ranks_of
from tests.system.test_resume import on_one_rank
from tests.system.whole_runs import Launch, Launches, Material, comparable, write_config
from tests.tiers import slow
from tests.unpickling.watch import PickleWatch

pytestmark = pytest.mark.timeout(1800)
TOTAL = 8
MORE_STEPS = [f"grpo.max_num_steps={TOTAL}"]
NEVER_DUE = 10_000
SECRET = "planted-in-the-environment"
OTHER_USER = 65534


def ray_directory(launch: Launch) -> Path:
    """The private directory of a launch's Ray, from the command line of its raylet."""
    [raylet] = [words for words in launch.processes().values() if "raylet/raylet" in words]
    found = re.search(r"--session_dir=(\S+)/ray/session_", raylet)
    assert found, raylet
    return Path(found[1])


def check_private(directory: Path) -> None:
    """Only this user can enter it, whatever the modes of what is in it."""
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700 and directory.stat().st_uid == os.getuid()
    if os.getuid() == 0:
        file = next(directory.glob("ray/session_*/sockets")) / "of-another-user"
        touched = subprocess.run(
            ["touch", file],
            user=OTHER_USER,
            group=OTHER_USER,
            extra_groups=[],
            capture_output=True,
            check=False,
        )
        assert touched.returncode != 0 and b"Permission denied" in touched.stderr, touched


def saved_steps(run_dir: Path) -> list[int]:
    """Steps of the checkpoints, each of which is whole."""
    paths = list((run_dir / "checkpoints").glob("step_*"))
    assert all(verify(path) == [] for path in paths)
    return sorted(int(path.name.removeprefix("step_")) for path in paths)


def after_step_one(launch: Launch) -> Path:
    """Wait for it; the directory of its Ray."""
    launch.await_moment(launch.logged(1))
    return ray_directory(launch)


@slow
def test_a_signal_to_the_whole_group_saves_and_exits_75(
    material: Material, launches: Launches, tmp_path: Path
) -> None:
    """As from a launcher that ends all that it has started. The workers are not to hear of it before the run
    has saved.

    The same run shows that nobody else can enter the directory of its Ray, that none of its processes reads a
    pickle but by Ray, and that a secret of the environment is not shown when a worker says it.
    """
    config = on_one_rank(write_config(tmp_path / "run.yaml", "grpo", material, save_period=NEVER_DUE))
    watch = PickleWatch(tmp_path / "pickles")
    watch.directory.mkdir()
    said = {"HF_PAT": SECRET, "MEGARL_TEST_SAID": "HF_PAT"}
    launch = launches.start(config, tmp_path / "run", changed={**watch.variables, **said})
    private = after_step_one(launch)
    check_private(private)
    os.killpg(launch.process.pid, signal.SIGTERM)
    assert launch.finish() == STOPPED, launch.output()[-5000:]
    told = re.search(r"stopped after step (\d) \(SIGTERM\)", launch.output())
    assert told, launch.output()[-5000:]
    assert saved_steps(tmp_path / "run") == [int(told[1])]
    assert not private.exists()
    assert any("default_worker.py" in words for words in watch.watched()) and any(
        "megarl.cli" in words for words in watch.watched()
    )
    found = watch.found()
    assert not found, "\n".join(found)[:20_000]
    assert "logged: HF_PAT=***" in launch.output() and "printed: ***" in launch.output(), launch.output()[
        -5000:
    ]
    assert SECRET not in launch.output()
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


@slow
def test_a_launch_that_is_told_to_end_while_its_workers_start_exits_75(
    material: Material, launches: Launches, tmp_path: Path
) -> None:
    """The driver waits in a call of Ray then, out of which comes another exit code than went in."""
    config = on_one_rank(write_config(tmp_path / "run.yaml", "grpo", material, save_period=NEVER_DUE))
    launch = launches.start(config, tmp_path / "run", [])
    launch.await_moment(lambda: bool(ranks_of(launch)))
    launch.process.send_signal(signal.SIGTERM)
    assert launch.finish() == STOPPED, launch.output()[-5000:]
    assert "SIGTERM: stopping at once, outside of the training loop" in launch.output()
    assert read_launches(tmp_path / "run")[-1].outcome == f"exit code {STOPPED}"


@slow
def test_ctrl_c_twice_ends_at_once(material: Material, launches: Launches, tmp_path: Path) -> None:
    config = on_one_rank(write_config(tmp_path / "run.yaml", "grpo", material, save_period=NEVER_DUE))
    launch = launches.start(config, tmp_path / "run", ["grpo.max_num_steps=100"])
    private = after_step_one(launch)
    os.killpg(launch.process.pid, signal.SIGINT)
    launch.await_moment(lambda: "SIGINT: stopping after step " in launch.output())
    os.killpg(launch.process.pid, signal.SIGINT)
    assert launch.finish() == INTERRUPTED, launch.output()[-5000:]
    assert "SIGINT after SIGINT: stopping at once" in launch.output()
    assert saved_steps(tmp_path / "run") == [] and not private.exists()


@slow
def test_a_killed_driver_leaves_nothing(material: Material, launches: Launches, tmp_path: Path) -> None:
    config = on_one_rank(write_config(tmp_path / "run.yaml", "grpo", material))
    launch = launches.start(config, tmp_path / "run")
    private = after_step_one(launch)
    assert any(
        "DashboardAgent" in words or "RuntimeEnvAgent" in words for words in launch.processes().values()
    ), launch.processes()
    launch.kill_when(lambda: True)
    assert not private.exists()


@slow
def test_interrupted_and_hung_up_it_ends_like_another(
    material: Material, launches: Launches, tmp_path: Path
) -> None:
    """Ctrl-C once, then a terminal that closes: the run is saved both times, and goes on as if nothing had
    been."""
    undisturbed = launches.start(
        on_one_rank(write_config(tmp_path / "whole.yaml", "grpo", material)), tmp_path / "whole", MORE_STEPS
    )
    assert undisturbed.finish() == 0, undisturbed.output()[-5000:]

    config, run_dir = (
        on_one_rank(write_config(tmp_path / "run.yaml", "grpo", material, save_period=NEVER_DUE)),
        tmp_path / "run",
    )
    interrupted = launches.start(config, run_dir, MORE_STEPS)
    private = after_step_one(interrupted)
    os.killpg(interrupted.process.pid, signal.SIGINT)
    assert interrupted.finish() == INTERRUPTED, interrupted.output()[-5000:]
    [first] = saved_steps(run_dir)
    assert f"stopped after step {first} (SIGINT)" in interrupted.output() and not private.exists()

    assert hung_up(launches, config, run_dir, first + 1) == STOPPED
    second = saved_steps(run_dir)[-1]
    assert first < second < TOTAL
    assert [launch.end is not None for launch in read_launches(run_dir)] == [True, True]

    last = launches.start(config, run_dir, MORE_STEPS)
    assert last.finish() == 0, last.output()[-5000:]
    assert f"resumed after step {second}" in last.output()
    assert comparable(run_dir) == comparable(tmp_path / "whole")
    name = f"hf/step_{TOTAL}/model.safetensors"
    assert (run_dir / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def hung_up(launches: Launches, config: Path, run_dir: Path, step: int) -> int:
    """The exit code of a launch on a terminal that closes after a step."""
    master, terminal = os.openpty()
    closing = threading.Event()

    def read() -> None:
        # what it says is not needed, and must not fill the terminal
        while not closing.is_set():
            if select.select([master], [], [], 0.05)[0]:
                # an error once the launch has ended, of which the main thread tells
                with contextlib.suppress(OSError):
                    os.read(master, 1 << 16)
        os.close(master)

    launch = launches.start(config, run_dir, MORE_STEPS, terminal=terminal)
    os.close(terminal)
    reading = threading.Thread(target=read)
    reading.start()
    try:
        launch.await_moment(launch.logged(step))
        private = ray_directory(launch)
    finally:
        closing.set()
        reading.join()
    code = launch.finish()
    assert not private.exists()
    return code


@slow
def test_a_run_without_its_ray_ends_with_4_and_says_why(
    material: Material, launches: Launches, tmp_path: Path
) -> None:
    """Its control process is killed. Left to itself, Ray aborts the driver after a minute."""
    config = on_one_rank(write_config(tmp_path / "run.yaml", "grpo", material))
    launch = launches.start(config, tmp_path / "run", ["grpo.max_num_steps=10000"])
    private = after_step_one(launch)
    [server] = [
        pid for pid, words in launch.processes().items() if words.split(" ")[0].endswith("gcs_server")
    ]
    os.kill(server, signal.SIGKILL)
    begun = time.monotonic()
    assert launch.finish() == WorkerLostError.exit_code, launch.output()[-5000:]
    print(f"left, and nothing of it was there, {time.monotonic() - begun:.1f} s after the end of the GCS")
    assert "Ray's control process (GCS)" in launch.output() and "is gone" in launch.output()
    [recorded] = read_launches(tmp_path / "run")
    assert recorded.end is not None and (recorded.outcome or "").startswith(
        "WorkerLostError: Ray's control process (GCS)"
    )
    assert saved_steps(tmp_path / "run") and not private.exists()


@slow
@pytest.mark.parametrize("way", ["--stop-at", "SLURM_JOB_END_TIME"])
def test_it_looks_ahead_to_its_time_limit(
    way: str, material: Material, launches: Launches, tmp_path: Path
) -> None:
    """Far more steps than fit: it saves and leaves before the time is over."""
    config = on_one_rank(write_config(tmp_path / "run.yaml", "grpo", material, save_period=10_000))
    limit = int(time.time()) + 60
    options = (
        ["--stop-at", time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(limit))] if way == "--stop-at" else []
    )
    launch = launches.start(
        config,
        tmp_path / "run",
        ["grpo.max_num_steps=10000", *options],
        {} if options else {"SLURM_JOB_END_TIME": str(limit)},
    )
    assert launch.finish() == STOPPED, launch.output()[-5000:]
    ended = read_launches(tmp_path / "run")[-1].end
    assert ended is not None and ended < limit
    print(f"ended {limit - ended:.1f} s before the limit")
    told = re.search(r"stopped after step (\d+) \((\S+) ", " ".join(launch.output().split()))
    assert told and told[2] == way, launch.output()[-3000:]
    *earlier, last = saved_steps(tmp_path / "run")
    # the first save counts like a step until it is measured, and may leave time for more
    assert last == int(told[1]) and len(earlier) <= 1
