"""Seconds from a SIGKILL of a worker to the next finished step, against a start from nothing to its first step.

A tiny GRPO run on one rank of Megatron that saves after every step; the worker is built anew within the launch.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.point import Metric, Point

CHANGES = (
    "policy.megatron_cfg.tensor_model_parallel_size=1",
    "cluster.gpus_per_node=1",
    "++cluster.max_restarts=10",
    "data.validation=null",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "grpo.max_num_steps=100000",
    "checkpointing.metric_name=null",
    # as many as 100,000 steps would leave have no room on any disk, and a start counts them
    "checkpointing.keep_top_k=2",
)


def measure(quick: bool) -> Iterator[Point]:
    """One launch that loses its worker once; quick or not, it takes most of a minute of CPU."""
    from megarl.observe.launches import WORKERS, read_launches
    from tests.system.whole_runs import Launches, make_material, write_config

    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        config = write_config(work / "run.yaml", "grpo", make_material(work / "material", teach=False), save_period=1)
        launches, run_dir = Launches(), work / "run"
        try:
            begun = time.monotonic()
            launch = launches.start(config, run_dir, CHANGES)
            launch.await_moment(launch.logged(1))
            start = [time.monotonic() - begun]
            [pid] = [pid for pid, words in launch.processes().items() if "WorkerShell" in words]
            worker = [_until_next_step(run_dir, launch.await_moment, lambda: os.kill(pid, signal.SIGKILL))]
            restarts = [restart for each in read_launches(run_dir) for restart in each.restarts if restart.what == WORKERS]
            assert len(restarts) == 1 and restarts[0].step, f"one restart from a checkpoint is expected, there are {restarts}"
        finally:
            launches.close()
    metrics = {
        "worker": Metric.ratio("a start from nothing", worker, start),
        "worker_seconds": Metric.of("s to the next finished step", worker),
        "start_seconds": Metric.of("s to the first step", start),
    }
    yield Point({"backend": "megatron", "ranks": 1}, metrics)


def _until_next_step(run_dir: Path, wait: Callable[[Callable[[], bool]], None], kill: Callable[[], None]) -> float:
    """Seconds from a kill until a step is logged that was not there before it."""
    wall, begun = time.time(), time.monotonic()
    kill()
    # rows are taken back to the checkpoint, and come again with the time of now
    wait(lambda: _has_row_since(run_dir, wall + 0.5))
    return time.monotonic() - begun


def _has_row_since(run_dir: Path, wall: float) -> bool:
    from tests.system.whole_runs import read_rows

    return any(row["time"] >= wall for row in read_rows(run_dir))
