"""Write files and directories atomically, so that a crash of the machine leaves either the old or the new
version."""

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
    """Rename a file or directory, and treat a rename that was done as a success even if the system reports an
    error.

    If the reply of a network file system is lost, it retries, and then reports that ``source`` does not
    exist.

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
    """Open a temporary file for writing, and rename it to ``path`` at the end of the block. If the block
    fails, the temporary file is deleted.

    Args:
        path: file to create or replace.
        durable: flush contents and name to disk.
    """
    # A rename works only within a file system. ``Staging`` recognises leftovers of a kill by this form of the
    # name.
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
    """Rename a finished directory to its final name, which must not exist, and flush the rename to disk.

    Raises:
        OSError: the rename failed, or ``final`` is a directory with files.
    """
    # Until the parent directory is flushed, a power failure may undo the rename.
    rename_surely(temporary, final)
    fsync_directory(final.parent)


def write_bytes_durably(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write a file, and wait until it is on disk. Not atomic: meant for files in a temporary directory.

    Args:
        path: file to create or overwrite.
        content: contents.
        private: only this user may read the file.
    """
    # Set the mode at creation, because another user could open the file before a later change.
    mode = 0o600 if private else 0o644
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        if private:
            # An existing file keeps its mode when it is opened.
            os.fchmod(descriptor, mode)
        write_all(descriptor, content)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, content: bytes) -> None:
    """Write all bytes, in several calls if the system accepts only a part at a time."""
    remaining = memoryview(content)
    while remaining:
        remaining = remaining[os.write(descriptor, remaining) :]


def write_json_atomic(path: str | Path, content: Any) -> None:
    """Write JSON atomically: readers see the old or the new file.

    Raises:
        TypeError, ValueError: ``content`` is not JSON (NaN and infinity are not). The old file is kept.
        OSError: the file could not be written. The old file is kept.
    """
    encoded = json_bytes(content)
    with whole_file(Path(path), durable=True) as file:
        file.write(encoded)


def json_bytes(content: Any) -> bytes:
    """Return indented JSON with a final newline. Raises ValueError for NaN and infinity."""
    return (json.dumps(content, indent=2, allow_nan=False) + "\n").encode()


def in_parallel(
    function: Callable[[Item], Result], items: Sequence[Item], threads: int | None = None
) -> list[Result]:
    """Call a function for each item in threads, and return the results in order. Unlike those of an executor,
    the threads do not keep the process alive if one hangs on a dead mount.

    Args:
        function: reads or writes a file.
        items: paths or names of files.
        threads: maximum number of threads; None for the number of cores, up to 8.
    """
    if len(items) < 2:
        return list(map(function, items))
    found: list[Any] = [None] * len(items)
    failures: list[BaseException] = []
    numbers = iter(range(len(items)))

    def work() -> None:
        try:
            # All threads take numbers from one iterator, so each number is processed once.
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
    """Wait until all regular files and directories below ``root``, and ``root`` itself, are on disk."""
    directories: list[Path] = []
    files: list[Path] = []
    for directory, _, names in os.walk(root, topdown=False):
        directories.append(Path(directory))
        # Opening a named pipe or a device would block.
        paths = map(Path(directory).joinpath, names)
        files += [path for path in paths if stat.S_ISREG(path.lstat().st_mode)]
    # With several flushes at once, the disk can combine its writes.
    in_parallel(fsync_file, files, _THREADS)
    for path in directories:
        fsync_directory(path)


def fsync_file(path: Path) -> None:
    """Wait until the contents of a file are on disk."""
    _fsync(path, os.O_RDONLY | os.O_NOFOLLOW)


def fsync_directory(directory: Path) -> None:
    """Wait until the file names in a directory are on disk."""
    _fsync(directory, os.O_RDONLY | os.O_DIRECTORY)


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
