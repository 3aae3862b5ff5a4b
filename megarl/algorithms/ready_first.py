"""Rollout source that trains on whichever groups of responses complete first.

Engines keep sampling while the policy trains, and across refits: an unfinished response continues with the
new weights. So timing decides which groups make up a batch. The run's ledger stores the batches as they were
trained on; a run that reads it (``Replay``) repeats the training bit for bit, without any engine.

A validation of the weights after a step runs during the next step. Engines first sample the validation
responses, and only then those for training: a group that continues over a refit would otherwise have to wait
for the end of the validation, or the validation for the group. The next step trains on groups that are
complete by then, and waits if there are too few.
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
from typing import TYPE_CHECKING

from converters.files.atomic import fsync_directory, fsync_file, write_json_atomic
from megarl.algorithms.ahead import HeldEngines, with_new_engines
from megarl.algorithms.rollout_source import InTurn, ValidatesBeside, other_schedule
from megarl.algorithms.sampled_batch import (
    DIRECTORY,
    GROUPS,
    Groups,
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
    from megarl.algorithms.rollout_source import Validated
    from megarl.data.datasets import Dataset
    from megarl.data.sampler import Sampler
    from megarl.models.generation.shared_stream import SharedStream
    from megarl.rollout.collector import Rollouts

_RUN = "run.json"
# Poll interval for failed engines while waiting for groups.
_LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Order:
    """Rule by which groups are combined into batches.

    Attributes:
        prompts: number of groups per batch.
        lookahead: number of batches that are being sampled or waiting while a step trains.
        most_age: maximum age of a response in training steps, from the oldest weights that sampled it to the
            weights that it trains.
        drops: discard groups that exceed the maximum age, and sample replacements. Otherwise a step waits for
            groups that would be too old for the next step, and trains on them first.
    """

    prompts: int
    lookahead: int
    most_age: int
    drops: bool


@dataclass(slots=True)
class _Group:
    """The responses to one prompt, in progress or complete.

    Attributes:
        ordinal: ordinal of the prompt in the run.
        index: index of its record.
        version: training steps of the oldest weights that sampled any of the responses.
        rollouts: the responses, once complete and scored.
        timer: phases of their sampling.
    """

    ordinal: int
    index: int
    version: int
    rollouts: Rollouts | None = None
    timer: PhaseTimer | None = None


class ReadyFirst(ValidatesBeside):
    """Rollout source that returns the batch of each step while engines sample later ones.

    Args:
        order: rule by which groups become batches.
        collect: samples and scores the responses to one record, given its index, its ordinal, the weight
            version and a timer. Called in one thread per group.
        join: concatenates groups into a batch.
        shared: request stream for all groups.
        engines: engines that get the policy's weights.
        sampler: yields the record indices in data order.
        last_step: last step of the run, after which nothing is sampled; None if unknown.
        timer: timer of the step.
        own_timer: timer of a validation in the background.
        ledger: stores batches before they are trained on.
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
        """Return the batch of a step. Engines keep sampling with the policy's current weights.

        Raises:
            MegarlError: an environment failed, or lost engines could not be replaced.
        """
        version = step - 1
        self._go_on(version, self._take_wanted())
        for group in self._begun_again:
            # These groups start from scratch, with the current weights.
            group.version = version
            self._begin(group)
        self._begun_again = []
        self._fill(step, version)
        with self._timer.phase(ROLLOUT_WAIT):
            chosen, dropped = self._chosen(step)
        # Queue work before the step trains, so that the engines are not idle.
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
        # Before training, so that the ledger has the batch of every step that has changed the weights.
        self._ledger.write(step, sampling)
        return sampling

    def settle(self) -> None:
        """Pause the engines at the end of a step, so that they are idle during validation, saving and refits.

        Raises:
            MegarlError: an environment failed, or lost engines could not be replaced.
        """
        if self._coming is not None:
            future, self._coming = self._coming, None
            with nullcontext() if future.done() else self._timer.phase(ROLLOUT_WAIT):
                self._found = future.result()
        try:
            self._shared.pause()
        except MegarlError as error:
            # The next step continues with the new engines and the newest weights.
            self._engines.replace_lost_engines(error)
        busy, now = self._shared.take_busy_seconds(), time.perf_counter()
        # A validation has its own phase, in which the engines are not idle.
        idle = now - self._settled_at - busy - self._validation_s
        self._settled_at, self._validation_s = now, 0.0
        self._timer.merge(self._own_timer, {GENERATION: busy, ENGINE_IDLE: max(idle, 0.0)})
        self._raise_failure()

    def close(self) -> None:
        """Start nothing more. A validation in progress ends when its engines do."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._shared.close()

    def save(self, directory: Path) -> None:
        """Write the complete groups, and the ordinals of those in progress. Call this while the engines are
        paused."""
        with self._changed:
            # In completion order, by which a resumed run chooses too.
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
        groups: Groups = {"arrived": list(ready), "running": running}
        (place / GROUPS).write_text(json.dumps(groups), encoding="utf-8")

    def load(self, directory: Path, data: Dataset) -> None:
        """Restore what ``save`` wrote, see ``RolloutSource``."""
        groups, batches = groups_of(directory), load_batches(directory, data)
        if groups is not None:
            self.resume(groups, batches)
        # Without waiting batches, another schedule loses nothing.
        elif batches:
            raise other_schedule(directory, len(batches), "in_order")

    def resume(self, groups: Groups, batches: Mapping[int, Sampling]) -> None:
        """Continue with the groups that ``save`` wrote. Groups that were in progress are sampled again, with
        the same seeds.

        Args:
            groups: see ``groups_of``.
            batches: complete groups, by ordinal.
        """
        # In completion order, by which a step chooses.
        for ordinal in groups["arrived"]:
            rollouts = batches[ordinal].rollouts
            version = int(rollouts.samples["weight_version"].min())
            self._groups[ordinal] = _Group(ordinal, rollouts.records[0].index, version, rollouts)
            self._arrived.append(ordinal)
        self._begun_again = [_Group(ordinal, index, 0) for ordinal, index in groups["running"]]

    def _go_on(self, version: int, validate: Callable[[], Validated] | None = None) -> None:
        """Refit the engines and let them continue, after a validation if one is given. Lost engines are
        replaced."""

        def go_on() -> None:
            with self._timer.phase("refit"):
                self._engines.bring_up_to_date()
            if validate is None:
                self._shared.resume(version)

        # Covers resume() too: engines may be lost between the refit and their first request.
        with_new_engines(self._engines, go_on)
        if validate is not None:
            self._engines.held = True
            self._coming = self._thread.submit(self._validated_first, validate, version)

    def _validated_first(self, validate: Callable[[], Validated], version: int) -> Validated:
        """Validate with the engines' current weights, then let them continue sampling."""
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
            # Nobody samples the groups for which the step waits now; wake it up, instead of at its end.
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()
            raise
        return found

    def _fill(self, step: int, version: int) -> None:
        """Start groups for ``step`` and later ones until the lookahead is reached."""
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
        # Daemon threads: groups may be in progress when the run ends, and nobody waits for them.
        threading.Thread(target=self._run, args=(group,), name=f"group-{group.ordinal}", daemon=True).start()

    def _run(self, group: _Group) -> None:
        # One timer per group, because a timer serves one thread.
        timer = PhaseTimer()
        try:
            rollouts = self._collect(group.index, group.ordinal, group.version, timer)
        except BaseException as error:
            # Nobody joins this thread; the next call that takes a batch raises the error.
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
        """Wait for enough groups for a step. Return them in data order, and the number of stale groups that
        were dropped."""
        dropped, oldest = 0, step - 1 - self._order.most_age
        while True:
            self._raise_failure()
            # Poll, because failing engines notify nobody: the threads of groups wait for the next resume.
            if self._shared.failed:
                self._recover(step - 1)
            with self._changed:
                if self._order.drops:
                    stale = [ordinal for ordinal in self._arrived if self._groups[ordinal].version < oldest]
                    dropped += len(stale)
                    self._forget(stale)
                found = self._enough(oldest)
                if found is not None:
                    # In data order, so that a batch depends only on which groups it contains.
                    groups = [self._groups[ordinal] for ordinal in sorted(found)]
                    self._forget(found)
                    return groups, dropped
                if not self._order.drops or not stale:
                    self._changed.wait(_LOOK_SECONDS)
            # Start replacements for the dropped groups while the step waits.
            self._fill(step, step - 1)

    def _enough(self, oldest: int) -> list[int] | None:
        """Return the ordinals of the groups for the next batch, or None if too few are complete.

        Groups due within n steps must not exceed what n steps can train on; otherwise one would become too
        old. So as many of the due groups as necessary come first, and the step waits for them.
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
        """Replace lost engines, and let the new ones continue."""
        try:
            self._shared.pause()
        except MegarlError as error:
            self._engines.replace_lost_engines(error)
        self._go_on(version)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


class Ledger:
    """On-disk record of a run's batches, by step, exactly as they were trained on.

    Args:
        directory: directory of the ledger.
        run: everything except weights and timing that determines a batch: seed, data, prompts per step and
            responses per prompt.
    """

    def __init__(self, directory: Path, run: Mapping[str, object]) -> None:
        self.directory, self._run = directory, dict(run)

    def write(self, step: int, batch: Sampling) -> None:
        """Write the batch of a step."""
        self.directory.mkdir(parents=True, exist_ok=True)
        write_json_atomic(self.directory / _RUN, self._run)
        # fsync, because a checkpoint of the step must not outlive the batch that it was trained on.
        for path in save_batch(self.directory, step, batch):
            fsync_file(path)
        fsync_directory(self.directory)

    def read(self, step: int, data: Dataset) -> Sampling:
        """Read the batch of a step.

        Raises:
            UnusableCheckpointError: it is missing, truncated or modified, or belongs to a run with other
                data.
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
    """Rollout source that returns the batches of a ledger.

    Args:
        ledger: the ledger.
        data: data set from which the batches were sampled.
    """

    is_ahead = True

    def __init__(self, ledger: Ledger, data: Dataset) -> None:
        super().__init__(lambda step: ledger.read(step, data))

    def load(self, directory: Path, data: Dataset) -> None:
        """Do nothing: the ledger has the batches of all steps."""
