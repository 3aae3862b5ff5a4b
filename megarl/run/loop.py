"""The training loop that all algorithms share: train, validate, save and log each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.distributed.deadlines import at_step, validating
from megarl.errors import StateError
from megarl.observe.timing import STEP_SECONDS, VALIDATION_BESIDE, PhaseTimer
from megarl.run.stopping import StopRequest

if TYPE_CHECKING:
    from megarl.algorithms.algorithm import Algorithm
    from megarl.observe.console import TrainingConsole
    from megarl.observe.sinks import MetricSinks
    from megarl.run.profiling import StepProfiler
    from megarl.run.resume import CheckpointWriter
    from megarl.throughput.step import StepThroughput

STEP_TOKENS = "num_tokens"
"""Name of the metric that every step must return: its number of tokens without padding, used for the
throughput."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The number of training steps of a run, and when it validates.

    Attributes:
        total_steps: number of the last step.
        val_period: steps between validations; 0 disables periodic validation.
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
    """Destinations and sources of a run's logged metrics.

    Attributes:
        sinks: receive each step's row of metrics.
        console: shows steps and validations to the user.
        timer: measures the phases of a step.
        memory: returns the memory metrics of the workers, in GiB.
        throughput: computes throughput metrics; None logs only tokens per second.
        restarts: returns the numbers of engine and worker restarts by metric name; empty if there were none.
        look_around: called after each step, before anything is written; raises if the run directory is gone.
    """

    sinks: MetricSinks
    console: TrainingConsole
    timer: PhaseTimer
    memory: Callable[[], Mapping[str, float]] = dict
    throughput: StepThroughput | None = None
    restarts: Callable[[], Mapping[str, float]] = dict
    look_around: Callable[[], None] = lambda: None

    def row(self, step: int, train: Mapping[str, float]) -> dict[str, float]:
        """Return a step's metrics with prefixes (``train/``, ``timing/``, ``performance/``), without
        validation.

        Args:
            step: number of the step, for messages.
            train: metrics that the algorithm returned; empty for the row before the first step.

        Raises:
            StateError: ``train`` lacks ``num_tokens``.
        """
        # Row 0 precedes all training, so there are no memory figures.
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
        """Log a step's row together with the metrics of its validation, if any."""
        self.sinks.log({**row, **_prefixed("validation", validation)}, step)
        if validation:
            self.console.validation(step, validation)


