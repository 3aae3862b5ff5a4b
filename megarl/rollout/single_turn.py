"""SingleTurn: environment with one turn, in which reward functions compare the response with the record's
reference answer."""

from __future__ import annotations

import functools
import logging
import operator
import os
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

from megarl.config.environments import EnvConfig, rewards_of
from megarl.distributed.token_rows import TokenRows
from megarl.errors import RewardError
from megarl.import_path import is_import_path
from megarl.rollout.environment import EnvironmentReturn, Turn
from megarl.rollout.reward_pool import RewardPool, Score, score_of
from megarl.rollout.rewards import Reward, RewardSpec, Task, get_reward

if TYPE_CHECKING:
    from megarl.data.records import Doubt

logger = logging.getLogger(__name__)

# Missing scores that are logged one by one in a run; after that each batch logs a single line.
_TOLD = 3

# The run fails after this number of consecutive batches without any score.
_BATCHES = 3


_Task = TypeVar("_Task")
_Score = TypeVar("_Score")


class ScoresAhead(Generic[_Task, _Score]):
    """Scores tasks in a background thread while more tasks arrive. ``begin`` and ``take`` must be called from
    the same thread.

    Args:
        score: returns the scores of a list of tasks, in order. It gets all tasks that have arrived since its
            previous call, and is never called concurrently.
    """

    def __init__(self, score: Callable[[Sequence[_Task]], Sequence[_Score]]) -> None:
        self._score = score
        self._lock = threading.Lock()
        self._waiting: list[tuple[Hashable, _Task]] = []
        self._found: defaultdict[Hashable, deque[_Score]] = defaultdict(deque)
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def begin(self, tasks: Sequence[tuple[Hashable, _Task]]) -> None:
        """Queue tasks for scoring. Each comes with the key under which ``take`` returns its score."""
        with self._lock:
            self._waiting += tasks
            if self._thread is None and self._waiting:
                self._thread = threading.Thread(target=self._work, name="rewards", daemon=True)
                self._thread.start()

    def take(self) -> dict[Hashable, deque[_Score]]:
        """Wait until all queued tasks are scored, then return and clear the scores. Each key maps to one
        score per task with that key, in queue order.

        Raises:
            BaseException: the exception that ``score`` raised.
        """
        if (thread := self._thread) is not None:
            thread.join()
        found, self._found = self._found, defaultdict(deque)
        error, self._error = self._error, None
        if error is not None:
            raise error
        return dict(found)

    def _work(self) -> None:
        while True:
            with self._lock:
                tasks, self._waiting = self._waiting, []
                # Clear the attribute under the lock, so that a task which arrives later starts a new thread.
                if not tasks or self._error is not None:
                    self._thread = None
                    return
            try:
                scores = self._score([task for _, task in tasks])
            except BaseException as error:
                self._error = error
                continue
            for (key, _), score in zip(tasks, scores, strict=True):
                self._found[key].append(score)


@dataclass(frozen=True, slots=True)
class _Part:
    """One reward function of an environment that adds up several.

    Attributes:
        name: name of the reward.
        weight: factor in the sum.
        spec: name and options of the reward.
        reward: the reward function.
        place: index of the reward in the process pool; None if the driver computes it.
    """

    name: str
    weight: float
    spec: RewardSpec
    reward: Reward
    place: int | None


