"""Tables of variable-length rows, in memory or in files. They are written row by row and cached on disk for
later runs."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from converters.files.atomic import rename_surely
from megarl.errors import DataError

logger = logging.getLogger(__name__)

_META = "meta.json"
_BLOCK = 2**20
# Names of complete and of unfinished tables. ``bound_tables`` deletes nothing else, since a user may point
# data.cache_dir at a directory with other files.
_KEPT_NAME = re.compile(r"[0-9a-f]{32}")
_PARTIAL_NAME = re.compile(r"\.[0-9a-f]{32}\.partial-\d+")
# An unfinished table without a write for this many seconds was left by a killed run.
_ABANDONED_S = 86400.0


class StoredValues:
    """A 1-dimensional array in a file, of which slices are read on access.

    The file is not memory-mapped: if another process truncated it, the next access would kill this process
    with SIGBUS.

    Args:
        path: path of the file.
        dtype: numpy dtype name of its numbers.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path, dtype: str) -> None:
        self._path, self._dtype = path, np.dtype(dtype)
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        self._count = os.fstat(self._descriptor).st_size // self._dtype.itemsize

    def __len__(self) -> int:
        return self._count

    def require(self, owner: int, digest: str) -> None:
        """Check that the file has been written by the user ``owner``, that nobody else may write it, and that
        it has the given digest.

        Raises:
            ValueError: it fails one of these checks.
        """
        _require_owner(self._path, os.fstat(self._descriptor), owner)
        with os.fdopen(os.dup(self._descriptor), "rb") as stream:
            stream.seek(0)
            if hashlib.file_digest(stream, "sha256").hexdigest() != digest:
                raise ValueError(f"{self._path.name} has other bytes than were written")

    def __getitem__(self, places: slice) -> np.ndarray:
        """Read a contiguous slice.

        Raises:
            DataError: the file was truncated, or can no longer be read.
        """
        start, stop, step = places.indices(self._count)
        assert step == 1
        wanted = max(stop - start, 0) * self._dtype.itemsize
        try:
            content = _read_all(self._descriptor, wanted, start * self._dtype.itemsize)
        except OSError as error:
            raise DataError(f"{self._path} cannot be read any more: {error}. {_FIX}") from error
        if len(content) < wanted:
            raise DataError(
                f"{self._path} was truncated while the run used it: {len(content)} of {wanted} bytes are "
                f"there. {_FIX}"
            )
        return np.frombuffer(content, self._dtype)


def _require_owner(path: Path, status: os.stat_result, owner: int) -> None:
    if status.st_uid != owner:
        raise ValueError(f"{path.name} belongs to another user")
    if status.st_mode & stat.S_IWOTH:
        raise ValueError(f"everybody may write to {path.name}")


_FIX = "Fix: start the run again, which tokenizes the data again; find out who writes into data.cache_dir"


def _read_all(descriptor: int, count: int, place: int) -> bytes:
    """Read ``count`` bytes at the offset ``place``, fewer only at the end of the file. A single pread returns
    at most 2 GiB."""
    parts, missing = list[bytes](), count
    while missing and (part := os.pread(descriptor, missing, place + count - missing)):
        parts.append(part)
        missing -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


@dataclass(frozen=True, slots=True)
class Column:
    """One field of all rows, as a flat array.

    Attributes:
        values: 1-dimensional, the values of all rows concatenated.
        starts: [rows + 1] int64 offsets; row r is ``values[starts[r]:starts[r + 1]]``.
    """

    values: np.ndarray | StoredValues
    starts: np.ndarray | StoredValues

    def __getitem__(self, row: int) -> np.ndarray:
        start, end = self.starts[row : row + 2].tolist()
        return self.values[start:end]

    @property
    def lengths(self) -> np.ndarray:
        """Length of each row, [rows] int64."""
        return np.diff(self.starts[:])


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Table:
    """A complete table. While this object exists, ``bound_tables`` does not delete the table's directory.

    Attributes:
        columns: columns by name; all have the same number of rows.
        meta: metadata, as JSON types.
        directory: directory of the files; None if the table is in memory.
    """

    columns: Mapping[str, Column]
    meta: Mapping[str, Any] = field(default_factory=dict)
    directory: Path | None = None

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())).starts) - 1


