"""The file ``launches.jsonl``: when each launch of a run started, from which step, what it restarted, and how
it ended. ``metrics.jsonl`` cannot record this, because it is truncated on resume."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from megarl import env
from megarl.errors import MegarlError, WorkerLostError
from megarl.redaction import redacted_text

logger = logging.getLogger(__name__)

FILE_NAME = "launches.jsonl"
FINISHED = "finished"
ENGINES, WORKERS = "engines", "workers"
"""Values of ``Restart.what``: only the rollout engines were restarted, or all workers."""
_LONGEST_REASON = 300
T = TypeVar("T")
UnixSeconds = Annotated[float, Field(ge=0, lt=1e12)]
"""Unix seconds in the range that can be converted to a date."""


@dataclass(frozen=True, slots=True)
class Restart:
    """One restart of workers or engines within the process of a launch.

    Attributes:
        what: ``ENGINES`` or ``WORKERS``.
        time: unix seconds.
        reason: the first line of the error.
        step: number of finished steps from which all workers continued; None for engines, which lose no
            steps.
    """

    what: str
    time: UnixSeconds
    reason: str
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """One start of a run.

    Attributes:
        start: unix seconds.
        first_step: number of steps that earlier launches had finished; None if the launch ended before it
            determined this.
        total_steps: number of the last step of the run; None as for ``first_step``.
        host: host name of the driver.
        process: process id of the driver on that host.
        job_id: Slurm job, or empty.
        array_task: the job as ARRAY_INDEX if it is a task of an array, or empty.
        end: unix seconds; None for a launch that is running or was killed.
        outcome: ``"finished"`` or why it ended; None as for ``end``.
        restarts: restarts within the launch, in order.
    """

    start: UnixSeconds
    host: str
    process: int
    first_step: int | None = None
    total_steps: int | None = None
    job_id: str = ""
    array_task: str = ""
    end: UnixSeconds | None = None
    outcome: str | None = None
    restarts: tuple[Restart, ...] = ()


_LAUNCH, _RESTART = TypeAdapter(Launch), TypeAdapter(Restart)


@dataclass
class LaunchOutcome:
    """The outcome that is recorded for a launch, unless an error ends the launch.

    Attributes:
        text: the outcome in words.
        path: path of the file; None if it cannot be written.
    """

    text: str = "stopped before its last step"
    path: Path | None = None
    _identity: tuple[int, int] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._identity = None if self.path is None else _identity(self.path)

    def restarted(self, what: str, error: BaseException, step: int | None = None) -> None:
        """Record that engines or workers are restarted now; see ``Restart``."""
        self.write({"restart": {"what": what, "time": time.time(), "reason": _reason(error), "step": step}})

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append a line. Do nothing if the launch's first line was never written or the file has been
        replaced since, because the line would then be attributed to another launch."""
        if self.path is not None and _identity(self.path) == self._identity is not None:
            _append(self.path, entry)


# Launches of this process that are not written yet: for each file, the Unix time in seconds at which the
# launch began.
_starting: dict[Path, float] = {}
# Launches of this process that have not ended, by file.
_open_launches: dict[Path, LaunchOutcome] = {}


@contextmanager
def recorded_start(run_dir: Path) -> Iterator[None]:
    """Record a launch that loses a worker or hangs before it reaches ``recorded_launch``. A launch that is
    refused for another error is not recorded."""
    path = run_dir / FILE_NAME
    _starting[path] = time.time()
    try:
        yield
    except MegarlError as error:
        if error.exit_code == WorkerLostError.exit_code:
            _end_starting(_reason(error))
        raise
    finally:
        _starting.pop(path, None)


def _end_starting(outcome: str) -> None:
    while _starting:
        path, begun = _starting.popitem()
        if _append(path, _start(begun)):
            _append(path, _end(outcome))


def _start(begun: float) -> dict[str, Any]:
    return {
        "start": begun,
        "host": socket.gethostname(),
        "process": os.getpid(),
        "job_id": env.text("SLURM_JOB_ID") or "",
        "array_task": array_task(env.text("SLURM_ARRAY_JOB_ID")),
    }


