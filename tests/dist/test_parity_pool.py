"""The pool of workers: results by rank, failures with their traceback, and no process that outlives its
use."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from megarl.parity.pool import JobError, WorkerPool
from tests.tiers import slow


def sum_of_ranks(offset: int) -> tuple[int, float, int]:
    total = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(total)
    return dist.get_rank(), float(total), os.getpid()


def fail_everywhere() -> None:
    raise ValueError(f"rank {dist.get_rank()} cannot")


def fail_on_the_last() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("only this one")
    dist.all_reduce(torch.zeros(1))


def die() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(1))


def stand_still(directory: Path) -> None:
    (directory / str(dist.get_rank())).touch()
    threading.Event().wait()


def leave_one_alone(directory: Path) -> None:
    if dist.get_rank() == 0:
        stand_still(directory)
    while not (directory / "0").exists():
        pass
    raise RuntimeError("[gloo/transport/tcp/unbound_buffer.cc] timed out")


def thread_count() -> int:
    return psutil.Process().num_threads()


@pytest.fixture
def own_pool() -> Iterator[WorkerPool]:
    with WorkerPool() as pool:
        yield pool


def test_every_rank_answers_in_order_and_worlds_of_all_sizes_share_processes(own_pool: WorkerPool) -> None:
    first = own_pool.run(3, sum_of_ranks, 10)
    assert [answer[:2] for answer in first] == [(rank, 33.0) for rank in range(3)]
    second = own_pool.run(2, sum_of_ranks, 0)
    assert [answer[:2] for answer in second] == [(0, 1.0), (1, 1.0)]
    assert [answer[2] for answer in second] == [answer[2] for answer in first[:2]]


def test_a_failure_of_all_ranks_is_reported_and_costs_no_process(own_pool: WorkerPool) -> None:
    before = [answer[2] for answer in own_pool.run(2, sum_of_ranks, 0)]
    with pytest.raises(JobError, match=r"rank 0 of fail_everywhere:[\s\S]*ValueError: rank 0 cannot"):
        own_pool.run(2, fail_everywhere)
    assert [answer[2] for answer in own_pool.run(2, sum_of_ranks, 0)] == before


@pytest.mark.parametrize(
    ("job", "message"),
    [(fail_on_the_last, "ValueError: only this one"), (die, "the process died with exit code -9")],
)
def test_ranks_that_wait_for_one_that_failed_are_replaced(
    own_pool: WorkerPool, job: object, message: str
) -> None:
    with pytest.raises(JobError, match=message):
        own_pool.run(2, job)  # type: ignore[arg-type]
    assert [answer[1] for answer in own_pool.run(2, sum_of_ranks, 0)] == [1.0, 1.0]


def test_a_job_that_takes_too_long_ends_with_the_stacks_of_the_silent_ranks(
    own_pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hear_nothing(connections: Sequence[Any], timeout: float) -> list[Any]:
        while len(list(tmp_path.iterdir())) < 2:
            pass
        return []

    monkeypatch.setattr("megarl.parity.pool.wait", hear_nothing)
    with pytest.raises(
        TimeoutError, match=r"ranks \[0, 1\] of stand_still gave no result in 300 s"
    ) as caught:
        own_pool.run(2, stand_still, tmp_path)
    _, *stacks = str(caught.value).split("\n--- rank ")
    assert [stack[0] for stack in stacks] == ["0", "1"] and all("in stand_still" in stack for stack in stacks)
    monkeypatch.undo()
    assert [answer[1] for answer in own_pool.run(2, sum_of_ranks, 0)] == [1.0, 1.0]


def test_a_failure_of_the_transport_comes_with_the_stack_of_the_rank_that_stands_still(
    own_pool: WorkerPool, tmp_path: Path
) -> None:
    with pytest.raises(
        JobError,
        match=r"rank 1 of leave_one_alone:[\s\S]*timed out[\s\S]*--- rank 0 ---[\s\S]*in stand_still",
    ):
        own_pool.run(2, leave_one_alone, tmp_path)


def test_groups_leave_no_threads_behind(own_pool: WorkerPool) -> None:
    own_pool.run(2, sum_of_ranks, 0)
    before = own_pool.run(2, thread_count)
    for _ in range(5):
        own_pool.run(2, sum_of_ranks, 0)
    assert own_pool.run(2, thread_count) == before


def test_close_ends_all_processes() -> None:
    pool = WorkerPool()
    processes = [psutil.Process(answer[2]) for answer in pool.run(2, sum_of_ranks, 0)]
    pool.close()
    assert not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


SUDDEN_END = """
import os
from megarl.parity.pool import WorkerPool
from tests.dist.test_parity_pool import sum_of_ranks

if __name__ == "__main__":
    print(*[answer[2] for answer in WorkerPool().run(2, sum_of_ranks, 0)], flush=True)
    os._exit(3)
"""


@slow
def test_workers_end_with_the_process_that_started_them() -> None:
    answer = subprocess.run([sys.executable, "-c", SUDDEN_END], capture_output=True, text=True, check=False)
    assert answer.returncode == 3, answer.stderr
    for pid in map(int, answer.stdout.split()):
        if psutil.pid_exists(pid):
            psutil.Process(pid).wait(timeout=60)
    assert multiprocessing.current_process().is_alive()
