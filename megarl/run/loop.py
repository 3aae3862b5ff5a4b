"""The training loop that all algorithms share: step, validate, save, report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.distributed.deadlines import at_step, validating
from megarl.errors import StateError
from megarl.observe.timing import STEP_SECONDS, VALIDATION_BESIDE
from megarl.run.stopping import StopRequest

if TYPE_CHECKING:
    from megarl.algorithms.algorithm import Algorithm
    from megarl.observe.console import TrainingConsole
    from megarl.observe.sinks import MetricSinks
    from megarl.observe.timing import PhaseTimer
    from megarl.run.profiling import StepProfiler
    from megarl.run.resume import CheckpointWriter
    from megarl.throughput.step import StepThroughput

STEP_TOKENS = "num_tokens"
"""Metric: the step's number of tokens without padding, from which the throughput is computed."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The steps of a run and its validations.

    Attributes:
        total_steps: number of the last step.
        val_period: steps between validations; 0 for none.
        val_at_start: validate before the first step.
        val_at_end: validate after the last step.
    """

    total_steps: int
    val_period: int = 0
    val_at_start: bool = False
    val_at_end: bool = False

    def validates_after(self, step: int) -> bool:
        """Return whether a validation follows this step."""
        periodic = self.val_period > 0 and step % self.val_period == 0
        return periodic or (self.val_at_end and step == self.total_steps)


@dataclass(frozen=True, slots=True)
class Reporting:
    """Destinations of a run's reports.

    Attributes:
        sinks: the log.
        console: output for a person.
        timer: records the phases of a step.
        memory: returns the memory figures of the workers, in GiB.
        throughput: converts seconds and sequences to rates; None for only tokens a second of the step.
        restarts: numbers of restarts of engines and workers, by name; empty if there were none.
        look_around: called after each step, before anything is written; raises if the run's directory is
            gone.
    """

    sinks: MetricSinks
    console: TrainingConsole
    timer: PhaseTimer
    memory: Callable[[], Mapping[str, float]] = dict
    throughput: StepThroughput | None = None
    restarts: Callable[[], Mapping[str, float]] = dict
    look_around: Callable[[], None] = lambda: None

    def row(self, step: int, train: Mapping[str, float]) -> dict[str, float]:
        """Return the row of a step, with the timer's phases but without its validation."""
        # Before the first validation nothing was trained, so there are no figures of memory.
        memory = {**self.memory(), **self.restarts()} if train else {}
        seconds, sequences = self.timer.collect(), self.timer.take_sequences()
        row = {
            **_prefixed("train", train),
            **_prefixed("timing", seconds),
        }
        if train and STEP_TOKENS not in train:
            raise StateError(
                f"the metrics of step {step} lack {STEP_TOKENS}. Fix: let the algorithm's step return it"
            )
        if train and seconds[STEP_SECONDS] > 0:
            row["performance/tokens_per_s"] = train[STEP_TOKENS] / seconds[STEP_SECONDS]
        if train and self.throughput is not None:
            row.update(
                _prefixed("performance", self.throughput.metrics(int(train[STEP_TOKENS]), seconds, sequences))
            )
        row.update(_prefixed("performance", memory))
        return row

    def write(self, step: int, row: Mapping[str, float], validation: Mapping[str, float]) -> None:
        """Log a row with the metrics of a validation."""
        self.sinks.log({**row, **_prefixed("validation", validation)}, step)
        if validation:
            self.console.validation(step, validation)


