"""A pool of processes that compute rewards, with a hard limit a sample.

A reward function may raise, hang, print, leak or kill its process; the driver and the other samples come to no harm. Each process is this
module run as a program: it reads tasks from its standard input and writes results to what was its standard output, a JSON list a line.
What the function prints goes to standard error. Time that is over is told to the function by an alarm first, since a process that goes on
saves its imports; one that does not listen is killed a moment later, and another takes its place.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import math
import os
import selectors
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megarl.errors import ConfigError, RewardError, Violation
from megarl.import_path import is_import_path
from megarl.rollout.mathematics import JudgementTimeoutError, math_verify
from megarl.rollout.rewards import KEY, RewardFunction, get_reward
from megarl.time_limit import OutOfTimeError, time_limit

START_SECONDS = 300.0
"""How long a process may take to start and to import what the function needs."""

GRACE_SECONDS = 1.0
"""Between the alarm and the kill."""

_READY, _VALUE, _ERROR, _TIMEOUT, _UNUSABLE = "ready", "value", "error", "timeout", "unusable"


@dataclass(frozen=True, slots=True)
class Score:
    """Score: what a reward function made of one response.

    Attributes:
        value: the reward; None where there is none.
        fault: why there is none: ``error`` (it raised, returned no finite number, or its process died) or ``timeout``.
        message: the fault in words.
    """

    value: float | None
    fault: Literal["error", "timeout"] | None = None
    message: str = ""


class RewardPool:
    """Processes that compute one reward function.

    Args:
        name: of the function, see ``get_reward``.
        processes: how many, at least 1.
        timeout_s: seconds that one response may take.

    Raises:
        ConfigError: a user's function cannot be imported; found by the first process, which is waited for.
    """

    def __init__(self, name: str, processes: int, timeout_s: float) -> None:
        self.name, self.timeout_s = name, timeout_s
        self._processes: list[_Process] = []
        self._processes = [self._started() for _ in range(processes)]
        with self._closed_on_error():
            # a built-in function is there; its processes may start while the workers do
            while is_import_path(name) and not self._processes[0].is_ready:
                self._processes[0].receive(START_SECONDS)

    def score(self, tasks: Sequence[tuple[str, str]]) -> list[Score]:
        """The score of each (response, reference answer), in their order."""
        scores: list[Score | None] = [None] * len(tasks)
        waiting = deque(range(len(tasks)))
        with self._closed_on_error():
            while any(score is None for score in scores):
                for process in self._processes:
                    if waiting and process.is_ready and process.task is None:
                        process.send(waiting.popleft(), tasks)
                for place, process in enumerate(self._processes):
                    if time.monotonic() > process.deadline:
                        if process.task is None:
                            raise RewardError(f"a process for {KEY} = {self.name!r} did not start within {START_SECONDS:g} s")
                        scores[process.task] = Score(None, "timeout", f"no answer within {self.timeout_s:g} s")
                        self._processes[place] = self._replaced(process)
                self._receive(scores)
        return [score for score in scores if score is not None]

    def close(self) -> None:
        """End the processes. The pool cannot be used afterwards."""
        for process in self._processes:
            process.kill()
        self._processes = []

    def _receive(self, scores: list[Score | None]) -> None:
        """Take what processes have to say, once at least one has, or a deadline is over."""
        with selectors.DefaultSelector() as selector:
            for place, process in enumerate(self._processes):
                selector.register(process.output, selectors.EVENT_READ, place)
            wait = max(min(process.deadline for process in self._processes) - time.monotonic(), 0.0) + 0.01
            for key, _ in selector.select(wait):
                process = self._processes[key.data]
                was_ready, task = process.is_ready, process.task
                score = process.receive(0.0)
                if score is not None and task is not None:
                    scores[task] = score
                elif process.has_ended:
                    if not was_ready:
                        raise RewardError(f"a process for {KEY} = {self.name!r} ended before it was ready, with {process.exit_code()}")
                    if task is not None:
                        scores[task] = Score(None, "error", f"its process died ({process.exit_code()})")
                    self._processes[key.data] = self._replaced(process)

    def _started(self) -> _Process:
        return _Process.started(self.name, self.timeout_s)

    def _replaced(self, process: _Process) -> _Process:
        process.kill()
        return self._started()

    @contextlib.contextmanager
    def _closed_on_error(self) -> Any:
        try:
            yield
        except BaseException:
            self.close()
            raise


@dataclass
class _Process:
    """One process of a pool.

    Attributes:
        child: the process.
        name: of the reward function.
        timeout_s: seconds a response.
        task: number of the task that it works on.
        deadline: when it is over, by the monotonic clock.
        is_ready: it has imported what it needs.
        has_ended: its output is closed.
    """

    child: subprocess.Popen[bytes]
    name: str
    timeout_s: float
    task: int | None = None
    deadline: float = math.inf
    is_ready: bool = False
    has_ended: bool = False
    _received: bytearray = field(default_factory=bytearray)

    @classmethod
    def started(cls, name: str, timeout_s: float) -> _Process:
        command = [sys.executable, "-m", "megarl.rollout.reward_pool", name, repr(timeout_s)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        return cls(child, name, timeout_s, deadline=time.monotonic() + START_SECONDS)

    @property
    def output(self) -> int:
        """File descriptor of what it says."""
        assert self.child.stdout is not None
        return self.child.stdout.fileno()

    def send(self, task: int, tasks: Sequence[tuple[str, str]]) -> None:
        """Give it a task; its time begins."""
        assert self.child.stdin is not None
        self.task, self.deadline = task, time.monotonic() + self.timeout_s + GRACE_SECONDS
        # a process that has died is found where its answer is waited for
        with contextlib.suppress(BrokenPipeError):
            self.child.stdin.write(json.dumps(tasks[task]).encode() + b"\n")
            self.child.stdin.flush()

    def receive(self, seconds: float) -> Score | None:
        """Return what it says next, if that is a score.

        Raises:
            ConfigError: it cannot import the function.
            RewardError: it says nothing for so long, or ends, before it is ready.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self.output, selectors.EVENT_READ)
            if seconds and not selector.select(seconds):
                raise RewardError(f"a process for {KEY} = {self.name!r} did not start within {seconds:g} s")
        data = os.read(self.output, 1 << 16)
        if not data:
            self.has_ended = True
            if seconds:
                raise RewardError(f"a process for {KEY} = {self.name!r} ended before it was ready, with {self.exit_code()}")
        self._received += data
        line, end, rest = bytes(self._received).partition(b"\n")
        if not end:
            return None
        self._received = bytearray(rest)
        kind, what = json.loads(line)
        if kind == _UNUSABLE:
            raise ConfigError([Violation(KEY, self.name, what[0], what[1])])
        if kind == _READY:
            self.is_ready, self.deadline = True, math.inf
            return None
        self.task, self.deadline = None, math.inf
        return Score(what) if kind == _VALUE else Score(None, kind, what)

    def exit_code(self) -> str:
        """Return how it ended, in words; waits for its end."""
        code = self.child.wait()
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        """End it, whatever it does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, 9)
        self.child.wait()
        for stream in (self.child.stdin, self.child.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def _score(function: RewardFunction, response: str, answer: str, timeout_s: float) -> tuple[str, Any]:
    """Kind and content of the line that answers a task."""
    try:
        with time_limit(timeout_s):
            value = float(function(response, answer))
    except (OutOfTimeError, JudgementTimeoutError):
        return _TIMEOUT, f"no answer within {timeout_s:g} s"
    except KeyboardInterrupt:
        raise
    # a user's function may raise anything, SystemExit too
    except BaseException as error:
        return _ERROR, f"{type(error).__name__}: {error}"
    return (_VALUE, value) if math.isfinite(value) else (_ERROR, f"it returned {value}, and a finite number is wanted")


def main(name: str, timeout_s: float) -> None:
    """Serve tasks until standard input ends."""
    results = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    if isinstance(sys.stdout, io.TextIOWrapper):
        # what a model says need not be text that can be encoded
        sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)

    def tell(kind: str, what: Any) -> None:
        results.write(json.dumps([kind, what]).encode() + b"\n")

    _die_with_the_parent()
    try:
        function = get_reward(name)
        if function is math_verify:
            # its imports take more time than an answer
            math_verify("1", "1")
    except ConfigError as error:
        violation = error.violations[0]
        tell(_UNUSABLE, [violation.bound, violation.fix])
        return
    tell(_READY, None)
    for line in sys.stdin.buffer:
        response, answer = json.loads(line)
        tell(*_score(function, response, answer, timeout_s))


def _die_with_the_parent() -> None:
    """Ask Linux to kill this process when its parent is gone: a function that hangs would never see that standard input ended."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, 9)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
