"""Batches of the groups of responses that complete first.

Engines keep sampling while the policy trains, and over refits: an unfinished response continues with the new
weights. So timing decides which groups make up the batch of a step. The ledger of a run has the batches as
they
were trained on, and a run that reads them (``Replay``) repeats its training bit for bit without any engine.

A validation of the weights of a step runs during the next one. Engines sample its responses first, and sample
for training only after it: otherwise groups that continue over a refit would have to wait for its end, or it
for theirs. The next step trains on groups that are complete by then, and waits if these are too few.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.files.atomic import fsync_directory, fsync_file, write_json_atomic
from megarl.algorithms.ahead import with_new_engines
from megarl.algorithms.rollout_source import InTurn, ValidatesBeside, other_schedule
from megarl.algorithms.sampled_batch import (
    DIRECTORY,
    GROUPS,
    Sampling,
    groups_of,
    load_batch,
    load_batches,
    save_batch,
    save_batches,
)
from megarl.distributed.deadlines import validating
from megarl.errors import MegarlError, UnusableCheckpointError
from megarl.observe.timing import ENGINE_IDLE, GENERATION, ROLLOUT_WAIT, VALIDATION_BESIDE, PhaseTimer

if TYPE_CHECKING:
    from megarl.algorithms.ahead import HeldEngines
    from megarl.algorithms.rollout_source import Validated
    from megarl.data.datasets import Dataset
    from megarl.data.sampler import Sampler
    from megarl.models.generation.shared_stream import SharedStream
    from megarl.rollout.collector import Rollouts

_RUN = "run.json"
# Seconds between checks of the engines while groups are waited for.
_LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Order:
    """The rule by which groups become batches.

    Attributes:
        prompts: groups of a batch.
        lookahead: batches that are sampled, or wait, while a step trains.
        most_age: maximum age of a response in training steps, from the oldest weights that sampled it to
            those that it trains.
        drops: discard a group that is older, and replace it by another; otherwise a step waits for groups
            that would be too old for the next one, and trains on them first.
    """

    prompts: int
    lookahead: int
    most_age: int
    drops: bool


@dataclass(slots=True)
class _Group:
    """The responses to one prompt.

    Attributes:
        ordinal: of the prompt in the run.
        index: of its record.
        version: number of training steps behind the oldest weights that sampled any of them.
        rollouts: the responses, once they are complete and scored.
        timer: phases of their sampling.
    """

    ordinal: int
    index: int
    version: int
    rollouts: Rollouts | None = None
    timer: PhaseTimer | None = None


class ReadyFirst(ValidatesBeside):
    """The source that returns the batch of each step while engines sample later ones.

    Args:
        order: how groups become batches.
        collect: samples and scores the responses to a record, by its index, its ordinal and the version of
            the weights; called in one thread per group.
        join: joins groups into one batch.
        shared: requests of all groups.
        engines: engines that get the policy's weights.
        sampler: the order of the data.
        last_step: of the run, after which nothing is sampled; None if unknown.
        timer: of the step.
        own_timer: receives the phases of a validation.
        ledger: where batches are written before they are trained on.
    """

    is_ahead = True

    def __init__(
        self,
        order: Order,
        collect: Callable[[int, int, int, PhaseTimer], Rollouts],
        join: Callable[[list[Rollouts]], Rollouts],
        shared: SharedStream,
        engines: HeldEngines,
        sampler: Sampler,
        last_step: int | None,
        timer: PhaseTimer,
        own_timer: PhaseTimer,
        ledger: Ledger,
    ) -> None:
        super().__init__()
        self._order, self._collect, self._join, self._shared = order, collect, join, shared
        self._engines, self._sampler, self._last, self._ledger = engines, sampler, last_step, ledger
        self._timer, self._own_timer = timer, own_timer
        self._thread = ThreadPoolExecutor(1, "validation")
        self._coming: Future[Validated] | None = None
        self._changed = threading.Condition()
        self._groups: dict[int, _Group] = {}
        self._arrived: list[int] = []
        self._failure: BaseException | None = None
        self._begun_again: list[_Group] = []
        self._settled_at, self._validation_s = time.perf_counter(), 0.0
        self.metrics: Mapping[str, float] = {}

    def next(self, step: int) -> Sampling:
        """Return the batch of a step; engines keep sampling with the policy's current weights.

        Raises:
            MegarlError: an environment failed, or engines that could not be replaced.
        """
        version = step - 1
        self._go_on(version, self._take_wanted())
        for group in self._begun_again:
            # These groups are sampled from the start, with the current weights.
            group.version = version
            self._begin(group)
        self._begun_again = []
        self._fill(step, version)
        with self._timer.phase(ROLLOUT_WAIT):
            chosen, dropped = self._chosen(step)
        # Give the engines work before the step trains.
        self._fill(step + 1, version)
        rollouts = self._join([each.rollouts for each in chosen if each.rollouts is not None])
        for group in chosen:
            if group.timer is not None:
                self._timer.count(group.timer)
        with self._changed:
            ready = len(self._arrived)
            self.metrics = {
                "rollouts_ready": float(ready),
                "rollouts_running": float(len(self._groups) - ready),
                "rollouts_dropped": float(dropped),
            }
        sampling = Sampling(rollouts, rollouts.samples, {}, self._sampler.epoch)
        self._ledger.write(step, sampling)
        return sampling

    def settle(self) -> None:
        """Pause the engines at the end of a step, so that validation, saving and refits find them idle.

        Raises:
            MegarlError: an environment failed, or engines that could not be replaced.
        """
        if self._coming is not None:
            future, self._coming = self._coming, None
            with nullcontext() if future.done() else self._timer.phase(ROLLOUT_WAIT):
                self._found = future.result()
        try:
            self._shared.pause()
        except MegarlError as error:
            # The next step continues with new engines and the newest weights.
            self._engines.replace_lost_engines(error)
        busy, now = self._shared.take_busy_seconds(), time.perf_counter()
        # A validation has a phase of its own, in which engines are not idle.
        idle = now - self._settled_at - busy - self._validation_s
        self._settled_at, self._validation_s = now, 0.0
        self._timer.merge(self._own_timer, {GENERATION: busy, ENGINE_IDLE: max(idle, 0.0)})
        self._raise_failure()

    def close(self) -> None:
        """Begin nothing more. A validation in progress ends when its engines do."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._shared.close()

    def save(self, directory: Path) -> None:
        """Write the waiting groups, and the numbers of those in progress; call it during a pause."""
        with self._changed:
            # Store the order of completion, by which a resumed run chooses too.
            ready = {ordinal: self._groups[ordinal] for ordinal in self._arrived}
            running = [
                [each.ordinal, each.index] for each in self._groups.values() if each.ordinal not in ready
            ]
        batches = {
            ordinal: Sampling(each.rollouts, each.rollouts.samples, {})
            for ordinal, each in ready.items()
            if each.rollouts is not None
        }
        save_batches(directory, batches)
        place = directory / DIRECTORY
        place.mkdir(exist_ok=True)
        (place / GROUPS).write_text(
            json.dumps({"arrived": list(ready), "running": running}), encoding="utf-8"
        )

    def load(self, directory: Path, data: Dataset) -> None:
        """Read groups that ``save`` wrote, see ``RolloutSource``."""
        groups, batches = groups_of(directory), load_batches(directory, data)
        if groups is not None:
            self.resume(groups, batches)
        # If no batches wait, another schedule loses nothing.
        elif batches:
            raise other_schedule(directory, len(batches), "in_order")

    def resume(self, groups: Mapping[str, Any], batches: Mapping[int, Sampling]) -> None:
        """Continue with the groups that ``save`` wrote; sample those that were in progress again, with the
        same seeds.

        Args:
            groups: see ``groups_of``.
            batches: groups that were complete, by ordinal.
        """
        # Keep the order of completion, by which a step chooses.
        for ordinal in groups["arrived"]:
            rollouts = batches[ordinal].rollouts
            version = int(rollouts.samples["weight_version"].min())
            self._groups[ordinal] = _Group(ordinal, rollouts.records[0].index, version, rollouts)
            self._arrived.append(ordinal)
        self._begun_again = [_Group(ordinal, index, 0) for ordinal, index in groups["running"]]

    def _go_on(self, version: int, validate: Callable[[], Validated] | None = None) -> None:
        """Send the newest weights to the engines and let them continue, after a validation if there is one;
        lost engines are replaced."""

        def go_on() -> None:
            with self._timer.phase("refit"):
                self._engines.bring_up_to_date()
            if validate is None:
                self._shared.resume(version)

        # Engines that are lost before they continue are replaced and refitted too.
        with_new_engines(self._engines, go_on)
        if validate is not None:
            self._engines.held = True
            self._coming = self._thread.submit(self._validated_first, validate, version)

    def _validated_first(self, validate: Callable[[], Validated], version: int) -> Validated:
        """Validate with the engines' current weights, then let them continue."""
        begun = time.perf_counter()
        try:
            try:
                with validating(), self._own_timer.phase(VALIDATION_BESIDE):
                    found = validate()
            finally:
                self._validation_s = time.perf_counter() - begun
                self._engines.held = False
            self._shared.resume(version)
        except BaseException as error:
            # The step waits for groups that nobody samples now, and would notice this failure only at its
            # end.
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()
            raise
        return found

    def _fill(self, step: int, version: int) -> None:
        """Begin groups for ``step`` and later ones, until as many are in progress or waiting as the lookahead
        allows."""
        wanted = self._order.lookahead * self._order.prompts
        if self._last is not None:
            wanted = min(wanted, (self._last - step + 1) * self._order.prompts)
        with self._changed:
            missing = wanted - len(self._groups)
        for _ in range(missing):
            ordinal = self._sampler.taken
            [index] = self._sampler.take(1)
            self._begin(_Group(ordinal, index, version))

    def _begin(self, group: _Group) -> None:
        with self._changed:
            self._groups[group.ordinal] = group
        # Use daemon threads, because groups may be in progress when a run ends, and nobody waits for them.
        threading.Thread(target=self._run, args=(group,), name=f"group-{group.ordinal}", daemon=True).start()

    def _run(self, group: _Group) -> None:
        # Each group has a timer of its own, because a timer serves one thread.
        timer = PhaseTimer()
        try:
            rollouts = self._collect(group.index, group.ordinal, group.version, timer)
        except BaseException as error:
            # Nobody waits for this thread, so the next call that takes a batch raises its error.
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()
            return
        with self._changed:
            group.rollouts, group.timer = rollouts, timer
            group.version = int(rollouts.samples["weight_version"].min())
            self._arrived.append(group.ordinal)
            self._changed.notify_all()

    def _chosen(self, step: int) -> tuple[list[_Group], int]:
        """Return the groups of a step, in the order of the data, and the number of groups dropped before
        there were enough."""
        dropped, oldest = 0, step - 1 - self._order.most_age
        while True:
            self._raise_failure()
            # Check each time: engines that fail wake nobody here, and the threads of groups wait for the next
            # resume.
            if self._shared.failed:
                self._recover(step - 1)
            with self._changed:
                if self._order.drops:
                    stale = [ordinal for ordinal in self._arrived if self._groups[ordinal].version < oldest]
                    dropped += len(stale)
                    self._forget(stale)
                found = self._enough(oldest)
                if found is not None:
                    # Use the order of the data, so that a batch depends only on which groups it has.
                    groups = [self._groups[ordinal] for ordinal in sorted(found)]
                    self._forget(found)
                    return groups, dropped
                if not self._order.drops or not stale:
                    self._changed.wait(_LOOK_SECONDS)
            # Other groups replace the dropped ones while the step waits.
            self._fill(step, step - 1)

    def _enough(self, oldest: int) -> list[int] | None:
        """Return the groups of the next batch, or None if too few are complete.

        The groups that must be trained on within some number of steps never exceed what these steps take, or
        one would be too old in the end: as many of them come first, and a step waits for them.
        """
        chosen: list[int] = []
        for steps in range(0 if self._order.drops else self._order.most_age + 1):
            due = {each.ordinal for each in self._groups.values() if each.version <= oldest + steps}
            missing = len(due) - steps * self._order.prompts - len(due.intersection(chosen))
            found = [ordinal for ordinal in self._arrived if ordinal in due and ordinal not in chosen]
            if len(found) < missing:
                return None
            chosen += found[: max(missing, 0)]
        rest = [ordinal for ordinal in self._arrived if ordinal not in chosen]
        chosen += rest[: self._order.prompts - len(chosen)]
        return chosen if len(chosen) == self._order.prompts else None

    def _forget(self, ordinals: list[int]) -> None:
        for ordinal in ordinals:
            self._arrived.remove(ordinal)
            del self._groups[ordinal]

    def _recover(self, version: int) -> None:
        """Replace lost engines and continue."""
        try:
            self._shared.pause()
        except MegarlError as error:
            self._engines.replace_lost_engines(error)
        self._go_on(version)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


