"""Programs that a model wrote, run against tests: the reward `code`.

A test gives a program input and compares what it writes, or calls a function of it and compares what that returns, or is a statement that
has to run. Each test is a process of its own. Expected outputs stay outside it; statements (``assert f(2) == 4``) run inside, so that a
program that sets out to deceive can see them.

Limits of a process are those of Linux (``setrlimit``): address space, size of a file, open files. A supervisor beside it looks every few
milliseconds how many processes and threads there are, how much memory they have together and how much time is over, and in the end kills
all that the program started. Memory that belongs to no process (``memfd_create``, shared memory of System V) is not counted. Where Linux
grants user namespaces, the program also has no network, sees no process but its own, and can write nowhere but into an empty file system
in memory of limited size; directories of temporary files, through whose sockets other programs could be reached, are hidden. It can read
what the user of the run can, and the command lines of other processes. Where namespaces are not granted (often in containers), it could
also reach the network, write files and end the supervisor: ``env.isolation`` decides.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import math
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from megarl.errors import RewardError

logger = logging.getLogger(__name__)

_FENCE = re.compile(r"^[ \t]*```[ \t]*([^\s`]*)[^`\n]*$", re.MULTILINE)
_PYTHON = ("", "python", "python3", "py")
_HIDDEN = ("/tmp", "/var/tmp", "/run", "/dev/shm")
_LOOK_SECONDS = 0.005
_START_SECONDS = 120.0
_OPEN_FILES = 64
_LONGEST_OUTPUT = 1 << 24
"""Bytes of a program's output that are compared; more are wrong."""

_LEAST_SECONDS = 0.05
"""In which no program starts, so that a test with no more is not begun."""

_STOPPED = 125
"""Exit code of a supervisor that ended its program."""

_PROGRAM = """
import json, os, sys
with os.fdopen(int(sys.argv[1])) as file:
    task = json.load(file)
told = int(sys.argv[2])
sys.argv = ["program.py"]
names = {"__name__": "program" if task["function"] or task["statement"] else "__main__"}
given = {}
if task["given_names"]:
    import builtins
    for module in task["given_names"]:
        loaded = __import__(module)
        public = getattr(loaded, "__all__", None) or [name for name in vars(loaded) if not name.startswith("_")]
        given.update((name, getattr(loaded, name)) for name in public if not hasattr(builtins, name))
    given.update((name, __import__(name)) for name in task["given_modules"])
    if "Solution" not in task["code"]:
        given.pop(task["function"], None)
names.update(given)
exec(compile(task["code"], "program.py", "exec"), names)
if task["function"]:
    name = task["function"]
    # what was given is no answer, should the function have its name
    own = names.get(name) if names.get(name) is not given.get(name) else None
    function = own or getattr(names["Solution"](), name)
    os.write(told, json.dumps(function(*task["arguments"])).encode())
elif task["statement"]:
    exec(compile(task["statement"], "test.py", "exec"), names)
    os.write(told, task["proof"].encode())
"""