class _HeldStep:
    """A step whose validation runs while the next step trains. Its row is logged, and its checkpoint
    committed, only when the validation's metrics are known.

    Args:
        algorithm: runs the validation.
        reporting, checkpoints, stop: as in ``run_loop``.

    Attributes:
        save_took: seconds of the step, and seconds of its save so far.
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
        """Hold a step's row until ``finish``."""
        self._row = step, row

    def finish(self) -> None:
        """Log the held step with its validation metrics, and commit its checkpoint. If no step has followed
        that could run the validation, run it now. No-op if no step is held.

        Raises:
            ConfigError: as in ``CheckpointWriter.require_metric``.
            CheckpointError: as in ``CheckpointWriter.complete``.
        """
        if self._row is None:
            return
        step, row = self._row
        validation = self._algorithm.validated_beside()
        # No step has followed, so the model still has the held step's weights.
        if validation is None:
            validation = _validate(self._algorithm, self._reporting)
        # Clear the row only after the validation. If that fails, ``__exit__`` still logs the row.
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
        # An error ends the run. Log the row without validation, because it helps to find the cause.
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
    """Train from ``first_step + 1`` to the last step, or until a stop is requested. Return the last finished
    step.

    Before a stop, the loop trains and saves one more step if there is unsaved progress. If the stop was
    requested because the time limit is near, and the save was so fast that another step fits, training
    continues.

    A validation runs while the next step trains, if the algorithm supports that. The checkpoint of the
    validated step then becomes visible at the end of the next step, with the validation metrics.

    Args:
        algorithm: trains and validates.
        schedule: number of steps, and when to validate.
        reporting: receives the metrics.
        checkpoints: writes checkpoints; None for a run without.
        first_step: number of steps that earlier launches have finished.
        stop: checked between steps; None if nothing can stop the run.
        profiler: records selected steps; None for no profiles.
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
    # Discard the time measured during the start, which belongs to no step.
    reporting.timer.collect()
    if schedule.val_at_start and first_step == 0:
        if algorithm.validate_beside():
            held.keep(0, reporting.row(0, {}))
        else:
            validation = _validate(algorithm, reporting)
            reporting.write(0, reporting.row(0, {}), validation)
    for step in range(first_step + 1, schedule.total_steps + 1):
        # Stop at once if the run has no checkpoints, or the last checkpoint has all progress. Otherwise train
        # and save one more step.
        if stop.reason is not None and (checkpoints is None or step == first_step + 1):
            held.finish()
            return step - 1
        stop.last_step = step
        if checkpoints is not None:
            # Do not wait for a write in progress. Only a finished one is committed here.
            checkpoints.settle()
        begun = time.monotonic()
        if profiler is not None:
            profiler.begin(step)
        with at_step(step):
            train = algorithm.step(step)
            if profiler is not None:
                profiler.end(step)
            held.finish()
            # A validation can run during the next step only if there is one: not before the end or a stop.
            is_due, goes_on = schedule.validates_after(step), step < schedule.total_steps
            is_beside = is_due and goes_on and stop.reason is None and algorithm.validate_beside()
            validation = _validate(algorithm, reporting) if is_due and not is_beside else {}
        done = time.monotonic()
        reporting.look_around()
        stop.step_took(done - begun)
        metrics = {**_prefixed("train", train), **_prefixed("validation", validation)}
        # Skipped steps and warm-up steps lack some metrics, so a missing ``metric_name`` is no error there.
        if checkpoints is not None and not train.get("skipped_steps") and not algorithm.is_warming_up(step):
            checkpoints.require_metric(metrics)
        # A stop may have been requested during the step.
        saves = checkpoints is not None and (
            checkpoints.due(step, schedule.total_steps) or stop.reason is not None
        )
        # A stop that is requested from now on trains and saves one more step.
        stop.last_step = min(step + (checkpoints is not None), schedule.total_steps)
        with at_step(step), ExitStack() as around_report:
            if checkpoints is not None and saves:
                # The row is made inside this phase: it has the seconds so far, and the next row the rest.
                around_report.enter_context(reporting.timer.phase("checkpoint"))
                around_report.enter_context(
                    checkpoints.saving(
                        step,
                        algorithm.sampler.state(),
                        metrics,
                        # Bind the step now: the loop variable changes before this is called.
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
            # A stop would also wait for the validation, so add it to the time that a step needs.
            stop.step_took(done - begun + beside_s)
        if saves:
            assert checkpoints is not None
            # A stop also waits for a background write. Its duration is not known yet, so use that of the
            # previous write.
            held.save_took = done - begun, max(time.monotonic() - done, checkpoints.seconds[0])
            stop.save_took(*held.save_took)
            if stop.reason is not None:
                held.finish()
                checkpoints.settle(wait=True, is_last=lambda: True)
                # If this save failed, train and save one more step.
                if not checkpoints.failed:
                    return step
    if checkpoints is not None:
        checkpoints.settle(wait=True, is_last=lambda: True)
    # If the run resumed from a checkpoint beyond its last step, no step was trained.
    return max(schedule.total_steps, first_step)


def total_steps(
    max_num_steps: int, max_num_epochs: int | None, num_records: int, records_per_step: int
) -> int:
    """Return the number of the last step, at least 1: ``max_num_steps``, or fewer if the epochs end before.
    An incomplete step at the end of the epochs is dropped."""
    if max_num_epochs is None:
        return max_num_steps
    return max(min(max_num_steps, max_num_epochs * num_records // records_per_step), 1)


def _validate(algorithm: Algorithm, reporting: Reporting) -> dict[str, float]:
    with validating(), reporting.timer.phase("validation"):
        return algorithm.validate()


def _prefixed(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in metrics.items()}
