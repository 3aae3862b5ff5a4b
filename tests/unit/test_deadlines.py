"""Deadlines that follow from measured durations, and what is seen of processes that do not answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.config.defaults import complete_run
from megarl.distributed import worker_stacks
from megarl.distributed.deadlines import PHASES, Call, PhaseDeadlines, at_step, keeping_durations, validating
from megarl.distributed.worker_results import Deadline, blame
from megarl.distributed.worker_stacks import (
    GONE,
    RUNS,
    STOPPED,
    ProcessLook,
    look_at,
    read_activity,
    read_state,
    register_stacks,
    worker_of,
)
from megarl.errors import DeadlineError

SECONDS = st.floats(0.0, 1e5)
DEFAULTS = complete_run({})["deadlines"]


@given(st.lists(SECONDS, max_size=25), SECONDS, st.floats(1.0, 10.0), SECONDS)
def test_a_bound_is_a_multiple_of_the_slowest_of_the_last_ten(
    took: list[float], least: float, multiple: float, limit: float
) -> None:
    deadlines = PhaseDeadlines(
        {phase: limit if phase == "save" else 1e9 for phase in PHASES}, least, multiple, first_s=limit / 2
    )
    for seconds in took:
        deadlines.took(Call.of("save_checkpoint"), seconds)
        deadlines.took(Call.of("train"), 1e8)
    expected = limit / 2
    if took:
        expected = multiple * sorted(took[-10:])[-1]
        expected = least if expected < least else expected
        expected = limit if expected > limit else expected
    assert deadlines.bound_s(Call.of("save_checkpoint")) == expected


def test_by_default_a_rank_that_stands_still_is_found_within_five_minutes() -> None:
    """Written out: a test that reads the defaults from their fields would not see that they changed."""
    deadlines = PhaseDeadlines.of(DEFAULTS)
    assert deadlines.look_s == 300
    for method in (
        "train",
        "get_logprobs",
        "generate",
        "save_checkpoint",
        "load_checkpoint",
        "hand_over_weights",
        "get_gpu_info",
    ):
        assert deadlines.bound_s(Call.of(method)) == 1800, method
        deadlines.took(Call.of(method), 99.0)
        assert deadlines.bound_s(Call.of(method)) == 300, method
        deadlines.took(Call.of(method), 200.0)
        assert deadlines.bound_s(Call.of(method)) == 600, method
    assert deadlines.longest_s == 3600
    assert DeadlineError.exit_code == 4, "Slurm requeues"


def test_phases_without_a_key_of_their_own_follow_the_step_and_the_save() -> None:
    filled = complete_run({"deadlines": {"step_s": 7000.0, "save_s": 5.0, "refit_s": 9.0}})["deadlines"]
    limits = {phase: filled[f"{phase}_s"] for phase in PHASES}
    assert limits == {
        "step": 7000.0,
        "logprobs": 7000.0,
        "generate": 7000.0,
        "save": 5.0,
        "load": 5.0,
        "refit": 9.0,
        "validate": 7000.0,
    }


def test_the_first_time_of_a_phase_is_bounded_apart() -> None:
    """It compiles; and the first time of each method of a phase does."""
    deadlines = PhaseDeadlines.of({**DEFAULTS, "first_s": 1000.0, "save_s": 700.0})
    train, save = Call.of("train"), Call.of("save_checkpoint")
    assert (deadlines.bound_s(train), deadlines.key(train)) == (1000, "deadlines.first_s")
    assert (deadlines.bound_s(save), deadlines.key(save)) == (700, "deadlines.save_s")
    deadlines.took(train, 400.0)
    assert (deadlines.bound_s(train), deadlines.key(train)) == (1200, "deadlines.multiple")
    for _ in range(10):
        deadlines.took(Call.of("train"), 20.0)
    assert (deadlines.bound_s(train), deadlines.key(train)) == (300, "deadlines.least_s")
    unknown = Call("", "")
    assert (deadlines.bound_s(unknown), deadlines.key(unknown)) == (3600, "deadlines.step_s")
    deadlines.took(Call.of("offload_after_refit"), 0.1)
    assert deadlines.bound_s(Call.of("offload_after_refit")) == 300
    assert deadlines.bound_s(Call.of("hand_over_weights")) == 1000


def test_new_workers_have_the_durations_of_those_before_them_in_a_launch() -> None:
    def of(name: str) -> PhaseDeadlines:
        deadlines = PhaseDeadlines.of(DEFAULTS, name)
        deadlines.new_workers()
        return deadlines

    with keeping_durations():
        before = of("lm_policy")
        before.took(Call.of("train"), 500.0)
        for _ in range(10):
            before.took(Call.of("train"), 20.0)
        assert before.bound_s(Call.of("train")) == 300
        anew = of("lm_policy")
        # they compile again
        assert anew.bound_s(Call.of("train")) == 1500
        anew.took(Call.of("train"), 250.0)
        assert anew.bound_s(Call.of("train")) == 750
        # the slowest first time counts, of all workers before
        assert of("lm_policy").bound_s(Call.of("train")) == 1500
        assert of("critic").bound_s(Call.of("train")) == of("").bound_s(Call.of("train")) == 1800
    assert of("lm_policy").bound_s(Call.of("train")) == 1800
    with keeping_durations():
        assert of("lm_policy").bound_s(Call.of("train")) == 1800, (
            "another launch may have other devices and rows"
        )


def test_a_first_time_that_is_waited_for_in_parts_counts_whole() -> None:
    deadlines = PhaseDeadlines.of(DEFAULTS)
    parts = Call.of("train")
    for seconds in (1.0, 200.0):
        deadlines.took(parts, seconds)
    for _ in range(10):
        deadlines.took(Call.of("train"), 1.0)
    assert deadlines.bound_s(Call.of("train")) == 300
    deadlines.new_workers()
    assert deadlines.bound_s(Call.of("train")) == 600


def test_a_validation_has_durations_of_its_own() -> None:
    deadlines = PhaseDeadlines.of(DEFAULTS)
    deadlines.took(Call.of("generate"), 10.0)
    with validating():
        assert deadlines.bound_s(Call.of("generate")) == DEFAULTS["first_s"]
        assert Call.of("save_checkpoint").phase == "save"
        deadlines.took(Call.of("generate"), 500.0)
    assert deadlines.bound_s(Call.of("generate")) == 300


def test_a_call_that_is_waited_for_in_parts_counts_once() -> None:
    deadlines = PhaseDeadlines.of(DEFAULTS)
    deadlines.took(Call.of("train"), 200.0)
    parts = Call.of("train")
    for seconds in range(20):
        deadlines.took(parts, float(seconds))
    assert deadlines.bound_s(Call.of("train")) == 600


def test_a_call_says_where_the_run_is() -> None:
    assert str(Call.of("train")) == "train"
    with at_step(12):
        assert [
            str(Call.of(method))
            for method in ("train", "get_logprobs", "save_checkpoint", "init_collective", "get_gpu_info")
        ] == [
            "train, step 12",
            "logprobs, step 12",
            "save, step 12",
            "refit, step 12",
            "get_gpu_info, step 12",
        ]
        with validating():
            assert str(Call.of("generate")) == "generate (validation), step 12"
    assert str(Call.of("generate")) == "generate"


def test_a_deadline_counts_from_the_call_and_leaves_a_moment_to_fetch() -> None:
    now = time.monotonic()
    assert 90 < (Deadline(100.0, begun=now - 5.0).left() or 0) <= 95
    assert 0 < (Deadline(100.0, begun=now - 500.0).left() or 0) <= 10
    assert Deadline(None).left() is None


WAITING = """
import sys
sys.path[:] = {path!r}
from megarl.distributed.worker_stacks import register_stacks
register_stacks("policy-0-1")
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_process_is_looked_at_from_outside() -> None:
    register_stacks()
    child = subprocess.Popen(
        [sys.executable, "-c", WAITING.format(path=sys.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        look = look_at(child.pid)
        assert look.state == RUNS and "in <module>" in look.stack and look.activity is not None
        assert worker_of(child.pid) == "policy-0-1"
        child.send_signal(signal.SIGSTOP)
        while read_state(child.pid) != STOPPED:
            assert child.poll() is None
        begun = time.monotonic()
        assert look_at(child.pid) == ProcessLook(STOPPED)
        assert time.monotonic() - begun < 1.5, "nobody waits for the stacks of a process that is stopped"
    finally:
        child.kill()
    while read_state(child.pid) != GONE:
        assert child.returncode is None
    child.communicate()
    assert look_at(child.pid) == ProcessLook(GONE)
    assert worker_of(child.pid) is None


METHOD = '  File "/x/megarl/distributed/worker_shell.py", line 130 in call\n'
IN_COLLECTIVE = ProcessLook(
    RUNS,
    (
        'Thread 0x1:\n  File "threading.py", line 1\n\nThread 0x2:\n  File '
        f'"/x/torch/distributed/distributed_c10d.py", line 3\n{METHOD}'
    ),
)
ELSEWHERE = ProcessLook(
    RUNS,
    (
        'Thread 0x1:\n  File "/x/torch/distributed/store.py", line 1\n\nThread 0x2:\n  File "loss.py", line '
        f"7\n{METHOD}"
    ),
)

WITHIN_FSDP1 = (
    f'  File "/x/torch/distributed/fsdp/fully_sharded_data_parallel.py", line 857 in forward\n{METHOD}'
)
GATHERING = ProcessLook(
    RUNS,
    f'Thread 0x2:\n  File "/x/torch/distributed/fsdp/_flat_param.py", line 1474 in unshard\n{WITHIN_FSDP1}',
)
IN_A_LAYER = ProcessLook(
    RUNS, f'Thread 0x2:\n  File "/x/transformers/modeling_qwen2.py", line 348 in forward\n{WITHIN_FSDP1}'
)


@pytest.mark.parametrize(
    ("looks", "said"),
    [
        (
            [IN_COLLECTIVE, ProcessLook(STOPPED), IN_COLLECTIVE],
            " Silent: the process of [b] is stopped by a signal (SIGSTOP or SIGTSTP).",
        ),
        ([ProcessLook(GONE), None, ELSEWHERE], " Silent: the process of [a] is gone."),
        ([IN_COLLECTIVE, IN_COLLECTIVE, ELSEWHERE], " In no collective, while 2 others wait in one: [c]."),
        ([IN_COLLECTIVE, IN_COLLECTIVE, IN_COLLECTIVE], ""),
        ([GATHERING, IN_A_LAYER, GATHERING], " In no collective, while 2 others wait in one: [b]."),
        ([ELSEWHERE, ELSEWHERE, ProcessLook(RUNS)], ""),
        ([None, None, None], ""),
    ],
)
def test_who_keeps_the_others_waiting(looks: list[ProcessLook | None], said: str) -> None:
    assert blame(["[a]", "[b]", "[c]"], looks) == said


ASKING = """
import threading, time
def ask():
    while True:
        time.sleep(0.002)
for _ in range(5):
    threading.Thread(target=ask, daemon=True).start()
print("asks", flush=True)
ask()
"""
COMPUTING = """
print("computes", flush=True)
while True:
    pass
"""


@pytest.mark.parametrize(
    ("program", "computes"), [(ASKING, False), (COMPUTING, True)], ids=["asks", "computes"]
)
def test_a_process_that_asks_again_and_again_whether_it_may_go_on_is_at_rest(
    program: str, computes: bool
) -> None:
    """At some moments one of its threads runs, and at all moments where it computes."""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None and child.stdout.readline()
            seen = [read_activity(child.pid) for _ in range(8)]
        finally:
            child.kill()
    goes_on = [each is not None and each.goes_on for each in seen]
    assert all(goes_on) if computes else goes_on.count(False) > 4, goes_on


@pytest.mark.parametrize(
    ("states", "goes_on"), [("RS", False), ("RRRRS", False), ("S", False), ("RDRRR", True)]
)
def test_a_thread_has_to_run_at_all_moments_to_count(states: str, goes_on: bool) -> None:
    seen = iter(states)
    with mock.patch.object(
        worker_stacks, "_goes_on", lambda processes: next(seen) in worker_stacks._GOING_ON
    ):
        activity = read_activity(os.getpid())
    assert activity is not None and activity.goes_on is goes_on and not [*seen]