class Ledger:
    """The batches of a run, by their steps, as they were trained on.

    Args:
        directory: of the ledger.
        run: everything that a batch depends on besides weights and time: seed, data, prompts per step and
            responses per prompt.
    """

    def __init__(self, directory: Path, run: Mapping[str, Any]) -> None:
        self.directory, self._run = directory, dict(run)

    def write(self, step: int, batch: Sampling) -> None:
        """Write the batch of a step."""
        self.directory.mkdir(parents=True, exist_ok=True)
        write_json_atomic(self.directory / _RUN, self._run)
        # A checkpoint of the step must not outlive the data that it was trained on.
        for path in save_batch(self.directory, step, batch):
            fsync_file(path)
        fsync_directory(self.directory)

    def read(self, step: int, data: Dataset) -> Sampling:
        """Return the batch of a step.

        Raises:
            UnusableCheckpointError: it is missing, truncated or changed, or belongs to a run with other data.
        """
        try:
            theirs = dict(json.loads((self.directory / _RUN).read_text(encoding="utf-8")))
            differing = sorted(key for key in self._run if theirs.get(key) != self._run[key])
            if differing:
                key = differing[0]
                raise ValueError(
                    f"it belongs to a run with {key} = {theirs.get(key)!r}, and this one has "
                    f"{self._run[key]!r}"
                )
            return load_batch(self.directory, step, data)
        except (OSError, ValueError, TypeError) as error:
            raise UnusableCheckpointError(
                f"step {step}: the ledger {self.directory} cannot be replayed: {error}. Fix: name "
                "a run in grpo.async_grpo.replay that has this step, with the same data, seed and "
                "sizes"
            ) from error


class Replay(InTurn):
    """The source that returns the batches of a ledger.

    Args:
        ledger: the ledger.
        data: the data set that its batches were sampled from.
    """

    is_ahead = True

    def __init__(self, ledger: Ledger, data: Dataset) -> None:
        super().__init__(lambda step: ledger.read(step, data))

    def load(self, directory: Path, data: Dataset) -> None:
        """Read nothing: the ledger has the batches of all steps."""
