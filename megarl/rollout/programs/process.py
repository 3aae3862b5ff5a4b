"""A program in a separate process, within limits, under a supervisor.

Limits of a process are those of Linux (``setrlimit``): address space, file size, open files, timers. A
supervisor checks every few milliseconds the number of processes and threads, their total memory and the
elapsed time, and at the end kills everything that the program started. In the sandbox (``sandbox``) no other
memory is available, and the program is the first process of its namespace, so that all others end with it.
Outside of the sandbox a program can reach the network, write files, end the supervisor, and use memory that
belongs to no process; ``env.isolation`` determines whether that is allowed.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO

from megarl.errors import RewardError, RewardOutageError
from megarl.rollout.programs import sandbox, system_calls

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.005
_START_SECONDS = 120.0
_OPEN_FILES = 64
# Maximum number of pending signals and timers of the process's user, which take memory of the kernel.
_WAITING_SIGNALS = 256

LONGEST_OUTPUT = 1 << 24
"""Maximum number of bytes of a program's output; a longer output is incorrect."""

STOPPED = 125
"""Exit code of a supervisor that has killed its program."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a program.

    Attributes:
        seconds: time for one test.
        memory_mb: address space of each of its processes, and resident memory of all together.
        processes: number of processes and threads at a time.
        file_mb: size of all files that it writes.
        isolated: whether it runs in the sandbox.
        bubblewrap: path of the bubblewrap that creates the sandbox; empty if the run creates it itself.
    """

    seconds: float = 4.0
    memory_mb: int = 512
    processes: int = 16
    file_mb: int = 16
    isolated: bool = True
    bubblewrap: str = ""


def python_command(source: str, *arguments: str) -> list[str]:
    """Return the command that runs a text as a Python program, without installed packages and their start-up
    code."""
    return [sys.executable, "-S", "-P", "-c", source, *arguments]


@contextlib.contextmanager
def file_of(text: str = "") -> Iterator[IO[bytes]]:
    """Yield an unnamed file with the given text."""
    with tempfile.TemporaryFile() as file:
        file.write(text.encode("utf-8", "backslashreplace"))
        file.seek(0)
        yield file


def text_in(file: IO[bytes]) -> str:
    """Return the whole content of a file; empty if it is too long."""
    if os.fstat(file.fileno()).st_size > LONGEST_OUTPUT:
        return ""
    file.seek(0)
    return file.read().decode("utf-8", "replace")


def isolation() -> tuple[str | None, str]:
    """Return why programs cannot be isolated here, or None; and the value of ``Limits.bubblewrap`` with which
    they can."""
    fault = fault_of_isolation()
    other = sandbox.found_bubblewrap() if fault else ""
    return (None, other) if other and fault_of_isolation(other) is None else (fault, "")


@lru_cache(maxsize=2)
def fault_of_isolation(bubblewrap: str = "") -> str | None:
    """Return why programs cannot be isolated here, or None. This runs a test program, and logs once if
    isolation works.

    Args:
        bubblewrap: as in ``Limits``.
    """
    if sys.platform != "linux":
        return "only Linux has namespaces"
    # Test in a separate process: this one may have threads, and with threads no Python should run between
    # fork and exec.
    command = [sys.executable, "-m", "megarl.rollout.programs", bubblewrap]
    try:
        found = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_START_SECONDS
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {error}"
    if found.returncode:
        return (found.stderr.strip().splitlines() or [f"exit code {found.returncode}"])[-1]
    if found.stdout.strip():
        return found.stdout.strip()
    by = f" that {bubblewrap} makes" if bubblewrap else ""
    logger.info(
        "programs of the model run in a sandbox%s: no network, no other processes, no files but those of "
        "Python",
        by,
    )
    return None


def notice_of_user() -> str:
    """Return a warning if the run's user is root, and an empty text for any other user."""
    if os.geteuid() != 0:
        return ""
    who = "65534" if sandbox.planned_root().changes_user else "of this container's root, without capabilities"
    return (
        f"the run is root. Programs of the model run in a sandbox, as user {who}; but a hole in "
        "the kernel would give them the complete machine. Start the run as another user"
    )


