"""Runs a program in a separate process, within limits, under a supervisor process.

Linux limits each process by itself (``setrlimit``): address space, file size, open files, timers. The
supervisor checks every few milliseconds the number of processes and threads, their total memory and the
elapsed time. At the end it kills everything that the program has started.

In the sandbox (see ``sandbox``) no other memory is available, and the program is the first process of its PID
namespace, so all others end with it. Without the sandbox a program can reach the network, write files, kill
the supervisor, and use memory that belongs to no process; ``env.isolation`` decides whether that is allowed.
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
# Maximum pending signals and timers of the user, which take kernel memory.
_WAITING_SIGNALS = 256

LONGEST_OUTPUT = 1 << 24
"""Maximum bytes of a program's output. A longer output counts as incorrect."""

STOPPED = 125
"""Exit code of a supervisor that has killed its program for exceeding a limit."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of a program.

    Attributes:
        seconds: time limit of one test.
        memory_mb: maximum address space of each process, and maximum resident memory of all together, in MiB.
        processes: maximum number of processes and threads at a time.
        file_mb: maximum size of all written files together, in MiB.
        isolated: run the program in the sandbox.
        bubblewrap: path of the bubblewrap executable that creates the sandbox; empty if this package creates
            it.
    """

    seconds: float = 4.0
    memory_mb: int = 512
    processes: int = 16
    file_mb: int = 16
    isolated: bool = True
    bubblewrap: str = ""


def python_command(source: str, *arguments: str) -> list[str]:
    """Return the command that runs ``source`` with Python. Installed packages and their start-up hooks are
    left out."""
    return [sys.executable, "-S", "-P", "-c", source, *arguments]


@contextlib.contextmanager
def file_of(text: str = "") -> Iterator[IO[bytes]]:
    """Yield an unnamed temporary file that contains a text."""
    with tempfile.TemporaryFile() as file:
        file.write(text.encode("utf-8", "backslashreplace"))
        file.seek(0)
        yield file


def text_in(file: IO[bytes]) -> str:
    """Return the content of a file, or an empty text if it exceeds ``LONGEST_OUTPUT``."""
    if os.fstat(file.fileno()).st_size > LONGEST_OUTPUT:
        return ""
    file.seek(0)
    return file.read().decode("utf-8", "replace")


def isolation() -> tuple[str | None, str]:
    """Find out how programs can be isolated on this machine.

    Returns:
        The reason why they cannot (None if they can), and the value for ``Limits.bubblewrap``.
    """
    fault = fault_of_isolation()
    other = sandbox.found_bubblewrap() if fault else ""
    return (None, other) if other and fault_of_isolation(other) is None else (fault, "")


@lru_cache(maxsize=2)
def fault_of_isolation(bubblewrap: str = "") -> str | None:
    """Return why programs cannot be isolated on this machine, or None. This runs a test program in the
    sandbox, and logs once if isolation works.

    Args:
        bubblewrap: see ``Limits``.
    """
    if sys.platform != "linux":
        return "only Linux has namespaces"
    # Test in a separate process: this one may have threads, and after a fork with threads it is not safe to
    # run Python.
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
    """Return a warning if this process runs as root, else an empty text."""
    if os.geteuid() != 0:
        return ""
    who = "65534" if sandbox.planned_root().changes_user else "of this container's root, without capabilities"
    return (
        f"the run is root. Programs of the model run in a sandbox, as user {who}; but a hole in "
        "the kernel would give them the complete machine. Start the run as another user"
    )


