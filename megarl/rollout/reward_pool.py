"""A pool of worker processes that compute rewards, with a hard time limit for each score.

A reward function may raise, hang, print, leak memory or kill its process without harming the driver or other
samples. Each worker process runs this module as a program. It reads tasks from its standard input and writes
results, one JSON list per line, to the pipe that was its standard output. Whatever the function prints goes
to the driver's standard error, with known secrets redacted.

At the time limit the function first receives an alarm signal, because a process that survives need not import
its modules again. If the alarm has no effect, the process is killed after ``GRACE_SECONDS`` and replaced,
with all children in its process group.

While scoring is fast, several tasks are queued for a process, so that it need not wait for the driver between
two tasks; the time limit of a task starts when the previous result arrives. Each result carries the number of
its task, so that it cannot be mistaken for the result of another one.
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
"""Time limit in seconds for a process to start and import the reward functions, counted from when the pool
waits for it."""

STARTS = 3
"""The pool fails after this number of failed starts in a row. A single failure may have an outside cause,
such as the kernel's OOM killer."""

GRACE_SECONDS = 1.0
"""Time between the alarm signal and the kill, in seconds."""

# Poll interval in seconds for dead processes: if a forked child keeps the pipe open, the death of a process
# does not close it.
_POLL_SECONDS = 0.5

# Work queued for a process, in seconds. The driver may be busy or wait for a CPU core this long without
# leaving the process idle.
_AHEAD_SECONDS = 0.05

# Requested pipe capacity, so that most tasks are written in one call.
_PIPE_BYTES = 1 << 18

_STANDARD_ERROR = 2

# Largest number of float32, the type of rewards.
_LARGEST = struct.unpack(">f", b"\x7f\x7f\xff\xff")[0]

_READY, _VALUE, _UNUSABLE = "ready", "value", "unusable"
# Line that reports the start or end of an import, whose duration does not count against the task's time
# limit.
_IMPORTS = "imports"


# Error numbers that no response can cause: a server is unreachable, or the machine is out of resources.
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

# Signals that usually come from outside, such as from the kernel's OOM killer.
_SENT_FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})

# Maximum characters of a traceback; the end is kept.
_LONGEST_TRACE = 4000


@dataclass(slots=True)
class Score:
    """A reward function's score of one response.

    Attributes:
        value: the reward; None if there is none.
        fault: why a response has no reward: ``error`` (the function raised, returned no finite number, or its
            process died), ``timeout``, or ``outage``, which no response can cause (a scorer, the machine or
            an import failed). None if the response has a reward, or belongs to another reward function's
            task.
        message: description of the fault.
        trace: traceback of the function's exception; empty if the message is sufficient.
        accuracy: accuracy of the response, 0 to 1, if the function reports it in addition to the reward.
    """

    value: float | None
    fault: Literal["error", "timeout", "outage"] | None = None
    message: str = ""
    accuracy: float | None = None
    trace: str = field(default="", compare=False)


