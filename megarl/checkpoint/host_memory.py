"""Memory that a process of this machine may still allocate: the system's free memory, limited by the
container's control group."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

# One entry per control-group version: directory, file of the limit, file of the usage, and the line of
# ``memory.stat`` that counts reclaimable memory.
_VERSIONS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_bytes() -> int:
    """Return the bytes that can be allocated without swapping or hitting a memory limit."""
    # The smallest limit counts: a container may be allowed less than its machine has.
    limits = [psutil.virtual_memory().available]
    for directory, limit, usage, cached in _VERSIONS:
        # A file may be missing, or contain "max" if there is no limit.
        with contextlib.suppress(OSError, ValueError):
            stat = dict(map(str.split, (directory / "memory.stat").read_text().splitlines()))
            used = int((directory / usage).read_text()) - int(stat.get(cached, 0))
            limits.append(int((directory / limit).read_text()) - used)
    return max(0, min(limits))
