"""The file ``launches.jsonl`` of a run: start, first step, restarts and outcome of each launch. This cannot
be recorded in ``metrics.jsonl``, which is truncated on resume."""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypedDict, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from megarl import env
from megarl.errors import MegarlError, WorkerLostError
from megarl.redaction import redacted_text

logger = logging.getLogger(__name__)

FILE_NAME = "launches.jsonl"
FINISHED = "finished"
ENGINES, WORKERS = "engines", "workers"
"""Values of ``Restart.what``: only the rollout engines, or all workers."""
_LONGEST_REASON = 300
T = TypeVar("T")
UnixSeconds = Annotated[float, Field(ge=0, lt=1e12)]
"""Unix seconds in a range that can be converted to a date."""


class _Entry(TypedDict, total=False):
    """A line of the file: a start has fields of ``Launch``, later lines add its restarts and its end."""

    start: float
    host: str
    process: int
    job_id: str
    array_task: str
    first_step: int
    total_steps: int
    restart: Mapping[str, object]
    end: float
    outcome: str


@dataclass(frozen=True, slots=True)
class Restart:
    """A restart of workers or engines within a launch.

    Attributes:
        what: ``ENGINES`` or ``WORKERS``.
        time: unix seconds.
        reason: first line of the error.
        step: finished steps from which all workers continued; None for engines, whose restart loses no step.
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
        first_step: number of steps that earlier launches had finished; None if the launch failed before this
            was known.
        total_steps: number of the run's last step; None as for ``first_step``.
        host: host name of the driver.
        process: process id of the driver on that host.
        job_id: Slurm job id, or empty.
        array_task: ARRAY_INDEX if the job is a task of a job array, or empty.
        end: unix seconds; None while the launch is running, or if it was killed.
        outcome: ``"finished"`` or the reason for its end; None as for ``end``.
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
    """The outcome to record when a launch ends without an error.

    Attributes:
        text: the outcome.
        path: ``launches.jsonl``; None if the start of the launch could not be written.
    """

    text: str = "stopped before its last step"
    path: Path | None = None
    _identity: tuple[int, int] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._identity = None if self.path is None else _identity(self.path)

    def restarted(self, what: str, error: BaseException, step: int | None = None) -> None:
        """Record a restart of engines or workers; see ``Restart``."""
        self.write({"restart": asdict(Restart(what, time.time(), _reason(error), step))})

    def write(self, entry: _Entry) -> None:
        """Append an entry to this launch. No-op if the launch's start was not written or the file has been
        replaced since, because the entry would be attributed to another launch."""
        if self.path is not None and _identity(self.path) == self._identity is not None:
            _append(self.path, entry)


# File -> unix seconds of the start, for launches of this process that are not recorded yet.
_starting: dict[Path, float] = {}
# File -> outcome, for launches of this process that are recorded and have not ended.
_open_launches: dict[Path, LaunchOutcome] = {}


@contextmanager
def recorded_start(run_dir: Path) -> Iterator[None]:
    """Record a launch that loses a worker or hangs before it reaches ``recorded_launch``. A launch that fails
    with another error inside the block, such as an invalid configuration, is not recorded."""
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


def _start(begun: float) -> _Entry:
    return {
        "start": begun,
        "host": socket.gethostname(),
        "process": os.getpid(),
        "job_id": env.text("SLURM_JOB_ID") or "",
        "array_task": array_task(env.text("SLURM_ARRAY_JOB_ID")),
    }


def array_task(array: str | None) -> str:
    """Return the Slurm job array task of this process as ARRAY_INDEX, or an empty string. Tasks have job ids
    of their own, but ``sbatch`` prints only the id of the array.

    Args:
        array: job id of the array; None if unknown.
    """
    task = env.text("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else ""


@contextmanager
def recorded_launch(run_dir: Path, first_step: int, total_steps: int) -> Iterator[LaunchOutcome]:
    """Record the start of a launch and, at the end of the block, its outcome. If the record cannot be
    written, the run continues.

    Yields:
        The outcome to record. Set its text to ``FINISHED`` after the last step.
    """
    path = run_dir / FILE_NAME
    start = _start(_starting.pop(path, time.time()))
    recorded = _append(path, {**start, "first_step": first_step, "total_steps": total_steps})
    # If the start was not written, an end would be attributed to the previous launch.
    outcome = LaunchOutcome(path=path if recorded else None)
    if recorded:
        _open_launches[path] = outcome
    try:
        yield outcome
    except BaseException as error:
        outcome.text = _reason(error)
        raise
    finally:
        # ``end_open_launches`` may have recorded the end already.
        if _open_launches.pop(path, None) is outcome:
            outcome.write(_end(outcome.text))


def end_open_launches(outcome: str) -> None:
    """Record an outcome for this process's open launches, before the process exits without an exception."""
    _end_starting(outcome)
    while _open_launches:
        _open_launches.popitem()[1].write(_end(outcome))


def read_launches(run_dir: Path) -> list[Launch]:
    """Return the launches of a run, oldest first; empty if nothing is recorded. Incomplete lines are skipped.

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
        # Entries without a start are restarts of the last launch, or its end.
        elif isinstance(entry, dict) and found and "restart" in entry:
            # A damaged restart must not invalidate its launch.
            if _valid(_RESTART, entry["restart"]) is not None:
                found[-1]["restarts"].append(entry["restart"])
        elif isinstance(entry, dict) and found:
            found[-1].update(entry)
    return [launch for entry in found if (launch := _valid(_LAUNCH, entry)) is not None]


def restarts_within(launches: Iterable[Launch], what: str) -> int:
    """Count the restarts of a kind (``ENGINES`` or ``WORKERS``) in some launches."""
    return sum(restart.what == what for launch in launches for restart in launch.restarts)


def _valid(adapter: TypeAdapter[T], entry: object) -> T | None:
    """Convert an entry to its dataclass; return None if a field is missing or has the wrong type."""
    try:
        # Strict validation accepts a list for a tuple only from JSON, not from Python.
        return adapter.validate_json(json.dumps(entry), strict=True)
    except (ValidationError, RecursionError):
        return None


def _reason(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"exit code {error.code}"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    lines = str(error).strip().splitlines()
    # Redact, because errors of other programs may contain passwords.
    return redacted_text(f"{type(error).__name__}: {lines[0] if lines else ''}")


def _end(outcome: str) -> _Entry:
    return {"end": time.time(), "outcome": outcome[:_LONGEST_REASON]}


def _identity(path: Path) -> tuple[int, int] | None:
    """Return the device and inode of a file, or None if it does not exist."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _append(path: Path, entry: _Entry) -> bool:
    """Append an entry as a line, and return whether that succeeded."""
    try:
        with path.open("ab+") as stream:
            # A killed launch may have left an incomplete line, so start a new one.
            size = stream.seek(0, os.SEEK_END)
            torn = size > 0 and os.pread(stream.fileno(), 1, size - 1) != b"\n"
            stream.write((b"\n" if torn else b"") + json.dumps(entry).encode() + b"\n")
    except OSError as error:
        logger.warning("%s cannot be written: %s", path, error)
        return False
    return True
