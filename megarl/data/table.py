"""Tables of rows of different lengths, in memory or in memory-mapped files, written row by row and kept for the next start."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

_META = "meta.json"
_BLOCK = 2**20


@dataclass(frozen=True, slots=True)
class Column:
    """One field of all rows.

    Attributes:
        values: of all rows one after another, 1-dimensional.
        starts: [rows + 1] int64; row r is ``values[starts[r]:starts[r + 1]]``.
    """

    values: np.ndarray
    starts: np.ndarray

    def __getitem__(self, row: int) -> np.ndarray:
        return self.values[self.starts[row] : self.starts[row + 1]]

    @property
    def lengths(self) -> np.ndarray:
        """[rows] int64."""
        return np.diff(self.starts)


@dataclass(frozen=True, slots=True)
class Table:
    """Rows that have been written.

    Attributes:
        columns: by name; all have as many rows.
        meta: what was said of them, of the types of JSON.
        directory: that they lie in; None for memory.
    """

    columns: Mapping[str, Column]
    meta: Mapping[str, Any] = field(default_factory=dict)
    directory: Path | None = None

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())).starts) - 1


class TableWriter:
    """Writes a table.

    Args:
        dtypes: numpy's name of the type of each column.
        directory: where the table comes to lie once it is too large for memory; until ``finish``, in one beside it that is not taken for
            a table. None keeps everything in memory.
        most_in_memory: bytes of values that are collected before they go to files.
    """

    def __init__(self, dtypes: Mapping[str, str], directory: Path | None, most_in_memory: int) -> None:
        self._dtypes, self._directory, self._most_in_memory = dict(dtypes), directory, most_in_memory
        self._waiting: dict[str, list[np.ndarray]] = {name: [] for name in dtypes}
        self._lengths: dict[str, list[np.ndarray]] = {name: [] for name in dtypes}
        self._bytes = 0
        self._partial: Path | None = None
        self._files: dict[str, BinaryIO] = {}

    def append(self, rows: Mapping[str, Sequence[Sequence[int] | bytes]]) -> None:
        """Add as many rows to every column.

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
        """The table of all rows so far.

        Raises:
            OSError: it cannot be written.
        """
        if self._partial is None:
            columns = {}
            for name, dtype in self._dtypes.items():
                lengths = np.concatenate([np.zeros(1, np.int64), *self._lengths[name]])
                columns[name] = Column(np.concatenate([np.zeros(0, dtype), *self._waiting[name]]), np.cumsum(lengths))
            return Table(columns, meta)
        assert self._directory is not None
        self._flush()
        for file in self._files.values():
            file.close()
        for name in self._dtypes:
            _add_up(self._partial / f"{name}.lengths", self._partial / f"{name}.starts")
        sizes = {file.name: file.stat().st_size for file in sorted(self._partial.iterdir())}
        content = {"dtypes": self._dtypes, "sizes": sizes, "meta": dict(meta)}
        (self._partial / _META).write_text(json.dumps(content), encoding="utf-8")
        try:
            self._partial.rename(self._directory)
        except OSError:
            # another run was faster; a damaged one is in the way
            if read_table(self._directory) is None:
                shutil.rmtree(self._directory)
                self._partial.rename(self._directory)
        self.discard()
        table = read_table(self._directory)
        assert table is not None
        return table

    def discard(self) -> None:
        """Remove what was written and is not a finished table."""
        for file in self._files.values():
            file.close()
        if self._partial is not None:
            shutil.rmtree(self._partial, ignore_errors=True)

    def _flush(self) -> None:
        assert self._directory is not None
        if self._partial is None:
            self._directory.parent.mkdir(parents=True, exist_ok=True)
            self._partial = self._directory.with_name(f".{self._directory.name}.partial-{os.getpid()}")
            shutil.rmtree(self._partial, ignore_errors=True)
            self._partial.mkdir()
            names = [f"{name}.{part}" for name in self._dtypes for part in ("values", "lengths")]
            self._files = {name: (self._partial / name).open("wb") for name in names}
        for part, waiting in (("values", self._waiting), ("lengths", self._lengths)):
            for name, arrays in waiting.items():
                for array in arrays:
                    self._files[f"{name}.{part}"].write(array.tobytes())
                arrays.clear()
        self._bytes = 0


def read_table(directory: Path) -> Table | None:
    """A table that was written there, its values left on the disk; None where there is none, or one whose files are not whole."""
    try:
        content = json.loads((directory / _META).read_text(encoding="utf-8"))
        if any((directory / name).stat().st_size != size for name, size in content["sizes"].items()):
            return None
        columns = {
            name: Column(_mapped(directory / f"{name}.values", dtype), _mapped(directory / f"{name}.starts", "int64"))
            for name, dtype in content["dtypes"].items()
        }
        return Table(columns, content["meta"], directory)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _values(row: Sequence[int] | bytes, dtype: str) -> np.ndarray:
    return np.frombuffer(row, dtype) if isinstance(row, bytes) else np.asarray(row, dtype)


def _mapped(path: Path, dtype: str) -> np.ndarray:
    # an empty file cannot be mapped
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.zeros(0, dtype)


def _add_up(lengths: Path, starts: Path) -> None:
    """Make the starts of rows from their lengths, block by block."""
    total = 0
    with lengths.open("rb") as source, starts.open("wb") as target:
        target.write(np.zeros(1, np.int64).tobytes())
        while block := source.read(8 * _BLOCK):
            ends = np.cumsum(np.frombuffer(block, np.int64)) + total
            target.write(ends.tobytes())
            total = int(ends[-1])
    lengths.unlink()
