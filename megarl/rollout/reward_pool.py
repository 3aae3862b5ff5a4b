"""A pool of processes that compute rewards, with a hard time limit for each reward of a sample.

A reward function may raise, hang, print, leak or kill its process without harming the driver and the other
samples. Each process is this module run as a program: it reads tasks from its standard input, and writes
results to what was its standard output, one JSON list per line. What the function prints goes to the driver's
standard error, without the secrets that the driver knows. When the time limit is over, the function first
gets an alarm, since a process that continues need not import its modules again. If it does not react, it is
killed a moment later, and another process replaces it. If responses take little time, several tasks are sent
to a process ahead, so that it need not wait for the driver after each; the time of a task begins when the
task before it is answered. Each answer carries the number of its task, so that it cannot be taken for the
answer to another one. Threads and children of its process group that a function leaves behind end with its
process.
"""

from __future__ import annotations

import base64
import builtins
import contextlib
import ctypes
import errno
import fcntl
import functools
import gc
import io
import json
import logging
import math
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from megarl import env
from megarl.config.environments import REWARD
from megarl.errors import ConfigError, RewardError, RewardOutageError, StateError, Violation
from megarl.import_path import is_import_path, pickled_object, unpickle_object
from megarl.redaction import LineRedactor, learn, redact_log, redacted_text
from megarl.rollout.mathematics import JudgementTimeoutError, math_verify
from megarl.rollout.mathematics import fault_of_reference as fault_of_mathematics
from megarl.rollout.rewards import Reward, RewardSpec, Task, VerdictError, get_reward, verdict
from megarl.time_limit import OutOfTimeError, time_limit, unlimited

logger = logging.getLogger(__name__)

START_SECONDS = 300.0
"""Maximum seconds that a process may take to start and to import what the function needs, from when the pool
waits for it."""

STARTS = 3
"""Number of failed starts in a row at which the pool gives up. Something else may have killed a starting
process, such as the kernel for lack of memory."""

GRACE_SECONDS = 1.0
"""Seconds between the alarm and the kill."""

# Interval at which each process is checked for having ended. If a forked child holds the pipe open, the end
# of the process does not close it.
_POLL_SECONDS = 0.5

# Amount of work that is queued for a process, in seconds. The driver may be busy elsewhere, or wait for a
# core, for this long without leaving the process idle.
_AHEAD_SECONDS = 0.05

# Capacity of a pipe to a process, if Linux grants it, so that the driver need not come back for the rest of
# an answer.
_PIPE_BYTES = 1 << 18

_STANDARD_ERROR = 2

# Largest number of float32, the type of rewards.
_LARGEST = struct.unpack(">f", b"\x7f\x7f\xff\xff")[0]

_READY, _VALUE, _UNUSABLE = "ready", "value", "unusable"
# Kind of a line that reports whether the present task's function is importing a module, because an import
# does not count against the task's time.
_IMPORTS = "imports"


# Errors of the system that no response can cause: a server does not answer, or the machine is full.
_OF_THE_MACHINE = frozenset(
    {
        *(
            errno.ECONNREFUSED,
            errno.EHOSTUNREACH,
            errno.ENETUNREACH,
            errno.EHOSTDOWN,
            errno.ENETDOWN,
            errno.ETIMEDOUT,
        ),
        *(errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EIO, errno.ESTALE),
    }
)

# Signals by which others end a process, such as the kernel if memory runs out.
_SENT_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})

# Number of characters that are kept from the end of a traceback.
_LONGEST_TRACE = 4000


@dataclass(slots=True)
class Score:
    """A reward function's score of one response.

    Attributes:
        value: the reward; None if there is none.
        fault: why there is none although the response should have one: ``error`` (the function raised,
            returned no finite number, or its process died), ``timeout``, or ``outage``, which no response can
            cause (a scorer, the machine or an import failed).
        message: the fault in words.
        trace: traceback of the exception that the function raised; empty if the message is sufficient.
        accuracy: accuracy of the response, 0 to 1, if the function reports it in addition to the reward.
    """

    value: float | None
    fault: Literal["error", "timeout", "outage"] | None = None
    message: str = ""
    accuracy: float | None = None
    trace: str = field(default="", compare=False)


