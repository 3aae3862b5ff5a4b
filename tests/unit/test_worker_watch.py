"""Workers that stand still are told from those at work, by what is seen of their processes from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.distributed import worker_watch
from megarl.distributed.worker_stacks import RUNS, STOPPED, Activity, ProcessLook, read_activity
from megarl.distributed.worker_watch import LOOKS, WorkerWatch, stand_still

AT_FIRST = Activity(at=100.0, cpu_s=7.0, bytes=5000, faults=3, processes=frozenset({11, 12}))
LATER = replace(AT_FIRST, at=175.0)
"""75 seconds without anything."""


@pytest.mark.parametrize(
    ("done", "rested"),
    [
        ({}, True),
        ({"cpu_s": 10.7, "bytes": 5000 + (1 << 20), "faults": 103}, True),
        ({"cpu_s": 10.8}, False),
        ({"cpu_s": 6.9}, False),
        ({"bytes": 5001 + (1 << 20)}, False),
        ({"bytes": 4999}, False),
        ({"faults": 104}, False),
        ({"processes": frozenset({11})}, False),
        ({"processes": frozenset({11, 12, 13})}, False),
        ({"goes_on": True}, False),
    ],
)
def test_what_a_process_at_rest_may_have_done(done: dict[str, Any], rested: bool) -> None:
    assert replace(LATER, **done).rested_since(AT_FIRST) is rested
    assert LATER.rested_since(replace(AT_FIRST, goes_on=True)) is False


def look(
    line: int = 7, at: int = 0, *, writer: str = "Thread", state: str = RUNS, method: bool = True, **done: Any
) -> ProcessLook:
    """Of a worker in the given line of its code, at the given look of several."""
    last = '  File "/x/megarl/distributed/worker_shell.py", line 130 in call\n' if method else ""
    stack = f'{writer} 0x1 (most recent call first):\n  File "loss.py", line {line} in wait\n{last}'
    return ProcessLook(state, stack, replace(AT_FIRST, at=100.0 + 75.0 * at, **done))


STILL = [look(at=at) for at in range(LOOKS)]


def with_one(position: int, other: ProcessLook | None) -> list[ProcessLook | None]:
    return [other if index == position else seen for index, seen in enumerate(STILL)]


@pytest.mark.parametrize(
    ("looks", "still"),
    [
        (STILL, True),
        (with_one(2, look(at=2, writer="Current thread")), True),
        (with_one(1, look(line=8, at=1)), False),
        (with_one(3, look(at=3, cpu_s=50.0)), False),
        (with_one(1, None), False),
        (with_one(0, replace(STILL[0], activity=None)), False),
        (with_one(3, look(at=3, state="waits for a disk or a network file system")), False),
        ([look(at=at, method=False) for at in range(LOOKS)], False),
        ([replace(seen, stack="") for seen in STILL], False),
    ],
)
def test_workers_stand_still_where_all_of_them_do(looks: Sequence[ProcessLook | None], still: bool) -> None:
    alone, pairs = [[seen] for seen in looks], list(zip(STILL, looks, strict=True))
    assert stand_still(alone) is still
    assert stand_still(pairs) is still


class Looks:
    """Gives what is seen, look by look; the last one for ever."""

    def __init__(self, *seen: ProcessLook | None) -> None:
        self.seen = list(seen)

    def __call__(self, processes: Sequence[Any]) -> list[ProcessLook | None]:
        return [self.seen.pop(0) if len(self.seen) > 1 else self.seen[0]]


def said(watch: WorkerWatch, count: int) -> list[str]:
    return [watch.give_up([None]) for _ in range(count)]


def still_from(first: int, count: int) -> list[ProcessLook]:
    return [look(at=at) for at in range(first, first + count)]


def test_they_are_given_up_after_the_time_and_not_before() -> None:
    watch = WorkerWatch(300.0, look=Looks(*still_from(0, 9)))
    reason = "make no progress for at least 225 s"
    assert said(watch, 5) == ["", "", "", reason, reason]
    watch.answered()
    assert said(watch, 4) == ["", "", "", reason]


def test_whoever_moves_has_the_whole_time_again() -> None:
    watch = WorkerWatch(300.0, look=Looks(look(), look(at=1), look(line=8, at=2), *still_from(3, 5)))
    assert said(watch, 7) == ["", "", "", "", "", "", "make no progress for at least 225 s"]


def test_workers_that_may_wait_for_others_are_not_given_up_for_standing_still() -> None:
    assert said(WorkerWatch(300.0, wait_for_others=True, look=Looks(*still_from(0, 9))), 8) == [""] * 8


@pytest.mark.parametrize("wait_for_others", [False, True])
def test_a_process_that_is_stopped_is_given_up_when_it_is_again_a_moment_later(
    wait_for_others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_watch, "_SURE_AFTER_S", 0.0)
    stopped = ProcessLook(STOPPED)
    assert said(WorkerWatch(300.0, wait_for_others, Looks(stopped)), 4) == ["", "", "", STOPPED]
    for_a_moment = Looks(look(), look(at=1), look(at=2), stopped, look(at=3))
    assert said(WorkerWatch(300.0, wait_for_others, for_a_moment), 4) == [""] * 4


def test_looks_come_in_equal_times() -> None:
    assert WorkerWatch(None).until_look() is None
    watch = WorkerWatch(400.0, look=Looks(look()))
    assert 90 < (watch.until_look() or 0) <= 100
    watch.give_up([None])
    assert 190 < (watch.until_look() or 0) <= 200
    watch.answered()
    assert 90 < (watch.until_look() or 0) <= 100


CHILDREN = {
    "waits": "import sys; print(flush=True); sys.stdin.read()",
    "computes": "print(flush=True)\nwhile True: pass",
    "a child computes": (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', "
        "'print(flush=True)\\nwhile True: pass'])"
    ),
    "writes": (
        "import time\nprint(flush=True)\nwith open({path!r}, 'wb') as file:\n  while "
        "file.write(bytes(1 << 19)): time.sleep(0.05)"
    ),
}


@pytest.mark.parametrize("what", CHILDREN)
def test_activity_of_real_processes(what: str, tmp_path: Path) -> None:
    program = CHILDREN[what].format(path=str(tmp_path / "file"))
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    child = subprocess.Popen([sys.executable, "-c", program], start_new_session=True, **pipes)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        before = read_activity(child.pid)
        rested: list[bool] = []
        end = time.monotonic() + 60
        # what is at work may have had no processor yet
        while (
            time.monotonic() < end and len(rested) < 3 and not (what != "waits" and rested and not rested[-1])
        ):
            time.sleep(0.3)
            now = read_activity(child.pid)
            assert before is not None and now is not None
            rested.append(replace(now, goes_on=False).rested_since(replace(before, goes_on=False)))
        assert rested[-1] is (what == "waits"), (before, now)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
    assert read_activity(child.pid) is None