_GIVEN_NAMES = ("typing", "operator", "math", "itertools", "functools", "collections", "heapq", "bisect")
_GIVEN_MODULES = (*_GIVEN_NAMES, "copy", "datetime", "random", "re", "string", "sys")
"""What a program finds imported that stands for a method of ``Solution``, or a function that is called, as on the site that such tasks come
from: all names of the former (of two modules that have one, the later module's), which hide none of Python's own; and each of the latter
under its own name, where the program writes ``name.``, since ``bisect`` is a function too.
"""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a program.

    Attributes:
        seconds: for one test.
        memory_mb: address space of each of its processes, and resident memory of all together.
        processes: processes and threads at a time.
        file_mb: all that it writes to files.
        isolated: it runs in namespaces of its own.
    """

    seconds: float = 4.0
    memory_mb: int = 512
    processes: int = 16
    file_mb: int = 16
    isolated: bool = True


@dataclass(frozen=True, slots=True)
class Test:
    """One test of a program.

    Attributes:
        given: what it reads from standard input.
        expected: what it has to write there, or the function has to return; None for a statement.
        function: name of what is called, at the top level or a method of ``Solution``; empty where nothing is.
        arguments: of the call.
        statement: that has to run without an error after the program; empty for none.
    """

    given: str = ""
    expected: Any = None
    function: str = ""
    arguments: Sequence[Any] = ()
    statement: str = ""


def judge(response: str, answer: str, limits: Limits, partial: bool = False, seconds: float = math.inf) -> float:
    """1.0 when the program of a response passes all tests, else 0.0.

    Args:
        response: with the program, see ``program_in``.
        answer: the tests, see ``tests_of``.
        limits: of the program, for each test.
        partial: return the share of the tests that pass.
        seconds: for all tests together, with ``partial``: each has its part of what is left, so that one that does not end leaves time for
            the others, and those that were cut short have what is left in the end. A test whose time does not come has not passed.

    Raises:
        RewardError: the program cannot be started, for a reason that is not its own.
    """
    tests = tests_of(answer)
    code = program_in(response)
    if code is None:
        return 0.0
    if partial:
        return _number_passed(code, tests, limits, time.monotonic() + seconds) / len(tests)
    return float(all(_passes(code, test, limits) is True for test in tests))


def _number_passed(code: str, tests: Sequence[Test], limits: Limits, deadline: float) -> int:
    passed, waiting = 0, [(test, 0.0) for test in tests]
    while waiting:
        cut_short = list[tuple[Test, float]]()
        for place, (test, before) in enumerate(waiting):
            granted = min(limits.seconds, (deadline - time.monotonic()) / (len(waiting) - place))
            # no more than it had says nothing new
            if granted <= max(before, _LEAST_SECONDS):
                continue
            result = _passes(code, test, replace(limits, seconds=granted))
            passed += result is True
            if result is None and granted < limits.seconds:
                cut_short.append((test, granted))
        waiting = cut_short
    return passed


def program_in(response: str) -> str | None:
    """The last block between lines of three backticks that is marked as Python or not at all; None where none ends."""
    found, kind, begin = None, None, 0
    for fence in _FENCE.finditer(response):
        name = fence[1].lower()
        if kind is None or name:
            kind, begin = name, fence.end()
            continue
        if kind in _PYTHON:
            found = response[begin : fence.start()]
        kind = None
    return found


def fault_of_tests(answer: str) -> str | None:
    """Why a program cannot be tested with a reference; None where it can."""
    try:
        tests_of(answer)
    except ValueError as error:
        return str(error)
    return None


def tests_of(answer: str) -> tuple[Test, ...]:
    """The tests that a reference answer holds as JSON, in one of the forms that data sets have.

    ``{"inputs": [...], "outputs": [...]}`` for programs that read and write text, with ``"fn_name"`` for a function that is called with
    each list of arguments (APPS, TACO); ``[{"input", "output"}, ...]``, of which those with ``"testtype": "functional"`` call the function
    ``"fn_name"`` or ``metadata.func_name`` with arguments that are written as JSON, one a line (LiveCodeBench); or statements,
    ``["assert f(2) == 4", ...]`` (MBPP).

    Raises:
        ValueError: it holds none.
    """
    try:
        given = json.loads(answer)
    except ValueError as error:
        raise ValueError(f"its tests are no JSON: {error}") from None
    tests = tuple(_tests_in(given))
    if not tests:
        raise ValueError("it holds no test")
    return tests


def _tests_in(given: Any) -> Iterator[Test]:
    if isinstance(given, Mapping):
        inputs, outputs = given.get("inputs"), given.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise ValueError("inputs and outputs are wanted, two lists of one length")
        for each, expected in zip(inputs, outputs, strict=True):
            yield _test(each, expected, given.get("fn_name"))
        return
    if not isinstance(given, list):
        raise ValueError("its tests are neither a list nor an object")
    for each in given:
        if isinstance(each, str):
            yield Test(statement=each)
        elif isinstance(each, Mapping) and "input" in each and "output" in each:
            name = each.get("fn_name") or (each.get("metadata") or {}).get("func_name")
            if each.get("testtype") == "functional" and not name:
                raise ValueError("a functional test names no function under fn_name or metadata.func_name")
            yield _test(each["input"], each["output"], name if each.get("testtype", "functional") == "functional" else None)
        else:
            raise ValueError("a test is neither a statement nor an object with input and output")


def _test(given: Any, expected: Any, function: Any) -> Test:
    if not function:
        return Test(given=_lines(given), expected=_lines(expected))
    try:
        arguments = [json.loads(line) for line in given.splitlines() if line.strip()] if isinstance(given, str) else list(given)
        expected = json.loads(expected) if isinstance(expected, str) and isinstance(given, str) else expected
    except (ValueError, TypeError):
        raise ValueError(f"the arguments of a call of {function} are neither a list nor JSON, one a line") from None
    return Test(function=str(function), arguments=arguments, expected=expected)


def _lines(text: Any) -> str:
    """Text of a test; a list holds its lines."""
    return "\n".join(map(str, text)) if isinstance(text, list) else str(text)


def _passes(code: str, test: Test, limits: Limits) -> bool | None:
    """Whether a test passes; None where the program was ended for what it took."""
    proof = os.urandom(16).hex()
    is_part = bool(test.function) or "Solution(" in test.statement
    task = {
        "code": code,
        "function": test.function,
        "arguments": test.arguments,
        "statement": test.statement,
        "proof": proof,
        "given_names": _GIVEN_NAMES if is_part else (),
        "given_modules": [name for name in _GIVEN_MODULES if is_part and re.search(rf"(?<![\w.]){name}\.", code)],
    }
    with _file(json.dumps(task)) as source, _file(test.given) as given, _file() as written, _file() as told:
        command = [sys.executable, "-s", "-P", "-c", _PROGRAM, str(source.fileno()), str(told.fileno())]
        ended = run(command, limits, given, written, (source.fileno(), told.fileno()))
        if ended == _STOPPED:
            return None
        ended_well = ended == 0
        if test.function:
            return ended_well and _returned(_text(told), test.expected)
        return ended_well and (_text(told) == proof if test.statement else same_output(_text(written), test.expected))


@contextlib.contextmanager
def _file(text: str = "") -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile() as file:
        file.write(text.encode("utf-8", "backslashreplace"))
        file.seek(0)
        yield file


def _text(file: IO[bytes]) -> str:
    """What was written, from its beginning; empty where it is too long."""
    if os.fstat(file.fileno()).st_size > _LONGEST_OUTPUT:
        return ""
    file.seek(0)
    return file.read().decode("utf-8", "replace")


def _returned(told: str, expected: Any) -> bool:
    try:
        value = json.loads(told)
    except (ValueError, RecursionError):
        return False
    # some data sets put the one value that a function returns into a list
    return bool(value == expected) or bool([value] == expected)


def same_output(written: str, expected: str) -> bool:
    """Whether two outputs are equal but for white space around words, empty lines at the end, and the spelling of decimal numbers."""
    ours, theirs = written.rstrip().split("\n"), expected.rstrip().split("\n")
    return len(ours) == len(theirs) and all(_same_line(*pair) for pair in zip(ours, theirs, strict=True))


def _same_line(written: str, expected: str) -> bool:
    ours, theirs = written.split(), expected.split()
    return len(ours) == len(theirs) and all(a == b or _same_number(a, b) for a, b in zip(ours, theirs, strict=True))


def _same_number(written: str, expected: str) -> bool:
    try:
        return Decimal(written) == Decimal(expected)
    except InvalidOperation:
        return False


@lru_cache(maxsize=1)
def fault_of_isolation() -> str | None:
    """Why programs cannot be isolated here; None where they can. Found by running one, and said once in the log where they can."""
    if sys.platform != "linux":
        return "only Linux has namespaces"
    # by a process of its own: this one may have threads, beside which no Python should run between fork and exec
    command = [sys.executable, "-m", "megarl.rollout.programs"]
    try:
        found = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_START_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {error}"
    if found.returncode:
        return (found.stderr.strip().splitlines() or [f"exit code {found.returncode}"])[-1]
    if found.stdout.strip():
        return found.stdout.strip()
    logger.info("programs of the model run in namespaces of their own: no network, no other processes, no files of the machine to write to")
    return None


def main() -> None:
    """Say why programs cannot be isolated here, or nothing where they can."""
    with _file() as nothing, _file() as written:
        try:
            code = run([sys.executable, "-s", "-P", "-c", "import socket"], Limits(seconds=60.0), nothing, written)
        except (OSError, RewardError) as error:
            sys.stdout.write(str(error))
        else:
            sys.stdout.write(f"a program that does nothing ended with exit code {code} in namespaces" if code else "")


def run(command: Sequence[str], limits: Limits, given: IO[bytes], written: IO[bytes], passed: tuple[int, ...] = ()) -> int:
    """Run a program within limits, and return its exit code; ``_STOPPED`` where it was ended.

    Args:
        command: its arguments.
        limits: that it has.
        given: its standard input.
        written: takes its standard output.
        passed: further file descriptors that it has.

    Raises:
        RewardError: it cannot be started.
    """
    # nothing of the run's own environment, which may hold credentials; a fixed seed of hashes, so that equal programs write equal sets
    environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    with contextlib.ExitStack() as stack:
        work = _hideable()[0] if limits.isolated else stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        refusal = stack.enter_context(_file())
        parent = os.getpid()
        try:
            process = subprocess.Popen(
                command,
                stdin=given,
                stdout=written,
                stderr=subprocess.DEVNULL,
                env=environment,
                pass_fds=passed,
                start_new_session=True,
                preexec_fn=lambda: _supervise(limits, work, parent, refusal.fileno()),
            )
        except (OSError, subprocess.SubprocessError) as error:
            why = _text(refusal) or f"{type(error).__name__}: {error}"
            raise RewardError(f"no program can be started: {why}. Fix: see whether the machine is full") from error
        try:
            return process.wait()
        finally:
            process.terminate()
            process.wait()


@lru_cache(maxsize=1)
def _hideable() -> tuple[str, ...]:
    """Directories of temporary files that hold nothing of Python, and are no links.

    Raises:
        RewardError: there is none.
    """
    needed = [os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, sys.executable)]
    there = [path for path in (*_HIDDEN, tempfile.gettempdir()) if os.path.isdir(path) and os.path.realpath(path) == path]
    found = [path for path in dict.fromkeys(there) if not any(_is_within(each, path) for each in needed)]
    if not found:
        raise RewardError(f"Python itself is in each of {', '.join(there)}, so that none can be hidden. Fix: install it elsewhere")
    return tuple(path for path in found if not any(path != each and _is_within(path, each) for each in found))


def _is_within(path: str, directory: str) -> bool:
    return os.path.commonpath((path, directory)) == directory


def _supervise(limits: Limits, work: str, parent: int, refusal: int) -> None:
    """Become, in the child that ``subprocess`` has made, the supervisor of the program: only a child of this process comes back from here.

    Where namespaces are not granted it fails before that, and writes why to the file descriptor ``refusal``.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    set_parent_death_signal, set_child_subreaper, set_no_new_privileges = 1, 36, 38
    if limits.isolated:
        try:
            _enter_namespaces(libc, limits, work)
        except OSError as error:
            os.write(refusal, str(error).encode())
            raise
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM})
    libc.prctl(set_child_subreaper, 1, 0, 0, 0)
    libc.prctl(set_parent_death_signal, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(_STOPPED)
    child = os.fork()
    if child:
        # of pipes as well, whose end somebody waits for
        os.closerange(0, 1 << 16)
        try:
            code = _watch(child, limits)
        except BaseException:
            code = _STOPPED
        _kill_descendants()
        os._exit(code)
    # out of the supervisor's group: signals to a group reach over namespaces
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD, signal.SIGTERM})
    libc.prctl(set_parent_death_signal, int(signal.SIGKILL), 0, 0, 0)
    libc.prctl(set_no_new_privileges, 1, 0, 0, 0)
    os.chdir(work)
    for which, most in (
        (resource.RLIMIT_AS, limits.memory_mb << 20),
        (resource.RLIMIT_FSIZE, limits.file_mb << 20),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(which, (most, most))


def _watch(child: int, limits: Limits) -> int:
    """Wait for a program, and end it when it takes too long or becomes too many processes; its exit code."""
    deadline = time.monotonic() + limits.seconds
    while True:
        news = signal.sigtimedwait({signal.SIGCHLD, signal.SIGTERM}, _LOOK_SECONDS)
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return min(abs(os.waitstatus_to_exitcode(status)), 255)
        is_told_to_end = news is not None and news.si_signo == signal.SIGTERM
        if is_told_to_end or time.monotonic() > deadline or _takes_too_much(limits):
            # in namespaces it is the first process, with which all others end
            os.kill(child, signal.SIGKILL)
            return _STOPPED


def _takes_too_much(limits: Limits) -> bool:
    processes = _descendants()
    if sum(map(_threads, processes)) > limits.processes:
        return True
    # one alone is bounded by its address space, and until it is a program of its own it has the memory of the process that starts it
    return len(processes) > 1 and sum(map(_resident, processes)) > limits.memory_mb << 20


def _descendants(number: int = 0) -> list[int]:
    """Processes that this one is an ancestor of. One whose parent is gone belongs to the first of its namespace, or to this one.

    Args:
        number: of a signal that each gets as soon as it is found; 0 for none.
    """
    found, unseen = list[int](), [os.getpid()]
    while unseen:
        for path in Path(f"/proc/{unseen.pop()}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                children = [int(each) for each in path.read_text().split()]
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
    """Bytes of memory that a process has, those that it shares too."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def _kill_descendants() -> None:
    """Kill and bury until none is left. Each is stopped when it is found, so that it makes no other while it waits to be killed.

    A look may miss one that is made meanwhile, or whose sibling ends. When those before it are gone it is a child of this process, which
    therefore never waits for a child without looking again, and is done when it has none.
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


def _enter_namespaces(libc: ctypes.CDLL, limits: Limits, work: str) -> None:
    """Leave network, processes and mounts of the machine behind; children are in the namespace of processes.

    Raises:
        OSError: Linux grants none of this.
    """
    new_mounts, new_names, new_ipc, new_user, new_processes, new_network = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
    user, group = os.geteuid(), os.getegid()
    _checked(libc.unshare(new_user | new_mounts | new_names | new_ipc | new_processes | new_network), "unshare")
    # any user but 0, which would have capabilities after exec
    inside = 65534
    for file, text in (("setgroups", "deny"), ("uid_map", f"{inside} {user} 1"), ("gid_map", f"{inside} {group} 1")):
        Path(f"/proc/self/{file}").write_text(text)
    bind, recursive, private, no_set_user, no_devices, read_only = 0x1000, 0x4000, 0x40000, 2, 4, 1
    _checked(libc.mount(b"none", b"/", None, recursive | private, None), "mount")
    mount_setattr, current_directory, everything_below = 442, -100, 0x8000
    attributes = (ctypes.c_uint64 * 4)(read_only, 0, 0, 0)
    _checked(
        libc.syscall(mount_setattr, current_directory, b"/", everything_below, ctypes.byref(attributes), ctypes.sizeof(attributes)),
        "mount_setattr",
    )
    # in a changed root Linux grants no further namespaces, in which a program could mount what has no limit
    root = os.path.join(work, "root")
    _checked(libc.mount(b"none", work.encode(), b"tmpfs", no_set_user | no_devices, b"size=64k,mode=700"), f"mount {work}")
    os.mkdir(root)
    _checked(libc.mount(b"/", root.encode(), None, bind | recursive, None), f"mount {root}")
    for path in _hideable():
        flags = no_set_user | no_devices | (0 if path == work else read_only)
        options = f"size={limits.file_mb}m,nr_inodes=4096,mode=700".encode()
        _checked(libc.mount(b"none", f"{root}{path}".encode(), b"tmpfs", flags, options), f"mount {path}")
    os.chroot(root)


def _checked(result: int, what: str) -> None:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
