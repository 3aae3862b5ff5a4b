"""Batches that are sampled beside training: while a step trains, engines sample the batch of a later one.

The batch of step n is sampled with the weights behind step n - 1 - k: engines get the weights of step n - 1 before it begins, and sample
that of step n + k with them meanwhile. Which weights answer what so follows from the step alone, and not from who is faster. Both meet at
the end of a step, where the engines are up to date again, and a checkpoint can keep the k batches that wait.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.errors import MegarlError, UnusableCheckpointError, WorkerLostError
from megarl.observe.timing import ENGINE_IDLE, ROLLOUT_WAIT

if TYPE_CHECKING:
    from megarl.algorithms.refit import Refit
    from megarl.data.datasets import Dataset
    from megarl.distributed.batched_data_dict import BatchedDataDict
    from megarl.models.generation.interfaces import GenerationInterface
    from megarl.observe.timing import PhaseTimer
    from megarl.rollout.collector import Rollouts


@dataclass(frozen=True, slots=True)
class Sampling:
    """The batch that a step has sampled.

    Attributes:
        rollouts: what it trains on.
        judged: columns [B] of all answers that were judged for it, those that it does not train on among them.
        metrics: figures of how they were found.
        epoch: of the data, behind the last of them.
    """

    rollouts: Rollouts
    judged: BatchedDataDict[Any]
    metrics: Mapping[str, float]
    epoch: int = 0


@dataclass
class HeldEngines:
    """Engines for a collector, whose weights change only where nobody samples beside training.

    Attributes:
        refit: brings their weights.
        held: somebody samples.
    """

    refit: Refit
    held: bool = field(default=False, init=False)

    @property
    def generation(self) -> GenerationInterface:
        """The engines."""
        return self.refit.generation

    def bring_up_to_date(self) -> None:
        """Give the engines the policy's weights, but not while it trains."""
        if not self.held:
            self.refit.bring_up_to_date()

    def replace_lost_engines(self, error: MegarlError) -> None:
        """Start new engines; while the policy trains, the weights that they would have to have are no longer there.

        Raises:
            WorkerLostError: the batch has to be sampled again from the newest checkpoint on, which the run does.
        """
        if not self.held:
            return self.refit.replace_lost_engines(error)
        if self.refit.generation.is_alive():
            raise error
        raise WorkerLostError(
            f"engines were lost while they sampled beside training, and the weights that they had are gone: {error}\nFix: go on from the "
            "newest checkpoint: start the run again, or write cluster.max_restarts: 3, with which it does so itself"
        ) from error


