"""Read the status of a process from ``/proc``."""

from __future__ import annotations


def status_bytes(key: str, process: int | str = "self") -> int:
    """Return a size of proc_pid_status(5) in bytes.

    Args:
        key: ``VmRSS`` for the resident memory, or ``VmHWM`` for its peak since the program started.
            (getrusage also counts the time before exec.)
        process: process id, or ``self``.
    """
    # The process's name may not be valid UTF-8, so read bytes.
    with open(f"/proc/{process}/status", "rb") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{key}:".encode()))
