"""How much a process and those that it started have done, taken from outside: whether a worker that does not answer is at work."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_MOST_CPU_SHARE = 0.05
"""Of a processor, by a process at rest: Ray, gloo and NCCL have threads that wake now and then, and a loop may ask whether it may go on."""
_MOST_BYTES = 1 << 20
_MOST_FAULTS = 100
_FAULTS, _CPU = slice(9, 11), slice(11, 15)
"""Places in ``/proc/PID/stat`` behind the name: page faults that read a disk, and ticks of CPU, each with those of ended children."""
_GOING_ON = ("R", "D")


@dataclass(frozen=True, slots=True)
class Activity:
    """What a process of this host and its descendants have done until now.

    Attributes:
        at: when that was, monotonic seconds of its host.
        cpu_s: seconds of CPU, with those of descendants that have ended.
        bytes: that they have read and written, by calls and on disks.
        faults: pages that had to be read from a disk.
        processes: their numbers.
        goes_on: one of their threads runs, or would if it had a processor, or waits for a disk or a network file system.
    """

    at: float
    cpu_s: float
    bytes: int
    faults: int
    processes: frozenset[int]
    goes_on: bool = False

    def rested_since(self, before: Activity) -> bool:
        """Whether nothing was done since ``before`` but what processes do that wait."""
        return (
            not (self.goes_on or before.goes_on)
            and self.processes == before.processes
            # less than before: somebody has ended
            and 0 <= self.cpu_s - before.cpu_s <= _MOST_CPU_SHARE * (self.at - before.at)
            and 0 <= self.bytes - before.bytes <= _MOST_BYTES
            and 0 <= self.faults - before.faults <= _MOST_FAULTS
        )


def read_activity(process_id: int) -> Activity | None:
    """Of one process of this host; None where it is gone, or where there is no ``/proc``."""
    at = time.monotonic()
    try:
        children = psutil.Process(process_id).children(recursive=True)
        processes = frozenset({process_id, *(child.pid for child in children)})
        own = [(_stat(Path(f"/proc/{each}/stat")), _bytes(each)) for each in processes]
    except (psutil.Error, OSError):
        return None
    ticks = sum(sum(map(int, stat[_CPU])) for stat, _ in own)
    faults = sum(sum(map(int, stat[_FAULTS])) for stat, _ in own)
    goes_on = any(stat[0] in _GOING_ON for each in processes for stat in _threads(each))
    return Activity(at, ticks / os.sysconf("SC_CLK_TCK"), sum(count for _, count in own), faults, processes, goes_on)


def _stat(path: Path) -> list[str]:
    # the name before it may have brackets and spaces of its own
    return path.read_text().rpartition(")")[2].split()


def _threads(process_id: int) -> Iterator[list[str]]:
    with contextlib.suppress(OSError):
        for path in Path(f"/proc/{process_id}/task").iterdir():
            # threads come and go
            with contextlib.suppress(OSError):
                yield _stat(path / "stat")


def _bytes(process_id: int) -> int:
    """0 where it may not be seen."""
    with contextlib.suppress(OSError):
        counts = dict(line.split(": ") for line in Path(f"/proc/{process_id}/io").read_text().splitlines())
        return sum(int(counts[name]) for name in ("rchar", "wchar", "read_bytes", "write_bytes"))
    return 0
