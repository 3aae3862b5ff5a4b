"""Sampling ahead: engines sample the batch of a later step while the policy trains.

With a lag of k steps, the batch of step n is sampled with the weights after step n - 1 - k. Before step n
starts, the engines get the weights after step n - 1; during step n, they sample the batch of step n + k with
them. So the step number alone determines which weights sample which batch, regardless of which side is
faster. Both sides synchronise at the end of each step; then the engines can be refitted, and a checkpoint can
store the k waiting batches.

A validation of the weights after step n - 1 also runs during step n, after the sampling: the engines keep
these weights until the step ends.
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
from megarl.observe.timing import ENGINE_IDLE, ROLLOUT_WAIT, VALIDATION_BESIDE, PhaseTimer

if TYPE_CHECKING:
    from megarl.algorithms.refit import Refit
    from megarl.algorithms.rollout_source import Validated
    from megarl.algorithms.sampled_batch import Sampling
    from megarl.data.datasets import Dataset
    from megarl.models.generation.interfaces import GenerationInterface
    from megarl.rollout.collector import RefittedEngine


def with_new_engines(engines: RefittedEngine, call: Callable[[], None]) -> None:
    """Call a function that uses engines. If it fails because engines are lost, replace them and call it
    again."""
    while True:
        try:
            return call()
        except MegarlError as error:
            # Raises if no engine is lost, or after too many restarts.
            engines.replace_lost_engines(error)


@dataclass
class HeldEngines:
    """Engines whose weights are frozen while they sample during training.

    Attributes:
        refit: sends weights to the engines.
        held: the weights are frozen.
    """

    refit: Refit
    held: bool = field(default=False, init=False)

    @property
    def generation(self) -> GenerationInterface:
        """The generation interface of the engines."""
        return self.refit.generation

    def bring_up_to_date(self) -> None:
        """Sync the policy's weights to the engines, unless their weights are frozen."""
        if not self.held:
            self.refit.bring_up_to_date()

    def replace_lost_engines(self, error: MegarlError) -> None:
        """Start new engines in place of lost ones. This is impossible during training, because the weights
        that the engines would need no longer exist.

        Raises:
            WorkerLostError: engines were lost during training. The run restarts from the newest checkpoint,
                and samples the batch again.
            MegarlError: ``error`` itself if no engine is lost.
        """
        if not self.held:
            return self.refit.replace_lost_engines(error)
        # All engines are alive, so the error has another cause.
        if self.refit.generation.is_alive():
            raise error
        raise WorkerLostError(
            "engines were lost while they sampled during training, and the weights that they had "
            f"are gone: {error}\nFix: resume from the newest checkpoint: start the run again, or "
            "write cluster.max_restarts: 3 to have it done automatically"
        ) from error


class SamplingAhead(ValidatesBeside):
    """Rollout source that returns the batch of each step while the batch of a later step is being sampled.

    Args:
        sample: samples the batch of a step.
        lag: k, number of steps between sampling and training.
        last_step: last step of the run, after which nothing is sampled; None if unknown.
        engines: the engines that sample.
        waiting: batches, by step, that were sampled but not trained on yet. Modified here.
        timer: timer of the step; gets the phases of a batch's sampling when the step ends.
        own_timer: timer of the sampling thread.
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
        # One thread, so that prompts are taken from the sampler in step order.
        self._thread = ThreadPoolExecutor(1, "sampling")
        self._coming: Future[tuple[Sampling | None, Validated | None]] | None = None
        self._sampled_step = 0
        self._done_at = 0.0

    def next(self, step: int) -> Sampling:
        """Return the batch of a step, and start to sample the batch of step + lag with the policy's current
        weights."""
        for early in range(step, step + self._lag):
            # No earlier step has sampled for the first steps of a run, or of a run resumed from a checkpoint
            # without waiting batches.
            if early not in self._waiting and not self._is_behind_the_end(early):
                self._waiting[early] = self._sample(early)
        with self._timer.phase("refit"):
            with_new_engines(self._engines, self._engines.bring_up_to_date)
        ahead = step + self._lag
        # A resumed run already has this batch.
        is_sampled = ahead not in self._waiting and not self._is_behind_the_end(ahead)
        validate = self._take_wanted()
        if is_sampled or validate is not None:
            # Freeze before the thread starts: otherwise its calls would refit from a policy that is being
            # trained.
            self._engines.held, self._sampled_step = True, ahead
            self._coming = self._thread.submit(self._timed, ahead if is_sampled else None, validate)
        return self._waiting.pop(step)

    def settle(self) -> None:
        """Wait at the end of a step for the sampling and validation that run during it.

        Raises:
            MegarlError: one of them has failed.
        """
        if self._coming is None:
            return
        future, self._coming = self._coming, None
        # Time the wait only if there is one, so that its metric is absent otherwise.
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
        """Start nothing more. Sampling in progress ends when its engines do."""
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