def fault_here(bubblewrap: str) -> str | None:
    """Return why this process cannot run a program that does nothing in the sandbox, or None.

    Args:
        bubblewrap: as in ``Limits``.
    """
    with file_of() as nothing, file_of() as written:
        try:
            limits = Limits(seconds=60.0, bubblewrap=bubblewrap)
            with running(python_command("import json, socket"), limits, nothing, written) as process:
                code = process.wait()
        except (OSError, RewardError) as error:
            return str(error)
    return f"a program that does nothing ended with exit code {code} in the sandbox" if code else None


@contextlib.contextmanager
def running(
    command: Sequence[str],
    limits: Limits,
    given: IO[bytes],
    written: IO[bytes],
    passed: tuple[int, ...] = (),
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program within limits. Its exit code is ``STOPPED`` if it was killed for exceeding a limit.

    When the context exits, the program and everything that it started have ended.

    Args:
        command: the command with its arguments.
        limits: limits of the program.
        given: file for its standard input.
        written: file for its standard output.
        passed: additional file descriptors that it gets.

    Raises:
        RewardError: the program cannot be started.
    """
    # Pass nothing of the run's own environment, which may hold credentials. Fix the hash seed, so that equal
    # programs write equal sets. Use one OpenMP thread, because threads of a library count as the program's
    # own.
    environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    with contextlib.ExitStack() as stack:
        refusal, status = stack.enter_context(file_of()), stack.enter_context(file_of())
        parent = os.getpid()
        try:
            root = sandbox.planned_root() if limits.isolated else None
            if root and limits.bubblewrap:
                rules = stack.enter_context(_filter_file(root))
                ours = (rules.fileno(), status.fileno())
                command, passed = (
                    sandbox.with_bubblewrap(limits.bubblewrap, command, root, limits.file_mb, *ours),
                    (*passed, *ours),
                )
                root, work = None, "/"
            else:
                work = (
                    sandbox.WORK
                    if root
                    else stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
                )
            process = subprocess.Popen(
                command,
                stdin=given,
                stdout=written,
                # bubblewrap writes to standard error why it could not start the program.
                stderr=refusal if limits.bubblewrap else subprocess.DEVNULL,
                env=environment,
                pass_fds=passed,
                start_new_session=True,
                preexec_fn=lambda: _supervise(limits, root, work, parent, refusal.fileno()),
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise _no_program(text_in(refusal) or f"{type(error).__name__}: {error}") from error
        try:
            yield process
        finally:
            # End the supervisor by SIGTERM and not by SIGKILL, because it has to kill what the program has
            # started.
            process.terminate()
            process.wait()
        if limits.bubblewrap and process.returncode != STOPPED and '"exit-code"' not in text_in(status):
            raise _no_program(
                text_in(refusal).strip() or f"{limits.bubblewrap} ended with exit code {process.returncode}"
            )


def _no_program(why: str) -> RewardError:
    return RewardOutageError(
        f"no program can be started: {why}. Fix: check the free memory, processes and disk of the machine"
    )


@contextlib.contextmanager
def _filter_file(root: sandbox.Root) -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile() as file:
        file.write(system_calls.filter_program(root.machine))
        file.seek(0)
        yield file


def _supervise(limits: Limits, root: sandbox.Root | None, work: str, parent: int, refusal: int) -> None:
    """Turn the child that ``subprocess`` has forked into the supervisor. Only the supervisor's own child
    returns from here.

    If the sandbox is not granted, write the reason to the file descriptor ``refusal`` and raise.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    # Block these signals, so that sigtimedwait receives them and none is lost between two calls of it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
    set_parent_death_signal, set_child_subreaper = 1, 36
    libc.prctl(set_child_subreaper, 1, 0, 0, 0)
    libc.prctl(set_parent_death_signal, int(signal.SIGTERM), 0, 0, 0)
    # The parent may have died before the request for a signal at its death.
    if os.getppid() != parent:
        os._exit(STOPPED)
    try:
        child, pipe = sandbox.start_inside(root) if root else (os.fork(), -1)
        if child:
            if root:
                sandbox.let_in(root, child, pipe)
            _stand_by(child, limits)
        _become_program(libc, limits, root, work, pipe)
    except OSError as error:
        os.write(refusal, str(error).encode())
        raise


def _stand_by(child: int, limits: Limits) -> None:
    """Wait for the program, kill all processes that it has left behind, and exit with its exit code."""
    # Close all descriptors, including pipes: a reader at the other end would wait as long as this process
    # holds them.
    os.closerange(0, 1 << 16)
    try:
        code = _watch(child, limits)
    # Catch any error of the supervisor itself, because the program must not outlive it.
    except BaseException:
        code = STOPPED
    _kill_descendants()
    # Do not call sys.exit: this is a fork of the run's process, and must not run that process's exit
    # handlers.
    os._exit(code)


def _become_program(
    libc: ctypes.CDLL, limits: Limits, root: sandbox.Root | None, work: str, pipe: int
) -> None:
    """Prepare this process for the program that replaces it when ``subprocess`` continues."""
    set_parent_death_signal, set_no_new_privileges = 1, 38
    # Leave the supervisor's process group, because signals to a group cross namespaces.
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD, signal.SIGTERM})
    if root:
        sandbox.enter(libc, root, pipe, limits.file_mb)
    # Request the signal at the parent's death again, because a change of the user resets it.
    libc.prctl(set_parent_death_signal, int(signal.SIGKILL), 0, 0, 0)
    # Leave this to bubblewrap, which gives up the right to new privileges itself, and on some systems has to
    # gain one first.
    if not limits.bubblewrap:
        libc.prctl(set_no_new_privileges, 1, 0, 0, 0)
    os.chdir(work)
    # Set both the soft and the hard limit, so that the program cannot raise the soft one.
    for which, most in (
        (resource.RLIMIT_AS, limits.memory_mb << 20),
        (resource.RLIMIT_FSIZE, limits.file_mb << 20),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_SIGPENDING, _WAITING_SIGNALS),
    ):
        resource.setrlimit(which, (most, most))
    if root:
        sandbox.close_system_calls(libc, root)


