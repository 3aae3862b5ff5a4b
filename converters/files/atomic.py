"""Files and directories that are written atomically, even if the machine stops meanwhile."""

from __future__ import annotations

import json
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
# More threads would only compete for the disk.
_THREADS = 8


def rename_surely(source: Path, target: Path) -> None:
    """Rename a file or directory like ``os.rename``. A rename that was done counts as success, even if the
    system reports an error because the reply was lost.

    A network file system retries when no reply arrives, and then reports that ``source`` does not exist.

    Raises:
        OSError: the file or directory was not renamed.
    """
    before = os.lstat(source)
    try:
        os.rename(source, target)
    except OSError:
        if (
            os.path.lexists(source)
            or not os.path.lexists(target)
            or not os.path.samestat(os.lstat(target), before)
        ):
            raise


@contextmanager
def whole_file(path: Path, *, durable: bool = False) -> Iterator[IO[bytes]]:
    """Open a file for writing. The file gets its name at the end of the ``with`` block; if the block fails,
    no file remains.

    Args:
        path: path of the file, which may exist.
        durable: whether content and name are on the disk at the end.
    """
    # Use the same directory, because a rename across file systems fails. ``Staging`` finds what a kill has
    # left by this form of the name.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        rename_surely(temporary, path)
        if durable:
            fsync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def commit_directory(temporary: Path, final: Path) -> None:
    """Rename a finished directory to its final name, which must be free, and make the rename durable.

    Raises:
        OSError: the rename failed, or ``final`` already holds files.
    """
    # Flush the parent directory, which holds the new name: a power cut may undo the rename until then.
    rename_surely(temporary, final)
    fsync_directory(final.parent)


def write_bytes_durably(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write a new file, or replace the content of one, and wait until it is on disk. This is not atomic, and
    meant for files in a temporary directory.

    Args:
        path: path of the file.
        content: content of the file.
        private: whether only this user may read the file.
    """
    # Set the mode when the file is created: afterwards another user may already have opened it.
    mode = 0o600 if private else 0o644
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        if private:
            # Set the mode explicitly, because an existing file keeps its mode when it is opened.
            os.fchmod(descriptor, mode)
        write_all(descriptor, content)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, content: bytes) -> None:
    """Write all bytes, even if the system accepts only a part of them at a time."""
    remaining = memoryview(content)
    while remaining:
        remaining = remaining[os.write(descriptor, remaining) :]


def write_json_atomic(path: str | Path, content: Any) -> None:
    """Write ``content`` as JSON atomically: readers see either the old or the new file.

    Raises:
        TypeError, ValueError: ``content`` cannot be written as JSON (NaN and infinities cannot). The old file
            is kept.
        OSError: the file could not be written. The old file is kept.
    """
    encoded = json_bytes(content)
    with whole_file(Path(path), durable=True) as file:
        file.write(encoded)


def json_bytes(content: Any) -> bytes:
    """Return indented JSON with a final newline; refuse NaN and infinities."""
    return (json.dumps(content, indent=2, allow_nan=False) + "\n").encode()


def in_parallel(
    function: Callable[[Item], Result], items: Sequence[Item], threads: int | None = None
) -> list[Result]:
    """Call a function that reads or writes files for each item, and return the results in order. Unlike an
    executor's threads, these threads do not keep the program from exiting while one waits for a dead mount.

    Args:
        function: function that one thread calls for each item.
        items: paths or names of files.
        threads: limit of threads; None for the number of cores, but no more than a disk can serve.
    """
    if len(items) < 2:
        return list(map(function, items))
    found: list[Any] = [None] * len(items)
    failures: list[BaseException] = []
    numbers = iter(range(len(items)))

    def work() -> None:
        try:
            # The threads share this iterator, so that each number goes to one of them.
            for number in numbers:
                found[number] = function(items[number])
        except BaseException as error:
            failures.append(error)

    count = min(len(items), threads or min(_THREADS, os.cpu_count() or 1))
    started = [threading.Thread(target=work, name="files", daemon=True) for _ in range(count)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if failures:
        raise failures[0]
    return found


def fsync_tree(root: Path) -> None:
    """Wait until every regular file and directory below ``root``, and ``root`` itself, is on disk."""
    directories: list[Path] = []
    files: list[Path] = []
    for directory, _, names in os.walk(root, topdown=False):
        directories.append(Path(directory))
        # Flush regular files only: opening a named pipe or a device would block.
        paths = map(Path(directory).joinpath, names)
        files += [path for path in paths if stat.S_ISREG(path.lstat().st_mode)]
    # Flush several files at once, which lets the disk combine its writes.
    in_parallel(fsync_file, files, _THREADS)
    for path in directories:
        fsync_directory(path)


def fsync_file(path: Path) -> None:
    """Wait until the content of a file is on disk."""
    _fsync(path, os.O_RDONLY | os.O_NOFOLLOW)


def fsync_directory(directory: Path) -> None:
    """Wait until the names in a directory are on disk."""
    _fsync(directory, os.O_RDONLY | os.O_DIRECTORY)


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
