"""The file ``metrics.jsonl``: one JSON object per step, appended during training, truncated on resume, and
read by plots and reports."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from converters.files.atomic import whole_file, write_all
from megarl.errors import DataError

logger = logging.getLogger(__name__)

FILE_NAME = "metrics.jsonl"
MetricRow = Mapping[str, Any]
"""Metrics of a step: ``step``, ``time`` in unix seconds, and a number, text or None by metric name."""


class MetricsFile:
    """Appends rows ``{"step": int, "time": unix seconds, name: value, ...}`` to a JSON-lines file.

    A row is written to the operating system before ``append`` returns. JSON has no NaN and infinity, so these
    are written as null, with a warning.
    """

    def __init__(self, path: Path) -> None:
        """Open ``path`` for appending. An incomplete last line of a killed run is removed.

        Raises:
            OSError: the file cannot be opened.
        """
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        # With O_APPEND, writes go to the end even after the file was truncated.
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._drop_partial_line()

    def append(self, row: MetricRow) -> None:
        """Append a row.

        Raises:
            OSError: as in ``append_line``.
        """
        self.append_line(encoded(row))

    def append_line(self, line: bytes) -> None:
        """Append a row that was encoded with ``encoded``.

        Raises:
            OSError: the row could not be written; an incomplete row is removed again.
        """
        self._find_again()
        size_before = os.fstat(self._descriptor).st_size
        try:
            write_all(self._descriptor, line)
        except OSError:
            # The next row would continue the incomplete line, and both would be lost.
            os.ftruncate(self._descriptor, size_before)
            raise

    def truncate_after(self, step: int) -> int:
        """Remove damaged rows and rows of steps after ``step``; return the number of removed rows.

        Usually these are the last rows, and the file is truncated, which needs no disk space. Otherwise the
        file is rewritten and replaced atomically.

        Raises:
            OSError: the file could not be changed; the old contents stay.
        """
        self._find_again()
        kept: list[bytes] = []
        dropped = bytes_kept = bytes_before_dropped = 0
        with self.path.open("rb") as stream:
            for line in stream:
                row = _parse(line)
                if row is None or row["step"] > step:
                    # Remember the bytes before the first dropped row. If they are all the kept bytes in the
                    # end, only the last rows are dropped.
                    bytes_before_dropped = bytes_before_dropped if dropped else bytes_kept
                    dropped += 1
                else:
                    # Keep the line itself, so that its row need not be encoded again.
                    kept.append(line)
                    bytes_kept += len(line)
        if not dropped:
            return 0
        if bytes_before_dropped == bytes_kept:
            os.ftruncate(self._descriptor, bytes_kept)
            os.fsync(self._descriptor)
            return dropped
        self._replace(kept)
        return dropped

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _find_again(self) -> None:
        """Check that the open file is still the one at ``path``. If it was deleted, write it again; if it was
        replaced, open the new one. Otherwise rows would go to a file that nobody reads.

        Raises:
            OSError: the file cannot be opened or written.
        """
        try:
            there = os.stat(self.path)
        except FileNotFoundError:
            size = os.fstat(self._descriptor).st_size
            # A deleted file can still be read through its open descriptor.
            self._replace([os.pread(self._descriptor, size, 0)])
            logger.warning(
                "%s was removed during the run; it was written again, with all its rows", self.path
            )
            return
        if not os.path.samestat(there, os.fstat(self._descriptor)):
            self._open_again()
            self._drop_partial_line()
            logger.warning(
                "%s was replaced by another file during the run; further rows go to the new file", self.path
            )

    def _open_again(self) -> None:
        # Open first, so that an error leaves a usable descriptor.
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        os.close(self._descriptor)
        self._descriptor = descriptor

    def _replace(self, lines: Iterable[bytes]) -> None:
        """Replace the file atomically by one with these lines."""
        with whole_file(self.path, durable=True) as stream:
            stream.writelines(lines)
        self._open_again()

    def _drop_partial_line(self) -> None:
        size = os.fstat(self._descriptor).st_size
        if size == 0 or os.pread(self._descriptor, 1, size - 1) == b"\n":
            return
        last_newline = self.path.read_bytes().rfind(b"\n")
        os.ftruncate(self._descriptor, last_newline + 1)


def metrics_files(directory: Path) -> list[Path]:
    """Return the metrics files in a run directory, except those that were renamed when the run was started
    over."""
    return sorted(path for path in directory.glob("metrics*.jsonl") if ".before-" not in path.name)


def encoded(row: MetricRow) -> bytes:
    """Encode a row as a JSON line."""
    # By default Python writes NaN, which is not JSON.
    return (json.dumps(_finite(row), allow_nan=False) + "\n").encode()


def read_metrics(path: Path) -> list[MetricRow]:
    """Return all rows of a metrics file. An incomplete last line, which a killed run may leave, is skipped.

    Raises:
        DataError: the file is missing or has no row, or a line before the last one is damaged.
    """
    rows = list(stream_metrics(path))
    if not rows:
        raise DataError(
            f"metrics file {path} holds 0 rows, at least 1 is needed. Fix: let the run finish its first step"
        )
    return rows


def stream_metrics(path: Path) -> Iterator[MetricRow]:
    """Yield the rows of a metrics file one by one, because a long run's file is large. No row is no error
    here.

    Raises:
        DataError: as in ``read_metrics``, except for an empty file.
    """
    try:
        with path.open("rb") as stream:
            yield from _rows(path, stream)
    except OSError as error:
        raise DataError(
            f"metrics file {path} cannot be read: {error.strerror}. Fix: give the directory of a run that "
            "wrote one"
        ) from error


def _rows(path: Path, lines: Iterable[bytes]) -> Iterator[MetricRow]:
    broken: tuple[int, bytes] | None = None
    for number, line in enumerate(lines, 1):
        if broken is not None:
            raise DataError(
                f"metrics file {path} line {broken[0]} = {broken[1][:60]!r}: not a JSON object with an "
                "integer step. Fix: remove the line"
            )
        if not line.strip():
            continue
        row = _parse(line)
        if row is not None:
            yield row
        # A broken line is tolerated only at the end, where a killed run leaves it. So report it with the next
        # line.
        elif line.endswith(b"\n"):
            broken = number, line.rstrip()
        else:
            return  # End of the file; a live run may have written more since.


def _parse(line: bytes) -> MetricRow | None:
    """Decode a row; return None if the line is damaged."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _finite(row: MetricRow) -> MetricRow:
    finite, broken = dict(row), []
    for name, value in row.items():
        if isinstance(value, float) and not math.isfinite(value):
            finite[name] = None
            broken.append(f"{name} = {value}")
    if broken:
        values = ", ".join(broken)
        logger.warning("step %s: %s is not finite; metrics.jsonl holds null instead", row["step"], values)
    return finite
