"""Adapter for environments written for NeMo-RL, which implement its ``EnvironmentInterface`` and are named by
``env.environment: path/to/file.py:Name``.

Such a class steps a batch of conversations at once. It gets their message logs, and the metadata that it
returned for each at the previous turn. ``EnvironmentInterface`` and ``EnvironmentReturn`` can be imported
from this module when NeMo-RL is not installed.
"""

from __future__ import annotations

import abc
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from megarl.config.environments import EnvConfig, class_of_actor
from megarl.errors import BatchError
from megarl.rollout import environment
from megarl.rollout.environment import StopReason, Turn
from megarl.rollout.message_env import LOST

logger = logging.getLogger(__name__)

MetadataT = TypeVar("MetadataT")

# Number of failures that are logged; later ones are not.
_TOLD = 3

# Roles that chat templates support. Any other role in an observation, such as ``environment``, becomes
# ``user``.
_ROLES = frozenset({"user", "assistant", "system", "tool"})


class EnvironmentReturn(NamedTuple, Generic[MetadataT]):
    """Result of ``EnvironmentInterface.step`` for B conversations, with NeMo-RL's field names.

    Attributes:
        observations: B messages, ``{"role": ..., "content": ...}``.
        metadata: B objects that are passed to the next step; None for a conversation that ends.
        next_stop_strings: B lists of stop strings for the next response; None for a conversation without any.
        rewards: [B] or [B, parts] float; parts are summed.
        terminateds: [B] bool.
        answers: B final answers, or None. Not read by megarl.
    """

    observations: list[dict[str, str]]
    metadata: list[MetadataT | None]
    next_stop_strings: list[list[str] | None] | list[None]
    rewards: Tensor
    terminateds: Tensor
    answers: list[str | None] | None = None


class EnvironmentInterface(abc.ABC, Generic[MetadataT]):
    """NeMo-RL's abstract base class of environments."""

    @abc.abstractmethod
    def step(
        self, message_log_batch: list[list[dict[str, str]]], metadata: list[MetadataT]
    ) -> EnvironmentReturn[MetadataT]:
        """Return the environment's reply to the last message of each conversation."""

    @abc.abstractmethod
    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Compute metrics of a batch. Never called by this library, which computes its own metrics."""


@dataclass(frozen=True, slots=True)
class _Conversation:
    """Messages of a conversation so far, and the metadata that the environment returned last."""

    messages: list[dict[str, str]]
    metadata: Any


class NemoRLEnvironment:
    """An ``Environment`` that wraps a class written for NeMo-RL.

    The class is constructed with ``env.options``. A conversation's initial metadata are a dictionary with the
    reference answer as ``ground_truth`` and the record's fields (``data.extra_keys``).

    Args:
        kind: the class, or its Ray actor class.
        section: configuration section of the environment.
    """

    def __init__(self, kind: Any, section: EnvConfig) -> None:
        # Unwrap the Ray actor class, because the environment is called in this process.
        self._environment = class_of_actor(kind)(dict(section["options"]))
        self.step_timeout_s, self._ends = float(section["step_timeout_s"]), section["on_tool_error"] == "end"
        self._told = 0

    def step(self, turn: Turn) -> environment.EnvironmentReturn:
        """Step the wrapped environment with the whole batch. If it raises, step it again with one
        conversation at a time, so that only the conversations that cause the failure are affected. If it
        exceeds the time limit, the whole batch is left out of training.

        Raises:
            BatchError: the environment returned a malformed result.
        """
        conversations = [self._followed(turn, row) for row in range(len(turn.records))]
        try:
            return self._asked(conversations)
        except TimeoutError as error:
            self._tell(error)
            return _left_out(conversations, StopReason.LATE)
        except BatchError:
            raise
        except Exception as error:
            # A single conversation is not retried; in a larger batch each is stepped alone, to find the one
            # at fault.
            if len(conversations) == 1:
                return self._failed(conversations, error)
        return _joined([self.step(_row_of(turn, row)) for row in range(len(conversations))])

    def fault_of_reference(self, answer: str) -> str | None:
        """Return None: every reference answer is usable."""
        return None

    def close(self) -> None:
        """Call the environment's ``shutdown``, if it has one."""
        shutdown = getattr(self._environment, "shutdown", None)
        if callable(shutdown):
            shutdown()

    def _followed(self, turn: Turn, row: int) -> _Conversation:
        before = turn.metadata[row]
        if before is None:
            record = turn.records[row]
            asked = [{"role": "user", "content": str(turn.prompts[row])}] if turn.prompts else []
            before = _Conversation(asked, {"ground_truth": record.answer, **record.fields})
        return _Conversation(
            [*before.messages, {"role": "assistant", "content": turn.responses[row]}], before.metadata
        )

    def _asked(self, conversations: Sequence[_Conversation]) -> environment.EnvironmentReturn:
        # Pass copies of the messages, because an environment may change what it receives.
        logs = [list(map(dict, each.messages)) for each in conversations]
        metadata = [each.metadata for each in conversations]
        found = _within(lambda: self._environment.step(logs, metadata), self.step_timeout_s)
        return _converted(found, conversations)

    def _failed(
        self, conversations: Sequence[_Conversation], error: Exception
    ) -> environment.EnvironmentReturn:
        self._tell(error)
        if isinstance(error, LOST):
            return _left_out(conversations, StopReason.LOST)
        counts = {"tool_errors": 1.0}
        if self._ends:
            return environment.EnvironmentReturn(
                [0.0], [True], [False], metadata=conversations, metrics=counts, reasons=[StopReason.ERROR]
            )
        said = {"role": "user", "content": f"Error: {type(error).__name__}: {error}"}
        [conversation] = conversations
        following = _Conversation([*conversation.messages, said], conversation.metadata)
        return environment.EnvironmentReturn([0.0], [False], [False], [said], [following], counts)

    def _tell(self, error: Exception) -> None:
        self._told += 1
        if self._told <= _TOLD:
            logger.warning(
                "the environment %s failed: %s: %s",
                type(self._environment).__name__,
                type(error).__name__,
                error,
            )


