"""Storage that fails for a moment or has no room: reads that are retried, and messages about space."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from megarl.errors import StorageError

logger = logging.getLogger(__name__)

Read = TypeVar("Read")
TRANSIENT = frozenset(
    {
        errno.EIO,
        errno.ESTALE,
        errno.EREMOTEIO,
        errno.ETIMEDOUT,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.ENETDOWN,
    }
)
"""Errors by which a network file system, or a disk, reports a momentary failure, and nothing about a file's
contents."""
PAUSES_S = (0.1, 0.5, 2.0, 5.0)
"""Seconds between the attempts of a read."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def read_again(read: Callable[[], Read], what: str) -> Read:
    """Return the result of ``read``, and retry it after ever longer pauses while the storage fails for a
    moment.

    Args:
        read: may be called several times.
        what: for messages.

    Raises:
        StorageError: the last attempt failed for such a reason too. Every other error is raised unchanged.
    """
    # None stands for the last attempt, after which there is no pause.
    for pause in (*PAUSES_S, None):
        try:
            return read()
        except Exception as error:
            # Do not retry if an inner `read_again` has retried already.
            if isinstance(error, StorageError) or (cause := transient_cause(error)) is None:
                raise
            if pause is None:
                tries = f"{len(PAUSES_S) + 1} times within {sum(PAUSES_S):g} s"
                raise StorageError(
                    f"{what} cannot be read: {os.strerror(cause.errno or 0)}, {tries}. This is a "
                    "fault of the storage; the file is not damaged. Fix: start again when the storage "
                    "responds"
                ) from error
            logger.warning(
                "%s cannot be read (%s); trying again in %g s", what, os.strerror(cause.errno or 0), pause
            )
            time.sleep(pause)
    raise AssertionError("the last try returns or raises")


def is_file(path: Path) -> bool:
    """Return whether a path leads to a file. ``Path.is_file`` returns False, or raises, if the storage fails
    for a moment.

    Raises:
        StorageError: the storage does not tell.
    """
    return stat.S_ISREG(_mode(path))


def is_real_directory(path: Path) -> bool:
    """Return whether a path is a directory and not a link to one; reads like ``is_file``."""
    return stat.S_ISDIR(_mode(path, follow=False))


def is_there(path: Path) -> bool:
    """Return whether a path leads to anything; reads like ``is_file``."""
    return _mode(path) != 0


def names_in(directory: Path) -> list[str]:
    """Return the names in a directory, sorted; empty if the directory does not exist.

    Raises:
        StorageError: the storage does not tell.
    """
    try:
        return sorted(read_again(lambda: os.listdir(directory), str(directory)))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _mode(path: Path, follow: bool = True) -> int:
    """Return the mode of the target of a path, or of the path itself; 0 if nothing is there."""
    try:
        return read_again(lambda: os.stat(path, follow_symlinks=follow).st_mode, str(path))
    except (FileNotFoundError, NotADirectoryError):
        return 0


def transient_cause(error: BaseException | None) -> OSError | None:
    """Return the storage's error that ``error`` is, or was caused by; None if there is none."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in TRANSIENT:
            return error
        error = error.__cause__
    return None


def tree_bytes(root: Path) -> int:
    """Return the bytes of all files below ``root``; 0 if there is no such directory."""
    total = 0
    for directory, _, names in os.walk(root):
        for name in names:
            # Skip a file that has vanished, or cannot be seen, so that its size is unknown.
            with contextlib.suppress(OSError):
                total += (Path(directory) / name).lstat().st_size
    return total


def storage_error(error: Exception) -> Exception:
    """Return the storage's error that led to another one, or else that other one. When ``torch.save`` cannot
    write, it reports only that its position is not the expected one."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return found or error


def said_of_space(directory: Path, needed: int, error: BaseException) -> str:
    """Return ``no space: ...`` with the needed and the free bytes, if that may be why a checkpoint could not
    be written; else ``""``.

    Args:
        directory: directory of the checkpoint.
        needed: bytes that the checkpoint takes.
        error: the error that ended the write; if it names a quota, that counts, because the disk's free space
            says nothing of a quota.
    """
    try:
        free = shutil.disk_usage(directory).free
    except OSError:
        return ""
    if free >= needed and not any(os.strerror(number) in str(error) for number in _NO_SPACE):
        return ""
    elsewhere = " (a quota, or the limit on files, may be reached)" if free >= needed else ""
    return (
        f"no space: a checkpoint takes about {_gib(needed)}, {_gib(free)} are free in {directory}{elsewhere}"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.2f} MiB"
