"""State of a run, read from its directory alone. Nothing there is written, locked or waited for."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from megarl.observe.metrics_file import FILE_NAME, stream_metrics
from megarl.observe.series import Log, Series, collect_log
from megarl.observe.timing import STEP_SECONDS, beside_training
from megarl.watch.configured import Configured, read_configured

RECENT_STEPS = 20
MARKS = (FILE_NAME, LOCK_NAME, LAUNCHES_NAME)
"""What tells the directory of a run; a configuration is in that of a checkpoint too."""
_RATES = ("tokens_per_s", "tokens_per_s_per_device", "tflops", "mfu", "hfu", "padding_efficiency", "idle_s")
_STEP_SECONDS = f"timing/{STEP_SECONDS}"
# How often checkpoints are listed again, because the run removed one that was being read.
_LISTINGS = 3


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """A checkpoint.

    Attributes:
        step: finished steps.
        path: its directory.
        size: bytes.
        age_s: seconds since it was committed.
        problems: what is wrong with it; empty for a whole one.
        hashed: every byte was read; otherwise names and sizes were compared.
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
        directory: of the run.
        algorithm: what trains; None where the configuration cannot be read, like the next two.
        model: its policy.
        backend: what that runs on.
        state: ``running``, ``elsewhere`` (on a host that cannot be seen from here), ``finished``, ``ended``
            (it said why), ``killed`` (it did not) or ``not started``.
        reason: the state in words.
        step: last finished step.
        total_steps: number of the last step; None where nothing says it.
        eta_s: seconds until the last step at the pace of the recent steps; None without one.
        last_row_age_s: seconds since the last row of metrics.
        launches: of the run, oldest first.
        phases: mean seconds of each phase of the recent steps, longest first, with ``other``.
        step_s: median seconds of a recent step; the step before a checkpoint or validation does not move it.
        tokens_per_s: mean over the recent steps.
        rates: means over the recent steps of tokens a second, TFLOP/s and utilisation of the phases, by
            metric without ``performance/``.
        checkpoints: steps that have one, newest first.
        checkpoint: the newest whole one, or the newest when none is whole.
        unfinished: checkpoints that were begun.
        free_bytes: room on the file system of the run.
        not_finite: metrics whose newest value is NaN or infinite, each with the step since which that is so.
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
    """Look at a run.

    Args:
        directory: of the run.
        hashes: read every byte of the newest checkpoint; otherwise its files' names and sizes are compared
            with its manifest.
        now: unix seconds; the present when None.

    Raises:
        DataError: the directory is not that of a run, something in it cannot be read or does not answer, or
            its metrics are damaged.
    """
    try:
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
    # A run that ends writes its last row, then how it ended, then gives back its lock. Read in the opposite
    # order, one that ends meanwhile is called running; in the same order it could seem to have left without a
    # word.
    owner = read_owner(run_dir)
    launches = tuple(read_launches(run_dir))
    log = read_log(run_dir)
    trained = log.series.get(_STEP_SECONDS, Series((), ())).steps
    # Step 0 is a validation before training. Before the first row a launch tells at which step it goes on.
    step = max(
        [step for step in trained if step > 0], default=_newest([each.first_step for each in launches]) or 0
    )
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
    """Refuse what is not the directory of a run.

    Raises:
        DataError: says what was looked for, and which runs lie below.
    """
    if any((run_dir / mark).is_file() for mark in MARKS) or any(run_dir.glob("metrics*.jsonl")):
        found = first_special(run_dir)
        if found is not None:
            # opened, it would be waited for
            raise DataError(
                f"run directory {run_dir}: {found[0].name} in it is {found[1]}, not a file. Fix: remove it"
            )
        return
    if not run_dir.is_dir():
        raise DataError(
            f"run directory {run_dir} {'is a file' if run_dir.exists() else 'does not exist'}. Fix: give "
            "the run_dir of a run"
        )
    below = set[str]()
    # three levels, as in runs/quickstart/seed-1/grpo: a search of everything takes minutes on a shared disk
    for depth in ("*", "*/*", "*/*/*"):
        below.update(
            path.parent.relative_to(run_dir).as_posix() for path in run_dir.glob(f"{depth}/{FILE_NAME}")
        )
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
    """Return what the metrics say; nothing before the first row.

    Raises:
        DataError: a file of them cannot be read, or is damaged.
    """
    return collect_log(row for path in sorted(run_dir.glob("metrics*.jsonl")) for row in stream_metrics(path))


