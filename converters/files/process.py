"""Status of a process, from `/proc`."""

from __future__ import annotations


def status_bytes(key: str, process: int | str = "self") -> int:
    """Return bytes that proc_pid_status(5) says: ``VmRSS`` is what a process has in memory, ``VmHWM`` the
    most that it had there since it became the program that it is (which getrusage does not tell apart)."""
    with open(f"/proc/{process}/status", "rb") as file:  # its name may be of any bytes
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{key}:".encode()))
