"""CPU seconds used by a case and everything that it started, and by other programs of the machine meanwhile.

The kernel adds up the CPU seconds of processes that their parents waited for. Ray's raylet waits for none of
its workers, so the kernel reports their CPU seconds to nobody. Such processes are therefore sampled while
they run.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing.resource_tracker
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

# linux/prctl.h defines this number, which Python's standard library does not have.
_PR_SET_CHILD_SUBREAPER = 36
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
ORPHAN_SECONDS = 10.0
LOOK_SECONDS = 1.0


@dataclass(slots=True)
class Usage:
    """CPU usage of the machine over some time, filled in at the end of that time.

    Attributes:
        wall: wall seconds.
        cpu: CPU seconds of this process and of all its descendants, including orphans; of processes that
            nobody waits for, those until at most a second before their end.
        others: mean number of cores that other programs kept busy; None if the kernel does not report it.
    """

    wall: float = 0.0
    cpu: float = 0.0
    others: float | None = None


@contextlib.contextmanager
def measured_usage() -> Iterator[Usage]:
    """Measure the usage inside the block. Processes that outlive their parents become children of this
    process, so that their seconds count too."""
    # Start the resource tracker now: it lives as long as this process, so nobody may wait for it below.
    multiprocessing.resource_tracker.ensure_running()
    before = {child.pid for child in psutil.Process().children()}
    usage, begun, used, busy = Usage(), time.monotonic(), _own_cpu(), machine_cpu()
    _adopt_orphans(True)
    try:
        with _Unreported() as unreported:
            yield usage
    finally:
        # End the orphans before the figures are taken, because CPU seconds of children count only once
        # somebody has waited for them.
        _end_orphans(before)
        _adopt_orphans(False)
        usage.wall, usage.cpu = time.monotonic() - begun, _own_cpu() - used + unreported.seconds
        after = machine_cpu()
        if busy is not None and after is not None:
            usage.others = max(0.0, after - busy - usage.cpu) / usage.wall


def _own_cpu() -> float:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def machine_cpu(statistics: Path = Path("/proc/stat")) -> float | None:
    """Return the busy seconds, over all processes, of the cores of this process since the machine started;
    None if the kernel does not report them."""
    cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    try:
        lines = [line.split() for line in statistics.read_text(encoding="ascii").splitlines()]
    except OSError:
        return None
    # The columns are user, nice, system, idle, iowait, irq, softirq and steal; user already includes guests.
    # Leave out idle and iowait; stolen time is lost to another machine, and counts.
    counted = [[int(word) for word in words[1:9]] for words in lines if words[0] in cores]
    return sum(sum(ticks) - ticks[3] - ticks[4] for ticks in counted) / _CLOCK_TICKS if counted else None


class _Unreported:
    """CPU seconds, since the start of the block, of descendants whose parents ignore their end. A thread
    samples them every ``LOOK_SECONDS``."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, float], float] = {}
        self._found: dict[tuple[int, float], float] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look_on, daemon=True)

    def __enter__(self) -> _Unreported:
        # Such processes may run before the block, for example those of a running Ray.
        self._before = _unreported()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    @property
    def seconds(self) -> float:
        """The CPU seconds of all processes that were seen."""
        return sum(seconds - self._before.get(process, 0.0) for process, seconds in self._found.items())

    def _look_on(self) -> None:
        while not self._end.wait(LOOK_SECONDS):
            self._found |= _unreported()


def _unreported() -> dict[tuple[int, float], float]:
    """Return the CPU seconds so far of descendants whose parents ignore their end, by process id and creation
    time."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, OSError):
            if _ignores_children(process.ppid()):
                # The kernel reuses the numbers of ended processes, so the time of birth is part of the key.
                # The four times are user and system, of the process and of children that were waited for.
                found[process.pid, process.create_time()] = sum(process.cpu_times()[:4])
    return found


def _ignores_children(pid: int) -> bool:
    """Return whether a process ignores the end of its children."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    ignored = next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:"))
    # The lowest bit of the mask is signal 1.
    return bool(int(ignored, 16) >> (signal.SIGCHLD - 1) & 1)


def _adopt_orphans(adopt: bool) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def _end_orphans(before: set[int]) -> None:
    """Wait for new children, then end those that remain, because the next case needs an idle machine."""
    new = [child for child in psutil.Process().children() if child.pid not in before]
    _, alive = psutil.wait_procs(new, timeout=ORPHAN_SECONDS)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=ORPHAN_SECONDS)
