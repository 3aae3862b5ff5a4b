"""MessageEnv: an environment with one object per conversation that reads and writes messages.

A user-defined class (``env.environment: path/to/file.py:Name``) implements the answer to a response::

    class Guess(MessageEnv):
        def step(self, message):
            if message["content"].strip() == self.record.answer:
                return Step(reward=1.0, done=True)
            return Step("No. Guess again.")

Each conversation is stepped in a thread, so that none waits for another one. Objects of different
conversations must not share mutable state.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from megarl.config.environments import EnvConfig
from megarl.errors import BatchError, MegarlError, RewardError
from megarl.rollout.environment import EnvironmentReturn, StopReason, Turn, number_of
from megarl.rollout.tools.parsers import BadCallError, Calls, parser_of

if TYPE_CHECKING:
    from megarl.data.datasets import Example
    from megarl.data.records import Doubt

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]
"""Message with ``role`` and ``content``; one of the assistant also has ``tool_calls``, one of a tool ``name``
and ``tool_call_id``."""

# Number of an environment's failures that are reported one by one.
_TOLD = 3
# Number of failures after which a run ends, if no response has got a ``Step`` before: what a response may
# cause, every response does not.
_MOST_FAILED = 256
# Maximum number of an exception's characters that are logged.
_LONGEST_TOLD = 1000


class EnvironmentLostError(MegarlError):
    """An environment cannot answer, for a reason that no response can cause; the conversation is left out of
    training."""


LOST = (EnvironmentLostError, OSError, TimeoutError, MemoryError)
"""Errors that do not count against the response: a server is gone, a process was killed, the machine
is full."""


@dataclass(frozen=True, slots=True)
class Step:
    """Result of an environment for a response.

    Attributes:
        messages: what the policy sees next: a text, which becomes a user message, a message, or several; only
            read if the conversation continues.
        reward: added to the rewards of the other turns.
        done: the conversation ends.
        accuracy: accuracy of the conversation, from 0 to 1; None if the reward is the accuracy.
        metrics: metrics that are summed over conversations and turns.
        reason: reason of the conversation's end, if it is not simply done.
    """

    messages: str | Message | Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False
    accuracy: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    reason: StopReason | None = None


class MessageEnv:
    """One conversation.

    Attributes:
        section: the ``env`` section, or the section of the named environment in it; ``options`` has the keys
            that only this environment reads.
        record: data record that the conversation begins with; available from ``reset`` on.
        tools: JSON schemas that the chat template shows the policy, in the form of OpenAI's functions. Calls
            of these tools arrive as ``message["tool_calls"]``.
    """

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, section: EnvConfig) -> None:
        self.section = section
        self.record: Example

    def reset(self, record: Example) -> Sequence[Message] | None:
        """Begin a conversation. Returned messages replace the record's prompt; None keeps it."""
        return None

    def step(self, message: Message) -> Step:
        """Process a response, ``{"role": "assistant", "content": text, "tool_calls": [...]}``, and return the
        result.

        This is also called for a response that a length limit truncated: its reward counts, but the
        conversation ends there whatever ``done`` is. The same holds for the last of ``max_rollout_turns``
        responses.

        An exception counts against the response, and the policy sees its text (``env.on_tool_error``). The
        exceptions in ``LOST`` leave the conversation out of training instead. If each of the first 256
        responses raises, the run ends.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End the conversation, and release its resources."""

    @staticmethod
    def fault_of_reference(answer: str) -> str | None:
        """Return why a record with this reference answer is unusable, or None."""
        return None


