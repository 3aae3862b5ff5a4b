"""List and hash the files of a directory, without following symlinks or blocking on named pipes."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

ALGORITHM = "sha256"


def entries_below(root: Path) -> Iterator[tuple[str, bool]]:
    """Yield (path relative to ``root``, whether it is a regular file) for every entry that is not a
    directory."""
    for directory, subdirectories, names in os.walk(root):
        # os.walk lists a symlink to a directory among the directories, but does not follow it.
        for name in [*names, *subdirectories]:
            path = Path(directory) / name
            mode = path.lstat().st_mode
            if not stat.S_ISDIR(mode):
                yield path.relative_to(root).as_posix(), stat.S_ISREG(mode)


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading.

    Raises:
        OSError: the file cannot be opened, is a symlink, or is not a regular file.
    """
    # Without O_NONBLOCK, opening a named pipe would block. The check below rejects it.
    stream = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
        stream.close()
        raise OSError(f"{path} is not a regular file")
    return stream


def hash_of(path: Path) -> str:
    """Return the hexadecimal hash of a file; errors as in ``open_regular``."""
    with open_regular(path) as stream:
        return hashlib.file_digest(stream, ALGORITHM).hexdigest()
