"""Memory that a process of this machine may still allocate: what the system has free, within what the
container's
control group allows."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

# Of control groups: directory, files of limit and usage, and the line of ``memory.stat`` with what is given
# back when it is needed.
_VERSIONS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_bytes() -> int:
    """Return the bytes that can be allocated without evicting anything."""
    # The least counts: a container may take less than its machine has.
    limits = [psutil.virtual_memory().available]
    for directory, limit, usage, cached in _VERSIONS:
        # absent, or "max" where there is no limit
        with contextlib.suppress(OSError, ValueError):
            stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
            used = int((directory / usage).read_text()) - int(stat.get(cached, 0))
            limits.append(int((directory / limit).read_text()) - used)
    return max(0, min(limits))