def _within(call: Callable[[], Any], seconds: float) -> Any:
    """Run a call in a thread and return its result. On timeout the thread is abandoned, since a thread cannot
    be killed.

    Raises:
        TimeoutError: the call did not return within ``seconds``.
        OSError: the call itself raised a ``TimeoutError``.
        BaseException: any other exception of the call.
    """
    done: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            done.put((call(), None))
        except BaseException as error:
            done.put((None, error))

    # A daemon thread, so that a call that never returns cannot keep the process alive.
    threading.Thread(target=work, name="environment", daemon=True).start()
    try:
        found, error = done.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"step did not return within {seconds:g} s (env.step_timeout_s)") from None
    if isinstance(error, TimeoutError):
        # The environment itself raised this TimeoutError, for example for a server: do not report it as our
        # time limit.
        raise OSError(str(error)) from error
    if error is not None:
        raise error
    return found


def _converted(found: Any, conversations: Sequence[_Conversation]) -> environment.EnvironmentReturn:
    """Convert the result of a NeMo-RL environment step to this library's ``EnvironmentReturn``.

    Raises:
        BatchError: a field is missing, or its length is not the number of conversations.
    """
    missing = [
        name for name in ("observations", "metadata", "rewards", "terminateds") if not hasattr(found, name)
    ]
    if missing:
        raise BatchError(
            f"step returned a {type(found).__name__} without {', '.join(missing)}. Fix: return NeMo-RL's "
            "EnvironmentReturn"
        )
    rows = len(conversations)
    rewards = torch.as_tensor(found.rewards, dtype=torch.float64)
    stops = getattr(found, "next_stop_strings", None) or [None] * rows
    columns = {
        "observations": found.observations,
        "metadata": found.metadata,
        "rewards": rewards,
        "terminateds": found.terminateds,
        "next_stop_strings": stops,
    }
    wrong = {name: len(column) for name, column in columns.items() if len(column) != rows}
    if wrong:
        raise BatchError(
            f"step returned {wrong} for {rows} conversations. Fix: return one of each a conversation, in "
            "their order"
        )
    parts: Mapping[str, list[float]] = {}
    if rewards.ndim == 2:
        parts = {f"reward{place + 1}": column for place, column in enumerate(rewards.T.tolist())}
        rewards = rewards.sum(dim=1)
    ended = list(map(bool, found.terminateds))
    observations, following = list[Any](), list[_Conversation]()
    for conversation, end, said, metadata in zip(
        conversations, ended, found.observations, found.metadata, strict=True
    ):
        message = None if end else _message(said)
        observations.append(message)
        messages = conversation.messages if message is None else [*conversation.messages, message]
        following.append(_Conversation(messages, metadata))
    return environment.EnvironmentReturn(
        rewards.tolist(), ended, [False] * rows, observations, following, parts=parts, stop_strings=stops
    )


def _message(said: Any) -> dict[str, str]:
    if not isinstance(said, Mapping) or not isinstance(said.get("content"), str):
        raise BatchError(
            f"step continues with the observation {repr(said)[:80]}. Fix: return a message with "
            "role and content, or terminateds = True"
        )
    role = said.get("role")
    return {**said, "role": role if role in _ROLES else "user"}


def _left_out(conversations: Sequence[_Conversation], reason: StopReason) -> environment.EnvironmentReturn:
    rows = len(conversations)
    return environment.EnvironmentReturn(
        [None] * rows, [True] * rows, [True] * rows, metadata=conversations, reasons=[reason] * rows
    )


def _row_of(turn: Turn, row: int) -> Turn:
    def one(column: Sequence[Any]) -> list[Any]:
        return [column[row]] if column else []

    return Turn(
        one(turn.records),
        one(turn.responses),
        one(turn.response_ids),
        one(turn.metadata),
        one(turn.prompts),
        turns=one(turn.turns),
    )


def _joined(answers: Sequence[environment.EnvironmentReturn]) -> environment.EnvironmentReturn:
    """Concatenate the results of single conversations into the result of a batch. Metrics are summed."""

    def column(name: str) -> list[Any]:
        return [next(iter(getattr(each, name)), None) for each in answers]

    metrics: dict[str, float] = {}
    parts: dict[str, list[float | None]] = {}
    for row, each in enumerate(answers):
        for name, value in each.metrics.items():
            metrics[name] = metrics.get(name, 0.0) + value
        for name, values in each.parts.items():
            parts.setdefault(name, [None] * len(answers))[row] = values[0]
    further = {name: column(name) for name in ("observations", "metadata", "reasons", "stop_strings")}
    return environment.EnvironmentReturn(
        column("rewards"), column("terminated"), column("masked"), metrics=metrics, parts=parts, **further
    )