class RewardPool:
    """Processes that compute some reward functions; each process computes all of them.

    Args:
        specs: the functions, see ``get_reward``.
        processes: number of processes, at least 1.

    Raises:
        ConfigError: a user's function cannot be imported. The first process finds this out, and the pool
            waits for it.
        ValueError: the number of processes is less than 1.
    """

    def __init__(self, specs: Sequence[RewardSpec], processes: int) -> None:
        if processes < 1:
            raise ValueError(f"a pool of {processes} processes computes nothing. Fix: ask for at least 1")
        self.specs = tuple(specs)
        # Learn the secrets of the environment for redaction: the processes inherit it, and may print parts of
        # it.
        learn(env.snapshot())
        self._sent = 0
        self._looked = -math.inf
        self._seconds: dict[int, float] = {}
        self._failed_starts = [0] * processes
        self._processes = [self._started() for _ in range(processes)]
        with self._closed_on_error():
            # Wait only for imported functions. A built-in function always exists, so that its processes may
            # start while the workers do.
            if any(is_import_path(spec.name) for spec in self.specs):
                self._wait_until_ready(self._processes[0])

    def score(self, tasks: Sequence[tuple[int, Task]]) -> list[Score]:
        """Return the score of each task, in order. A task is given with the number of its reward.

        Raises:
            RewardError: a process does not start, or ends before it is ready.
            StateError: the pool is closed; an error of an earlier call closes it too.
        """
        if not self._processes:
            raise StateError("the pool of rewards is closed. Fix: create a new one")
        scores: dict[int, Score] = {}
        waiting, given_twice = deque(range(len(tasks))), set[int]()
        with self._closed_on_error():
            for process in self._processes:
                process.expect_start()
            places: Iterable[int] = range(len(self._processes))
            while True:
                for place in places:
                    # Receive answers before more tasks are given: an answer makes room, and a process that
                    # died must not receive more.
                    self._hear(place, waiting, scores, given_twice)
                for process in self._processes:
                    self._give(process, tasks, waiting)
                if len(scores) == len(tasks):
                    break
                places = self._wait_for_news()
        return [scores[row] for row in range(len(tasks))]

    def close(self) -> None:
        """End the processes. The pool cannot be used afterwards."""
        for process in self._processes:
            process.kill()
        self._processes = []

    def _hear(self, place: int, waiting: deque[int], scores: dict[int, Score], given_twice: set[int]) -> None:
        """Process the output of one process, and replace the process if it is no longer usable.

        Its output is read before its deadline is checked, so that an answer which arrived in time does not
        count as late after a delay of the driver.
        """
        process = self._processes[place]
        process.receive()
        self._check_start(place)
        for given, score, seconds in process.finished:
            scores[given.row] = score
            # Keep a mean that weighs recent calls most, because responses, and with them the time to score
            # one, grow longer in a run.
            self._seconds[given.which] = (self._seconds.get(given.which, seconds) + seconds) / 2
        process.finished.clear()
        if process.given and process.has_ended:
            row = process.given[0].row
            if row in given_twice:
                how = process.exit_code()
                kind: Literal["error", "outage"] = "outage" if process.was_killed else "error"
                scores[process.given.popleft().row] = Score(None, kind, f"its process died ({how})")
            # Retry once, because the process may have died of what an earlier response left behind.
            given_twice.add(row)
        elif process.given and time.monotonic() > process.deadline:
            late = process.given.popleft()
            scores[late.row] = _late(self.specs[late.which])
            process.has_ended = True
        if process.has_ended:
            # Put the tasks of a process that died at the front, in their order, so that they do not wait
            # behind the whole batch again.
            waiting.extendleft(given.row for given in reversed(process.given))
            process.kill()
            self._processes[place] = process = self._started()
            process.expect_start()

    def _check_start(self, place: int) -> None:
        """Count a process that ended before it was ready.

        Raises:
            RewardError: the process is the last of ``STARTS`` in a row that ended, or takes too long to
                start.
        """
        process = self._processes[place]
        if process.is_ready:
            self._failed_starts[place] = 0
        elif process.has_ended and self._failed_starts[place] + 1 < STARTS:
            self._failed_starts[place] += 1
            logger.warning(
                "a reward process ended before it was ready, with %s; another replaces it",
                process.exit_code(),
            )
        else:
            process.check_start()

    def _give(self, process: _Process, tasks: Sequence[tuple[int, Task]], waiting: deque[int]) -> None:
        """Give a process tasks as long as it has room for them."""
        while waiting and process.is_ready and self._has_room(process, len(waiting)):
            row = waiting.popleft()
            which, task = tasks[row]
            process.send(_Given(self._sent, row, which), task)
            self._sent += 1

    def _has_room(self, process: _Process, waiting: int) -> bool:
        """Return whether another task may be queued for a process. The queue holds ``_AHEAD_SECONDS`` of
        work, and less towards the end of the batch."""
        if not process.given:
            return True
        if process.unsent or len(process.given) > waiting // (2 * len(self._processes)):
            return False
        # A reward whose time is not known yet counts as slow: its process gets one task at a time.
        return sum(self._seconds.get(given.which, math.inf) for given in process.given) < _AHEAD_SECONDS

    def _wait_for_news(self) -> Iterable[int]:
        """Sleep until a process has sent output, can accept more input, or has exceeded its deadline; return
        the indices of such processes.

        Return all indices if ``_POLL_SECONDS`` have passed since all were last returned.
        """
        files, places = select.poll(), dict[int, int]()
        for place, process in enumerate(self._processes):
            # Use poll instead of select, which accepts no descriptor above 1,023.
            files.register(process.output, select.POLLIN)
            places[process.output] = place
            if process.unsent:
                files.register(process.input, select.POLLOUT)
                places[process.input] = place
        wait = min(process.deadline for process in self._processes) - time.monotonic()
        news = {places[file] for file, _ in files.poll(1000 * min(max(wait, 0.0) + 0.01, _POLL_SECONDS))}
        now = time.monotonic()
        if now > self._looked + _POLL_SECONDS:
            self._looked = now
            # Check all processes from time to time: if a child holds its pipe open, the death of a process
            # causes no event.
            news = set(range(len(self._processes)))
        for place, process in enumerate(self._processes):
            if process.unsent and place in news:
                process.send_more()
            if now > process.deadline:
                news.add(place)
        return news

    def _wait_until_ready(self, process: _Process) -> None:
        process.expect_start()
        while not process.is_ready:
            self._wait_for_news()
            process.receive()
            process.check_start()

    def _started(self) -> _Process:
        return _Process.started(self.specs)

    @contextlib.contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise


