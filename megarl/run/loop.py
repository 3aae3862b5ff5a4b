"""The training loop that all algorithms share: step, validate, save, report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.distributed.deadlines import at_step, validating
from megarl.errors import StateError
from megarl.observe.timing import STEP_SECONDS
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
"""Metric of a step that counts its tokens without padding; the throughput comes from it."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """When what happens.

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
        console: what a person sees.
        timer: told the phases of a step.
        memory: the memory figures of the workers, in GiB.
        throughput: turns seconds and sequences into rates; None for tokens a second of the step alone.
        restarts: how often engines and workers were started anew, by name; empty where they were not.
        look_around: called after each step, before anything is written; raises where the directory that all
            of it goes to is gone.
    """

    sinks: MetricSinks
    console: TrainingConsole
    timer: PhaseTimer
    memory: Callable[[], Mapping[str, float]] = dict
    throughput: StepThroughput | None = None
    restarts: Callable[[], Mapping[str, float]] = dict
    look_around: Callable[[], None] = lambda: None

    def report(self, step: int, train: Mapping[str, float], validation: Mapping[str, float]) -> None:
        """One row in the log and the lines on the console; what the timer has collected goes with them."""
        memory = {**self.memory(), **self.restarts()} if train else {}
        seconds, sequences = self.timer.collect(), self.timer.take_sequences()
        row = {
            **_prefixed("train", train),
            **_prefixed("validation", validation),
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
        self.sinks.log(row, step)
        if train:
            self.console.step(step, row)
        if validation:
            self.console.validation(step, validation)


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

    The step before a stop gets a checkpoint also when none is due, if the run writes any. A run that saved
    because its time limit is near goes on if that save left time for another step.
    """
    stop = stop or StopRequest()
    reporting.timer.collect()
    if schedule.val_at_start and first_step == 0:
        reporting.report(0, {}, _validate(algorithm, reporting))
    for step in range(first_step + 1, schedule.total_steps + 1):
        if stop.reason is not None and (checkpoints is None or step == first_step + 1):
            return step - 1
        if checkpoints is not None:
            checkpoints.settle()
        begun = time.monotonic()
        if profiler is not None:
            profiler.begin(step)
        with at_step(step):
            train = algorithm.step(step)
            if profiler is not None:
                profiler.end(step)
            validation = _validate(algorithm, reporting) if schedule.validates_after(step) else {}
        done = time.monotonic()
        reporting.look_around()
        stop.step_took(done - begun)
        metrics = {**_prefixed("train", train), **_prefixed("validation", validation)}
        # a step that was skipped has not all of them, nor has a warm-up
        if checkpoints is not None and not train.get("skipped_steps") and not algorithm.is_warming_up(step):
            checkpoints.require_metric(metrics)
        saves = checkpoints is not None and (
            checkpoints.due(step, schedule.total_steps) or stop.reason is not None
        )
        with at_step(step), ExitStack() as around_report:
            if checkpoints is not None and saves:
                around_report.enter_context(reporting.timer.phase("checkpoint"))
                around_report.enter_context(
                    checkpoints.saving(
                        step,
                        algorithm.sampler.state(),
                        metrics,
                        lambda step=step: step == schedule.total_steps or stop.reason is not None,  # type: ignore[misc]
                    )
                )
            reporting.report(step, train, validation)
        if saves:
            assert checkpoints is not None
            stop.save_took(done - begun, max(time.monotonic() - done, checkpoints.seconds[0]))
            if stop.reason is not None:
                checkpoints.settle(wait=True, is_last=lambda: True)
                # asked right after a save that failed: one more step is saved
                if not checkpoints.failed:
                    return step
    if checkpoints is not None:
        checkpoints.settle(wait=True, is_last=lambda: True)
    return max(schedule.total_steps, first_step)


def total_steps(
    max_num_steps: int, max_num_epochs: int | None, num_records: int, records_per_step: int
) -> int:
    """The number of the last step: the epochs' last whole step, where that comes before ``max_num_steps``; at
    least 1."""
    if max_num_epochs is None:
        return max_num_steps
    return max(min(max_num_steps, max_num_epochs * num_records // records_per_step), 1)


def _validate(algorithm: Algorithm, reporting: Reporting) -> dict[str, float]:
    with validating(), reporting.timer.phase("validation"):
        return algorithm.validate()


def _prefixed(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in metrics.items()}
