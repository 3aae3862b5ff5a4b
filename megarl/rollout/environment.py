"""Environments, which receive the responses of a policy. An environment gives rewards, ends conversations, or
returns observations.

A user-defined environment is a class that is named by ``env.environment: path/to/file.py:Name`` and
constructed with the ``env`` section: a ``MessageEnv`` (``megarl.rollout.message_env``), which is one
conversation, or an ``Environment``, which steps a batch of them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from megarl.data.datasets import Example
    from megarl.data.records import Doubt


class StopReason(enum.StrEnum):
    """Reason why a conversation ended."""

    DONE = "done"
    """The environment ended the conversation."""
    LENGTH = "length"
    """A response reached the length limit of a response, or of the model."""
    TOKENS = "tokens"
    """The conversation has used up its tokens, including observations."""
    TURNS = "turns"
    """The conversation has reached the maximum number of turns."""
    TOOLS = "tools"
    """The conversation made more tool calls than allowed."""
    ERROR = "error"
    """A response made the environment fail, and such failures end the conversation."""
    LATE = "late"
    """The environment timed out; the conversation is masked."""
    LOST = "lost"
    """The environment failed through no fault of the response; the conversation is masked."""


CUT = frozenset({StopReason.LENGTH, StopReason.TOKENS})
"""Reasons that count as truncation."""


# This is not frozen, because an instance is made at every turn and a frozen dataclass takes four times as
# long to make.
@dataclass(slots=True)
class Turn:
    """The latest turn of a batch of B conversations.

    Attributes:
        records: B data records that the conversations began with.
        responses: B texts of the policy, without special tokens; for Harmony the final message.
        response_ids: B rows of the token ids that the policy sampled.
        metadata: what the environment returned for each conversation at the previous turn; None at the first.
        prompts: B texts of the prompts as the policy saw them, without special tokens; empty if nobody
            decodes them.
        full_responses: B texts of all that the policy sampled, with special tokens; empty if nobody decodes
            them.
        full_prompts: B texts of the prompts with special tokens; empty if nobody decodes them.
        turns: B, number of responses of each conversation so far, including this one; empty if there is one
            turn.
        truncated: B, whether a length limit ended the response; empty if unknown.
    """

    records: Sequence[Example]
    responses: Sequence[str]
    response_ids: Sequence[Sequence[int]]
    metadata: Sequence[Any]
    prompts: Sequence[str] = ()
    full_responses: Sequence[str] = ()
    full_prompts: Sequence[str] = ()
    turns: Sequence[int] = ()
    truncated: Sequence[bool] = ()


@dataclass(slots=True)
class EnvironmentReturn:
    """An environment's result for a turn of B conversations.

    Attributes:
        rewards: B finite numbers; None for a masked conversation without a reward.
        terminated: B, whether the conversation ends.
        masked: B, whether the conversation is left out of training, for example because its reward is
            unknown.
        observations: B, what the policy sees next: a text, which becomes a user message, a message, or a list
            of messages; None if the conversation ends.
        metadata: B objects that are passed to the next turn.
        metrics: metrics of the whole batch, which are summed over batches.
        accuracies: B numbers from 0 to 1, the accuracy of each response if it is not the reward; None if
            unknown.
        parts: name of each part of the rewards to B unweighted numbers; None for a conversation without that
            part.
        reasons: B, ``StopReason`` of each conversation that ends; None for done.
        stop_strings: B lists of additional texts that end the next response of each conversation; None for
            none.
    """

    rewards: Sequence[float | None]
    terminated: Sequence[bool]
    masked: Sequence[bool]
    observations: Sequence[Any] = ()
    metadata: Sequence[Any] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    accuracies: Sequence[float | None] = ()
    parts: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    reasons: Sequence[str | None] = ()
    stop_strings: Sequence[Sequence[str] | None] = ()


class Environment(Protocol):
    """Interface that steps a batch of conversations.

    If it has an attribute ``threads`` above 0, it is called for each conversation separately, from that many
    threads at once; ``step_timeout_s`` is then the time limit of such a call in seconds, ``begin(record)``
    begins each conversation and ``end(metadata)`` ends it
    (``megarl.rollout.message_env.MessageEnvironment``). If it has ``judge(turn)``, this is called once for
    all its conversations together when all have ended; these rewards are added to those of the turns. If it
    has ``scores_ahead`` true, ``score_ahead(turn)`` gets some responses at a time while others are sampled,
    and may begin to score them; ``step`` is then called for all of them.
    """

    def step(self, turn: Turn) -> EnvironmentReturn:
        """Return rewards and observations for a batch of responses, in the same order."""
        ...

    def fault_of_reference(self, answer: str) -> str | Doubt | None:
        """Return why a record with this reference answer is unusable, or None. Called when the data
        are read."""
        ...

    def close(self) -> None:
        """Release the environment's resources."""
        ...


def number_of(value: Any) -> float | None:
    """Convert a number of Python, NumPy or torch to a float; return None if the value is not a number."""
    if type(value) is float:
        return value
    try:
        # The value may be an array or a tensor of one element.
        plain = value.item() if hasattr(value, "item") else value
        return float(plain) if isinstance(plain, Real | Decimal) else None
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def environment_name(record: Any) -> str | None:
    """Return the name of a record's environment: its ``env_name``, else the field ``env_name`` or
    ``task_name`` of its data; None if it has none of them."""
    name = getattr(record, "env_name", None)
    fields = getattr(record, "fields", {})
    return name or fields.get("env_name") or fields.get("task_name")
