"""Temporary directories that record the process they belong to, so that the next start can remove those of
dead
runs.

A run removes its own at its end, or its keeper does; if both were killed, as with a whole control group, only
a later start can.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import socket
import stat
import tempfile
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

PREFIX = "megarl-"
OWNER_FILE = ".owner.json"


def owned_directory(parent: str | Path, prefix: str = PREFIX) -> Path:
    """Make a temporary directory that only this user can enter and that belongs to this process, and remove
    those of dead processes next to it.

    Raises:
        OSError: it cannot be made.
    """
    sweep(Path(parent))
    # Until it is claimed, the directory names no owner, so that the sweep of another process leaves it.
    directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    claim(directory)
    return directory


def claim(directory: Path) -> None:
    """Record that a directory belongs to this process."""
    # Ignore errors: if the system cannot identify processes this precisely, nothing is swept.
    with contextlib.suppress(OSError):
        (directory / OWNER_FILE).write_text(json.dumps(_identity(os.getpid())))


def keep(directory: Path) -> None:
    """Keep a directory after the end of this process."""
    (directory / OWNER_FILE).unlink(missing_ok=True)


def sweep(parent: Path) -> list[Path]:
    """Remove this user's directories there whose processes have certainly ended, and return them.

    Directories of another machine or container, whose processes cannot be seen here, stay, and so do those
    without an owner.
    """
    removed = []
    for directory in sorted(parent.glob(f"{PREFIX}*")):
        if _is_abandoned(directory):
            # Ignore errors, because two processes that start at once sweep the same directories.
            shutil.rmtree(directory, ignore_errors=True)
            removed.append(directory)
    if removed:
        logger.info("removed leftovers of dead runs: %s", ", ".join(map(str, removed)))
    return removed


def _is_abandoned(directory: Path) -> bool:
    try:
        # Use lstat, so that a link that another user created does not lead to somebody else's directory.
        status = directory.lstat()
        owner = json.loads((directory / OWNER_FILE).read_text())
        process = owner["process"]
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or not isinstance(process, int):
            return False
        here = _identity(os.getpid())
        # The number of a process is valid only on its host, since its boot, and in its namespace.
        if any(owner[key] != here[key] for key in ("host", "boot", "processes")):
            return False
        # Compare the start time as well, because process numbers are reused.
        return owner != _identity(process) and not _is_used(directory)
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return False


def _identity(process: int) -> dict[str, Any]:
    """Return what identifies a process: its number, its start time, and the namespace of its number. The
    start is 0 if there is no such process.

    Raises:
        OSError: this system does not tell.
    """
    started = 0
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        # Split after the last parenthesis: the program's name, in parentheses, may contain any character.
        state, *rest = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
        # A zombie has ended although it still has its number. For other processes, read field 22 of proc(5):
        # the start time, in ticks since boot.
        started = 0 if state in (b"Z", b"X") else int(rest[18])
    return {
        "process": process,
        "started": started,
        "host": socket.gethostname(),
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "processes": os.readlink("/proc/self/ns/pid"),
    }


def _is_used(directory: Path) -> bool:
    """Return whether a process has the directory on its command line, as Ray's processes do, which outlive a
    killed driver for a while."""
    name = os.fsencode(directory)
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if name in line.read_bytes():
                return True
    return False
