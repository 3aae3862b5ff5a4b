"""Storage that fails for a moment or has no room: reads that are tried again, and messages about space."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
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
"""What a file system over a network, or a disk, says of a moment, and not of what a file holds."""
PAUSES_S = (0.1, 0.5, 2.0, 5.0)
"""Between the tries of a read."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def read_again(read: Callable[[], Read], what: str) -> Read:
    """Return the result of ``read``, and call it again after ever longer pauses while the storage fails for a
    moment.

    Args:
        read: may be called several times.
        what: for messages.

    Raises:
        StorageError: the last try failed for such a reason too. Every other error is raised as it is.
    """
    # None stands for the last try, after which nothing is waited for.
    for pause in (*PAUSES_S, None):
        try:
            return read()
        except Exception as error:
            # An inner `read_again` has waited already.
            if isinstance(error, StorageError) or (cause := transient_cause(error)) is None:
                raise
            if pause is None:
                tries = f"{len(PAUSES_S) + 1} times within {sum(PAUSES_S):g} s"
                raise StorageError(
                    f"{what} cannot be read: {os.strerror(cause.errno or 0)}, {tries}. That is a fault of "
                    "the storage and no damage of the "
                    "file. Fix: start again when it answers"
                ) from error
            logger.warning(
                "%s cannot be read (%s); trying again in %g s", what, os.strerror(cause.errno or 0), pause
            )
            time.sleep(pause)
    raise AssertionError("the last try returns or raises")


def is_file(path: Path) -> bool:
    """Return whether a path leads to a file. ``Path.is_file`` says no, or raises, where the storage fails for
    a moment.

    Raises:
        StorageError: the storage does not say.
    """
    return stat.S_ISREG(_mode(path))


def is_real_directory(path: Path) -> bool:
    """Return whether a path is a directory and no link to one; reads like ``is_file``."""
    return stat.S_ISDIR(_mode(path, follow=False))


def is_there(path: Path) -> bool:
    """Return whether a path leads to anything; reads like ``is_file``."""
    return _mode(path) != 0


def names_in(directory: Path) -> list[str]:
    """Names of what is in a directory, sorted; none where there is no such directory.

    Raises:
        StorageError: the storage does not say.
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
    """Return the error of the storage that ``error`` is, or is made of; None where there is none."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in TRANSIENT:
            return error
        error = error.__cause__
    return None


def tree_bytes(root: Path) -> int:
    """Return bytes of all files below ``root``; 0 where there is no such directory."""
    return sum(
        size
        for directory, _, names in os.walk(root)
        for size in _sizes(Path(directory) / name for name in names)
    )


def _sizes(paths: Iterator[Path]) -> Iterator[int]:
    for path in paths:
        try:
            yield path.lstat().st_size
        except OSError:
            # it vanished, or cannot be seen: then nothing is known of it
            continue


def storage_error(error: Exception) -> Exception:
    """Return the error of the storage that led to another one; where there is none, the other one.
    ``torch.save`` tells of what it could not write only that it is at another position than it thought."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return found or error


def said_of_space(directory: Path, needed: int, error: BaseException) -> str:
    """``no space: ...`` with what is needed and what is free, where that may be why a checkpoint could not be
    written; else ``""``.

    Args:
        directory: where it was to be.
        needed: bytes that it takes.
        error: that ended it; what it says of a quota counts, of which the free space of the disk tells
            nothing.
    """
    try:
        free = shutil.disk_usage(directory).free
    except OSError:
        return ""
    if free >= needed and not any(os.strerror(number) in str(error) for number in _NO_SPACE):
        return ""
    elsewhere = " (a quota, or the number of files, may be in the way)" if free >= needed else ""
    return (
        f"no space: a checkpoint takes about {_gib(needed)}, {_gib(free)} are free in {directory}{elsewhere}"
    )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.2f} MiB"