def _as_told(spec: RewardSpec) -> list[Any]:
    """Encode a reward for a process. The function itself is included if ``megarl.train`` was given one."""
    pickled = pickled_object(spec.name)
    return [
        spec.name,
        dict(spec.options),
        spec.timeout_s,
        None if pickled is None else base64.b64encode(pickled).decode(),
    ]


def _read_told(line: bytes) -> list[RewardSpec]:
    """Decode the rewards from the first line that a process gets.

    Raises:
        ConfigError: a function that ``megarl.train`` was given cannot be unpickled here.
    """
    specs = []
    for name, options, timeout_s, pickled in json.loads(line):
        if pickled is not None:
            unpickle_object(name, base64.b64decode(pickled))
        specs.append(RewardSpec(name, options, timeout_s))
    return specs


@dataclass(frozen=True, slots=True)
class _Given:
    """A task that was given to a process.

    Attributes:
        number: number of the task among all that the pool has sent, which its answer must carry.
        row: row of the task in the batch.
        which: number of its reward.
    """

    number: int
    row: int
    which: int


@dataclass
class _Process:
    """One process of a pool.

    Attributes:
        child: the process.
        specs: specifications of the reward functions.
        teller: thread that forwards what the process prints, until no process can print any more.
        given: the tasks that the process has; it works on the first one.
        finished: the tasks answered since the pool last looked, with their scores and the seconds that each
            took.
        deadline: time limit of the start or of the first task, by the monotonic clock.
        is_ready: the process has imported what it needs.
        has_ended: the process is gone, or has sent an unexpected line and cannot be trusted any more.
        unsent: bytes that the pipe to the process has not accepted yet.
        paused_s: seconds that the first task had left when it began an import; None while it is not
            importing.
    """

    child: subprocess.Popen[bytes]
    specs: Sequence[RewardSpec]
    teller: threading.Thread
    given: deque[_Given] = field(default_factory=deque)
    finished: list[tuple[_Given, Score, float]] = field(default_factory=list)
    deadline: float = math.inf
    is_ready: bool = False
    has_ended: bool = False
    unsent: bytes = b""
    paused_s: float | None = None
    _received: bytearray = field(default_factory=bytearray)

    @classmethod
    def started(cls, specs: Sequence[RewardSpec]) -> _Process:
        # Request this only in the main thread, because Linux counts the thread that starts the process as the
        # parent.
        dies_with = ["--die-with-parent"] if threading.current_thread() is threading.main_thread() else []
        command = [sys.executable, "-m", "megarl.rollout.reward_pool", *dies_with]
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Do not buffer: a buffered read of standard error would wait for 64 KiB before a line is shown.
            bufsize=0,
            start_new_session=True,
        )
        assert child.stderr is not None
        teller = threading.Thread(
            target=_pass_on, args=(child.stderr,), name=f"prints of {child.pid}", daemon=True
        )
        teller.start()
        # Send this through the pipe and not on the command line, which everybody on the machine may read: an
        # address may hold a password.
        told = json.dumps(list(map(_as_told, specs))).encode() + b"\n"
        process = cls(child, specs, teller, unsent=told)
        # Do not block: neither a process that does not read nor one that writes half a line may stop the
        # driver.
        os.set_blocking(process.input, False)
        os.set_blocking(process.output, False)
        if sys.platform == "linux":
            # This may fail, because a user has a limit for all pipes together.
            with contextlib.suppress(OSError):
                fcntl.fcntl(process.input, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        process.send_more()
        return process

    @property
    def input(self) -> int:
        """File descriptor that the driver writes tasks to."""
        assert self.child.stdin is not None
        return self.child.stdin.fileno()

    @property
    def output(self) -> int:
        """File descriptor that the driver reads results from."""
        assert self.child.stdout is not None
        return self.child.stdout.fileno()

    def expect_start(self) -> None:
        """Set the deadline of the process's start, unless the process is ready."""
        if not self.is_ready:
            self.deadline = time.monotonic() + START_SECONDS

    def check_start(self) -> None:
        """Raise if the process fails to start. Call this after its output has been read.

        Raises:
            RewardError: the process ended before it was ready, or takes too long.
        """
        if self.is_ready:
            return
        if self.has_ended:
            raise RewardError(
                f"a process for {REWARD} = {self._names()} ended before it was ready, with {self.exit_code()}"
            )
        if time.monotonic() > self.deadline:
            raise RewardError(
                f"a process for {REWARD} = {self._names()} did not start within {START_SECONDS:g} s"
            )

    def send(self, given: _Given, task: Task) -> None:
        """Give the process a task. The task's time begins when the tasks before it are answered."""
        self.given.append(given)
        if len(self.given) == 1:
            self._begin()
        # Convert other types, because a field of a record may be a date or an array.
        line = [
            given.number,
            given.which,
            task.response,
            task.answer,
            task.length,
            task.prompt,
            task.record,
            task.is_chat,
        ]
        self.unsent += json.dumps(line, default=str).encode() + b"\n"
        self.send_more()

    def _begin(self) -> None:
        """Set the deadline for the first task, or to infinity if there is none."""
        self.paused_s = None
        self.deadline = (
            time.monotonic() + self.specs[self.given[0].which].timeout_s + GRACE_SECONDS
            if self.given
            else math.inf
        )

    def _pause(self, begins: bool) -> None:
        """Exclude an import from the first task's time limit, and limit it like the start of a process
        instead."""
        now = time.monotonic()
        if begins:
            self.paused_s, self.deadline = self.deadline - now, now + START_SECONDS
        elif self.paused_s is not None:
            self.deadline, self.paused_s = now + self.paused_s, None

    def send_more(self) -> None:
        """Send as much as the pipe accepts."""
        try:
            self.unsent = self.unsent[os.write(self.input, self.unsent) :]
        except BlockingIOError:
            pass
        # A process that has died is detected where its answer is awaited.
        except BrokenPipeError:
            self.unsent = b""

    def receive(self) -> None:
        """Read and process all output of the process, and check whether it is still running.

        Raises:
            ConfigError: the process cannot import the function.
        """
        # Check this before the output is read: if the process has ended, everything that it wrote can then be
        # read.
        is_gone = self.child.poll() is not None
        # An empty read means the end of the file; an empty pipe raises an error instead.
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.output, 1 << 16):
                self._received += data
            is_gone = True
        *lines, rest = self._received.split(b"\n")
        self._received = rest
        for line in lines:
            try:
                number, kind, what, seconds = json.loads(line)
            # The function has written to a file descriptor that is not its own.
            except (ValueError, TypeError):
                self.has_ended = True
            else:
                self._take(number, kind, what, seconds)
        self.has_ended |= is_gone

    def _take(self, number: int, kind: Any, what: Any, seconds: float) -> None:
        """Process one line of output."""
        if kind == _UNUSABLE:
            raise ConfigError([Violation(REWARD, what[0], what[1], what[2])])
        if kind == _READY and not self.is_ready:
            self.is_ready, self.deadline = True, math.inf
        # A function that found the pipe might answer for other tasks, so that an incorrect number ends its
        # process.
        elif self.has_ended or not self.given or number != self.given[0].number:
            self.has_ended = True
        elif kind == _IMPORTS:
            self._pause(bool(what))
        else:
            if kind == _VALUE:
                score = Score(what[0], accuracy=what[1])
            else:
                score = Score(None, kind, redacted_text(what[0]), trace=redacted_text(what[1]))
            self.finished.append((self.given.popleft(), score, seconds))
            self._begin()

    def _names(self) -> str:
        return ", ".join(repr(spec.name) for spec in self.specs)

    def exit_code(self) -> str:
        """Return in words how the process ended."""
        try:
            code = self.child.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            # The process is still running.
            return "its output was closed or invalid"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    @property
    def was_killed(self) -> bool:
        """True if something outside the pool has killed the process."""
        code = self.child.poll()
        return code is not None and -code in _SENT_FROM_OUTSIDE

    def kill(self) -> None:
        """Kill the process and its process group."""
        with contextlib.suppress(ProcessLookupError):
            # Kill the whole group, which start_new_session made, so that everything that the function has
            # started ends too.
            os.killpg(self.child.pid, 9)
        self.child.wait()
        for stream in (self.child.stdin, self.child.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        # Limit the wait: a child of the function that left the group may keep the stream open.
        self.teller.join(GRACE_SECONDS)


def _pass_on(stream: IO[bytes]) -> None:
    """Forward what a process writes to standard error, line by line, until its last writer is gone. This is
    run by a thread."""
    lines = LineRedactor()
    with stream:
        while data := stream.read(1 << 16):
            _show(lines.take(data))
    _show(lines.end())


def _show(text: str) -> None:
    """Write to standard error without Python's own stream, whose lock a thread must not hold when the program
    ends."""
    said = text.encode(errors="backslashreplace")
    # Ignore errors: the reader of standard error may be gone, but the processes have to continue.
    with contextlib.suppress(OSError):
        while said:
            said = said[os.write(_STANDARD_ERROR, said) :]


def _late(spec: RewardSpec) -> Score:
    return Score(None, "timeout" if spec.blames_answer else "outage", f"no reply within {spec.timeout_s:g} s")


def _place_of(error: BaseException) -> str:
    """Return the file and line that raised an error, in parentheses."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return (
        "" if trace is None else f" ({Path(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno})"
    )


def _is_outage(error: BaseException | None) -> bool:
    """Return whether an exception of a reward function cannot have been caused by a response, because a
    remote service does not answer, the machine is full, or an import of the function failed."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        # Remember the errors, because a chain of causes may be circular.
        seen.add(id(error))
        if isinstance(error, RewardOutageError | socket.gaierror) or (
            isinstance(error, OSError) and error.errno in _OF_THE_MACHINE
        ):
            return True
        if isinstance(error, ImportError):
            return _is_of_a_file(error)
        reason = getattr(error, "reason", None)
        error = (
            error.__cause__ or error.__context__ or (reason if isinstance(reason, BaseException) else None)
        )
    return False


def _is_of_a_file(error: ImportError) -> bool:
    """Return whether the failed import is in a file. A response's program that a function runs has no
    file."""
    path = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = frame.f_code.co_filename
        # Skip the frames that import on behalf of others: those of Python and of ``_imports_told``.
        if not name.startswith("<frozen importlib") and name != __file__:
            path = name
    return os.path.exists(path)


def score_of(reward: Reward, task: Task, spec: RewardSpec) -> Score:
    """Score a task by a reward in this process.

    Args:
        reward: the reward.
        task: the task to score.
        spec: specification of the reward, with the seconds after which an alarm is raised.
    """
    try:
        if reward.is_immediate:
            judged = reward.judge(task)
        else:
            with time_limit(spec.timeout_s):
                judged = reward.judge(task)
        if judged is None and reward.may_abstain:
            return Score(None)
        value, accuracy = verdict(judged)
    except (OutOfTimeError, JudgementTimeoutError):
        return _late(spec)
    except KeyboardInterrupt:
        raise
    except VerdictError as error:
        return Score(None, "error", str(error))
    # Catch every exception, including SystemExit, because a user's function may raise any.
    except BaseException as error:
        fault: Literal["error", "outage"] = "outage" if _is_outage(error) else "error"
        # A scorer that is unreachable may come back, whereas a missing module does not.
        is_of_code = isinstance(error, ImportError) or (
            fault == "error" and not isinstance(error, RewardError)
        )
        trace = "".join(traceback.format_exception(error))[-_LONGEST_TRACE:] if is_of_code else ""
        return Score(None, fault, f"{type(error).__name__}: {error}{_place_of(error)}", trace=trace)
    # Write "not <=" instead of ">", so that NaN is refused too.
    if not abs(value) <= _LARGEST:
        return Score(None, "error", f"it returned {value}, and a finite number is wanted")
    if accuracy is None:
        return Score(value)
    if not 0 <= accuracy <= 1:
        return Score(None, "error", f"it returned acc = {accuracy}, and a number from 0 to 1 is wanted")
    return Score(value, accuracy=accuracy)


def main() -> None:
    """Serve tasks until end of file on standard input, whose first line has the rewards. The functions and
    their child processes get an empty standard input."""
    own = os.getpid()
    redact_log(env.snapshot())
    tasks = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    # Duplicate the descriptor for answers: what the function prints then goes to standard error, and cannot
    # be taken for an answer.
    results = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Escape what cannot be encoded, because a model's text may contain lone surrogates.
        sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)

    def tell(number: int, kind: str, what: Any, seconds: float = 0.0) -> None:
        # A function may fork, and its child may return to this loop.
        if os.getpid() != own:
            os._exit(0)
        line = json.dumps([number, kind, what, seconds]).encode() + b"\n"
        while line:
            line = line[results.write(line) :]

    try:
        specs = _read_told(tasks.readline())
        rewards = list(map(get_reward, specs))
    except ConfigError as error:
        violation = error.violations[0]
        tell(-1, _UNUSABLE, [violation.value, violation.bound, violation.fix])
        return
    for spec, reward in zip(specs, rewards, strict=True):
        if reward.fault_of_reference is fault_of_mathematics and not _judges():
            fix = "install the version that megarl's package asks for"
            tell(-1, _UNUSABLE, [spec.name, "the installed math-verify says that 1 is not 1", fix])
            return
    # Freeze the imported objects, which stay, so that the garbage collector does not search them after every
    # few answers.
    gc.freeze()
    tell(-1, _READY, None)
    for line in tasks:
        number, which, *task = json.loads(line)
        begun = time.monotonic()
        with _imports_told(functools.partial(tell, number, _IMPORTS)):
            score = score_of(rewards[which], Task(*task), specs[which])
        seconds = time.monotonic() - begun
        if score.fault is None:
            tell(number, _VALUE, [score.value, score.accuracy], seconds)
        else:
            tell(number, score.fault, [score.message, score.trace], seconds)


