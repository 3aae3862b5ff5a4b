"""Run the pieces of a conversion in threads, within a memory limit, and report progress."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from converters.errors import ConversionError
from converters.files.process import status_bytes

CHUNK_BYTES = 32 * 2**20
"""Bytes of a tensor that are processed at a time. Constant, so that the output does not depend on memory or
threads."""
READ_BYTES = CHUNK_BYTES // 2
"""Bytes of a tensor that are read at a time, in the stored dtype, which may be wider than the written one."""
BYTES_A_WORKER = 5 * CHUNK_BYTES
"""Memory that a thread may use: a chunk, its serialised form, and the data read for it, in several dtypes
and, for a merged adapter, in float32."""
_SECONDS_BETWEEN_LINES = 5.0
_M_MMAP_THRESHOLD = -3  # from malloc.h


Answer = tuple[int, dict[str, Any], str]
"""Result of a command: exit code, summary for JSON, text for the terminal."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of a conversion that do not change its output.

    Attributes:
        workers: number of threads.
        max_memory: limit of resident memory in bytes; None for no limit. Reduces the number of threads if
            necessary. A program that uses this library must call ``give_memory_back`` to stay within the
                limit.
        overwrite: replace an existing checkpoint of the same kind.
        progress: stream for progress reports; None for none.
        part: (number of this part from 1, number of parts); None for all of the work. The part that finishes
            last completes the directory.
    """

    workers: int = 2
    max_memory: int | None = None
    overwrite: bool = False
    progress: TextIO | None = None
    part: tuple[int, int] | None = None

    def has(self, number: int) -> bool:
        """Return whether a file belongs to this part of the work."""
        return self.part is None or number % self.part[1] == self.part[0] - 1

    def parts_to_wait_for(
        self,
        others: Mapping[int, list[dict[str, Any]]],
        check: Callable[[list[dict[str, Any]]], None],
        incomplete: Callable[[], Iterable[int]],
    ) -> tuple[int, ...]:
        """Return the parts that are not finished. If all are finished, verify their files, and return the
        parts with damaged files.

        Args:
            others: part -> its records, for the other finished parts.
            check: verifies the files with these records.
            incomplete: returns the numbers of incomplete files after ``check``.
        """
        if self.part is None:
            return ()
        own, count = self.part
        missing = set(range(1, count + 1)) - set(others) - {own}
        if not missing:
            check(list(itertools.chain.from_iterable(others.values())))
            missing = {number % count + 1 for number in incomplete()}
        return tuple(sorted(missing))


@dataclass(frozen=True, slots=True)
class Piece:
    """A unit of work: its size in bytes for the progress, and the function that does it."""

    size: int
    run: Callable[[], None]


@dataclass(frozen=True)
class ConversionResult:
    """Result of a conversion.

    Attributes:
        target: the written directory.
        tensors: number of tensors written.
        size: bytes of these tensors.
        resumed: bytes that an earlier run had written.
        workers: number of threads used.
        peak_memory: peak resident memory in bytes.
        notes: values and remarks that ``conversion.json`` records about this conversion.
        waits_for: numbers of the parts (``--part``) that are not finished yet; ``target`` is created when all
            are. Empty for a complete conversion.
    """

    target: Path
    tensors: int
    size: int
    resumed: int
    workers: int
    peak_memory: int
    notes: dict[str, Any]
    waits_for: tuple[int, ...] = ()


def give_memory_back() -> None:
    """Make glibc return freed blocks of 1 MiB or more to the system at once, for the rest of the process.

    By default glibc keeps freed blocks of a chunk's size, and a process holds up to twice the memory that it
    uses. No effect with other C libraries.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**20)


def workers_within(wanted: int, max_memory: int | None) -> int:
    """Return the number of threads that fit into ``max_memory`` bytes, at most ``wanted``.

    Raises:
        ConversionError: not even one thread fits.
    """
    if wanted < 1:
        raise ConversionError(f"workers = {wanted}: at least one is needed", "pass --workers 1 or more")
    if max_memory is None:
        return wanted
    # The limit covers the whole process, including torch and the headers.
    resident = status_bytes("VmRSS")
    fit = (max_memory - resident) // BYTES_A_WORKER
    if fit < 1:
        least = resident + BYTES_A_WORKER
        raise ConversionError(
            f"max-memory = {max_memory / 2**20:.0f} MiB: {least / 2**20:.0f} MiB are needed",
            "raise --max-memory",
        )
    return min(wanted, int(fit))


def run_pieces(pieces: Sequence[Piece], workers: int, progress: Progress) -> None:
    """Run all pieces in threads. After a failure, pieces that have not started are skipped.

    Raises:
        ConversionError: a piece failed, or writing to the file system failed.
    """
    stop = threading.Event()

    def one(piece: Piece) -> None:
        if stop.is_set():
            return
        try:
            piece.run()
        except BaseException:
            stop.set()
            raise
        progress.add(piece.size)

    with ThreadPoolExecutor(max_workers=workers) as pool:
        futures = [pool.submit(one, piece) for piece in pieces]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        # Ctrl-C is raised here. The pool waits for its pieces when it closes; after this they return at once.
        except BaseException:
            stop.set()
            raise
    for future in futures:
        error = future.exception()
        if isinstance(error, OSError):
            raise ConversionError(f"writing failed ({error})", "free space or choose another disk") from error
        if error is not None:
            raise error


class Progress:
    """Reports progress in bytes and the remaining time: one line that is rewritten on a terminal, else a line
    every few seconds.

    Args:
        total: bytes of all work.
        label: name of the work.
        stream: output; None for none.
    """

    def __init__(self, total: int, label: str, stream: TextIO | None = sys.stderr) -> None:
        self._total, self._label, self._stream = max(total, 1), label, stream
        self._done = self._skipped = 0
        self._begun = self._shown = time.monotonic()
        self._lock = threading.Lock()

    def say(self, line: str) -> None:
        """Write a separate line."""
        if self._stream is not None:
            self._stream.write(f"{line}\n")
            self._stream.flush()

    def skip(self, size: int) -> None:
        """Count bytes that an earlier run has finished."""
        self._done += size
        self._skipped += size

    def add(self, size: int) -> None:
        """Count finished bytes."""
        with self._lock:
            self._done += size
            now = time.monotonic()
            terminal = self._stream is not None and self._stream.isatty()
            if now - self._shown > (0.2 if terminal else _SECONDS_BETWEEN_LINES):
                self._shown = now
                self._write(now, terminal)

    def finish(self) -> None:
        """End the line on a terminal."""
        if self._stream is not None and self._stream.isatty():
            self._write(time.monotonic(), True)
            self._stream.write("\n")

    def _write(self, now: float, terminal: bool) -> None:
        if self._stream is None:
            return
        # Work of an earlier run took no time in this one.
        rate = (self._done - self._skipped) / max(now - self._begun, 1e-9)
        left = (self._total - self._done) / rate if rate > 0 else 0.0
        line = (
            f"{self._label}: {self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB, {rate / 1e9:.2f} "
            f"GB/s, {_clock(left)} left"
        )
        self._stream.write(f"\r{line:<78}" if terminal else f"{line}\n")
        self._stream.flush()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def row_ranges(shape: Sequence[int], itemsize: int, most: int | None = None) -> Iterable[tuple[int, int]]:
    """Yield row ranges of a tensor, of at most ``most`` bytes but at least one row. None means
    CHUNK_BYTES."""
    step = max(1, (CHUNK_BYTES if most is None else most) // max(math.prod(shape[1:]) * itemsize, 1))
    return ((start, min(start + step, shape[0])) for start in range(0, shape[0], step))
