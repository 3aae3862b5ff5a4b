"""Python stacks, states and activity of processes, observed from outside, to tell whether a silent process is
working, and where it hangs.

A process that registers opens an unnamed file, to which ``faulthandler`` writes the stacks of all threads on
SIGUSR2. This works even while the process waits in C++ code or for the GIL. Another process of the same user
finds the file in ``/proc``, sends the signal and reads the file; nothing is left on disk.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

_READ_WAIT_S = 2.0
_LONGEST_STACK = 6000
_FILE_NAME = "megarl-stacks"
_LINK = f"/memfd:{_FILE_NAME}:"
STOPPED, GONE, RUNS = "is stopped by a signal (SIGSTOP or SIGTSTP)", "is gone", ""
_STATES = {"T": STOPPED, "Z": GONE, "X": GONE, "D": "waits for a disk or a network file system"}
# The stack of a thread that waits for other ranks contains at least one of these paths. The list does not
# contain all of torch.distributed, because FSDP1 and other wrappers run entire forward passes inside it.
_COLLECTIVES = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
    "torch/distributed/fsdp/_flat_param.py",
    "torch/distributed/fsdp/_runtime_utils.py",
    "torch/distributed/fsdp/_fully_shard/",
    "torch/nn/parallel/",
    "megatron/core/distributed/param_and_grad_buffer.py",
    "megatron/core/pipeline_parallel/p2p_communication.py",
)
# Text in the stack of the thread that runs the worker's method.
_METHOD = 'worker_shell.py", line'
# Maximum fraction of a CPU core that a waiting process uses. It is not 0, because threads of Ray, gloo and
# NCCL wake up at times, and the process may wait in a polling loop.
_MOST_CPU_SHARE = 0.05
_MOST_BYTES = 1 << 20
_MOST_FAULTS = 100
_FAULTS, _CPU = slice(9, 11), slice(11, 15)
"""Fields of ``/proc/PID/stat`` after the program name: page faults that read from a disk, and CPU time in
clock ticks, each also of child processes that have ended."""
# States in ``/proc/PID/stat``: running or ready to run, and waiting for a disk.
_GOING_ON = ("R", "D")
_LOOKS_AGAIN, _PAUSE_S = 4, 0.023
"""Number of further samples of the thread states, and seconds between them. A thread that polls every few
milliseconds is running in some samples; a thread that computes is running in all of them."""


@dataclass(frozen=True, slots=True)
class Activity:
    """Total work of a process on this host and of its descendants so far.

    Attributes:
        at: time of the sample, in monotonic seconds of the host.
        cpu_s: CPU seconds, including those of descendants that have ended.
        bytes: bytes read and written, by system calls and on disks.
        faults: number of pages that had to be read from a disk.
        processes: ids of the processes.
        goes_on: a thread of these processes runs, is ready to run, or waits for a disk or a network file
            system.
    """

    at: float
    cpu_s: float
    bytes: int
    faults: int
    processes: frozenset[int]
    goes_on: bool = False

    def rested_since(self, before: Activity) -> bool:
        """Return whether the processes have only waited since the sample ``before``."""
        return (
            not (self.goes_on or before.goes_on)
            and self.processes == before.processes
            # A negative difference means that a process has ended.
            and 0 <= self.cpu_s - before.cpu_s <= _MOST_CPU_SHARE * (self.at - before.at)
            and 0 <= self.bytes - before.bytes <= _MOST_BYTES
            and 0 <= self.faults - before.faults <= _MOST_FAULTS
        )


@dataclass(frozen=True, slots=True)
class ProcessLook:
    """A sample of a process's state.

    Attributes:
        state: what keeps the process from running, as the end of a sentence; "" if it runs or sleeps, or if
            its state is unknown.
        stack: stacks of its threads, at most 6000 characters; "" if there are none.
        activity: its work so far; None if unknown.
    """

    state: str
    stack: str = ""
    activity: Activity | None = field(default=None, compare=False)

    @property
    def place(self) -> str:
        """Stack of the thread that runs the worker's method; empty if unknown."""
        blocks = self._method
        # Skip the first line, which shows whether this thread wrote the stacks. That may differ between
        # samples.
        return blocks[-1].partition("\n")[2] if blocks else ""

    @property
    def _method(self) -> list[str]:
        return [block for block in self.stack.split("\n\n") if _METHOD in block]

    @property
    def waits_for_others(self) -> bool | None:
        """True if the worker's method is in a collective; None if there is no stack."""
        blocks = self._method or ([self.stack] if self.stack else [])
        return any(sign in blocks[-1] for sign in _COLLECTIVES) if blocks else None


@functools.cache
def register_stacks(worker: str = "") -> None:
    """Let other processes read this process's stacks. No-op on a system without ``/proc`` or unnamed files.

    Args:
        worker: name of the worker in this process, which ``worker_of`` returns.
    """
    if hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir():
        # A bare file descriptor stays open until the process ends. SIGUSR2, because SIGUSR1 requests the end
        # of a run.
        faulthandler.register(
            signal.SIGUSR2, file=os.memfd_create(f"{_FILE_NAME}:{worker}"), all_threads=True
        )