def _watch(child: int, limits: Limits) -> int:
    """Wait for a program, and kill it if it exceeds a limit or the supervisor gets SIGTERM; return its exit
    code."""
    deadline = time.monotonic() + limits.seconds
    while True:
        news = signal.sigtimedwait({signal.SIGCHLD, signal.SIGTERM}, _LOOK_SECONDS)
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            # A program that a signal ended has a negative exit code, which os._exit does not accept.
            return min(abs(os.waitstatus_to_exitcode(status)), 255)
        is_told_to_end = news is not None and news.si_signo == signal.SIGTERM
        if is_told_to_end or time.monotonic() > deadline or _takes_too_much(limits):
            # With namespaces the child is the first process, and all others end with it.
            os.kill(child, signal.SIGKILL)
            return STOPPED


def _takes_too_much(limits: Limits) -> bool:
    processes = _descendants()
    if sum(map(_threads, processes)) > limits.processes + (
        sandbox.BUBBLEWRAPS_PROCESSES if limits.bubblewrap else 0
    ):
        return True
    # Do not check a single process: its address space bounds it, and until it has called exec it shows the
    # memory of the process that started it.
    return len(processes) > 1 and sum(map(_resident, processes)) > limits.memory_mb << 20


def _descendants(number: int = 0) -> list[int]:
    """Return the descendants of this process. An orphan is a child of the first process of its namespace, or
    of this one.

    Args:
        number: signal that each descendant gets as soon as it is found; 0 for none.
    """
    found, unseen = list[int](), [os.getpid()]
    while unseen:
        for path in Path(f"/proc/{unseen.pop()}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                children = list(map(int, path.read_text().split()))
                _send(children, number)
                unseen += children
                found += children
    return found


def _threads(process: int) -> int:
    try:
        return len(os.listdir(f"/proc/{process}/task"))
    except OSError:
        return 0


def _resident(process: int) -> int:
    """Return the resident memory of a process in bytes, including shared memory."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def _kill_descendants() -> None:
    """Kill and reap all descendants. Each is stopped when it is found, so that it cannot fork while it waits
    to be killed.

    One pass may miss a process that is created meanwhile, or whose sibling ends. Once its ancestors are gone,
    it is a child of this process. Therefore this process searches again each time before it waits for a
    child, until it has none.
    """
    while True:
        stopped = set[int]()
        while new := set(_descendants(signal.SIGSTOP)) - stopped:
            stopped |= new
        _send(stopped, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        signal.sigtimedwait({signal.SIGCHLD}, _LOOK_SECONDS)


def _send(processes: Iterable[int], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)
