"""Execution of a conversion's pieces in threads, within a memory limit, with progress reports."""

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
"""Bytes of a tensor that are handled at a time. The number is fixed, because files must not depend on memory
or workers."""
READ_BYTES = CHUNK_BYTES // 2
"""Bytes of a tensor that are read at a time, in the stored dtype, which may be wider than the written
dtype."""
BYTES_A_WORKER = 5 * CHUNK_BYTES
"""Memory that a worker may use: a chunk as it is written, its serialised form, and the data read for it, in
several dtypes and, if an adapter is merged, in float32."""
_SECONDS_BETWEEN_LINES = 5.0
_M_MMAP_THRESHOLD = -3  # from malloc.h


Answer = tuple[int, dict[str, Any], str]
"""Result of a command: exit code, facts for JSON, text for the terminal."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of a conversion that do not affect its output.

    Attributes:
        workers: number of threads.
        max_memory: limit of resident memory in bytes, or None for no limit. Fewer workers run if not all fit.
            A program that uses this as a library stays within the limit if it has called
            ``give_memory_back``.
        overwrite: whether to replace an existing checkpoint of the kind that is written.
        progress: stream for progress reports; None reports nothing.
        part: number of this part of the work, counted from 1, and the number of parts; None for all of the
            work. The last part to finish completes the directory.
    """

    workers: int = 2
    max_memory: int | None = None
    overwrite: bool = False
    progress: TextIO | None = None
    part: tuple[int, int] | None = None

    def has(self, number: int) -> bool:
        """Return whether the file of this number belongs to this part of the work."""
        return self.part is None or number % self.part[1] == self.part[0] - 1

    def parts_to_wait_for(
        self,
        others: Mapping[int, list[dict[str, Any]]],
        check: Callable[[list[dict[str, Any]]], None],
        incomplete: Callable[[], Iterable[int]],
    ) -> tuple[int, ...]:
        """Return the parts that are not finished. Once all are finished, read their files, and return the
        parts whose files have changed since.

        Args:
            others: records of each other finished part, by its number.
            check: compares records with the files.
            incomplete: returns the numbers of files that are incomplete after this check.
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
    """A piece of work: its size in bytes, for the progress, and the function that does it."""

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
        workers: number of threads that ran.
        peak_memory: peak resident memory in bytes.
        notes: notes of the manifest.
        waits_for: parts that are not finished, so that the directory does not exist yet; empty once it does.
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
    """Make the C library return every larger memory block to the system once it is free, for the rest of the
    process.

    By default glibc keeps blocks of the size of the first chunks, and a process holds up to twice the memory
    that it uses. With other C libraries this does nothing.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**20)


def workers_within(wanted: int, max_memory: int | None) -> int:
    """Return how many workers fit into ``max_memory`` bytes, at most ``wanted``.

    Raises:
        ConversionError: not even one worker fits.
    """
    if wanted < 1:
        raise ConversionError(f"workers = {wanted}: at least one is needed", "pass --workers 1 or more")
    if max_memory is None:
        return wanted
    # The limit includes the memory that torch and the headers hold already.
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
    """Run all pieces. The first failure stops the pieces that have not begun.

    Raises:
        ConversionError: raised by a piece, or in the place of an error of the file system.
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
        # Ctrl-C arrives here. When the pool closes it waits for all its pieces, which end at once after this.
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
    """Progress in bytes, with the remaining time: a line that is rewritten on a terminal, or a line every few
    seconds elsewhere.

    Args:
        total: bytes of all work.
        label: name of the work.
        stream: stream to write to; None writes nothing.
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
        """Count bytes that an earlier run finished."""
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
        """Finish the line on a terminal."""
        if self._stream is not None and self._stream.isatty():
            self._write(time.monotonic(), True)
            self._stream.write("\n")

    def _write(self, now: float, terminal: bool) -> None:
        if self._stream is None:
            return
        # Subtract the work of an earlier run, which took no time in this one.
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
    """Return ranges of a tensor's rows, of at most ``most`` bytes each but at least one row. None means the
    size of a chunk."""
    step = max(1, (CHUNK_BYTES if most is None else most) // max(math.prod(shape[1:]) * itemsize, 1))
    return ((start, min(start + step, shape[0])) for start in range(0, shape[0], step))