def worker_of(process_id: int) -> str | None:
    """Return the name of the worker in a process on this host: "" if it registered without a name, None if it
    has not registered."""
    with contextlib.suppress(OSError):
        path = _stack_file(process_id)
        if path is not None:
            return os.readlink(path).removeprefix(_LINK).removesuffix(" (deleted)")
    return None


def look_at(process_id: int, with_stack: bool = True) -> ProcessLook:
    """Sample a process on this host: its state and, unless it is stopped or gone, its stacks and activity."""
    state = read_state(process_id)
    if not with_stack or state in (STOPPED, GONE):
        return ProcessLook(state)
    # Read the activity first, because writing the stacks is activity too.
    activity = read_activity(process_id)
    return ProcessLook(state, read_stack(process_id), activity)


def kill_worker(process_id: int) -> None:
    """Kill a process on this host, even if it is stopped. A process that has not registered is not killed,
    because it is another one that has reused the id."""
    with contextlib.suppress(OSError):
        if _stack_file(process_id) is not None:
            os.kill(process_id, signal.SIGKILL)


def read_state(process_id: int) -> str:
    """Return what keeps a process on this host from running; see ``ProcessLook.state``."""
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return GONE if Path("/proc/self").exists() else RUNS
    except OSError:
        return RUNS
    # Split after the last bracket, because the program's name may itself contain brackets and spaces.
    return _STATES.get(stat.rpartition(")")[2].split()[0], RUNS)


def read_activity(process_id: int) -> Activity | None:
    """Sample the activity of a process on this host; None if it is gone, or if there is no ``/proc``."""
    at = time.monotonic()
    ticks = faults = moved = 0
    try:
        children = psutil.Process(process_id).children(recursive=True)
        processes = frozenset({process_id, *(child.pid for child in children)})
        for each in processes:
            stat = _stat(Path(f"/proc/{each}/stat"))
            ticks += sum(map(int, stat[_CPU]))
            faults += sum(map(int, stat[_FAULTS]))
            moved += _bytes(each)
    except (psutil.Error, OSError):
        return None
    goes_on = _goes_on(processes) and all(_goes_on_after(_PAUSE_S, processes) for _ in range(_LOOKS_AGAIN))
    return Activity(at, ticks / os.sysconf("SC_CLK_TCK"), moved, faults, processes, goes_on)


def _goes_on_after(seconds: float, processes: Iterable[int]) -> bool:
    time.sleep(seconds)
    return _goes_on(processes)


def _goes_on(processes: Iterable[int]) -> bool:
    """Return whether a thread of these processes runs now, is ready to run, or waits for a disk or a network
    file system."""
    return any(stat[0] in _GOING_ON for each in processes for stat in _threads(each))


def _stat(path: Path) -> list[str]:
    # Split after the last bracket, because the program's name may itself contain brackets and spaces.
    return path.read_text().rpartition(")")[2].split()


def _threads(process_id: int) -> Iterator[list[str]]:
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{process_id}/task").iterdir():
            # Ignore errors, because threads may end meanwhile.
            with contextlib.suppress(OSError):
                yield _stat(path / "stat")


def _bytes(process_id: int) -> int:
    """Return the bytes that a process has read and written; 0 if access is denied."""
    with contextlib.suppress(OSError):
        counts = dict(line.split(": ") for line in Path(f"/proc/{process_id}/io").read_text().splitlines())
        return sum(int(counts[name]) for name in ("rchar", "wchar", "read_bytes", "write_bytes"))
    return 0


def read_stack(process_id: int) -> str:
    """Signal a process on this host, and return the stacks that it writes, at most 6000 characters; ``""`` if
    it is gone or has no handler of that signal yet."""
    with contextlib.suppress(OSError):
        path = _stack_file(process_id)
        # Without this file, the process has no handler, and the signal would end it.
        if path is None:
            return ""
        before = os.stat(path).st_size
        os.kill(process_id, signal.SIGUSR2)
        deadline, size = time.monotonic() + _READ_WAIT_S, before
        while time.monotonic() < deadline:
            time.sleep(0.02)
            now = os.stat(path).st_size
            # The handler writes line by line and does not report its end, so wait until the size stays the
            # same.
            if now == size and now > before:
                break
            size = now
        with open(path, "rb") as file:
            file.seek(before)
            # Keep the end, because faulthandler writes the main thread last.
            return file.read().decode(errors="replace")[-_LONGEST_STACK:]
    return ""


def _stack_file(process_id: int) -> Path | None:
    for path in Path(f"/proc/{process_id}/fd").iterdir():
        # Ignore errors, because descriptors may be closed meanwhile.
        with contextlib.suppress(OSError):
            if os.readlink(path).startswith(_LINK):
                return path
    return None
