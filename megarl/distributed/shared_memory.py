"""Free space in ``/dev/shm``, where Ray's object store and the ranks of a vLLM engine share memory.

A file there may be larger than the free space. A process that writes to a page for which there is no space is
killed by the kernel (SIGBUS), without a message. So megarl warns when little space is left, and mentions it
when a process has died. Refit buffers are not files there.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
LITTLE = 64 * 2**20
"""Free bytes below which the batches and results of a step may not fit."""
_FIX = (
    "Fix: ls -l /dev/shm and remove what ended processes have left, or mount it larger (mount -o "
    "remount,size=8G /dev/shm; "
    "Docker: --shm-size=8g)"
)


def free_bytes() -> int | None:
    """Return the free bytes in ``/dev/shm``; None if it does not exist."""
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def note_of_full_memory() -> str:
    """Return a note for the error message of a process that died on this host; empty if enough space is
    free."""
    free = free_bytes()
    if free is None or free >= LITTLE:
        return ""
    return (
        f" {SHARED_MEMORY} has {free / 2**20:.1f} MiB free, which ends processes that share memory there "
        f"(SIGBUS). {_FIX}"
    )


class SharedMemoryWatch:
    """Warns when ``/dev/shm`` is almost full, and again only after it was not.

    Args:
        needed: bytes that Ray's object store may need there; 0 if it is elsewhere.
    """

    def __init__(self, needed: int) -> None:
        self._needed, self._told = needed, False

    def look(self) -> None:
        """Warn if fewer than ``LITTLE`` bytes are free, or fewer than ``needed`` if that is less."""
        free = free_bytes() if self._needed else None
        if free is None or free >= min(LITTLE, self._needed):
            self._told = False
        elif not self._told:
            self._told = True
            logger.warning(
                "%s has %.1f MiB free, and Ray's object store may need up to %.0f MiB there: a process that "
                "finds no room for a page is "
                "ended by the kernel (SIGBUS). %s",
                SHARED_MEMORY,
                free / 2**20,
                self._needed / 2**20,
                _FIX,
            )
