"""Read the state of a run from its directory. Reading writes nothing, takes no lock and does not wait for the
run."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import fmean

from converters.files.reading import first_special
from megarl.checkpoint.lock import LOCK_NAME, Owner, has_ended, read_owner
from megarl.checkpoint.manager import CheckpointManager, faults_of_checkpoint
from megarl.checkpoint.manifest import read_signing_key
from megarl.config.places import read_in_time
from megarl.errors import ConfigError, DataError, StorageError
from megarl.observe.launches import FILE_NAME as LAUNCHES_NAME
from megarl.observe.launches import FINISHED, Launch, read_launches
from megarl.observe.metrics_file import FILE_NAME, metrics_files, stream_metrics
from megarl.observe.series import Log, Series, collect_log
from megarl.observe.timing import STEP_SECONDS, beside_training
from megarl.watch.configured import Configured, read_configured

RECENT_STEPS = 20
MARKS = (FILE_NAME, LOCK_NAME, LAUNCHES_NAME)
"""Files that identify a run directory. ``config.yaml`` does not, because checkpoints contain it too."""
_RATES = ("tokens_per_s", "tokens_per_s_per_device", "tflops", "mfu", "hfu", "padding_efficiency", "idle_s")
_STEP_SECONDS = f"timing/{STEP_SECONDS}"
# The run may remove an old checkpoint while it is being read. Then list the checkpoints again, at most this
# many times in all.
_LISTINGS = 3


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """State of a checkpoint.

    Attributes:
        step: number of finished steps.
        path: directory of the checkpoint.
        size: size in bytes.
        age_s: seconds since it was committed.
        problems: faults found; empty if it is undamaged.
        hashed: whether all bytes were verified, not only names and sizes of the files.
    """

    step: int
    path: str
    size: int
    age_s: float
    problems: tuple[str, ...]
    hashed: bool


@dataclass(frozen=True, slots=True)
class RunState:
    """State of a run.

    Attributes:
        directory: the run directory.
        algorithm: name of the algorithm; None if the configuration cannot be read, like the next two.
        model: model of the policy.
        backend: training backend of the policy.
        state: ``running``, ``elsewhere`` (locked by a host that is not visible from here), ``finished``,
            ``ended`` (with a recorded reason), ``killed`` (without one) or ``not started``.
        reason: explanation of the state.
        step: last finished step.
        total_steps: number of the last step; None if unknown.
        eta_s: estimated seconds to the last step, from the recent steps; None if there are none.
        last_row_age_s: seconds since the last row of metrics.
        launches: launches of the run, oldest first.
        phases: mean seconds per step of each phase, over the recent steps, longest first, with ``other``.
        step_s: median seconds of the recent steps; not affected by a few validations or saves.
        tokens_per_s: mean over the recent steps.
        rates: metrics ``performance/NAME`` by NAME: tokens per second, TFLOP/s and utilisation, as means over
            the recent steps.
        checkpoints: steps that have a checkpoint, newest first.
        checkpoint: the newest undamaged checkpoint, or the newest one if all are damaged.
        unfinished: names of checkpoints that were started but not committed.
        free_bytes: free bytes on the file system of the run.
        not_finite: metrics whose newest value is NaN or infinite -> step since which this is so.
        series: all metrics.
    """

    directory: str
    algorithm: str | None
    model: str | None
    backend: str | None
    state: str
    reason: str
    step: int
    total_steps: int | None
    eta_s: float | None
    last_row_age_s: float | None
    launches: tuple[Launch, ...]
    phases: Mapping[str, float]
    step_s: float | None
    tokens_per_s: float | None
    rates: Mapping[str, float]
    checkpoints: tuple[int, ...]
    checkpoint: CheckpointState | None
    unfinished: tuple[str, ...]
    free_bytes: int
    not_finite: Mapping[str, int]
    series: Mapping[str, Series] = field(repr=False)


def read_run_state(directory: str | Path, hashes: bool = False, now: float | None = None) -> RunState:
    """Return the state of a run.

    Args:
        directory: the run directory.
        hashes: verify all bytes of the newest checkpoint; otherwise only the names and sizes of its files.
        now: unix seconds; None for the current time.

    Raises:
        DataError: the directory is not a run, a file in it cannot be read or does not respond, or the metrics
            are damaged.
    """
    try:
        # A read from a network file system whose server does not respond would never return.
        return read_in_time(
            lambda: _look(Path(directory), hashes, time.time() if now is None else now),
            f"run directory {directory}",
        )
    except OSError as error:
        place = error.filename or directory
        raise DataError(
            f"{place} cannot be read: {error.strerror or error}. Fix: ls -ld {place}; id   (who may read it)"
        ) from error


def _look(run_dir: Path, hashes: bool, now: float) -> RunState:
    require_run(run_dir)
    configured = read_configured(run_dir)
    # A run that ends writes its last row, then its outcome, and then releases its lock. Read these in the
    # opposite order. A run that ends meanwhile is then reported as running. In the same order, it could seem
    # to have ended without an outcome.
    owner = read_owner(run_dir)
    launches = tuple(read_launches(run_dir))
    log = read_log(run_dir)
    trained = log.series.get(_STEP_SECONDS, Series((), ())).steps
    # Exclude step 0, which is a validation before training. Before the first row, use the step from which the
    # launch continues.
    step = max(trained, default=0) or _newest([each.first_step for each in launches]) or 0
    total = _newest([configured.total_steps, *(each.total_steps for each in launches)])
    state, reason = _state(owner, launches, step, total)
    recent = _recent(log.series)
    step_s = statistics.median(recent[_STEP_SECONDS]) if recent.get(_STEP_SECONDS) else None
    checkpoints, checkpoint, unfinished = _checkpoints(
        configured.checkpoint_dir, hashes, now, _own_key(configured)
    )
    return RunState(
        directory=str(run_dir),
        algorithm=configured.algorithm,
        model=configured.model,
        backend=configured.backend,
        state=state,
        reason=reason,
        step=step,
        total_steps=total,
        eta_s=None if step_s is None or total is None else max(total - step, 0) * step_s,
        last_row_age_s=None if log.last_time is None else max(now - log.last_time, 0.0),
        launches=launches,
        phases=_phases(recent),
        step_s=step_s,
        tokens_per_s=_mean(recent.get("performance/tokens_per_s")),
        rates=_rates(recent),
        checkpoints=checkpoints,
        checkpoint=checkpoint,
        unfinished=unfinished,
        free_bytes=shutil.disk_usage(run_dir).free,
        not_finite=log.not_finite,
        series=log.series,
    )


def require_run(run_dir: Path) -> None:
    """Check that a directory is a run directory that can be read without blocking.

    Raises:
        DataError: it is not; names the runs below it, if there are any.
    """
    if any((run_dir / mark).is_file() for mark in MARKS) or any(run_dir.glob("metrics*.jsonl")):
        found = first_special(run_dir)
        if found is not None:
            # Opening a named pipe would block.
            raise DataError(
                f"run directory {run_dir}: {found[0].name} in it is {found[1]}, not a file. Fix: remove it"
            )
        return
    if not run_dir.is_dir():
        named = Path("runs") / run_dir
        raise DataError(
            f"run directory {run_dir} {'is a file' if run_dir.exists() else 'does not exist'}. Fix: "
            f"{f'write {named}' if named.is_dir() else 'give the run_dir of a run'}"
        )
    below = set[str]()
    # Search only three levels (``runs/quickstart/seed-1/grpo``), because a full search of a shared disk takes
    # minutes.
    for depth in ("*", "*/*", "*/*/*"):
        for path in run_dir.glob(f"{depth}/{FILE_NAME}"):
            below.add(path.parent.relative_to(run_dir).as_posix())
    shown = ", ".join(sorted(below)[:5])
    fix = (
        f"give one of the runs in it: {shown}{' ...' if len(below) > 5 else ''}"
        if below
        else "give the run_dir of a run"
    )
    raise DataError(
        f"{run_dir} is not the directory of a run: none of {', '.join(MARKS)} is in it. Fix: {fix}"
    )


def read_log(run_dir: Path) -> Log:
    """Return the metrics of a run; empty before the first row.

    Raises:
        DataError: a metrics file is damaged or cannot be read.
    """
    return collect_log(chain.from_iterable(map(stream_metrics, metrics_files(run_dir))))


def _state(owner: Owner | None, launches: Sequence[Launch], step: int, total: int | None) -> tuple[str, str]:
    job = launches[-1].job_id if launches else ""
    again = "start it again with the same command" + (f", unless Slurm does (job {job})" if job else "")
    if owner is not None and (ended := has_ended(owner)) is not True:
        if ended is None:
            # A process on another host cannot be checked from here.
            return "elsewhere", f"{owner}, which cannot be seen from this host"
        return "running", str(owner)
    reached = (
        not launches and owner is None and total is not None and step >= total
    )  # Old versions of megarl did not record launches.
    # If the last owner of the lock recorded no launch, it was killed before its first step. The outcome of an
    # earlier launch does not apply to it.
    outcome = (
        launches[-1].outcome if launches and (owner is None or owner.pid == launches[-1].process) else None
    )
    if reached or outcome == FINISHED:
        return "finished", f"all {total} steps"
    if outcome is not None:
        return "ended", f"{outcome}; {again}"
    if owner is not None or launches:
        return (
            "killed",
            (
                f"{owner or f'process {launches[-1].process} on host {launches[-1].host}'} ended "
                f"without a recorded reason; {again}"
            ),
        )
    if step:
        return "ended", f"no process is running it; {again}"
    return "not started", "no launch has reached its first step"


def _newest(values: Sequence[int | None]) -> int | None:
    """Return the last value that is not None, or None."""
    return next((value for value in reversed(values) if value is not None), None)


def _recent(series: Mapping[str, Series]) -> dict[str, list[float]]:
    """Return metric -> values at the recent training steps."""
    steps = [step for step in series.get(_STEP_SECONDS, Series((), ())).steps if step > 0][-RECENT_STEPS:]
    if not steps:
        return {}
    recent: dict[str, list[float]] = {}
    for name, each in series.items():
        recent[name] = [
            value for step, value in zip(each.steps, each.values, strict=True) if step >= steps[0]
        ]
    return recent


def _phases(recent: Mapping[str, list[float]]) -> dict[str, float]:
    """Return the mean seconds per step of each phase; a phase that runs at every tenth step counts a
    tenth."""
    steps = recent.get(_STEP_SECONDS)
    if not steps:
        return {}
    seconds: dict[str, float] = {}
    for name, values in recent.items():
        if values and name.startswith("timing/") and name.count("/") == 1 and name != _STEP_SECONDS:
            seconds[name.removeprefix("timing/").removesuffix("_s")] = sum(values) / len(steps)
    beside = beside_training(seconds)
    # Overlapping phases must not count twice.
    own = sum(value for name, value in seconds.items() if name not in beside)
    seconds["other"] = max(sum(steps) / len(steps) - own, 0.0)
    # Longest phase first; the remainder is always last.
    return dict(sorted(seconds.items(), key=lambda item: (item[0] == "other", -item[1])))


def _rates(recent: Mapping[str, list[float]]) -> dict[str, float]:
    rates: dict[str, float] = {}
    for name, values in recent.items():
        if values and name.startswith("performance/") and name.endswith(_RATES):
            rates[name.removeprefix("performance/")] = fmean(values)
    return rates


def _mean(values: Sequence[float] | None) -> float | None:
    return sum(values) / len(values) if values else None


def _own_key(configured: Configured) -> bytes | None:
    """Return the key that signs the checkpoints; None if they are unsigned or this user cannot read the
    key."""
    try:
        return read_signing_key(configured.signing_key_file)
    except ConfigError:
        return None


def _checkpoints(
    directory: Path, hashes: bool, now: float, key: bytes | None
) -> tuple[tuple[int, ...], CheckpointState | None, tuple[str, ...]]:
    """Return the steps with a checkpoint, the state of the one that a resume would use, and the names of
    unfinished checkpoints."""
    # Do not take the lock: a manager that holds it deletes unfinished checkpoints, which may belong to a live
    # run.
    manager = CheckpointManager({"enabled": True, "checkpoint_dir": str(directory)}, verify_hashes=hashes)
    for _ in range(_LISTINGS):
        found = manager.checkpoints()
        looked = list(_until_whole(found, hashes, now, key))
        # A missing checkpoint was replaced by a newer one, so the list is outdated.
        if None not in looked:
            break
    seen = list(filter(None, looked))
    best = next((state for state in seen if not state.problems), seen[0] if seen else None)
    return (
        tuple(dict.fromkeys(step for step, _ in found)),
        best,
        tuple(path.name for path in manager.unfinished()),
    )


def _until_whole(
    found: Sequence[tuple[int, Path]], hashes: bool, now: float, key: bytes | None
) -> Iterator[CheckpointState | None]:
    """Yield the states of checkpoints, newest first, up to the first undamaged one. Yields None for a
    checkpoint that was deleted meanwhile."""
    for step, path in found:
        state = _checkpoint_state(step, path, hashes, now, key)
        yield state
        # Only the newest usable checkpoint matters, and checking an older one may take long.
        if state is not None and not state.problems:
            return


def _checkpoint_state(
    step: int, path: Path, hashes: bool, now: float, key: bytes | None
) -> CheckpointState | None:
    """Return a checkpoint's state; None if the run has deleted it meanwhile."""
    try:
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        age_s = max(now - path.stat().st_mtime, 0.0)
    except FileNotFoundError:
        return None
    try:
        problems = tuple(faults_of_checkpoint(path, hashes, key))
    except StorageError as error:
        # A failing storage is reported as a fault of the checkpoint, and does not hide the rest of the
        # status.
        problems = (str(error),)
    return CheckpointState(step, str(path), size, age_s, problems, hashes) if path.is_dir() else None
