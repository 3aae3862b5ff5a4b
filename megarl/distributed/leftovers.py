"""Temporary directories that record which process owns them, so that a later start can remove those of dead
runs.

A run, or its keeper, removes the directory at its end. If both are killed, as when a whole control group is,
only a later start can do it.
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

logger = logging.getLogger(__name__)

PREFIX = "megarl-"
OWNER_FILE = ".owner.json"


def owned_directory(parent: str | Path, prefix: str = PREFIX) -> Path:
    """Create a temporary directory that only this user can enter and that this process owns. Also remove
    directories of dead processes next to it.

    Raises:
        OSError: the directory cannot be created.
    """
    sweep(Path(parent))
    # Until the claim, the directory has no owner, so other processes do not remove it.
    directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    claim(directory)
    return directory


def claim(directory: Path) -> None:
    """Record that this process owns a directory."""
    # Ignore errors: if the system cannot identify processes precisely, the directory is never swept.
    with contextlib.suppress(OSError):
        (directory / OWNER_FILE).write_text(json.dumps(_identity(os.getpid())))


def keep(directory: Path) -> None:
    """Prevent a directory from being removed after the end of this process."""
    (directory / OWNER_FILE).unlink(missing_ok=True)


def sweep(parent: Path) -> list[Path]:
    """Remove this user's directories in ``parent`` whose owner has certainly ended, and return them.

    Directories without an owner stay. So do those of another machine or container, whose processes are not
    visible here.
    """
    removed = []
    for directory in sorted(parent.glob(f"{PREFIX}*")):
        if _is_abandoned(directory):
            # Ignore errors, because another process may be sweeping the same directory.
            shutil.rmtree(directory, ignore_errors=True)
            removed.append(directory)
    if removed:
        logger.info("removed leftovers of dead runs: %s", ", ".join(map(str, removed)))
    return removed


def _is_abandoned(directory: Path) -> bool:
    try:
        # lstat does not follow a symbolic link, with which another user could point to any directory.
        status = directory.lstat()
        owner = json.loads((directory / OWNER_FILE).read_text())
        process = owner["process"]
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or not isinstance(process, int):
            return False
        here = _identity(os.getpid())
        # A process id is unique only on one host, since its last boot, and within one namespace.
        if any(owner[key] != here[key] for key in ("host", "boot", "processes")):
            return False
        # The identity includes the start time, because process ids are reused.
        return owner != _identity(process) and not _is_used(directory)
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        # If the owner cannot be determined, the directory must stay.
        return False


def _identity(process: int) -> dict[str, int | str]:
    """Return the data that identifies a process: its id, its start time, and the namespace of the id. The
    start time is 0 if there is no such process.

    Raises:
        OSError: this system does not provide the data.
    """
    started = 0
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        # Split after the last parenthesis: the program name is in parentheses and may contain any character.
        state, *rest = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
        # A zombie has ended although its id is still in use. The start time is field 22 of proc(5), in clock
        # ticks since boot.
        started = 0 if state in (b"Z", b"X") else int(rest[18])
    return {
        "process": process,
        "started": started,
        "host": socket.gethostname(),
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "processes": os.readlink("/proc/self/ns/pid"),
    }


def _is_used(directory: Path) -> bool:
    """Return whether any process has the directory on its command line. Ray's processes do, and may outlive a
    killed driver for a while."""
    name = os.fsencode(directory)
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if name in line.read_bytes():
                return True
    return False
