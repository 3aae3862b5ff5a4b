"""Batches sampled ahead: engines sample the batch of a later step while the policy trains.

The batch of step n is sampled with the weights after step n - 1 - k: engines get the weights of step n - 1
before step n begins, and meanwhile sample the batch of step n + k with them. So the step alone decides which
weights sample what, whichever side is faster. Both sides synchronise at the end of a step; then the engines
get new weights, and a checkpoint can keep the k waiting batches.

A validation of the weights of step n - 1 also runs during step n, after the sampling: the engines keep these
weights until the step ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megarl.algorithms.rollout_source import ValidatesBeside, WaitingBatches
from megarl.distributed.deadlines import validating
from megarl.errors import MegarlError, WorkerLostError
from megarl.observe.timing import ENGINE_IDLE, ROLLOUT_WAIT, VALIDATION_BESIDE

if TYPE_CHECKING:
    from megarl.algorithms.refit import Refit
    from megarl.algorithms.rollout_source import Validated
    from megarl.algorithms.sampled_batch import Sampling
    from megarl.data.datasets import Dataset
    from megarl.models.generation.interfaces import GenerationInterface
    from megarl.observe.timing import PhaseTimer
    from megarl.rollout.collector import RefittedEngine


def with_new_engines(engines: RefittedEngine, call: Callable[[], None]) -> None:
    """Call a function that uses engines; if it fails because they are lost, replace them and call it
    again."""
    while True:
        try:
            return call()
        except MegarlError as error:
            # This raises if no engine is lost, or if engines were replaced too often.
            engines.replace_lost_engines(error)


@dataclass
class HeldEngines:
    """Engines for a collector, whose weights are not changed while they sample during training.

    Attributes:
        refit: sends them weights.
        held: whether they are sampling.
    """

    refit: Refit
    held: bool = field(default=False, init=False)

    @property
    def generation(self) -> GenerationInterface:
        """The engines."""
        return self.refit.generation

    def bring_up_to_date(self) -> None:
        """Send the policy's weights to the engines, unless they are held."""
        if not self.held:
            self.refit.bring_up_to_date()

    def replace_lost_engines(self, error: MegarlError) -> None:
        """Start new engines; while the policy trains, the weights that they would need no longer exist.

        Raises:
            WorkerLostError: the batch has to be sampled again from the newest checkpoint on, which the run
                does.
        """
        if not self.held:
            return self.refit.replace_lost_engines(error)
        if self.refit.generation.is_alive():
            raise error
        raise WorkerLostError(
            "engines were lost while they sampled during training, and the weights that they had "
            f"are gone: {error}\nFix: resume from the newest checkpoint: start the run again, or "
            "write cluster.max_restarts: 3 to have it done automatically"
        ) from error


class SamplingAhead(ValidatesBeside):
    """The source that returns the batch of each step while the batch of a later step is being sampled.

    Args:
        sample: samples the batch of a step.
        lag: k, the number of steps between sampling and training.
        last_step: of the run, after which nothing is sampled; None if unknown.
        engines: engines that sample.
        waiting: batches that were sampled but not trained on yet, by their steps; changed here.
        timer: of the step; receives the phases of the sampling when its batch is returned.
        own_timer: receives the phases of sampling as they happen.
    """

    metrics: Mapping[str, float] = {}
    is_ahead = True

    def __init__(
        self,
        sample: Callable[[int], Sampling],
        lag: int,
        last_step: int | None,
        engines: HeldEngines,
        waiting: WaitingBatches,
        timer: PhaseTimer,
        own_timer: PhaseTimer,
    ) -> None:
        super().__init__()
        self._sample, self._lag, self._last, self._engines = sample, lag, last_step, engines
        self._timer, self._own_timer = timer, own_timer
        self._waiting = waiting
        # Use one thread, so that prompts are taken from the sampler in the order of steps.
        self._thread = ThreadPoolExecutor(1, "sampling")
        self._coming: Future[tuple[Sampling | None, Validated | None]] | None = None
        self._sampled_step = 0
        self._done_at = 0.0

    def next(self, step: int) -> Sampling:
        """Return the batch of a step, and begin to sample that of step + lag with the policy's current
        weights."""
        for early in range(step, step + self._lag):
            # The first steps of a run have no earlier step that could sample for them, nor have those of a
            # run that continues from a checkpoint without batches.
            if early not in self._waiting and not self._is_behind_the_end(early):
                self._waiting[early] = self._sample(early)
        with self._timer.phase("refit"):
            with_new_engines(self._engines, self._engines.bring_up_to_date)
        ahead = step + self._lag
        # A resumed run has this batch already.
        is_sampled = ahead not in self._waiting and not self._is_behind_the_end(ahead)
        validate = self._take_wanted()
        if is_sampled or validate is not None:
            # Hold the engines before the thread starts, because its calls must not send them the weights of a
            # policy that is being trained.
            self._engines.held, self._sampled_step = True, ahead
            self._coming = self._thread.submit(self._timed, ahead if is_sampled else None, validate)
        return self._waiting.pop(step)

    def settle(self) -> None:
        """Wait at the end of a step for the sampling and the validation in progress.

        Raises:
            MegarlError: one of them has failed.
        """
        if self._coming is None:
            return
        future, self._coming = self._coming, None
        # A step that did not wait has no phase of waiting in its metrics.
        waits = nullcontext() if future.done() else self._timer.phase(ROLLOUT_WAIT)
        try:
            with waits:
                sampled, self._found = future.result()
            if sampled is not None:
                self._waiting[self._sampled_step] = sampled
        finally:
            self._engines.held = False
        self._timer.merge(self._own_timer, {ENGINE_IDLE: max(time.perf_counter() - self._done_at, 0.0)})

    def save(self, directory: Path) -> None:
        """See ``RolloutSource``."""
        self._waiting.save(directory)

    def load(self, directory: Path, data: Dataset) -> None:
        """See ``RolloutSource``."""
        self._waiting.load(directory, data)

    def close(self) -> None:
        """Begin nothing more. Sampling in progress ends when its engines do."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _is_behind_the_end(self, step: int) -> bool:
        return self._last is not None and step > self._last

    def _timed(
        self, step: int | None, validate: Callable[[], Validated] | None
    ) -> tuple[Sampling | None, Validated | None]:
        try:
            sampled = None if step is None else self._sample(step)
            if validate is None:
                return sampled, None
            with validating(), self._own_timer.phase(VALIDATION_BESIDE):
                return sampled, validate()
        finally:
            self._done_at = time.perf_counter()
