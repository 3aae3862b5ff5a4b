"""Status of a process, read from ``/proc``."""

from __future__ import annotations


def status_bytes(key: str, process: int | str = "self") -> int:
    """Return a size from proc_pid_status(5) in bytes. ``VmRSS`` is the resident memory of a process;
    ``VmHWM`` is its peak since the process started its current program, which getrusage does not report
    separately."""
    # Read bytes: the name of the process may contain any.
    with open(f"/proc/{process}/status", "rb") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{key}:".encode()))