def _state(owner: Owner | None, launches: Sequence[Launch], step: int, total: int | None) -> tuple[str, str]:
    job = launches[-1].job_id if launches else ""
    again = "start it again with the same command" + (f", unless Slurm does (job {job})" if job else "")
    if owner is not None and (ended := has_ended(owner)) is not True:
        if ended is None:
            return "elsewhere", f"{owner}, which cannot be seen from this host"
        return "running", str(owner)
    reached = (
        not launches and owner is None and total is not None and step >= total
    )  # a run from before launches were written down
    # An owner that no launch tells of was killed before its first step could begin; what an earlier launch
    # said is not about it.
    told = launches[-1].outcome if launches and (owner is None or owner.pid == launches[-1].process) else None
    if reached or told == FINISHED:
        return "finished", f"all {total} steps"
    if told is not None:
        return "ended", f"{told}; {again}"
    if owner is not None or launches:
        return (
            "killed",
            (
                f"{owner or f'process {launches[-1].process} on host {launches[-1].host}'} left without a "
                "word; "
                f"{again}"
            ),
        )
    if step:
        return "ended", f"no process holds it; {again}"
    return "not started", "no launch has reached its first step"


def _newest(values: Sequence[int | None]) -> int | None:
    """Return the last one that is known."""
    return next((value for value in reversed(values) if value is not None), None)


def _recent(series: Mapping[str, Series]) -> dict[str, list[float]]:
    """Return values of the last training steps, by metric."""
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
    """Mean seconds a step: a phase that comes every tenth step counts a tenth."""
    steps = recent.get(_STEP_SECONDS)
    if not steps:
        return {}
    names = [
        name
        for name in recent
        if name.startswith("timing/") and name.count("/") == 1 and name != _STEP_SECONDS
    ]
    seconds = {
        name.removeprefix("timing/").removesuffix("_s"): sum(recent[name]) / len(steps)
        for name in names
        if recent[name]
    }
    beside = beside_training(seconds)
    own = sum(value for name, value in seconds.items() if name not in beside)
    seconds["other"] = max(sum(steps) / len(steps) - own, 0.0)
    return dict(sorted(seconds.items(), key=lambda item: (item[0] == "other", -item[1])))


def _rates(recent: Mapping[str, list[float]]) -> dict[str, float]:
    names = [name.removeprefix("performance/") for name in recent if name.startswith("performance/")]
    return {
        name: fmean(recent[f"performance/{name}"])
        for name in names
        if name.endswith(_RATES) and recent[f"performance/{name}"]
    }


def _mean(values: Sequence[float] | None) -> float | None:
    return sum(values) / len(values) if values else None


def _own_key(configured: Configured) -> bytes | None:
    """Return the key by which the run signs its checkpoints; None where it does not, or whoever looks may not
    read it."""
    try:
        return read_signing_key(configured.signing_key_file)
    except ConfigError:
        return None


def _checkpoints(
    directory: Path, hashes: bool, now: float, key: bytes | None
) -> tuple[tuple[int, ...], CheckpointState | None, tuple[str, ...]]:
    """Return steps that have a checkpoint, the one that a resume would take, and those that were begun."""
    # Without a lock: what is unfinished may be a live run's, and a manager that holds one removes it.
    manager = CheckpointManager({"enabled": True, "checkpoint_dir": str(directory)}, verify_hashes=hashes)
    for _ in range(_LISTINGS):
        found = manager.checkpoints()
        looked = list(_until_whole(found, hashes, now, key))
        # one that is gone was replaced: the list is out of date
        if None not in looked:
            break
    seen = [state for state in looked if state is not None]
    best = next((state for state in seen if not state.problems), seen[0] if seen else None)
    return (
        tuple(dict.fromkeys(step for step, _ in found)),
        best,
        tuple(path.name for path in manager.unfinished()),
    )


def _until_whole(
    found: Sequence[tuple[int, Path]], hashes: bool, now: float, key: bytes | None
) -> Iterator[CheckpointState | None]:
    """Yield one checkpoint after the other, up to the first whole one."""
    for step, path in found:
        state = _checkpoint_state(step, path, hashes, now, key)
        yield state
        if state is not None and not state.problems:
            return


def _checkpoint_state(
    step: int, path: Path, hashes: bool, now: float, key: bytes | None
) -> CheckpointState | None:
    """None when the run removed it meanwhile, as it does with older ones when it has saved: that is no
    damage."""
    try:
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        age_s = max(now - path.stat().st_mtime, 0.0)
    except FileNotFoundError:
        return None
    try:
        problems = tuple(faults_of_checkpoint(path, hashes, key))
    except StorageError as error:
        problems = (str(error),)
    return CheckpointState(step, str(path), size, age_s, problems, hashes) if path.is_dir() else None