class SingleTurn:
    """Environment with one turn: reward functions compare the response with the record's reference answer,
    and the conversation ends.

    Rewards that may fail, hang or take long run in a process pool, so that a bad response cannot harm the run
    or other samples.

    Args:
        section: the ``env`` section, or the section of one named environment in it.

    Raises:
        ConfigError: a reward function does not exist.
    """

    def __init__(self, section: EnvConfig) -> None:
        on_error = section["on_error"]
        # An outage masks the sample even if errors count as 0, because no response can cause it.
        self._on_fault = {
            "error": on_error,
            "timeout": section["on_timeout"],
            "outage": "raise" if on_error == "raise" else "mask",
        }
        self._has_several = section.get("rewards") is not None
        self._keeps_special_tokens = section.get("keep_special_tokens", False)
        self._batches_without_scores = self._rows_without_scores = self._told = 0
        self._step_rows = 0
        self._failing: dict[str, int] = {}
        self._advised = False
        pooled: list[RewardSpec] = []
        self._parts: list[_Part] = []
        for key, inner in rewards_of(section).items():
            spec = RewardSpec.of_section(inner)
            reward = get_reward(spec)
            if reward.notice:
                logger.warning("%s: %s", key, reward.notice)
            place = None if reward.is_immediate else len(pooled)
            self._parts.append(_Part(key.rpartition(".")[2], inner.get("weight", 1.0), spec, reward, place))
            pooled += (
                [] if reward.is_immediate else [replace(spec, options={**spec.options, **reward.settled})]
            )
        self._pool: RewardPool | None = None
        self._ahead: ScoresAhead[tuple[int, Task], Score] | None = None
        if pooled:
            processes = section["processes"] or min(os.cpu_count() or 1, 8)
            self._pool = RewardPool(pooled, processes)
            self._ahead = ScoresAhead(self._pool.score)

    def judges_groups(self, step_rows: int) -> None:
        """Declare that each following call to ``step`` gets the responses to one prompt instead of a whole
        step.

        Args:
            step_rows: responses per training step. A reward function that fails on every response of its
                calls is treated as broken only after failing on this many in a row.
        """
        self._step_rows = step_rows

    @property
    def scores_ahead(self) -> bool:
        """True if rewards run in a process pool, so that scoring can start while other responses are still
        being sampled."""
        return self._ahead is not None

    def score_ahead(self, turn: Turn) -> None:
        """Start to score some responses of the batch that ``step`` gets next. This saves time and does not
        change the result of ``step``."""
        if self._ahead is not None:
            self._ahead.begin(self._pooled_tasks(self._as_read(turn)))

    def step(self, turn: Turn) -> EnvironmentReturn:
        """Return the rewards of the responses: the weighted sums of all reward functions.

        The metrics ``reward_errors`` (which include scorer outages) and ``reward_timeouts`` count scores that
        could not be computed. With several reward functions there is also one of each per function, such as
        ``reward_errors/NAME``.

        Raises:
            RewardError: a response has no score, and ``env.on_error`` or ``env.on_timeout`` is ``raise``; a
                reward function raised on every response; or ``_BATCHES`` batches in a row had no scored
                response.
        """
        turn = self._as_read(turn)
        columns = self._without_broken(_with_a_score_each(self._scores(turn)), turn)
        masked = self._masked(columns, turn)
        rewards = [_weighted(self._parts, scores) for scores in zip(*columns, strict=True)]
        return EnvironmentReturn(
            rewards=[0.0 if hidden else reward for reward, hidden in zip(rewards, masked, strict=True)],
            terminated=[True] * len(masked),
            masked=masked,
            metrics=self._metrics(columns),
            accuracies=self._accuracies(columns, rewards),
            parts=self._values_of_parts(columns, masked) if self._has_several else {},
        )

    def fault_of_reference(self, answer: str) -> str | Doubt | None:
        """Return the first reason why a reward function cannot use a reference answer, else the first
        ``Doubt`` of a reward function, else None."""
        doubt = None
        for part in self._parts:
            fault = part.reward.fault_of_reference
            said = None if fault is None else fault(answer)
            if isinstance(said, str):
                return f"{part.name}: {said}" if self._has_several else said
            doubt = doubt or said
        return doubt

    @property
    def final_answer(self) -> Callable[[str], str | None] | None:
        """Function that extracts the final answer from a response. It comes from the first reward function
        that measures correctness and can extract answers; None if there is no such function."""
        for part in self._parts:
            if part.reward.tells_right_from_wrong and part.reward.final_answer is not None:
                return part.reward.final_answer
        return None

    def close(self) -> None:
        """Stop the processes of the pool."""
        if self._pool is not None:
            self._pool.close()

    def _as_read(self, turn: Turn) -> Turn:
        return (
            replace(turn, responses=turn.full_responses, prompts=turn.full_prompts)
            if self._keeps_special_tokens
            else turn
        )

    def _scores(self, turn: Turn) -> list[list[Score]]:
        """Return one list of B scores per reward function."""
        pooled = self._pooled_scores(turn)
        full = self._tasks(turn) if any(part.place is None for part in self._parts) else []
        rows = len(turn.responses)
        columns: list[list[Score]] = []
        for part in self._parts:
            if part.place is None:
                columns.append([score_of(part.reward, task, part.spec) for task in full])
            else:
                columns.append(pooled[part.place * rows : (part.place + 1) * rows])
        return columns

    def _pooled_scores(self, turn: Turn) -> list[Score]:
        """Return the scores of the pool's rewards. Scores that ``score_ahead`` has started are reused."""
        if self._pool is None or self._ahead is None:
            return []
        ahead = self._ahead.take()
        found: list[Score | None] = []
        missing: list[tuple[int, Task]] = []
        for key, task in self._pooled_tasks(turn):
            # Pop from a queue, because two responses to a prompt may have the same text and hence the same
            # key.
            found.append(ahead[key].popleft() if ahead.get(key) else None)
            if found[-1] is None:
                missing.append(task)
        rest = iter(self._pool.score(missing))
        return [next(rest) if score is None else score for score in found]

    def _pooled_tasks(self, turn: Turn) -> list[tuple[Hashable, tuple[int, Task]]]:
        """Return the pool's tasks, each with a key that identifies it. Tasks are ordered by reward, so that a
        response which is slow for every reward does not occupy neighbouring slots."""
        tasks = self._tasks(turn)
        found: list[tuple[Hashable, tuple[int, Task]]] = []
        for part in self._parts:
            if part.place is None:
                continue
            for record, task in zip(turn.records, tasks, strict=True):
                # Identify the record by its object, which stays the same as long as its episode exists.
                key = part.place, id(record), task.response, task.length
                # Do not send what a reward does not read through the pipe to its process.
                sent = task if part.reward.wants_record else task._replace(prompt="", record={})
                found.append((key, (part.place, sent)))
        return found

    def _tasks(self, turn: Turn) -> list[Task]:
        asked, ids = any(part.reward.wants_record for part in self._parts), turn.response_ids
        lengths = ids.lengths.tolist() if isinstance(ids, TokenRows) else list(map(len, ids))
        return [_task(turn, row, length, with_record=asked) for row, length in enumerate(lengths)]

    def _values_of_parts(
        self, columns: Sequence[Sequence[Score]], masked: Sequence[bool]
    ) -> dict[str, list[float | None]]:
        """Return B values per reward function. A value is None for a masked sample, and for a sample that
        belongs to another function's task."""
        found: dict[str, list[float | None]] = {}
        for part, column in zip(self._parts, columns, strict=True):
            values = found[part.name] = []
            for score, is_masked in zip(column, masked, strict=True):
                value = 0.0 if score.value is None and score.fault is not None else score.value
                values.append(None if is_masked else value)
        return found

    def _masked(self, columns: Sequence[Sequence[Score]], turn: Turn) -> list[bool]:
        """Return a flag per sample that is true if the sample is left out of training. Log the samples
        without a reward.

        Raises:
            RewardError: too many batches in a row had no scored sample.
        """
        masked, untold, told_before = [False] * len(turn.responses), list[str](), self._told
        unscored, messages = [False] * len(masked), list[str]()
        for part, column in zip(self._parts, columns, strict=True):
            for row, score in enumerate(column):
                if score.fault is not None:
                    messages.append(score.message)
                    tell = self._told < _TOLD
                    masked[row] |= self._is_masked(score, part, turn, row, tell=tell)
                    unscored[row] |= masked[row] or score.fault == "error"
                    self._told += 1
                    untold += [] if tell else [f"record {turn.records[row].index}: {score.message}"]
        if untold:
            further = "further " if told_before < _TOLD else ""
            logger.warning(
                "%d %srewards of this batch could not be computed, the first of %s",
                len(untold),
                further,
                untold[0],
            )
        without = bool(unscored) and all(unscored)
        self._batches_without_scores = self._batches_without_scores + 1 if without else 0
        self._rows_without_scores = self._rows_without_scores + len(unscored) if without else 0
        if (
            self._batches_without_scores >= _BATCHES
            and self._rows_without_scores >= _BATCHES * self._step_rows
        ):
            raise RewardError(
                f"no response of {_BATCHES} batches in a row could be scored; the first fault of "
                f"the last batch is: {messages[0]}. Fix: correct the reward function, or start the "
                "scorer, and start the run again"
            )
        return masked

    def _without_broken(self, columns: list[list[Score]], turn: Turn) -> list[list[Score]]:
        """Handle reward functions that fail on every response of a batch. For an external scorer, mark the
        scores as an outage. A single response is not enough evidence and is left as it is.

        Raises:
            RewardError: a reward function other than an external scorer fails on every response, so the
                responses are not the cause.
        """
        for place, (part, column) in enumerate(zip(self._parts, columns, strict=True)):
            # ``score_of`` reports a failed import as an outage with a traceback; retrying cannot cure it.
            fails = len(column) > 1 and all(score.fault == "error" or score.trace for score in column)
            self._failing[part.name] = self._failing.get(part.name, 0) + len(column) if fails else 0
            if fails:
                if not part.spec.blames_answer:
                    columns[place] = [replace(score, fault="outage") for score in column]
                    continue
                if self._failing[part.name] < self._step_rows:
                    continue
                shown = f"{part.name} ({part.spec.name})" if self._has_several else part.spec.name
                what = f"the reward {shown} failed on each of the {len(column)} responses of a batch"
                first = f"record {turn.records[0].index}: {column[0].message}"
                raise RewardError(
                    (
                        f"{what}, so the responses are not the cause. The first, of {first}. Fix: "
                        f"correct the reward function\n{column[0].trace}"
                    ).rstrip()
                )
        return columns

    def _is_masked(self, score: Score, part: _Part, turn: Turn, row: int, *, tell: bool) -> bool:
        """Return whether a missing score leaves its sample out of training; False counts it as 0.

        Raises:
            RewardError: the configuration stops the run on such a failure.
        """
        assert score.fault is not None
        reward = f"reward {part.name}" if self._has_several else "reward"
        what = (
            f"record {turn.records[row].index}: no {reward}, {score.message}. The response ends in "
            f"{turn.responses[row][-80:]!r}"
        )
        decision = self._on_fault[score.fault]
        if decision == "raise":
            key = "timeout" if score.fault == "timeout" else "error"
            raise RewardError(
                f"{what}. Fix: correct the reward function, or set env.on_{key} to zero or mask"
            )
        if tell:
            logger.warning(
                "%s; %s", what, "it is left out of training" if decision == "mask" else "it counts as 0"
            )
        if (
            decision == "mask"
            and score.fault == "error"
            and is_import_path(part.spec.name)
            and not self._advised
        ):
            self._advised = True
            logger.warning(
                "%s: a response that it does not score, because it raises, dies or returns no number, is "
                "neither rewarded nor punished, "
                "and a policy may learn to give such ones. Where the response is at fault, return 0, or set "
                "env.on_error to zero",
                part.spec.name,
            )
        return bool(decision == "mask")

    def _metrics(self, columns: Sequence[Sequence[Score]]) -> dict[str, float]:
        """Count missing scores by reason."""
        counts: dict[str, float] = {"reward_errors": 0, "reward_timeouts": 0}
        for part, column in zip(self._parts, columns, strict=True):
            faults = ["error" if score.fault == "outage" else score.fault for score in column]
            for name, fault in (("reward_errors", "error"), ("reward_timeouts", "timeout")):
                counts[name] += faults.count(fault)  # type: ignore[arg-type]
                if self._has_several:
                    counts[f"{name}/{part.name}"] = faults.count(fault)  # type: ignore[arg-type]
        return counts

    def _accuracies(self, columns: Sequence[Sequence[Score]], rewards: Sequence[float]) -> list[float | None]:
        """Return the accuracy of each response, or an empty list if the accuracy equals the reward anyway.

        It is the accuracy that a reward function reports, else the score of the first function that measures
        correctness, else the summed reward.
        """
        if not self._has_several and all(score.accuracy is None for score in columns[0]):
            return []
        return list(map(self._accuracy, zip(*columns, strict=True), rewards))

    def _accuracy(self, scores: Sequence[Score], reward: float) -> float:
        for score in scores:
            if score.accuracy is not None:
                return score.accuracy
        for part, score in zip(self._parts, scores, strict=True):
            if part.reward.tells_right_from_wrong and not _is_of_another_task(score):
                return score.value or 0.0
        return reward


