"""Python stacks, states and activity of processes, observed from outside: whether a silent one is working,
and
where it hangs.

A process that registers opens an unnamed file and lets ``faulthandler`` write all its threads' stacks there
on SIGUSR2, which works even while it waits in C++ code or for the interpreter's lock. Another process of the
same user finds the file in ``/proc``, sends the signal and reads it; nothing is left on disk.
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
# The stack of a thread that waits for other ranks contains one of these. The list does not cover all of
# torch.distributed, inside which FSDP1 and other wrappers run whole passes.
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
# The stack of the thread that runs the worker's method contains this.
_METHOD = 'worker_shell.py", line'
# A process at rest uses at most this share of a processor: Ray, gloo and NCCL have threads that wake now and
# then, and a loop may check whether it can continue.
_MOST_CPU_SHARE = 0.05
_MOST_BYTES = 1 << 20
_MOST_FAULTS = 100
_FAULTS, _CPU = slice(9, 11), slice(11, 15)
"""Fields of ``/proc/PID/stat`` after the name: page faults that read a disk, and ticks of CPU, each with
those of ended children."""
_GOING_ON = ("R", "D")
_LOOKS_AGAIN, _PAUSE_S = 4, 0.023
"""Number of further samples and seconds between them. A thread that polls every few milliseconds runs in some
samples, and a thread that computes runs in all."""


@dataclass(frozen=True, slots=True)
class Activity:
    """Work that a process of this host and its descendants have done so far.

    Attributes:
        at: time of the sample, monotonic seconds of its host.
        cpu_s: seconds of CPU, including descendants that have ended.
        bytes: bytes that they have read and written, by calls and on disks.
        faults: pages that had to be read from a disk.
        processes: their numbers.
        goes_on: one of their threads runs, or would if it had a processor, or waits for a disk or a network
            file system.
    """

    at: float
    cpu_s: float
    bytes: int
    faults: int
    processes: frozenset[int]
    goes_on: bool = False

    def rested_since(self, before: Activity) -> bool:
        """Return whether the processes have only waited since ``before``."""
        return (
            not (self.goes_on or before.goes_on)
            and self.processes == before.processes
            # A difference below zero means that a process has ended.
            and 0 <= self.cpu_s - before.cpu_s <= _MOST_CPU_SHARE * (self.at - before.at)
            and 0 <= self.bytes - before.bytes <= _MOST_BYTES
            and 0 <= self.faults - before.faults <= _MOST_FAULTS
        )


@dataclass(frozen=True, slots=True)
class ProcessLook:
    """State of a process as observed from outside.

    Attributes:
        state: state that keeps it from running, as the end of a sentence; "" if it runs, sleeps or cannot be
            seen.
        stack: its threads' stacks, at most 6000 characters; "" if there is none.
        activity: its work so far; None if that cannot be seen.
    """

    state: str
    stack: str = ""
    activity: Activity | None = field(default=None, compare=False)

    @property
    def place(self) -> str:
        """Position of the thread that runs the worker's method, as lines of its stack; empty if unknown."""
        blocks = self._method
        # Skip the first line, which names the thread that has written the stack and may differ between
        # samples.
        return blocks[-1].partition("\n")[2] if blocks else ""

    @property
    def _method(self) -> list[str]:
        return [block for block in self.stack.split("\n\n") if _METHOD in block]

    @property
    def waits_for_others(self) -> bool | None:
        """True if the worker's method is in a collective; None if no stack tells."""
        blocks = self._method or ([self.stack] if self.stack else [])
        return any(sign in blocks[-1] for sign in _COLLECTIVES) if blocks else None


@functools.cache
def register_stacks(worker: str = "") -> None:
    """Prepare this process; without ``/proc`` or unnamed files its stacks are simply not reported.

    Args:
        worker: name of the worker that it holds, which ``worker_of`` returns.
    """
    if hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir():
        # Use a bare descriptor, which stays open as long as the process lives: a file object would buffer
        # what the signal handler writes. Use SIGUSR2, because SIGUSR1 asks a run to stop.
        faulthandler.register(
            signal.SIGUSR2, file=os.memfd_create(f"{_FILE_NAME}:{worker}"), all_threads=True
        )


