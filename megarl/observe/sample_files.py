"""Sample files of a run, ``samples/train_step_N.jsonl`` and ``samples/validation_step_N.jsonl``, with one
JSON object per sample.

A separate thread writes them. If it cannot write, samples are lost, but the run continues.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from converters.files.atomic import whole_file

logger = logging.getLogger(__name__)

DIRECTORY = "samples"
"""Name of the directory of the sample files, below the run's directory."""

TRAIN, VALIDATION = "train", "validation"
"""Kinds of sample files."""

UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)
"""Characters that a terminal may interpret, that change the direction of text, or that are not text; tab and
line feed are not included."""

Then = Callable[[str, int, Sequence[Mapping[str, Any]]], None]
"""Callback that takes the samples of a step: kind, step, rows."""

_NAME = re.compile(rf"({TRAIN}|{VALIDATION})_step_(\d+)\.jsonl")
_MOST_WAITING = 4
_PATIENCE_S = 10.0


class SampleFiles:
    """Writer of the sample files of a training run.

    ``write`` queues rows and returns at once. If the disk is full, slow or gone, the samples of a step are
    lost: the first loss is logged as a warning, and ``close`` logs how many there were.
    """

    def __init__(
        self, directory: Path, most_files: int | None = None, patience_s: float = _PATIENCE_S
    ) -> None:
        """Args:
        directory: directory of the files; created when the first samples are written.
        most_files: maximum number of files of each kind; the oldest one and the newest ones are kept.
            None keeps all.
        patience_s: seconds that ``flush`` and ``close`` wait for a disk.
        """
        self._directory, self._most_files, self._patience_s = directory, most_files, patience_s
        self._waiting: deque[tuple[str, int, Sequence[Mapping[str, Any]], Then | None]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._stalled = False
        self._lost = 0

    def write(
        self, kind: str, step: int, rows: Sequence[Mapping[str, Any]], then: Then | None = None
    ) -> None:
        """Queue the samples of a step for writing; they replace any earlier samples of that step.

        Args:
            kind: ``TRAIN`` or ``VALIDATION``.
            step: step of the run.
            rows: rows that JSON can represent; the caller must not change them afterwards.
            then: called by the thread with ``kind``, ``step`` and ``rows`` once they are written or writing
                has failed, for other slow work with the samples.
        """
        with self._changed:
            # Rows that find no room in the queue are lost, because a step must never wait for a disk.
            full = len(self._waiting) >= _MOST_WAITING
            if not full and not self._closed:
                self._waiting.append((kind, step, rows, then))
                self._changed.notify_all()
        if full:
            self._lose(
                "the disk, or another receiver of samples, is slower than the steps: samples of "
                f"{_MOST_WAITING} steps wait"
            )
        elif self._thread is None:
            # Use a daemon thread, so that a disk that does not respond cannot keep the process from ending.
            self._thread = threading.Thread(target=self._write_all, name="samples", daemon=True)
            self._thread.start()

    def flush(self) -> None:
        """Wait at most ``patience_s`` until all queued samples are on disk. Do not wait again for a disk that
        has hung before."""
        with self._changed:
            self._stalled = not self._changed.wait_for(
                lambda: not self._waiting, 0.0 if self._stalled else self._patience_s
            )
        if self._stalled:
            self._lose(f"they were not written to disk within {self._patience_s:g} s")

    def truncate_after(self, step: int) -> None:
        """Remove the files of later steps, which will be computed again, and temporary files of a
        killed run."""
        try:
            late = []
            for kind in (TRAIN, VALIDATION):
                late += [path for number, path in list_samples(self._directory, kind) if number > step]
            late += self._directory.glob(".*.tmp")
            for path in late:
                path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning(
                "samples of steps after %d cannot be removed from %s: %s", step, self._directory, error
            )

    def close(self) -> None:
        """Flush, and end the thread; a second call does nothing."""
        if self._closed:
            return
        self.flush()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._lost > 1:
            logger.warning(
                "samples were lost %d times, see the first warning of %s", self._lost, self._directory
            )

    def __enter__(self) -> SampleFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write_all(self) -> None:
        """Run the thread: write queued samples until the writer is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                kind, step, rows, then = self._waiting[0]
            try:
                self._directory.mkdir(exist_ok=True)
                # Write durably, because flush promises that samples are on the disk before the checkpoint of
                # their step.
                with whole_file(self._directory / f"{kind}_step_{step}.jsonl", durable=True) as stream:
                    stream.writelines(map(_line, rows))
                self._prune(kind)
            except Exception as error:
                self._lose(f"{kind}_step_{step}.jsonl cannot be written ({type(error).__name__}: {error})")
            try:
                if then is not None:
                    then(kind, step, rows)
            except Exception as error:
                self._lose(
                    f"another receiver of those of step {step} fails ({type(error).__name__}: {error})"
                )
            # Remove the entry only after it is written, because flush also waits for rows that are being
            # written.
            with self._changed:
                self._waiting.popleft()
                self._stalled = False
                self._changed.notify_all()

    def _prune(self, kind: str) -> None:
        if self._most_files is not None:
            # Keep the first file, which shows how the run began. A slice up to -0 would be empty, whereas
            # None means the end.
            for _, path in list_samples(self._directory, kind)[1 : -(self._most_files - 1) or None]:
                path.unlink(missing_ok=True)

    def _lose(self, why: str) -> None:
        with self._changed:
            self._lost += 1
            first = self._lost == 1
        if first:
            logger.warning(
                "samples are lost, training continues without them: %s in %s", why, self._directory
            )


def list_samples(directory: Path, kind: str) -> list[tuple[int, Path]]:
    """Return the steps and files of one kind, in ascending order of steps; empty if there is no such
    directory.

    Raises:
        OSError: the directory cannot be read.
    """
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    files = []
    for name in names:
        match = _NAME.fullmatch(name)
        if match and match[1] == kind:
            files.append((int(match[2]), directory / name))
    return sorted(files)


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Return the samples of a file. Lines that are not samples, for example after manual editing, are skipped
    with a warning.

    Raises:
        OSError: the file cannot be read.
    """
    rows: list[dict[str, Any]] = []
    damaged = 0
    # Split at line feeds only, because texts may hold other characters that Python regards as line ends.
    for line in path.read_bytes().split(b"\n"):
        row = _parse(line) if line.strip() else None
        if row is not None:
            rows.append(row)
        elif line.strip():
            damaged += 1
    if damaged:
        logger.warning("%s: %d lines are not samples and are skipped", path, damaged)
    return rows


def shorten(text: str, limit: int) -> str:
    """Return the text; if it is longer than ``limit`` characters, replace its middle by a note, since the end
    of a response matters most."""
    if len(text) <= limit:
        return text
    head = limit // 2
    return (
        f"{text[:head]}\n[... {len(text) - limit:,} characters left out "
        f"...]\n{text[len(text) - (limit - head) :]}"
    )


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        # Read NaN and Infinity as None: Python accepts them, but they are not JSON, and a user may have
        # edited the file.
        row = json.loads(line, parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        return None
    is_sample = isinstance(row, dict) and all(isinstance(row.get(name), str) for name in ("prompt", "answer"))
    return row if is_sample else None


def _line(row: Mapping[str, Any]) -> bytes:
    """Encode a row as a JSON line. Letters of all languages are kept and the characters of ``UNSAFE`` are
    escaped, so that ``cat`` can show the line."""
    text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    return UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text).encode() + b"\n"