class TableWriter:
    """Writes a table.

    Args:
        dtypes: numpy dtype name of each column.
        directory: directory of the table, if it is too large for memory. Until ``finish``, the files are in a
            temporary directory next to it, which no reader takes for a table. None keeps everything in
            memory.
        most_in_memory: size in bytes above which values are flushed to files.
    """

    def __init__(self, dtypes: Mapping[str, str], directory: Path | None, most_in_memory: int) -> None:
        self._dtypes, self._directory, self._most_in_memory = dict(dtypes), directory, most_in_memory
        self._waiting = defaultdict[str, list[np.ndarray]](list)
        self._lengths = defaultdict[str, list[np.ndarray]](list)
        self._bytes = 0
        self._partial: Path | None = None
        self._files: dict[str, BinaryIO] = {}

    def append(self, rows: Mapping[str, Sequence[Sequence[int] | bytes]]) -> None:
        """Append rows. Every column must get the same number.

        Raises:
            OSError: they cannot be written.
        """
        for name, dtype in self._dtypes.items():
            lengths = np.fromiter(map(len, rows[name]), np.int64, len(rows[name]))
            values = np.concatenate([np.zeros(0, dtype), *(_values(row, dtype) for row in rows[name])])
            self._waiting[name].append(values)
            self._lengths[name].append(lengths)
            self._bytes += values.nbytes + lengths.nbytes
        if self._directory is not None and self._bytes > self._most_in_memory:
            self._flush()

    def finish(self, meta: Mapping[str, Any]) -> Table:
        """Complete the table, and return it.

        Args:
            meta: metadata to store, as JSON types.

        Raises:
            OSError: it cannot be written.
        """
        if self._partial is None:
            columns = {}
            for name, dtype in self._dtypes.items():
                lengths = np.concatenate([np.zeros(1, np.int64), *self._lengths[name]])
                columns[name] = Column(
                    np.concatenate([np.zeros(0, dtype), *self._waiting[name]]), np.cumsum(lengths)
                )
            return Table(columns, meta)
        assert self._directory is not None
        self._flush()
        for file in self._files.values():
            file.close()
        for name in self._dtypes:
            _add_up(self._partial / f"{name}.lengths", self._partial / f"{name}.starts")
        digests = {file.name: _file_digest(file) for file in sorted(self._partial.iterdir())}
        content = {"dtypes": self._dtypes, "digests": digests, "meta": dict(meta)}
        # The metadata file has a digest of its own, because it holds the digests of all other files.
        text = json.dumps({**content, "digest": _digest_of(content)})
        (self._partial / _META).write_text(text, encoding="utf-8")
        for path in (self._partial, *self._partial.iterdir()):
            # Remove others' write permission, whatever the umask: a table that others can write is not
            # trusted.
            path.chmod(path.stat().st_mode & ~stat.S_IWOTH)
        # Use the owner that the file has: a network file system may map root to the user nobody.
        owner = self._partial.stat().st_uid
        # Lock the table before it gets its final name, so that no other run deletes it before it is read.
        with (self._partial / _META).open() as meta_file:
            _use(meta_file.fileno())
            try:
                rename_surely(self._partial, self._directory)
            except OSError:
                # The name is taken: another run was faster, or the existing table is damaged.
                if read_table(self._directory, owner) is None:
                    shutil.rmtree(self._directory)
                    rename_surely(self._partial, self._directory)
            self.discard()
            table = read_table(self._directory, owner)
        if table is None:
            raise OSError(f"{self._directory} was changed while it was written")
        return table

    def discard(self) -> None:
        """Delete the files of an unfinished table."""
        for file in self._files.values():
            file.close()
        if self._partial is not None:
            shutil.rmtree(self._partial, ignore_errors=True)

    def _flush(self) -> None:
        assert self._directory is not None
        if self._partial is None:
            self._directory.parent.mkdir(parents=True, exist_ok=True)
            self._partial = self._directory.with_name(f".{self._directory.name}.partial-{os.getpid()}")
            # A killed process with the same process id may have left this directory.
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial.mkdir()
            for column in self._dtypes:
                for name in (f"{column}.values", f"{column}.lengths"):
                    self._files[name] = (self._partial / name).open("wb")
        for part, waiting in (("values", self._waiting), ("lengths", self._lengths)):
            for name, arrays in waiting.items():
                for array in arrays:
                    self._files[f"{name}.{part}"].write(array.tobytes())
                arrays.clear()
        self._bytes = 0


