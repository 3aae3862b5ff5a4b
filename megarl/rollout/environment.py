"""Interface between the policy's conversations and an environment. After each response an environment returns
a reward and either ends the conversation or continues it with an observation.

A user-defined environment is a class that ``env.environment: path/to/file.py:Name`` names. It is constructed
with the ``env`` section. It is either a ``MessageEnv`` (``megarl.rollout.message_env``), with one object per
conversation, or an ``Environment``, which steps a whole batch of conversations.
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
    """A response reached its maximum number of new tokens, or the maximum length of the model."""
    TOKENS = "tokens"
    """The conversation has used up its token budget, which includes observations."""
    TURNS = "turns"
    """The conversation has reached the maximum number of turns."""
    TOOLS = "tools"
    """The conversation made more tool calls than allowed."""
    ERROR = "error"
    """The environment failed on a response, and the configuration ends conversations on such failures."""
    LATE = "late"
    """The environment exceeded its time limit. The conversation is left out of training."""
    LOST = "lost"
    """The environment failed for a reason that no response can cause. The conversation is left out of
    training."""


CUT = frozenset({StopReason.LENGTH, StopReason.TOKENS})
"""Stop reasons that count as truncation."""


# Not frozen: an instance is created at every turn, and creating a frozen dataclass takes four times as long.
@dataclass(slots=True)
class Turn:
    """The latest turn of a batch of B conversations, which an environment receives.

    Attributes:
        records: B data records from which the conversations started.
        responses: B response texts without special tokens; for Harmony only the final message.
        response_ids: B rows of the token ids that the policy sampled.
        metadata: B objects that the environment returned for these conversations at the previous turn; None
            at the first turn.
        prompts: B prompt texts without special tokens; empty if nobody decodes them.
        full_responses: B texts of all sampled tokens, with special tokens; empty if nobody decodes them.
        full_prompts: B prompt texts with special tokens; empty if nobody decodes them.
        turns: B numbers of responses in each conversation so far, including this one; empty for one-turn
            conversations.
        truncated: B flags, true if a length limit ended the response; empty if unknown.
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
    """Result of one environment step for a batch of B conversations. Optional sequences may be empty.

    Attributes:
        rewards: B finite numbers; None for a masked conversation without a reward.
        terminated: B flags, true if the conversation ends.
        masked: B flags, true if the conversation is left out of training, for example because its reward is
            unknown.
        observations: B inputs that the policy sees next: a text (which becomes a user message), a message, or
            a list of messages; None if the conversation ends.
        metadata: B objects that the environment gets back at the next turn.
        metrics: metrics of the whole batch; they are summed over batches.
        accuracies: B numbers from 0 to 1, for environments whose reward is not the accuracy itself; None if
            unknown.
        parts: maps the name of each reward part to B unweighted numbers; None for a conversation without that
            part.
        reasons: B values of ``StopReason`` for conversations that end; None means done.
        stop_strings: B lists of additional stop strings for the next response; None for no additional ones.
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
    """Interface of an environment that steps a batch of conversations at a time.

    An environment may have these optional attributes:

    * ``threads`` above 0: each conversation is stepped separately, in that many threads. ``step_timeout_s``
      is then the time limit of one call in seconds. ``begin(record)`` starts a conversation and
      ``end(metadata)`` releases it (see ``megarl.rollout.message_env.MessageEnvironment``).
    * ``judge(turn)``: called once after all conversations have ended, with all of them. Its rewards are added
      to those of the turns.
    * ``scores_ahead`` true: ``score_ahead(turn)`` receives some responses while others are still being
      sampled, so that scoring can start early. ``step`` is still called with all of them.
    """

    def step(self, turn: Turn) -> EnvironmentReturn:
        """Return rewards and observations for a batch of responses, in the order of the batch."""
        ...

    def fault_of_reference(self, answer: str) -> str | Doubt | None:
        """Return why a record with this reference answer cannot be used, a ``Doubt`` about a usable one, or
        None. Called for each record while the data are read."""
        ...

    def close(self) -> None:
        """Release the environment's resources."""
        ...


def number_of(value: Any) -> float | None:
    """Convert a Python, NumPy or torch scalar to a float. Return None if the value is not a number."""
    if type(value) is float:
        return value
    try:
        # Arrays and tensors of one element have `item`.
        plain = value.item() if hasattr(value, "item") else value
        return float(plain) if isinstance(plain, Real | Decimal) else None
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def environment_name(record: Any) -> str | None:
    """Return the name of the environment that scores a record, or None if the record names none.

    The record's ``env_name`` comes first, then the data fields ``env_name`` and ``task_name``.
    """
    name = getattr(record, "env_name", None)
    fields = getattr(record, "fields", {})
    return name or fields.get("env_name") or fields.get("task_name")