def array_task(array: str | None) -> str:
    """Return the name of this process's task in an array of Slurm jobs, by default empty: tasks have job
    numbers of their own, and ``sbatch`` prints only that of the array."""
    task = env.text("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else ""


@contextmanager
def recorded_launch(run_dir: Path, first_step: int, total_steps: int) -> Iterator[LaunchOutcome]:
    """Record that a launch starts now and, when the context exits, how it ended. If the disk is full, only
    the record is lost; the run continues.

    Yields:
        The outcome that will be recorded. Set its text to ``FINISHED`` once the last step is done.
    """
    path = run_dir / FILE_NAME
    start = _start(_starting.pop(path, time.time()))
    recorded = _append(path, {**start, "first_step": first_step, "total_steps": total_steps})
    # Without its own line in the file, this launch's end would be read as the end of the previous launch.
    outcome = LaunchOutcome(path=path if recorded else None)
    if recorded:
        _open_launches[path] = outcome
    try:
        yield outcome
    except BaseException as error:
        outcome.text = _reason(error)
        raise
    finally:
        # Skip a launch that has been ended already: its end is in the file.
        if _open_launches.pop(path, None) is outcome:
            outcome.write(_end(outcome.text))


def end_open_launches(outcome: str) -> None:
    """Record the outcome of this process's open launches, before the process exits without an error that
    would record it."""
    _end_starting(outcome)
    while _open_launches:
        _open_launches.popitem()[1].write(_end(outcome))


def read_launches(run_dir: Path) -> list[Launch]:
    """Return the launches of a run, oldest first; empty if the run has no such file. Partial lines of a
    killed launch are skipped.

    Raises:
        OSError: the file exists but cannot be read.
    """
    try:
        lines = (run_dir / FILE_NAME).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    found: list[dict[str, Any]] = []
    for line in lines:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and "start" in entry:
            found.append({**entry, "restarts": []})
        elif isinstance(entry, dict) and found and "restart" in entry:
            # Skip a damaged restart, so that it does not invalidate its launch.
            if _valid(_RESTART, entry["restart"]) is not None:
                found[-1]["restarts"].append(entry["restart"])
        elif isinstance(entry, dict) and found:
            found[-1].update(entry)
    return [launch for entry in found if (launch := _valid(_LAUNCH, entry)) is not None]


def restarts_within(launches: Iterable[Launch], what: str) -> int:
    """Count the restarts of ``ENGINES`` or ``WORKERS`` within launches."""
    return sum(restart.what == what for launch in launches for restart in launch.restarts)


def _valid(adapter: TypeAdapter[T], entry: Any) -> T | None:
    """Validate an entry; return None if a field is missing or has a wrong type, as in a damaged file."""
    try:
        # Validate by way of JSON: a strict validation reads its lists as tuples, but refuses lists of Python.
        return adapter.validate_json(json.dumps(entry), strict=True)
    except (ValidationError, RecursionError):
        return None


def _reason(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"exit code {error.code}"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    lines = str(error).strip().splitlines()
    return redacted_text(f"{type(error).__name__}: {lines[0] if lines else ''}")


def _end(outcome: str) -> dict[str, Any]:
    return {"end": time.time(), "outcome": outcome[:_LONGEST_REASON]}


def _identity(path: Path) -> tuple[int, int] | None:
    """Return the device and inode of a file, or None if there is no such file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _append(path: Path, entry: Mapping[str, Any]) -> bool:
    """Append a line, and return whether it was written."""
    try:
        with path.open("ab+") as stream:
            # Begin a new line if a killed launch left half of one, so that the two do not merge.
            size = stream.seek(0, os.SEEK_END)
            torn = size > 0 and os.pread(stream.fileno(), 1, size - 1) != b"\n"
            stream.write((b"\n" if torn else b"") + json.dumps(entry).encode() + b"\n")
    except OSError as error:
        logger.warning("%s cannot be written: %s", path, error)
        return False
    return True