class RewardPool:
    """Worker processes that compute rewards. Each process can compute all reward functions of the pool.

    Args:
        specs: the reward functions, see ``get_reward``.
        processes: number of processes, at least 1.

    Raises:
        ConfigError: a user-defined function cannot be imported. Only the first process is awaited to find
            out.
        ValueError: the number of processes is less than 1.
    """

    def __init__(self, specs: Sequence[RewardSpec], processes: int) -> None:
        if processes < 1:
            raise ValueError(f"a pool of {processes} processes computes nothing. Fix: ask for at least 1")
        self.specs = tuple(specs)
        # Register the environment's secrets for redaction: the processes inherit the environment, and may
        # print it.
        learn(env.snapshot())
        self._sent = 0
        self._looked = -math.inf
        self._seconds: dict[int, float] = {}
        self._failed_starts = [0] * processes
        self._processes = [self._started() for _ in range(processes)]
        with self._closed_on_error():
            # Wait only if there are user-defined functions, whose import may fail. Otherwise the processes
            # start while the trainer's workers do.
            if any(is_import_path(spec.name) for spec in self.specs):
                self._wait_until_ready(self._processes[0])

    def score(self, tasks: Sequence[tuple[int, Task]]) -> list[Score]:
        """Return the scores of tasks, in order. Each task comes with the index of its reward function.

        Raises:
            RewardError: a process does not start.
            StateError: the pool is closed, possibly by an error of an earlier call.
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
                    # Read results before sending tasks: a result makes room in the queue, and a dead process
                    # must get no task.
                    self._hear(place, waiting, scores, given_twice)
                for process in self._processes:
                    self._give(process, tasks, waiting)
                if len(scores) == len(tasks):
                    break
                places = self._wait_for_news()
        return [scores[row] for row in range(len(tasks))]

    def close(self) -> None:
        """Kill the processes. The pool cannot be used afterwards."""
        for process in self._processes:
            process.kill()
        self._processes = []

    def _hear(self, place: int, waiting: deque[int], scores: dict[int, Score], given_twice: set[int]) -> None:
        """Handle the output of one process, and replace the process if it has died or exceeded the time
        limit.

        The output is read before the deadline is checked, so that a result which arrived in time does not
        count as a timeout only because the driver was delayed.
        """
        process = self._processes[place]
        process.receive()
        self._check_start(place)
        for given, score, seconds in process.finished:
            scores[given.row] = score
            # Average durations with exponential decay, because responses, and the time to score them, grow
            # during a run.
            self._seconds[given.which] = (self._seconds.get(given.which, seconds) + seconds) / 2
        process.finished.clear()
        if process.given and process.has_ended:
            row = process.given[0].row
            if row in given_twice:
                how = process.exit_code()
                kind: Literal["error", "outage"] = "outage" if process.was_killed else "error"
                scores[process.given.popleft().row] = Score(None, kind, f"its process died ({how})")
            # Retry once: the process may have died because of what an earlier response left behind.
            given_twice.add(row)
        elif process.given and time.monotonic() > process.deadline:
            late = process.given.popleft()
            scores[late.row] = _late(self.specs[late.which])
            process.has_ended = True
        if process.has_ended:
            # Requeue the dead process's tasks at the front, so that they do not wait for the whole batch
            # again.
            waiting.extendleft(given.row for given in reversed(process.given))
            process.kill()
            self._processes[place] = process = self._started()
            process.expect_start()

    def _check_start(self, place: int) -> None:
        """Count failed starts of a process, and tolerate fewer than ``STARTS`` in a row.

        Raises:
            RewardError: too many starts failed in a row, or the process takes too long to start.
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
        """Send tasks to a process while its queue has room."""
        while waiting and process.is_ready and self._has_room(process, len(waiting)):
            row = waiting.popleft()
            which, task = tasks[row]
            process.send(_Given(self._sent, row, which), task)
            self._sent += 1

    def _has_room(self, process: _Process, waiting: int) -> bool:
        """Return whether another task may be queued for a process. The queue holds at most ``_AHEAD_SECONDS``
        of work, and less near the end of the batch, so that the last tasks are spread over all processes."""
        if not process.given:
            return True
        if process.unsent or len(process.given) > waiting // (2 * len(self._processes)):
            return False
        # A reward without a measured duration counts as slow: one task at a time.
        return sum(self._seconds.get(given.which, math.inf) for given in process.given) < _AHEAD_SECONDS

    def _wait_for_news(self) -> Iterable[int]:
        """Block until a process has written output, can accept input, or has exceeded its deadline. Return
        the indices of such processes.

        Every ``_POLL_SECONDS`` all indices are returned, to detect deaths that cause no event.
        """
        files, places = select.poll(), dict[int, int]()
        for place, process in enumerate(self._processes):
            # select accepts no file descriptor above 1,023.
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
            # If a child holds its pipe open, the death of a process causes no event, so check all regularly.
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
    """Encode a reward specification for a worker process. A function object passed to ``megarl.train`` is
    included in pickled form."""
    pickled = pickled_object(spec.name)
    return [
        spec.name,
        dict(spec.options),
        spec.timeout_s,
        None if pickled is None else base64.b64encode(pickled).decode(),
    ]


