"""Files and directories that appear whole or not at all, also when the machine stops in between."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from converters.checkpoint.files import rename_surely
from megarl.errors import CheckpointError

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")
TEMPORARY_PREFIX = "tmp_"
"""Start of the name of every directory that is not finished or on its way out; readers never look inside."""
_THREADS = 8
"""More only compete for the disk."""


@contextmanager
def atomic_directory(final: str | Path) -> Iterator[Path]:
    """Yield an empty sibling directory that becomes ``final`` when the block ends well and vanishes when it raises.

    What the block wrote is on disk before the one rename that makes it visible.

    Raises:
        CheckpointError: ``final`` exists already, before or after the block.
    """
    target = Path(final)
    _refuse_existing(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{TEMPORARY_PREFIX}{target.name}_{secrets.token_hex(4)}")
    temporary.mkdir()
    try:
        yield temporary
        fsync_tree(temporary)
        _refuse_existing(target)
        commit_directory(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def commit_directory(temporary: Path, final: Path) -> None:
    """Make a finished directory visible under its final name, which must be free, and make the rename itself durable.

    Raises:
        OSError: the rename failed, or ``final`` holds files already.
    """
    rename_surely(temporary, final)
    fsync_directory(final.parent)


def write_bytes_durably(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write a new file, or replace the content of one, and wait until it is on disk. Not atomic; for files in a temporary directory.

    Args:
        path: of the file.
        content: of it.
        private: nobody but this user may read it.
    """
    mode = 0o600 if private else 0o644
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        if private:
            # one that was there keeps its mode
            os.fchmod(descriptor, mode)
        remaining = memoryview(content)
        while remaining:
            remaining = remaining[os.write(descriptor, remaining) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json_atomic(path: str | Path, content: Any) -> None:
    """Write ``content`` as JSON; readers see the old file or the new one, never a part.

    Raises:
        TypeError, ValueError: ``content`` has no JSON form (NaN and infinities have none). The old file stays.
        OSError: it could not be written. The old file stays.
    """
    target = Path(path)
    encoded = json_bytes(content)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        write_bytes_durably(temporary, encoded)
        rename_surely(temporary, target)
        fsync_directory(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def json_bytes(content: Any) -> bytes:
    """Readable JSON with a final newline; refuses NaN."""
    return (json.dumps(content, indent=2, allow_nan=False) + "\n").encode()


def in_parallel(function: Callable[[Item], Result], items: Sequence[Item], threads: int | None = None) -> list[Result]:
    """What a function that reads or writes files returns for each item, in their order. Its threads do not keep the program from ending
    where one of them waits for a dead mount, as those of an executor would.

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
        files += [path for path in (Path(directory) / name for name in names) if stat.S_ISREG(path.lstat().st_mode)]
    # a disk that is told of several files at once makes fewer journeys
    in_parallel(lambda path: _fsync(path, os.O_RDONLY | os.O_NOFOLLOW), files, _THREADS)
    for path in directories:
        fsync_directory(path)


def fsync_directory(directory: Path) -> None:
    """Wait until the names in a directory are on disk."""
    _fsync(directory, os.O_RDONLY | os.O_DIRECTORY)


def remove_directory(directory: Path) -> bool:
    """Let a directory vanish at once by renaming it to a temporary name, then delete its files.

    A file that cannot be deleted is logged and left under the temporary name: deletion never stops a run.

    Returns:
        Whether the directory is gone from its old name.
    """
    doomed = directory.with_name(f"{TEMPORARY_PREFIX}deleted_{directory.name}_{secrets.token_hex(4)}")
    try:
        rename_surely(directory, doomed)
    except OSError as error:
        logger.warning("%s cannot be removed: %s", directory, error)
        return False
    remove_tree(doomed)
    return True


def remove_tree(directory: Path) -> None:
    """Delete a directory that nobody reads; a failure is logged and leaves the rest."""
    try:
        shutil.rmtree(directory)
    except OSError as error:
        logger.warning("%s cannot be deleted: %s", directory, error)


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refuse_existing(target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise CheckpointError(f"{target} exists already and is not overwritten. Fix: choose another name or remove it")
