"""A pool of processes that compute rewards, with a hard limit a sample.

A reward function may raise, hang, print, leak or kill its process; the driver and the other samples come to no harm. Each process is this
module run as a program: it reads tasks from its standard input and writes results to what was its standard output, a JSON list a line.
What the function prints goes to standard error. Time that is over is told to the function by an alarm first, since a process that goes on
saves its imports; one that does not listen is killed a moment later, and another takes its place. Each answer bears the number of its
task, so that none is taken for another's. What a function leaves behind, threads and children of its process group, ends with its process.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import math
import os
import selectors
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megarl.config.environments import REWARD
from megarl.errors import ConfigError, RewardError, StateError, Violation
from megarl.import_path import is_import_path
from megarl.rollout.mathematics import JudgementTimeoutError, math_verify
from megarl.rollout.rewards import RewardFunction, get_reward
from megarl.time_limit import OutOfTimeError, time_limit

START_SECONDS = 300.0
"""How long a process may take to start and to import what the function needs, from when it is waited for."""

GRACE_SECONDS = 1.0
"""Between the alarm and the kill."""

_POLL_SECONDS = 0.5
"""Between looks at whether a process is still there. One whose forked child holds the pipe open does not end it."""

_LARGEST = struct.unpack(">f", b"\x7f\x7f\xff\xff")[0]
"""Largest number of float32, which rewards are."""

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
        ValueError: no process is asked for.
    """

    def __init__(self, name: str, processes: int, timeout_s: float) -> None:
        if processes < 1:
            raise ValueError(f"a pool of {processes} processes computes nothing. Fix: ask for at least 1")
        self.name, self.timeout_s = name, timeout_s
        self._sent = 0
        self._processes = [self._started() for _ in range(processes)]
        with self._closed_on_error():
            # a built-in function is there; its processes may start while the workers do
            if is_import_path(name):
                self._wait_until_ready(self._processes[0])

    def score(self, tasks: Sequence[tuple[str, str]]) -> list[Score]:
        """The score of each (response, reference answer), in their order.

        Raises:
            RewardError: a process does not start, or ends before it has.
            StateError: the pool is closed, which an error of an earlier call does too.
        """
        if not self._processes:
            raise StateError("the pool of rewards is closed. Fix: make another one")
        scores: dict[int, Score] = {}
        waiting, given_twice = deque(range(len(tasks))), set[int]()
        with self._closed_on_error():
            for process in self._processes:
                process.expect_start()
            while len(scores) < len(tasks):
                for place in range(len(self._processes)):
                    self._advance(place, tasks, waiting, scores, given_twice)
                self._wait_for_news()
        return [scores[row] for row in range(len(tasks))]

    def close(self) -> None:
        """End the processes. The pool cannot be used afterwards."""
        for process in self._processes:
            process.kill()
        self._processes = []

    def _advance(
        self, place: int, tasks: Sequence[tuple[str, str]], waiting: deque[int], scores: dict[int, Score], given_twice: set[int]
    ) -> None:
        """Take what one process has said, replace it if it is of no more use, and give it work.

        What it has said comes before its deadline: a driver that was held up must not call an answer late that has long been there.
        """
        process = self._processes[place]
        process.receive()
        process.check_start()
        row = process.row
        if row is not None and process.score is not None:
            scores[row] = process.score
            process.row = process.score = None
        elif process.has_ended:
            if row in given_twice:
                scores[row] = Score(None, "error", f"its process died ({process.exit_code()})")
            elif row is not None:
                # it may have been dying of what an earlier response left behind
                given_twice.add(row)
                waiting.appendleft(row)
        elif row is not None and time.monotonic() > process.deadline:
            scores[row] = Score(None, "timeout", f"no answer within {self.timeout_s:g} s")
            process.has_ended = True
        if process.has_ended:
            process.kill()
            self._processes[place] = process = self._started()
            process.expect_start()
        if waiting and process.is_ready and process.row is None:
            row = waiting.popleft()
            process.send(self._sent, row, tasks[row])
            self._sent += 1

    def _wait_for_news(self) -> None:
        """Sleep until a process has something to say, can be told more, or a deadline is over."""
        with selectors.DefaultSelector() as selector:
            for process in self._processes:
                selector.register(process.output, selectors.EVENT_READ)
                if process.unsent:
                    selector.register(process.input, selectors.EVENT_WRITE)
            wait = min(process.deadline for process in self._processes) - time.monotonic()
            for key, _ in selector.select(min(max(wait, 0.0) + 0.01, _POLL_SECONDS)):
                for process in self._processes:
                    if process.unsent and key.fd == process.input:
                        process.send_more()

    def _wait_until_ready(self, process: _Process) -> None:
        process.expect_start()
        while not process.is_ready:
            self._wait_for_news()
            process.receive()
            process.check_start()

    def _started(self) -> _Process:
        return _Process.started(self.name, self.timeout_s)

    @contextlib.contextmanager
    def _closed_on_error(self) -> Iterator[None]:
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
        row: of the task that it works on; None while it has none.
        number: of that task, which its answer has to bear.
        score: the answer to that task; None until it is there.
        deadline: when its start or its task is over, by the monotonic clock.
        is_ready: it has imported what it needs.
        has_ended: it is gone, or has said what was not asked for and cannot be trusted with more.
        unsent: what the pipe to it has not taken yet.
    """

    child: subprocess.Popen[bytes]
    name: str
    timeout_s: float
    row: int | None = None
    number: int = -1
    score: Score | None = None
    deadline: float = math.inf
    is_ready: bool = False
    has_ended: bool = False
    unsent: bytes = b""
    _received: bytearray = field(default_factory=bytearray)

    @classmethod
    def started(cls, name: str, timeout_s: float) -> _Process:
        # Linux counts as the parent the thread that starts it
        dies_with = ["--die-with-parent"] if threading.current_thread() is threading.main_thread() else []
        command = [sys.executable, "-m", "megarl.rollout.reward_pool", name, repr(timeout_s), *dies_with]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        process = cls(child, name, timeout_s)
        os.set_blocking(process.input, False)
        os.set_blocking(process.output, False)
        return process

    @property
    def input(self) -> int:
        """File descriptor of what it is told."""
        assert self.child.stdin is not None
        return self.child.stdin.fileno()

    @property
    def output(self) -> int:
        """File descriptor of what it says."""
        assert self.child.stdout is not None
        return self.child.stdout.fileno()

    def expect_start(self) -> None:
        """Begin to wait for its start, if it has not been heard of."""
        if not self.is_ready:
            self.deadline = time.monotonic() + START_SECONDS

    def check_start(self) -> None:
        """Refuse a process that does not start, to be asked once what it has said was read.

        Raises:
            RewardError: it ended before it was ready, or takes too long.
        """
        if self.is_ready:
            return
        if self.has_ended:
            raise RewardError(f"a process for {REWARD} = {self.name!r} ended before it was ready, with {self.exit_code()}")
        if time.monotonic() > self.deadline:
            raise RewardError(f"a process for {REWARD} = {self.name!r} did not start within {START_SECONDS:g} s")

    def send(self, number: int, row: int, task: tuple[str, str]) -> None:
        """Give it a task; its time begins."""
        self.number, self.row, self.deadline = number, row, time.monotonic() + self.timeout_s + GRACE_SECONDS
        self.unsent = json.dumps([number, *task]).encode() + b"\n"
        self.send_more()

    def send_more(self) -> None:
        """Send what the pipe takes."""
        try:
            self.unsent = self.unsent[os.write(self.input, self.unsent) :]
        except BlockingIOError:
            pass
        # a process that has died is found where its answer is waited for
        except BrokenPipeError:
            self.unsent = b""

    def receive(self) -> None:
        """Read all that it has said, and see whether it is still there.

        Raises:
            ConfigError: it cannot import the function.
        """
        # before its output is read: what it said before it went is then all there
        is_gone = self.child.poll() is not None
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.output, 1 << 16):
                self._received += data
            is_gone = True
        *lines, rest = self._received.split(b"\n")
        self._received = rest
        for line in lines:
            self._take(*json.loads(line))
        self.has_ended |= is_gone

    def _take(self, number: int, kind: Any, what: Any) -> None:
        """Take one line."""
        if kind == _UNUSABLE:
            raise ConfigError([Violation(REWARD, self.name, what[0], what[1])])
        if kind == _READY and not self.is_ready:
            self.is_ready, self.deadline = True, math.inf
        elif self.row is None or number != self.number or self.score is not None:
            self.has_ended = True
        else:
            self.deadline = math.inf
            self.score = Score(what) if kind == _VALUE else Score(None, kind, what)

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
    if not abs(value) <= _LARGEST:
        return _ERROR, f"it returned {value}, and a finite number is wanted"
    return _VALUE, value


def main(name: str, timeout_s: float) -> None:
    """Serve tasks until standard input ends. What the function and its own processes find there is empty."""
    own = os.getpid()
    tasks = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    results = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    if isinstance(sys.stdout, io.TextIOWrapper):
        # what a model says need not be text that can be encoded
        sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)

    def tell(number: int, kind: str, what: Any) -> None:
        # a function may fork, and the child come back from it
        if os.getpid() != own:
            os._exit(0)
        line = json.dumps([number, kind, what]).encode() + b"\n"
        while line:
            line = line[results.write(line) :]

    try:
        function = get_reward(name)
        if function is math_verify and not _judges():
            tell(-1, _UNUSABLE, ["the installed math-verify says that 1 is not 1", "install the version that megarl's package asks for"])
            return
    except ConfigError as error:
        violation = error.violations[0]
        tell(-1, _UNUSABLE, [violation.bound, violation.fix])
        return
    tell(-1, _READY, None)
    for line in tasks:
        number, response, answer = json.loads(line)
        tell(number, *_score(function, response, answer, timeout_s))


def _judges() -> bool:
    """Whether mathematics can be judged; the imports for it take more time than an answer. A library that has changed would raise errors,
    which count as answers that are no mathematics."""
    return math_verify("1", "1") == 1.0


def _die_with_the_parent() -> None:
    """Ask Linux to kill this process when its parent is gone: a function that hangs would never see that standard input ended."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, 9)


if __name__ == "__main__":
    if "--die-with-parent" in sys.argv[3:]:
        _die_with_the_parent()
    main(sys.argv[1], float(sys.argv[2]))
