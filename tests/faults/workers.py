"""A running launch, seen from outside: which process is which rank, what each is doing, and which step it
is."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time

from megarl.distributed.deadlines import PHASES, STEP, Call
from megarl.distributed.worker_stacks import _stack_file, worker_of
from megarl.models.policy.policy_engines import WORKERS as ENGINES
from tests.faults.fault import INIT
from tests.system.whole_runs import Launch, read_rows

POLICY = "lm_policy"
_SHELL = "distributed/worker_shell.py"
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line \d+ in (?P<name>\S+)')
_WRAPPERS = 4
"""Frames between the shell and the worker's method, of decorators."""
_NAMES = {STEP: "train"}
_STACK_S = 2.0
_QUIET_S = 0.02
_POLL_S = 0.0005


def ranks_of(launch: Launch) -> list[int]:
    """Process ids of the policy's workers by rank; those on other hosts are not seen."""
    found = []
    for pid in launch.processes():
        name = worker_of(pid)
        if name is not None and name.startswith(POLICY):
            found.append(([int(number) for number in re.findall(r"\d+", name.removeprefix(POLICY))], pid))
    return [pid for _, pid in sorted(found)]


def engines_of(launch: Launch) -> list[int]:
    """Process ids of the workers that only generate."""
    return [pid for pid in launch.processes() if (worker_of(pid) or "").startswith(ENGINES)]


def reward_processes_of(launch: Launch) -> list[int]:
    """Process ids of what computes rewards beside the driver."""
    return [pid for pid, command in launch.processes().items() if "megarl.rollout.reward_pool" in command]


def phase_in(stack: str) -> str:
    """The phase of a run that a worker is in by its threads' stacks, as ``faulthandler`` writes them; ""
    where it is in none."""
    for block in stack.split("\n\n"):
        frames = [match.groupdict() for match in map(_FRAME.match, block.splitlines()) if match]
        shell = next((index for index, frame in enumerate(frames) if frame["file"].endswith(_SHELL)), None)
        if shell is None:
            continue
        if any(frame["name"] == "construct" for frame in frames[shell:]):
            return INIT
        # innermost first: the method is called by the shell
        for frame in reversed(frames[max(shell - _WRAPPERS, 0) : shell]):
            phase = Call.of(frame["name"]).phase
            if phase in PHASES:
                return _NAMES.get(phase, phase)
    return ""


def strike(pid: int, phase: str, number: int) -> bool:
    """Send a worker's process a signal if it is in a phase now; whether it was.

    ``faulthandler`` writes the stacks in the thread that runs the worker's method, which does not go on
    meanwhile; so the signal is sent as soon as its part is there, and not when all has been read.
    """
    with contextlib.suppress(OSError):
        path = _stack_file(pid)
        # without it the process would take the first signal for its end
        if path is None:
            return False
        with path.open("rb", buffering=0) as file:
            file.seek(0, os.SEEK_END)
            os.kill(pid, signal.SIGUSR2)
            seen, begun = b"", time.monotonic()
            grown = begun
            while time.monotonic() < (grown + _QUIET_S if seen else begun + _STACK_S):
                more = file.read()
                if more:
                    seen, grown = seen + more, time.monotonic()
                    if phase_in(seen.decode(errors="replace")) == phase:
                        os.kill(pid, number)
                        return True
                time.sleep(_POLL_S)
    return False


def step_of(launch: Launch, first: int) -> int:
    """The step that a launch is in, whose workers are there: what was logged after the checkpoint that they
    read is taken back by then.

    Args:
        launch: that runs.
        first: step before any row, 0 for a run that validates before its first.
    """
    rows = read_rows(launch.run_dir)
    return rows[-1]["step"] + 1 if rows else first


def slow_down(pid: int, seconds: float, stopped_s: float = 0.18, running_s: float = 0.02) -> None:
    """Let a process run for a tenth of the time."""
    end = time.monotonic() + seconds
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < end:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(stopped_s)
            os.kill(pid, signal.SIGCONT)
            time.sleep(running_s)
