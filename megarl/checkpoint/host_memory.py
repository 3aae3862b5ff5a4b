"""Memory that a process of this machine may still allocate: what the system has free, within what the
container's
control group allows."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

# The entries are versions of control groups: the directory, the files of limit and usage, and the line of
# ``memory.stat`` that counts reclaimable memory.
_VERSIONS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_bytes() -> int:
    """Return the bytes that can be allocated without evicting anything."""
    # Take the smallest limit: a container may use less than its machine has.
    limits = [psutil.virtual_memory().available]
    for directory, limit, usage, cached in _VERSIONS:
        # The file may be absent, or contain "max" if there is no limit.
        with contextlib.suppress(OSError, ValueError):
            stat = dict(map(str.split, (directory / "memory.stat").read_text().splitlines()))
            used = int((directory / usage).read_text()) - int(stat.get(cached, 0))
            limits.append(int((directory / limit).read_text()) - used)
    return max(0, min(limits))