def _is_of_another_task(score: Score) -> bool:
    return score.value is None and score.fault is None


def _with_a_score_each(columns: list[list[Score]]) -> list[list[Score]]:
    """Mark a response as failed if every reward function returned None for it, claiming that it belongs to
    another task."""
    for row, scores in enumerate(zip(*columns, strict=True)):
        if all(map(_is_of_another_task, scores)):
            columns[0][row] = Score(
                None, "error", "it returned None, as every reward did, and a number is wanted"
            )
    return columns


def _weighted(parts: Sequence[_Part], scores: Sequence[Score]) -> float:
    """Return the weighted sum of scores per response. A single reward of weight 1 keeps its exact values."""
    values = list[float]()
    for part, score in zip(parts, scores, strict=True):
        values.append(part.weight * (0.0 if score.value is None else score.value))
    # Add one by one: from Python 3.12 on, sum() rounds differently.
    return functools.reduce(operator.add, values)


def _task(turn: Turn, row: int, length: int, *, with_record: bool) -> Task:
    record, response = turn.records[row], turn.responses[row]
    if not with_record:
        return Task(response, record.answer, length, is_chat=getattr(record, "is_chat", False))
    # The data's own field ``index`` overrides the record number, since a user's function was written for it;
    # ``answer`` is always the reference.
    fields = {"index": record.index, **getattr(record, "fields", {}), "answer": record.answer}
    prompt = turn.prompts[row] if turn.prompts else ""
    return Task(response, record.answer, length, prompt, fields, getattr(record, "is_chat", False))