class MessageEnvironment:
    """An ``Environment`` in which each conversation has a ``MessageEnv``.

    Args:
        make: builds a ``MessageEnv`` from the section.
        section: section of the environment.
        judge: scores whole conversations once all have ended; None if only the turns have rewards.
        fault_of_reference: see ``Environment``.
    """

    def __init__(
        self,
        make: Callable[[EnvConfig], MessageEnv],
        section: EnvConfig,
        judge: Callable[[Turn], EnvironmentReturn] | None = None,
        fault_of_reference: Callable[[str], str | Doubt | None] = MessageEnv.fault_of_reference,
    ) -> None:
        self._make, self._section = make, section
        self.tools = getattr(make, "tools", ())
        self.threads, self.step_timeout_s = int(section["threads"]), float(section["step_timeout_s"])
        self.fault_of_reference = fault_of_reference
        # Methods that a class only inherits need not be called in a thread for every conversation.
        self.begins_at_once = all(
            getattr(make, name, None) is getattr(MessageEnv, name) for name in ("__init__", "reset")
        )
        self.ends_at_once = getattr(make, "close", None) is MessageEnv.close
        self._told = self._failed = 0
        self._works = False
        # Set the attribute only if there is a judge, because the runner of episodes tests whether it exists.
        if judge is not None:
            self.judge = judge

    @cached_property
    def _parse(self) -> Callable[[str, Sequence[str]], tuple[str, Calls]]:
        return parser_of(self._section["tool_parser"], self.tools)

    def begin(self, record: Example) -> tuple[MessageEnv | None, Sequence[Message] | None]:
        """Begin a conversation with a record. Return the conversation, and the messages of its prompt if they
        replace the record's. Return None for both if the conversation cannot begin."""
        try:
            conversation = self._make(self._section)
            conversation.record = record
            return conversation, conversation.reset(record)
        except (Exception, SystemExit) as error:
            self._tell(record, "cannot begin", error)
            return None, None

    def end(self, conversation: MessageEnv | None) -> None:
        """End a conversation."""
        if conversation is not None:
            conversation.close()

    def step(self, turn: Turn) -> EnvironmentReturn:
        """Return the result for one response."""
        [conversation], [record], [truncated] = turn.metadata, turn.records, turn.truncated
        message = self._message(turn)
        if isinstance(message, str):
            if self._section["on_bad_call"] == "end":
                return _answer(conversation, Step(done=True), StopReason.ERROR, {"bad_tool_calls": 1})
            return _answer(
                conversation,
                Step([{"role": "user", "content": message}]),
                None,
                {"bad_tool_calls": 1},
                truncated,
            )
        try:
            step = conversation.step(message)
        except LOST as error:
            self._tell(record, "is lost", error)
            return EnvironmentReturn(
                [None], [True], [True], metadata=[conversation], reasons=[StopReason.LOST]
            )
        except (Exception, SystemExit) as error:
            self._tell(record, "failed on a response", error)
            self._failed += 1
            if self._failed >= _MOST_FAILED and not self._works:
                raise RewardError(
                    f"{type(conversation).__name__}.step raised on each of the first {_MOST_FAILED} "
                    f"responses; of the last one {_described(error)}. Fix: correct it; where a response may "
                    "be the cause, catch the exception and return a Step"
                ) from error
            if self._section["on_tool_error"] == "end":
                return _answer(conversation, Step(done=True), StopReason.ERROR, {"tool_errors": 1})
            said = f"Error: {type(error).__name__}: {_text_of(error)}"
            return _answer(
                conversation, Step(_answers_to(message, said)), None, {"tool_errors": 1}, truncated
            )
        self._works = True
        return _answer(conversation, step, None, {}, truncated)

    def close(self) -> None:
        """Do nothing, since no resources are held between conversations."""

    def _message(self, turn: Turn) -> Message | str:
        """Return the response as a message, or an error text for the policy if a tool call in it cannot be
        read."""
        try:
            content, calls = self._parse(turn.responses[0], turn.full_responses)
        except BadCallError as error:
            return f"The tool call could not be read: {error}"
        return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}

    def _tell(self, record: Example, what: str, error: BaseException) -> None:
        self._told += 1
        if self._told <= _TOLD:
            later = "; further ones are counted, and not logged" if self._told == _TOLD else ""
            logger.warning(
                "record %s: its environment %s: %s%s", record.index, what, _described(error), later
            )


def _described(error: BaseException) -> str:
    """Return class and text of an exception, and the line that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    # Escape lone surrogates, which could not be written into a log.
    text = _text_of(error)[:_LONGEST_TOLD].encode("utf-8", "backslashreplace").decode()
    return f"{type(error).__name__}: {text} ({frame.filename}:{frame.lineno})"


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    # A user's exception may fail in its own __str__, which would end the run.
    except Exception as another:
        return f"(its text fails: {type(another).__name__})"


def _answers_to(message: Message, text: str) -> Sequence[Message]:
    """Return a text as the answers of all tools that a message calls, or as a user message if it
    calls none."""
    calls = message.get("tool_calls") or ()
    answers = [
        {"role": "tool", "name": call["function"]["name"], "tool_call_id": call["id"], "content": text}
        for call in calls
    ]
    return answers or [{"role": "user", "content": text}]


def _answer(
    conversation: MessageEnv,
    step: Any,
    reason: StopReason | None,
    counts: Mapping[str, float],
    truncated: bool = False,
) -> EnvironmentReturn:
    name = f"{type(conversation).__name__}.step"
    if not isinstance(step, Step):
        raise BatchError(
            f"{name} returned {repr(step)[:80]}. Fix: return a Step, as Step(reward=1.0, done=True)"
        )
    accuracy = 0.0 if step.accuracy is None else number_of(step.accuracy)
    if accuracy is None or not 0 <= accuracy <= 1:
        raise BatchError(
            f"{name} returned accuracy = {repr(step.accuracy)[:80]}. Fix: return a number from 0 to 1, or "
            "None"
        )
    if not isinstance(step.metrics, Mapping):
        raise BatchError(
            f"{name} returned metrics = {repr(step.metrics)[:80]}. Fix: return names and numbers, or {{}}"
        )
    try:
        ended = bool(step.done)
    except (TypeError, ValueError, RuntimeError) as error:
        raise BatchError(
            f"{name} returned done = {repr(step.done)[:80]}. Fix: return True or False"
        ) from error
    done = ended or truncated
    return EnvironmentReturn(
        [step.reward],
        [ended],
        [False],
        [None if done else step.messages],
        [conversation],
        {**step.metrics, **counts},
        [] if step.accuracy is None else [step.accuracy],
        reasons=[reason or step.reason],
    )
