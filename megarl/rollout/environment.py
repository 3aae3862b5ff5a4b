"""Environments: what a policy's responses meet. An environment gives rewards, ends conversations, or answers with an observation.

The protocol is that of conversations of several turns; the collector (``megarl.rollout.collector``) takes those of one turn. An
environment of a user's own is a class, named by ``env.environment: path/to/file.py:Name``, that is called with the ``env`` section.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from megarl.config.environments import environment_class
from megarl.errors import RewardError
from megarl.import_path import is_import_path
from megarl.rollout.reward_pool import RewardPool, Score
from megarl.rollout.rewards import fault_of_reference, get_reward, is_immediate
from megarl.time_limit import OutOfTimeError, time_limit

if TYPE_CHECKING:
    from megarl.data.datasets import Example

logger = logging.getLogger(__name__)

SINGLE_TURN = "single_turn"
_TOLD = 3
"""Responses of a batch without a reward that are reported one by one."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The latest turn of a batch of B conversations.

    Attributes:
        records: B records of the data that the conversations began with.
        responses: B texts of the policy, without special tokens.
        response_ids: B rows of the token ids that the policy sampled.
        metadata: what the environment returned for each conversation at the turn before; None at the first.
    """

    records: Sequence[Example]
    responses: Sequence[str]
    response_ids: Sequence[Sequence[int]]
    metadata: Sequence[Any]


@dataclass(frozen=True, slots=True)
class EnvironmentReturn:
    """Environment return: what an environment says to a turn of B conversations.

    Attributes:
        rewards: B finite numbers; None for no reward, of a conversation that is masked.
        terminated: B, whether the conversation ends.
        masked: B, whether the conversation is left out of training, for example because its reward is not known.
        observations: B texts that the policy sees next; None where the conversation ends.
        metadata: B objects for the next turn.
        metrics: figures of the whole batch, which are summed over batches.
    """

    rewards: Sequence[float | None]
    terminated: Sequence[bool]
    masked: Sequence[bool]
    observations: Sequence[str | None] = ()
    metadata: Sequence[Any] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)


class Environment(Protocol):
    """Steps a batch of conversations."""

    def step(self, turn: Turn) -> EnvironmentReturn:
        """Rewards and observations for a batch of responses, in their order."""
        ...

    def fault_of_reference(self, answer: str) -> str | None:
        """Return why a record with this reference answer is of no use, or None. Called when the data are read."""
        ...

    def close(self) -> None:
        """Give back what the environment holds."""
        ...


class SingleTurn:
    """Environment of one turn: a reward function compares the response with the record's reference answer, and the conversation ends.

    A reward that may fail or take long is computed in processes of a pool, so that no response harms the run or the other samples.

    Args:
        section: the ``env`` section.

    Raises:
        ConfigError: there is no such reward function.
    """

    def __init__(self, section: Mapping[str, Any]) -> None:
        self._on_fault = {"error": section["on_error"], "timeout": section["on_timeout"]}
        self._reward = get_reward(section["reward"], section["strip"])
        self._pool: RewardPool | None = None
        if not is_immediate(self._reward):
            processes = section["processes"] or min(os.cpu_count() or 1, 8)
            self._pool = RewardPool(section["reward"], processes, section["timeout_s"])

    def step(self, turn: Turn) -> EnvironmentReturn:
        """Rewards of the responses. ``reward_errors`` and ``reward_timeouts`` count responses without one.

        Raises:
            RewardError: a response has no reward, and ``env.on_error`` or ``env.on_timeout`` says ``raise``.
        """
        tasks = [(response, record.answer) for response, record in zip(turn.responses, turn.records, strict=True)]
        scores = self._pool.score(tasks) if self._pool else [Score(self._reward(*task)) for task in tasks]
        faults = [score.fault for score in scores]
        told = 0
        masked = []
        for row, score in enumerate(scores):
            masked.append(self._is_masked(score, turn, row, tell=told < _TOLD))
            told += score.fault is not None
        if told > _TOLD:
            logger.warning("%d further responses of this batch have no reward either", told - _TOLD)
        return EnvironmentReturn(
            rewards=[0.0 if score.value is None else score.value for score in scores],
            terminated=[True] * len(scores),
            masked=masked,
            metrics={"reward_errors": faults.count("error"), "reward_timeouts": faults.count("timeout")},
        )

    def fault_of_reference(self, answer: str) -> str | None:
        """Return why nothing can be compared with a reference answer, as the reward function says."""
        find = fault_of_reference(self._reward)
        return None if find is None else find(answer)

    def close(self) -> None:
        """End the processes of the pool."""
        if self._pool is not None:
            self._pool.close()

    def _is_masked(self, score: Score, turn: Turn, row: int, *, tell: bool) -> bool:
        """Whether a sample is not trained on; reports one that has no reward."""
        if score.fault is None:
            return False
        what = f"record {turn.records[row].index}: no reward, {score.message}. The response ends in {turn.responses[row][-80:]!r}"
        decision = self._on_fault[score.fault]
        if decision == "raise":
            raise RewardError(f"{what}. Fix: mend the reward function, or set env.on_{score.fault} to zero or mask")
        if tell:
            logger.warning("%s; %s", what, "it is left out of training" if decision == "mask" else "it counts as 0")
        return decision == "mask"


def find_faults(environment: Environment, timeout_s: float) -> Callable[[str], str | None]:
    """Return what asks an environment for the fault of a reference answer, whatever a user's code does then.

    Args:
        environment: that is asked.
        timeout_s: seconds that it may take.
    """

    def find(answer: str) -> str | None:
        try:
            with time_limit(timeout_s):
                return environment.fault_of_reference(answer)
        except OutOfTimeError:
            return f"fault_of_reference did not come back within {timeout_s:g} s"
        except (Exception, SystemExit) as error:
            return f"fault_of_reference fails on it: {type(error).__name__}: {error}"

    return find


def make_environment(section: Mapping[str, Any]) -> Environment:
    """The environment that an ``env`` section describes.

    Raises:
        ConfigError: it cannot be imported or built.
    """
    name = section["environment"]
    if not is_import_path(name):
        return SingleTurn(section)
    environment: Environment = environment_class(name)(section)
    return environment