def worker_of(process_id: int) -> str | None:
    """Return the name of the worker in a process of this host; "" for a worker without a name, None for a
    process that has not registered."""
    with contextlib.suppress(OSError):
        path = _stack_file(process_id)
        if path is not None:
            return os.readlink(path).removeprefix(_LINK).removesuffix(" (deleted)")
    return None


def look_at(process_id: int, with_stack: bool = True) -> ProcessLook:
    """Return the state of one process of this host, its stacks if it may still reply, and its activity."""
    state = read_state(process_id)
    if not with_stack or state in (STOPPED, GONE):
        return ProcessLook(state)
    # Read the activity first, before the process's threads wake to write their stacks.
    activity = read_activity(process_id)
    return ProcessLook(state, read_stack(process_id), activity)


def kill_worker(process_id: int) -> None:
    """Kill a process of this host, which may be stopped. A process that has not registered is left alone,
    because it has reused the number."""
    with contextlib.suppress(OSError):
        if _stack_file(process_id) is not None:
            os.kill(process_id, signal.SIGKILL)


def read_state(process_id: int) -> str:
    """Return why a process of this host does not run, as in ``ProcessLook``."""
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return GONE if Path("/proc/self").exists() else RUNS
    except OSError:
        return RUNS
    # Split after the last bracket, because the program's name may itself contain brackets and spaces.
    return _STATES.get(stat.rpartition(")")[2].split()[0], RUNS)


def read_activity(process_id: int) -> Activity | None:
    """Read the activity of one process of this host; None if it is gone, or if there is no ``/proc``."""
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
    """Return whether, at this moment, a thread runs, or would if it had a processor, or waits for a disk or a
    network file system."""
    return any(stat[0] in _GOING_ON for each in processes for stat in _threads(each))


def _stat(path: Path) -> list[str]:
    # Split after the last bracket, because the program's name may itself contain brackets and spaces.
    return path.read_text().rpartition(")")[2].split()


def _threads(process_id: int) -> Iterator[list[str]]:
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{process_id}/task").iterdir():
            # Ignore errors, because threads come and go.
            with contextlib.suppress(OSError):
                yield _stat(path / "stat")


def _bytes(process_id: int) -> int:
    """Return the bytes that a process has read and written; 0 if that may not be seen."""
    with contextlib.suppress(OSError):
        counts = dict(line.split(": ") for line in Path(f"/proc/{process_id}/io").read_text().splitlines())
        return sum(int(counts[name]) for name in ("rchar", "wchar", "read_bytes", "write_bytes"))
    return 0


def read_stack(process_id: int) -> str:
    """Signal one process of this host and return the stacks that it wrote, at most 6000 characters; ``""`` if
    it is gone or was not prepared."""
    with contextlib.suppress(OSError):
        path = _stack_file(process_id)
        # Do not send the signal: without this file the process has no handler for it and would end.
        if path is None:
            return ""
        before = os.stat(path).st_size
        os.kill(process_id, signal.SIGUSR2)
        deadline, size = time.monotonic() + _READ_WAIT_S, before
        while time.monotonic() < deadline:
            time.sleep(0.02)
            now = os.stat(path).st_size
            # Wait until the size stays the same: the handler writes line by line, and does not report its
            # end.
            if now == size and now > before:
                break
            size = now
        with open(path, "rb") as file:
            file.seek(before)
            # Keep the end, where faulthandler writes the main thread.
            return file.read().decode(errors="replace")[-_LONGEST_STACK:]
    return ""


def _stack_file(process_id: int) -> Path | None:
    for path in Path(f"/proc/{process_id}/fd").iterdir():
        # Ignore errors, because descriptors are opened and closed meanwhile.
        with contextlib.suppress(OSError):
            if os.readlink(path).startswith(_LINK):
                return path
    return None
