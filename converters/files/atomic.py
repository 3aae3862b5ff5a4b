"""Files and directories that appear whole or not at all, also when the machine stops in between."""

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
# More only compete for the disk.
_THREADS = 8


def rename_surely(source: Path, target: Path) -> None:
    """Rename a file or directory, as ``os.rename``; one whose reply was lost has been done, whatever the
    system says of it.

    A file system over a network asks again where no reply came, and is told then that there is no ``source``
    any more.

    Raises:
        OSError: it was not renamed.
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
    """Open a file for writing; it gets its name at the end of the ``with`` block, and nothing is left of it
    if the block fails.

    Args:
        path: of the file, which may exist.
        durable: its content and its name are on the disk afterwards.
    """
    # In the same directory, because a rename across file systems fails.
    # ``Staging`` finds by this form of the name what a kill has left.
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
    """Make a finished directory visible under its final name, which must be free, and make the rename itself
    durable.

    Raises:
        OSError: the rename failed, or ``final`` holds files already.
    """
    # A rename is an entry of the directory above, which a power cut may take back until that is on the disk.
    rename_surely(temporary, final)
    fsync_directory(final.parent)


def write_bytes_durably(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write a new file, or replace the content of one, and wait until it is on disk. Not atomic; for files in
    a temporary directory.

    Args:
        path: of the file.
        content: of it.
        private: nobody but this user may read it.
    """
    # At once and not after the file was written, when another user may have opened it.
    mode = 0o600 if private else 0o644
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        if private:
            # one that was there keeps its mode
            os.fchmod(descriptor, mode)
        write_all(descriptor, content)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, content: bytes) -> None:
    """Write bytes where the system may take a part of them at a time."""
    remaining = memoryview(content)
    while remaining:
        remaining = remaining[os.write(descriptor, remaining) :]


def write_json_atomic(path: str | Path, content: Any) -> None:
    """Write ``content`` as JSON; readers see the old file or the new one, never a part.

    Raises:
        TypeError, ValueError: ``content`` has no JSON form (NaN and infinities have none). The old file
            stays.
        OSError: it could not be written. The old file stays.
    """
    encoded = json_bytes(content)
    with whole_file(Path(path), durable=True) as file:
        file.write(encoded)


def json_bytes(content: Any) -> bytes:
    """Readable JSON with a final newline; refuses NaN."""
    return (json.dumps(content, indent=2, allow_nan=False) + "\n").encode()


def in_parallel(
    function: Callable[[Item], Result], items: Sequence[Item], threads: int | None = None
) -> list[Result]:
    """Call a function that reads or writes files for each item, and return the results in order. Its threads
    do not keep the program from ending while one waits for a dead mount, unlike those of an executor.

    Args:
        function: is called for each, by one thread.
        items: paths or names of files.
        threads: at most; None for as many as cores, and no more than compete for a disk.
    """
    if len(items) < 2:
        return [function(item) for item in items]
    found: list[Any] = [None] * len(items)
    failures: list[BaseException] = []
    numbers = iter(range(len(items)))

    def work() -> None:
        try:
            # each number goes to one of them
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
        # A named pipe or a device would be waited for when it is opened.
        paths = map(Path(directory).joinpath, names)
        files += [path for path in paths if stat.S_ISREG(path.lstat().st_mode)]
    # a disk that is told of several files at once makes fewer journeys
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
