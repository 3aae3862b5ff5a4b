"""Sample files of a run, ``samples/train_step_N.jsonl`` and ``samples/validation_step_N.jsonl``, one JSON
object per sample.

A thread writes them. If it fails, samples are lost but the run continues.
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
from typing import Required, TypedDict

from converters.files.atomic import whole_file

logger = logging.getLogger(__name__)

DIRECTORY = "samples"
"""Name of the directory of sample files, inside the run directory."""

TRAIN, VALIDATION = "train", "validation"
"""Kinds of sample files; each begins a file name."""

UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)
"""Control characters that a terminal may interpret, characters that change the direction of text, and lone
surrogates; tab and line feed are allowed."""

Figure = float | str | None
"""A number of a sample: None if it is unknown, ``inf`` or ``-inf`` if it is infinite."""


class SampleTurn(TypedDict, total=False):
    """A turn of a conversation, see ``megarl.rollout.sample_log``."""

    role: str
    text: str
    reward: Figure
    segment: int


class Sample(TypedDict, total=False):
    """A row of a sample file, see ``megarl.rollout.sample_log``. A user may have edited the file: only
    ``prompt`` and ``answer`` are known to be there."""

    step: int
    set: str | None
    group: int
    generation: int
    record: int
    source: str | None
    env: str | None
    prompt: Required[str]
    answer: Required[str]
    reference: str
    reward: Figure
    accuracy: Figure
    advantage: Figure
    mismatch: Figure
    rewards: Mapping[str, Figure]
    length: int
    truncated: bool
    masked: bool
    weight_version: int
    newest_weight_version: int
    turns: list[SampleTurn]
    ended: str
    prompt_ids: list[int]
    answer_ids: list[int]


Then = Callable[[str, int, Sequence[Mapping[str, object]]], None]
"""Callback for the samples of a step: (kind, step, rows)."""

_NAME = re.compile(rf"({TRAIN}|{VALIDATION})_step_(\d+)\.jsonl")
_MOST_WAITING = 4
_PATIENCE_S = 10.0


class SampleFiles:
    """Writes the sample files of a run in a background thread.

    ``write`` queues samples and returns at once. If the disk is full, hangs or is slower than training,
    samples are lost. The first loss is logged at once, and ``close`` logs the number of losses.
    """

    def __init__(
        self, directory: Path, most_files: int | None = None, patience_s: float = _PATIENCE_S
    ) -> None:
        """Args:
        directory: directory for the files; created at the first write.
        most_files: maximum number of files of each kind: the oldest and the newest ones are kept. None
            keeps all.
        patience_s: seconds that ``flush`` and ``close`` wait for the disk."""
        self._directory, self._most_files, self._patience_s = directory, most_files, patience_s
        self._waiting: deque[tuple[str, int, Sequence[Mapping[str, object]], Then | None]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._stalled = False
        self._lost = 0

    def write(
        self, kind: str, step: int, rows: Sequence[Mapping[str, object]], then: Then | None = None
    ) -> None:
        """Queue the samples of a step. They replace an earlier file of that step.

        Args:
            kind: ``TRAIN`` or ``VALIDATION``.
            step: number of the training step.
            rows: JSON-compatible samples; must not be changed afterwards.
            then: called by the thread after the write, even a failed one, for other slow work such as
                uploads.
        """
        with self._changed:
            # If the queue is full, drop the samples, because a step must not wait for the disk.
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
            # A daemon thread cannot keep the process alive when the disk hangs.
            self._thread = threading.Thread(target=self._write_all, name="samples", daemon=True)
            self._thread.start()

    def flush(self) -> None:
        """Wait up to ``patience_s`` until all queued samples are on disk. Returns at once if the previous
        wait timed out and the disk still hangs."""
        with self._changed:
            self._stalled = not self._changed.wait_for(
                lambda: not self._waiting, 0.0 if self._stalled else self._patience_s
            )
        if self._stalled:
            self._lose(f"they were not written to disk within {self._patience_s:g} s")

    def truncate_after(self, step: int) -> None:
        """Delete the files of steps after ``step``, which a resumed run repeats, and temporary files of a
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
        """Flush, and end the thread. A second call does nothing."""
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
        """Write queued samples until the writer is closed; runs in the thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                kind, step, rows, then = self._waiting[0]
            try:
                self._directory.mkdir(exist_ok=True)
                # Flush to disk, because the checkpoint of a step may only become visible after its samples.
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
            # Remove the entry after the write, because ``flush`` waits until the queue is empty.
            with self._changed:
                self._waiting.popleft()
                self._stalled = False
                self._changed.notify_all()

    def _prune(self, kind: str) -> None:
        if self._most_files is not None:
            # Keep the first file, because it shows how the run began. ``or None`` is needed because a slice
            # up to -0 is empty.
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
    """Return (step, file) of all samples of a kind, in ascending order; empty if the directory does not
    exist.

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


def read_samples(path: Path) -> list[Sample]:
    """Return the samples in a file. Other lines, as from manual editing, are skipped with a warning.

    Raises:
        OSError: the file cannot be read.
    """
    rows: list[Sample] = []
    damaged = 0
    # ``splitlines`` would also split at other characters inside the texts.
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
    """Shorten a text to ``limit`` characters plus a note, by removing its middle. The end of a response
    matters most, so it is kept."""
    if len(text) <= limit:
        return text
    # Both ends matter: the beginning shows the approach, the end the answer.
    head = limit // 2
    return (
        f"{text[:head]}\n[... {len(text) - limit:,} characters left out "
        f"...]\n{text[len(text) - (limit - head) :]}"
    )


def _parse(line: bytes) -> Sample | None:
    try:
        # Python accepts NaN and Infinity, which are not JSON; a user may have edited the file.
        row = json.loads(line, parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        return None
    is_sample = isinstance(row, dict) and all(isinstance(row.get(name), str) for name in ("prompt", "answer"))
    return row if is_sample else None


def _line(row: Mapping[str, object]) -> bytes:
    """Encode a sample as a JSON line. Letters of all languages stay readable, and characters of ``UNSAFE``
    are escaped, so that a terminal can show the line."""
    text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    return UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text).encode() + b"\n"