def fault_here(bubblewrap: str) -> str | None:
    """Run an empty program in the sandbox. Return why this failed, or None.

    Args:
        bubblewrap: see ``Limits``.
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
    """Run a program within limits, and yield its process. The exit code is ``STOPPED`` if it was killed for
    exceeding a limit.

    When the context exits, the program and everything that it has started are gone.

    Args:
        command: the command with its arguments.
        limits: limits of the program.
        given: file for its standard input.
        written: file for its standard output.
        passed: additional file descriptors that it inherits.

    Raises:
        RewardError: the program cannot be started.
    """
    # Pass nothing of the run's environment, which may hold credentials. The fixed hash seed makes the output
    # of sets reproducible. One OpenMP thread, because a library's threads count towards the limit.
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
            # SIGTERM and not SIGKILL: the supervisor has to kill what the program has started.
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
    returns from this function, and then becomes the program.

    If the sandbox cannot be created, write the reason to the file descriptor ``refusal`` and raise
    ``OSError``.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    # Blocked signals stay pending, so that none is lost between two calls of sigtimedwait.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
    set_parent_death_signal, set_child_subreaper = 1, 36
    libc.prctl(set_child_subreaper, 1, 0, 0, 0)
    libc.prctl(set_parent_death_signal, int(signal.SIGTERM), 0, 0, 0)
    # The parent may have died before prctl took effect.
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
    # Close all descriptors: a reader of one of the program's pipes would otherwise wait until this process
    # ends.
    os.closerange(0, 1 << 16)
    try:
        code = _watch(child, limits)
    # Whatever goes wrong in the supervisor, the program must not outlive it.
    except BaseException:
        code = STOPPED
    _kill_descendants()
    # Not sys.exit: this is a fork of the run's process, whose exit handlers must not run here.
    os._exit(code)


def _become_program(
    libc: ctypes.CDLL, limits: Limits, root: sandbox.Root | None, work: str, pipe: int
) -> None:
    """Prepare this process for the exec of the program, which follows when ``subprocess`` continues."""
    set_parent_death_signal, set_no_new_privileges = 1, 38
    # Leave the supervisor's process group, because signals to a group cross namespaces.
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD, signal.SIGTERM})
    if root:
        sandbox.enter(libc, root, pipe, limits.file_mb)
    # Request the death signal again, because a change of the user resets it.
    libc.prctl(set_parent_death_signal, int(signal.SIGKILL), 0, 0, 0)
    # bubblewrap sets this itself, and on some systems it has to gain privileges first.
    if not limits.bubblewrap:
        libc.prctl(set_no_new_privileges, 1, 0, 0, 0)
    os.chdir(work)
    # Both the soft and the hard limit, so that the program cannot raise the soft one.
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
    """Wait for a program and return its exit code. Kill it if it exceeds a limit, or if the supervisor
    receives SIGTERM."""
    deadline = time.monotonic() + limits.seconds
    while True:
        news = signal.sigtimedwait({signal.SIGCHLD, signal.SIGTERM}, _LOOK_SECONDS)
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            # A program killed by a signal has a negative exit code, which os._exit does not accept.
            return min(abs(os.waitstatus_to_exitcode(status)), 255)
        is_told_to_end = news is not None and news.si_signo == signal.SIGTERM
        if is_told_to_end or time.monotonic() > deadline or _takes_too_much(limits):
            # In the sandbox the child is the first process of its namespace, and all others end with it.
            os.kill(child, signal.SIGKILL)
            return STOPPED


def _takes_too_much(limits: Limits) -> bool:
    processes = _descendants()
    if sum(map(_threads, processes)) > limits.processes + (
        sandbox.BUBBLEWRAPS_PROCESSES if limits.bubblewrap else 0
    ):
        return True
    # A single process is bounded by its address space; and before its exec it shows the memory of the process
    # from which it was forked.
    return len(processes) > 1 and sum(map(_resident, processes)) > limits.memory_mb << 20


def _descendants(number: int = 0) -> list[int]:
    """Return the process ids of all descendants of this process. The kernel reparents orphans to the first
    process of their namespace, or to this one.

    Args:
        number: signal to send to each descendant as soon as it is found; 0 for none.
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
    """Kill and reap all descendants. Each is stopped as soon as it is found, so that it cannot fork before it
    is killed.

    One pass may miss a process that is created in the meantime. Once its ancestors are dead it is reparented
    to this process; so the search is repeated until this process has no children left.
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