class _HeldStep:
    """A step that is validated while the next one trains: its row and its checkpoint wait for the metrics.

    Args:
        algorithm: runs the validation.
        reporting, checkpoints, stop: as in ``run_loop``.

    Attributes:
        save_took: seconds of the step, and of the part of its save that is done.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        reporting: Reporting,
        checkpoints: CheckpointWriter | None,
        stop: StopRequest,
    ) -> None:
        self._algorithm, self._reporting = algorithm, reporting
        self._checkpoints, self._stop = checkpoints, stop
        self._row: tuple[int, Mapping[str, float]] | None = None
        self.save_took = 0.0, 0.0

    def keep(self, step: int, row: Mapping[str, float]) -> None:
        """Hold a row until ``finish``."""
        self._row = step, row

    def finish(self) -> None:
        """Log the step with the metrics of its validation, which are complete at the end of the next step, or
        are computed now if no step follows. Its checkpoint becomes visible.

        Raises:
            ConfigError: as in ``CheckpointWriter.require_metric``.
            CheckpointError: as in ``CheckpointWriter.complete``.
        """
        if self._row is None:
            return
        step, row = self._row
        validation = self._algorithm.validated_beside()
        # No step has followed, so that the weights are still those of the held step.
        if validation is None:
            validation = _validate(self._algorithm, self._reporting)
        # Clear the row only now: if the validation fails, ``__exit__`` still logs the row.
        self._row = None
        self._reporting.write(step, row, validation)
        if self._checkpoints is not None:
            figures = _prefixed("validation", validation)
            self._checkpoints.require_metric(figures)
            if self._checkpoints.uncommitted:
                begun = time.monotonic()
                with self._reporting.timer.phase("checkpoint"):
                    self._checkpoints.complete(figures)
                step_s, save_s = self.save_took
                self._stop.save_took(step_s, save_s + time.monotonic() - begun)

    def __enter__(self) -> _HeldStep:
        return self

    def __exit__(self, *_: object) -> None:
        # The run fails, and will be resumed from an earlier step. The row helps to find the reason.
        if self._row is not None:
            self._reporting.write(*self._row, {})


def run_loop(
    algorithm: Algorithm,
    schedule: Schedule,
    reporting: Reporting,
    checkpoints: CheckpointWriter | None = None,
    first_step: int = 0,
    stop: StopRequest | None = None,
    profiler: StepProfiler | None = None,
) -> int:
    """Train the steps after ``first_step``, to the last one or until a stop is requested. Return the last
    finished step.

    If the run writes checkpoints, the step before a stop gets one even if none is due. A run that saved
    because its time limit is near continues if that save left time for another step.

    A step is validated while the next one trains, if that is possible. Its checkpoint then gets its name,
    with the metrics, at the end of the next step.
    """
    stop = stop or StopRequest()
    with _HeldStep(algorithm, reporting, checkpoints, stop) as held:
        return _run_steps(algorithm, schedule, reporting, checkpoints, first_step, stop, profiler, held)


def _run_steps(
    algorithm: Algorithm,
    schedule: Schedule,
    reporting: Reporting,
    checkpoints: CheckpointWriter | None,
    first_step: int,
    stop: StopRequest,
    profiler: StepProfiler | None,
    held: _HeldStep,
) -> int:
    # Discard the seconds of the start, which belong to no step.
    reporting.timer.collect()
    if schedule.val_at_start and first_step == 0:
        if algorithm.validate_beside():
            held.keep(0, reporting.row(0, {}))
        else:
            validation = _validate(algorithm, reporting)
            reporting.write(0, reporting.row(0, {}), validation)
    for step in range(first_step + 1, schedule.total_steps + 1):
        # Stop at once if there is nothing to save, or nothing new since the last checkpoint. Otherwise train
        # and save one more step.
        if stop.reason is not None and (checkpoints is None or step == first_step + 1):
            held.finish()
            return step - 1
        if checkpoints is not None:
            # Do not wait: only a checkpoint whose write has ended becomes visible.
            checkpoints.settle()
        begun = time.monotonic()
        if profiler is not None:
            profiler.begin(step)
        with at_step(step):
            train = algorithm.step(step)
            if profiler is not None:
                profiler.end(step)
            held.finish()
            # A validation can run next to the following step, and there is none after the last step or a
            # stop.
            is_due, goes_on = schedule.validates_after(step), step < schedule.total_steps
            is_beside = is_due and goes_on and stop.reason is None and algorithm.validate_beside()
            validation = _validate(algorithm, reporting) if is_due and not is_beside else {}
        done = time.monotonic()
        reporting.look_around()
        stop.step_took(done - begun)
        metrics = {**_prefixed("train", train), **_prefixed("validation", validation)}
        # A skipped step does not have all metrics, nor does a warm-up step.
        if checkpoints is not None and not train.get("skipped_steps") and not algorithm.is_warming_up(step):
            checkpoints.require_metric(metrics)
        # Check for a stop again, because it may have been requested during the step.
        saves = checkpoints is not None and (
            checkpoints.due(step, schedule.total_steps) or stop.reason is not None
        )
        with at_step(step), ExitStack() as around_report:
            if checkpoints is not None and saves:
                # Keep this phase open while the row is made: its seconds so far are in this row, and the rest
                # in the next one.
                around_report.enter_context(reporting.timer.phase("checkpoint"))
                around_report.enter_context(
                    checkpoints.saving(
                        step,
                        algorithm.sampler.state(),
                        metrics,
                        # Bind the step now: the function is called later, when the loop variable has changed.
                        lambda step=step: step == schedule.total_steps or stop.reason is not None,  # type: ignore[misc]
                        is_validated=not is_beside,
                    )
                )
            row = reporting.row(step, train)
            reporting.console.step(step, row)
            if is_beside:
                held.keep(step, row)
            else:
                reporting.write(step, row, validation)
        if beside_s := row.get(f"timing/{VALIDATION_BESIDE}_s"):
            # A stop would have to wait for the validation as well.
            stop.step_took(done - begun + beside_s)
        if saves:
            assert checkpoints is not None
            # A stop also waits for a write in the background; the duration of the previous write is the
            # estimate.
            held.save_took = done - begun, max(time.monotonic() - done, checkpoints.seconds[0])
            stop.save_took(*held.save_took)
            if stop.reason is not None:
                held.finish()
                checkpoints.settle(wait=True, is_last=lambda: True)
                # If the save before this stop failed, train and save one more step.
                if not checkpoints.failed:
                    return step
    if checkpoints is not None:
        checkpoints.settle(wait=True, is_last=lambda: True)
    # A run that resumes from a checkpoint after its last step trains no step, and has reached that
    # checkpoint.
    return max(schedule.total_steps, first_step)


def total_steps(
    max_num_steps: int, max_num_epochs: int | None, num_records: int, records_per_step: int
) -> int:
    """Return the number of the last step: the last complete step of the epochs if that comes before
    ``max_num_steps``; at least 1."""
    if max_num_epochs is None:
        return max_num_steps
    return max(min(max_num_steps, max_num_epochs * num_records // records_per_step), 1)


def _validate(algorithm: Algorithm, reporting: Reporting) -> dict[str, float]:
    with validating(), reporting.timer.phase("validation"):
        return algorithm.validate()


def _prefixed(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in metrics.items()}