class SamplingAhead:
    """Gives the batch of each step, and has that of a later one sampled meanwhile.

    Args:
        sample: samples the batch of a step.
        lag: k, steps between.
        last_step: of the run, behind which nothing is sampled; None where it is not known.
        engines: that sample.
        waiting: batches that were sampled and not trained on yet, by their steps; changed here.
        timer: of the step; gets the phases of what was sampled meanwhile when it is there.
        own_timer: told the phases of sampling.
    """

    def __init__(
        self,
        sample: Callable[[int], Sampling],
        lag: int,
        last_step: int | None,
        engines: HeldEngines,
        waiting: dict[int, Sampling],
        timer: PhaseTimer,
        own_timer: PhaseTimer,
    ) -> None:
        self._sample, self._lag, self._last, self._engines = sample, lag, last_step, engines
        self._timer, self._own_timer = timer, own_timer
        self._waiting = waiting
        self._thread = ThreadPoolExecutor(1, "sampling")
        self._coming: tuple[int, Future[Sampling]] | None = None
        self._done_at = 0.0

    def take(self, step: int) -> Sampling:
        """The batch of a step; that of step + lag is sampled from now on, with the weights that the policy has now."""
        for early in range(step, step + self._lag):
            # the first steps of a run have nobody to sample for them, nor has one that goes on from a checkpoint without batches
            if early not in self._waiting and not self._is_behind_the_end(early):
                self._waiting[early] = self._sample(early)
        with self._timer.phase("refit"):
            self._refit()
        ahead = step + self._lag
        if ahead not in self._waiting and not self._is_behind_the_end(ahead):
            self._engines.held = True
            self._coming = ahead, self._thread.submit(self._timed, ahead)
        return self._waiting.pop(step)

    def _refit(self) -> None:
        while True:
            try:
                return self._engines.bring_up_to_date()
            except MegarlError as error:
                # raises where none is lost, or that was done too often
                self._engines.replace_lost_engines(error)

    def settle(self) -> None:
        """Wait for what is being sampled, at the end of a step.

        Raises:
            MegarlError: that has failed.
        """
        if self._coming is None:
            return
        (ahead, future), self._coming = self._coming, None
        waits = nullcontext() if future.done() else self._timer.phase(ROLLOUT_WAIT)
        try:
            with waits:
                self._waiting[ahead] = future.result()
        finally:
            self._engines.held = False
        self._timer.merge(self._own_timer, {ENGINE_IDLE: max(time.perf_counter() - self._done_at, 0.0)})

    def close(self) -> None:
        """Begin nothing more. What is being sampled ends when its engines do."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _is_behind_the_end(self, step: int) -> bool:
        return self._last is not None and step > self._last

    def _timed(self, step: int) -> Sampling:
        try:
            return self._sample(step)
        finally:
            self._done_at = time.perf_counter()


DIRECTORY = "rollouts"
"""Of a checkpoint, where there are any."""

_SAMPLES, _JUDGED, _EARLIER = "samples/", "judged/", "earlier/"


def save_batches(directory: Path, batches: Mapping[int, Sampling]) -> None:
    """Write batches that wait to be trained on, by their steps, below a directory of a checkpoint: the tensors of each as safetensors, the
    rest as JSON. Their weights are gone by then, so that nobody could sample them again.

    Raises:
        OSError: a file cannot be written.
    """
    import torch
    from safetensors.torch import save_file

    place = directory / DIRECTORY
    if batches:
        place.mkdir()
    for step, batch in batches.items():
        samples, judged = batch.rollouts.samples, batch.judged
        tensors = {f"{_SAMPLES}{name}": value for name, value in samples.items() if isinstance(value, torch.Tensor)}
        if judged is not samples:
            tensors |= {f"{_JUDGED}{name}": value for name, value in judged.items() if isinstance(value, torch.Tensor)}
        tensors |= {f"{_EARLIER}{name}": value for name, value in (batch.rollouts.earlier or {}).items()}
        save_file({name: value.clone().contiguous() for name, value in tensors.items()}, place / f"step_{step}.safetensors")
        told = {
            "records": [record.index for record in batch.rollouts.records],
            "columns": list(samples),
            "others": {name: value for name, value in samples.items() if not isinstance(value, torch.Tensor)},
            "metrics": dict(batch.rollouts.metrics),
            "sampling": dict(batch.metrics),
            "epoch": batch.epoch,
        }
        (place / f"step_{step}.json").write_text(json.dumps(told), encoding="utf-8")


def load_batches(directory: Path, data: Dataset) -> dict[int, Sampling]:
    """Batches that ``save_batches`` has written, by their steps; none where there are none.

    Args:
        directory: of a checkpoint, whose files are whole.
        data: that they were sampled from; its fingerprint was compared before.

    Raises:
        UnusableCheckpointError: they cannot be read.
    """
    from safetensors import SafetensorError

    try:
        return {
            int(path.stem.removeprefix("step_")): _read(path, data) for path in sorted((directory / DIRECTORY).glob("step_*.safetensors"))
        }
    except (OSError, ValueError, KeyError, IndexError, SafetensorError) as error:
        what = f"the batches in {directory / DIRECTORY} that wait to be trained on cannot be read ({type(error).__name__}: {error})"
        raise UnusableCheckpointError(f"{what}. Fix: remove {directory} to resume from an earlier one") from error


def _read(path: Path, data: Dataset) -> Sampling:
    from safetensors import safe_open

    from megarl.distributed.batched_data_dict import BatchedDataDict
    from megarl.rollout.collector import Rollouts

    told: dict[str, Any] = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    found = {name: tensors[f"{_SAMPLES}{name}"] if f"{_SAMPLES}{name}" in tensors else told["others"][name] for name in told["columns"]}
    samples: BatchedDataDict[Any] = BatchedDataDict(found)
    judged = {name.removeprefix(_JUDGED): value for name, value in tensors.items() if name.startswith(_JUDGED)}
    earlier = {name.removeprefix(_EARLIER): value for name, value in tensors.items() if name.startswith(_EARLIER)}
    rollouts = Rollouts(samples, data.select(told["records"]), told["metrics"], BatchedDataDict(earlier) if earlier else None)
    return Sampling(rollouts, BatchedDataDict(judged) if judged else samples, told["sampling"], told["epoch"])