@contextlib.contextmanager
def _imports_told(tell: Callable[[bool], None]) -> Iterator[None]:
    """Stop the clock while the context imports a module for the first time. Otherwise the first response
    alone would pay for the import, and time out.

    Args:
        tell: called with True when an import begins, and with False when it is over. Nested imports are part
            of the outer one.
    """
    original, main, importing = builtins.__import__, threading.current_thread(), False

    def imported(name: str, *arguments: Any, **named: Any) -> Any:
        nonlocal importing
        wanted = arguments[2] if len(arguments) > 2 else named.get("fromlist")
        if importing or _is_there(name, wanted or ()) or threading.current_thread() is not main:
            return original(name, *arguments, **named)
        importing = True
        try:
            # Suspend the time limit, so that its alarm does not fire while the clock is stopped.
            with unlimited():
                tell(True)
                try:
                    return original(name, *arguments, **named)
                finally:
                    tell(False)
        finally:
            importing = False

    builtins.__import__ = imported
    try:
        yield
    finally:
        builtins.__import__ = original


def _is_there(name: str, wanted: Iterable[str]) -> bool:
    """Return whether a module has been imported, with all names that are wanted from it; a package may import
    its submodules on demand."""
    return name in sys.modules and all(each in vars(sys.modules[name]) for each in wanted if each != "*")


def _judges() -> bool:
    """Return whether mathematics can be scored; the imports for it take longer than a response. A library
    that has changed would raise errors, which would count as responses without mathematics."""
    return math_verify("1", "1") == 1.0


def _die_with_the_parent() -> None:
    """Ask Linux to kill this process when its parent ends. A function that hangs would never notice end of
    file on standard input."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, 9)


if __name__ == "__main__":
    if "--die-with-parent" in sys.argv[1:]:
        _die_with_the_parent()
    main()