def _read_told(line: bytes) -> list[RewardSpec]:
    """Decode the reward specifications from the first input line of a worker process.

    Raises:
        ConfigError: a function object passed to ``megarl.train`` cannot be unpickled here.
    """
    specs = []
    for name, options, timeout_s, pickled in json.loads(line):
        if pickled is not None:
            unpickle_object(name, base64.b64decode(pickled))
        specs.append(RewardSpec(name, options, timeout_s))
    return specs


@dataclass(frozen=True, slots=True)
class _Given:
    """A task that was sent to a process.

    Attributes:
        number: serial number among all tasks of the pool; the result must carry it.
        row: index of the task in the batch.
        which: index of its reward function.
    """

    number: int
    row: int
    which: int


@dataclass
class _Process:
    """The driver's side of one worker process.

    Attributes:
        child: the process.
        specs: the reward functions.
        teller: thread that forwards the process's standard error until the last writer has closed it.
        given: tasks in the process's queue; it works on the first one.
        finished: tasks finished since the pool last collected them, with their scores and durations in
            seconds.
        deadline: deadline of the start or of the first task, on the monotonic clock.
        is_ready: the process has imported the reward functions.
        has_ended: the process is gone, or has written an invalid line and is no longer trusted.
        unsent: bytes that the pipe to the process has not accepted yet.
        paused_s: seconds that the first task had left when it started to import a module; None while it is
            not importing.
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
        # Linux treats the starting thread as the parent, and other threads may end before the driver does.
        dies_with = ["--die-with-parent"] if threading.current_thread() is threading.main_thread() else []
        command = [sys.executable, "-m", "megarl.rollout.reward_pool", *dies_with]
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Unbuffered: a buffered read of standard error would wait for 64 KiB before it shows a line.
            bufsize=0,
            start_new_session=True,
        )
        assert child.stderr is not None
        teller = threading.Thread(
            target=_pass_on, args=(child.stderr,), name=f"prints of {child.pid}", daemon=True
        )
        teller.start()
        # Send this through the pipe, because a command line is visible to every user of the machine, and a
        # scorer's URL may contain a password.
        told = json.dumps(list(map(_as_told, specs))).encode() + b"\n"
        process = cls(child, specs, teller, unsent=told)
        # Non-blocking, so that neither a process that stops reading nor one that writes half a line can stall
        # the driver.
        os.set_blocking(process.input, False)
        os.set_blocking(process.output, False)
        if sys.platform == "linux":
            # May fail: Linux limits the total pipe memory per user.
            with contextlib.suppress(OSError):
                fcntl.fcntl(process.input, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        process.send_more()
        return process

    @property
    def input(self) -> int:
        """File descriptor to which the driver writes tasks."""
        assert self.child.stdin is not None
        return self.child.stdin.fileno()

    @property
    def output(self) -> int:
        """File descriptor from which the driver reads results."""
        assert self.child.stdout is not None
        return self.child.stdout.fileno()

    def expect_start(self) -> None:
        """Set the deadline for the start of the process, unless it is ready."""
        if not self.is_ready:
            self.deadline = time.monotonic() + START_SECONDS

    def check_start(self) -> None:
        """Check that the process has not failed to start. Call this after ``receive``.

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
        """Queue a task for the process. Its time limit starts when all earlier tasks are finished."""
        self.given.append(given)
        if len(self.given) == 1:
            self._begin()
        # ``default=str`` because a record's field may be a date or an array.
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
        """Start the time limit of the first queued task."""
        self.paused_s = None
        self.deadline = (
            time.monotonic() + self.specs[self.given[0].which].timeout_s + GRACE_SECONDS
            if self.given
            else math.inf
        )

    def _pause(self, begins: bool) -> None:
        """Suspend the first task's time limit while it imports a module (``begins``), or resume it. The
        import gets the time limit of a start instead."""
        now = time.monotonic()
        if begins:
            self.paused_s, self.deadline = self.deadline - now, now + START_SECONDS
        elif self.paused_s is not None:
            self.deadline, self.paused_s = now + self.paused_s, None

    def send_more(self) -> None:
        """Write as many pending bytes as the pipe accepts."""
        try:
            self.unsent = self.unsent[os.write(self.input, self.unsent) :]
        except BlockingIOError:
            pass
        # A dead process is detected later, when its result is awaited.
        except BrokenPipeError:
            self.unsent = b""

    def receive(self) -> None:
        """Read and handle all available output, and check whether the process is still running.

        Raises:
            ConfigError: the process cannot import a reward function.
        """
        # Check this before reading: if the process has ended, everything that it wrote can then be read.
        is_gone = self.child.poll() is not None
        # An empty read means end of file; an empty pipe raises BlockingIOError.
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.output, 1 << 16):
                self._received += data
            is_gone = True
        *lines, rest = self._received.split(b"\n")
        self._received = rest
        for line in lines:
            try:
                number, kind, what, seconds = json.loads(line)
            # Not a line of ours: the function has written to the result pipe.
            except (ValueError, TypeError):
                self.has_ended = True
            else:
                self._take(number, kind, what, seconds)
        self.has_ended |= is_gone

    def _take(self, number: int, kind: Any, what: Any, seconds: float) -> None:
        """Handle one line of output."""
        if kind == _UNUSABLE:
            raise ConfigError([Violation(REWARD, what[0], what[1], what[2])])
        if kind == _READY and not self.is_ready:
            self.is_ready, self.deadline = True, math.inf
        # A function that found the result pipe might forge results of other tasks; a wrong number ends its
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
        """Describe how the process ended, for messages."""
        try:
            code = self.child.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            # The process is still running.
            return "its output was closed or invalid"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    @property
    def was_killed(self) -> bool:
        """True if the process died of a signal that usually comes from outside, such as the OOM killer's."""
        code = self.child.poll()
        return code is not None and -code in _SENT_FROM_OUTSIDE

    def kill(self) -> None:
        """Kill the process and its process group."""
        with contextlib.suppress(ProcessLookupError):
            # Kill the process group (see start_new_session), which includes everything that the function has
            # started.
            os.killpg(self.child.pid, 9)
        self.child.wait()
        for stream in (self.child.stdin, self.child.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        # Bounded wait: a child that left the group may keep the stream open.
        self.teller.join(GRACE_SECONDS)


def _pass_on(stream: IO[bytes]) -> None:
    """Forward a process's standard error line by line, with secrets redacted, until the last writer closes
    it. Runs in a thread."""
    lines = LineRedactor()
    with stream:
        while data := stream.read(1 << 16):
            _show(lines.take(data))
    _show(lines.end())


def _show(text: str) -> None:
    """Write to file descriptor 2 directly. Python's ``sys.stderr`` has a lock, and a daemon thread that holds
    it at interpreter exit can crash the process."""
    said = text.encode(errors="backslashreplace")
    # The reader of standard error may be gone; scoring continues anyway.
    with contextlib.suppress(OSError):
        while said:
            said = said[os.write(_STANDARD_ERROR, said) :]


def _late(spec: RewardSpec) -> Score:
    return Score(None, "timeout" if spec.blames_answer else "outage", f"no reply within {spec.timeout_s:g} s")


def _place_of(error: BaseException) -> str:
    """Return the file and line that raised an exception as ``" (file, line N)"``."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return (
        "" if trace is None else f" ({Path(trace.tb_frame.f_code.co_filename).name}, line {trace.tb_lineno})"
    )


def _is_outage(error: BaseException | None) -> bool:
    """Return whether a reward function's exception cannot have been caused by a response: a remote service is
    unreachable, the machine is out of resources, or an import in the function's own code failed."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        # A chain of causes may be circular.
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
    """Return whether the failed import statement is in a file. Code of a response that the function executes
    has no file."""
    path = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = frame.f_code.co_filename
        # Skip the frames that import on behalf of others: those of Python and of ``_imports_told``.
        if not name.startswith("<frozen importlib") and name != __file__:
            path = name
    return os.path.exists(path)


def score_of(reward: Reward, task: Task, spec: RewardSpec) -> Score:
    """Score one task in this process, and turn exceptions into faults.

    Args:
        reward: the reward function.
        task: the task to score.
        spec: name of the reward function, and the time limit, which an alarm signal enforces.
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
    # A user-defined function may raise anything, including SystemExit.
    except BaseException as error:
        fault: Literal["error", "outage"] = "outage" if _is_outage(error) else "error"
        # Keep the traceback only if code is at fault: an unreachable scorer may recover, a missing module
        # does not.
        is_of_code = isinstance(error, ImportError) or (
            fault == "error" and not isinstance(error, RewardError)
        )
        trace = "".join(traceback.format_exception(error))[-_LONGEST_TRACE:] if is_of_code else ""
        return Score(None, fault, f"{type(error).__name__}: {error}{_place_of(error)}", trace=trace)
    # ``not <=`` instead of ``>`` also rejects NaN.
    if not abs(value) <= _LARGEST:
        return Score(None, "error", f"it returned {value}, and a finite number is wanted")
    if accuracy is None:
        return Score(value)
    if not 0 <= accuracy <= 1:
        return Score(None, "error", f"it returned acc = {accuracy}, and a number from 0 to 1 is wanted")
    return Score(value, accuracy=accuracy)


def main() -> None:
    """Run a worker process: read the reward functions from the first line of standard input, then serve tasks
    until end of file. The functions and their children get an empty standard input."""
    own = os.getpid()
    redact_log(env.snapshot())
    tasks = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    # Move the result pipe to another descriptor, so that whatever the function prints goes to standard error
    # and is never read as a result.
    results = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A model's text may contain lone surrogates, which cannot be encoded.
        sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)

    def tell(number: int, kind: str, what: Any, seconds: float = 0.0) -> None:
        # A forked child of the function may return into this loop; it must not write results.
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
    # Exclude the imported objects from garbage collection, which would otherwise scan them again every few
    # tasks.
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
    """Report imports in the context, so that the driver can suspend the time limit: otherwise the first
    response would pay for the import, and time out.

    Args:
        tell: called with True when an import starts, and with False when it is done. Nested imports are not
            reported separately.
    """
    original, main, importing = builtins.__import__, threading.current_thread(), False

    def imported(name: str, *arguments: Any, **named: Any) -> Any:
        nonlocal importing
        wanted = arguments[2] if len(arguments) > 2 else named.get("fromlist")
        if importing or _is_there(name, wanted or ()) or threading.current_thread() is not main:
            return original(name, *arguments, **named)
        importing = True
        try:
            # Suspend the alarm too, so that it does not fire during the import.
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
    """Return whether a module is already imported and has all names in ``wanted``. A missing name may be a
    submodule that the package imports on demand."""
    return name in sys.modules and all(each in vars(sys.modules[name]) for each in wanted if each != "*")


def _judges() -> bool:
    """Check that math-verify works. An incompatible version would raise for each response, which would count
    as incorrect. This also imports its modules before the first task."""
    return math_verify("1", "1") == 1.0


def _die_with_the_parent() -> None:
    """Ask Linux to kill this process when its parent ends, because a function that hangs never sees end of
    file on standard input."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, 9)


if __name__ == "__main__":
    if "--die-with-parent" in sys.argv[1:]:
        _die_with_the_parent()
    main()
