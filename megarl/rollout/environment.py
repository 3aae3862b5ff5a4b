"""Environments: what a policy's responses meet. An environment gives rewards, ends conversations, or answers
with an observation.

An environment of a user's own is a class, named by ``env.environment: path/to/file.py:Name``, that is called
with the ``env`` section: a ``MessageEnv`` (``megarl.rollout.message_env``), which is one conversation, or an
``Environment``, which steps a batch of them.
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
    """Why a conversation ended."""

    DONE = "done"
    """The environment ended it."""
    LENGTH = "length"
    """A response met the length limit of a response, or of the model."""
    TOKENS = "tokens"
    """The tokens of a conversation were used up, observations among them."""
    TURNS = "turns"
    """So many turns are all that a conversation may have."""
    TOOLS = "tools"
    """It called more tools than a conversation may."""
    ERROR = "error"
    """A response made the environment fail, and that ends the conversation."""
    LATE = "late"
    """The environment did not answer in time: the conversation is masked."""
    LOST = "lost"
    """The environment failed by no fault of the response: the conversation is masked."""


CUT = frozenset({StopReason.LENGTH, StopReason.TOKENS})
"""Reasons that count as truncation."""


# Not frozen, as one of each is made a turn: a frozen dataclass takes four times as long to make.
@dataclass(slots=True)
class Turn:
    """The latest turn of a batch of B conversations.

    Attributes:
        records: B records of the data that the conversations began with.
        responses: B texts of the policy, without special tokens; of Harmony's the final message.
        response_ids: B rows of the token ids that the policy sampled.
        metadata: what the environment returned for each conversation at the turn before; None at the first.
        prompts: B texts of the prompts as the policy saw them, without special tokens; empty where nobody
            decodes them.
        full_responses: B texts of all that the policy sampled, with special tokens; empty likewise.
        full_prompts: B texts of the prompts with special tokens; empty likewise.
        turns: B, responses of each conversation so far, this one among them; empty where there is one.
        truncated: B, whether a length limit ended the response; empty where nobody says so.
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
    """An environment's answer to a turn of B conversations.

    Attributes:
        rewards: B finite numbers; None for no reward, of a conversation that is masked.
        terminated: B, whether the conversation ends.
        masked: B, whether the conversation is left out of training, for example because its reward is not
            known.
        observations: B, what the policy sees next: a text, which the user says, a message or a list of
            messages; None where the conversation ends.
        metadata: B objects for the next turn.
        metrics: figures of the whole batch, which are summed over batches.
        accuracies: B numbers from 0 to 1, how right each response is, where that is not the reward; None
            where it is not known.
        parts: name of each part of the rewards to B numbers, without weights; None for a conversation that
            has no such part.
        reasons: B, why each conversation that ends does so, ``StopReason``; None for done.
        stop_strings: B lists of texts that end the next response of each conversation too; None for none.
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
    """Steps a batch of conversations.

    One with an attribute ``threads`` above 0 is asked for each conversation by itself, from so many threads
    at once; ``step_timeout_s`` is then how many seconds that may take, ``begin(record)`` begins each
    conversation and ``end(metadata)`` ends it (``megarl.rollout.message_env.MessageEnvironment``). One with
    ``judge(turn)`` is asked once more, for all its conversations together, when all have ended; these rewards
    are added to those of the turns. One with ``scores_ahead`` true may begin to judge responses that
    ``score_ahead(turn)`` gives it while others are sampled, some at a time; ``step`` is then asked of all of
    them.
    """

    def step(self, turn: Turn) -> EnvironmentReturn:
        """Rewards and observations for a batch of responses, in their order."""
        ...

    def fault_of_reference(self, answer: str) -> str | Doubt | None:
        """Return why a record with this reference answer is of no use, or None. Called when the data are
        read."""
        ...

    def close(self) -> None:
        """Give back what the environment holds."""
        ...


def number_of(value: Any) -> float | None:
    """Return a number of Python, NumPy or torch as a float, or None if the value is none."""
    if type(value) is float:
        return value
    try:
        # an array or a tensor of one element
        plain = value.item() if hasattr(value, "item") else value
        return float(plain) if isinstance(plain, Real | Decimal) else None
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def environment_name(record: Any) -> str | None:
    """The name of the environment that a record meets: its ``env_name``, else the field ``env_name`` or
    ``task_name`` of its data."""
    name = getattr(record, "env_name", None)
    fields = getattr(record, "fields", {})
    return name or fields.get("env_name") or fields.get("task_name")