def read_table(directory: Path, owner: int | None = None) -> Table | None:
    """Open a cached table, whose values stay on disk. Return None if there is none or it cannot be trusted:
    its bytes do not match their digests, or another user has written or may write its files.

    Args:
        directory: directory of the table.
        owner: user id that must own the files; None for the current user.
    """
    user = os.geteuid() if owner is None else owner
    try:
        descriptor = os.open(directory / _META, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        _use(descriptor)
        _require_owner(directory, directory.lstat(), user)
        _require_owner(directory / _META, os.fstat(descriptor), user)
        content = json.loads((directory / _META).read_text(encoding="utf-8"))
        if content.pop("digest") != _digest_of(content):
            raise ValueError(f"{_META} has other bytes than were written")
        columns: dict[str, Column] = {}
        for name, dtype in content["dtypes"].items():
            values = StoredValues(directory / f"{name}.values", dtype)
            starts = StoredValues(directory / f"{name}.starts", "int64")
            columns[name] = Column(values, starts)
            for part, stored in (("values", values), ("starts", starts)):
                # Compare every byte, because a byte that was corrupted on the disk would be trained on.
                stored.require(user, content["digests"][f"{name}.{part}"])
        table = Table(columns, content["meta"], directory)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        os.close(descriptor)
        logger.warning("%s is not used but written again: %s", directory, error)
        return None
    # The descriptor holds the lock of ``_use``, so it stays open as long as the table exists.
    weakref.finalize(table, os.close, descriptor)
    return table


def _use(descriptor: int) -> None:
    """Lock a table against deletion while its metadata file is open, and update its time of last use.

    Raises:
        BlockingIOError: the table is being deleted.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        # Without file locks no table is deleted either, so no lock is needed.
        return
    # The directory may belong to another user and be read-only.
    with contextlib.suppress(OSError):
        os.utime(descriptor)


def bound_tables(directory: Path, most_bytes: float) -> list[Path]:
    """Delete the least recently used tables in a directory until the rest takes at most ``most_bytes``.

    Tables in use are kept, whatever their size. Unfinished tables are deleted one day after the last write.
    Nothing else in the directory is touched.

    Returns:
        The deleted directories.
    """
    removed: list[Path] = []
    for partial in _children(directory, _PARTIAL_NAME):
        if _is_abandoned(partial):
            shutil.rmtree(partial, ignore_errors=True)
            removed.append(partial)
    tables, total = list[tuple[float, int, Path]](), 0
    for table in _children(directory, _KEPT_NAME):
        used, size = _last_use_and_bytes(table)
        tables.append((used, size, table))
        total += size
    for _, size, table in sorted(tables):
        if total <= most_bytes:
            break
        if _remove_unused(table):
            removed.append(table)
            total -= size
    return removed


def _children(directory: Path, name: re.Pattern[str]) -> Iterator[Path]:
    if directory.is_dir():
        for each in directory.iterdir():
            if name.fullmatch(each.name) and each.is_dir() and not each.is_symlink():
                yield each


def _stats(directory: Path) -> list[os.stat_result]:
    """Return the stat results of a directory and its files. Files that disappear in the meantime are
    skipped."""
    found = []
    for file in [directory, *directory.glob("*")]:
        with contextlib.suppress(OSError):
            found.append(file.stat())
    return found


def _is_abandoned(partial: Path) -> bool:
    return max((each.st_mtime for each in _stats(partial)), default=time.time()) < time.time() - _ABANDONED_S


def _last_use_and_bytes(table: Path) -> tuple[float, int]:
    try:
        used = (table / _META).stat().st_mtime
    except OSError:
        used = 0.0
    return used, sum(each.st_size for each in _stats(table))


def _remove_unused(table: Path) -> bool:
    """Delete a table unless it is in use or its use cannot be determined. Return whether it was deleted."""
    hidden = table.with_name(f".{table.name}.partial-{os.getpid()}")
    try:
        # Open for writing: NFS implements this lock as a byte-range lock, which needs write permission.
        descriptor = os.open(table / _META, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The rename hides the table atomically, so that no run sees part of it.
        rename_surely(table, hidden)
    except OSError:
        return False
    finally:
        # Close the file before deleting it: NFS renames an open file instead, and its directory could not be
        # deleted.
        os.close(descriptor)
    shutil.rmtree(hidden, ignore_errors=True)
    return True


def _file_digest(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _values(row: Sequence[int] | bytes, dtype: str) -> np.ndarray:
    return np.frombuffer(row, dtype) if isinstance(row, bytes) else np.asarray(row, dtype)


def _add_up(lengths: Path, starts: Path) -> None:
    """Compute row offsets from row lengths, block by block, and delete the lengths."""
    total = 0
    with lengths.open("rb") as source, starts.open("wb") as target:
        target.write(np.zeros(1, np.int64).tobytes())
        # Whole 8-byte integers: a buffered read returns fewer bytes only at the end of the file.
        while block := source.read(8 * _BLOCK):
            ends = np.cumsum(np.frombuffer(block, np.int64)) + total
            target.write(ends.tobytes())
            total = int(ends[-1])
    lengths.unlink()
