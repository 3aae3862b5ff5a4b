"""MessageEnv: an environment as a person writes it, one object a conversation, that reads and writes
messages.

A class of one's own (``env.environment: path/to/file.py:Name``) says what it answers to a response::

    class Guess(MessageEnv):
        def step(self, message):
            if message["content"].strip() == self.record.answer:
                return Step(reward=1.0, done=True)
            return Step("No. Guess again.")

Each conversation is answered in a thread, so that none waits for another one; objects of different
conversations must not share what they change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megarl.config.environments import EnvConfig
from megarl.errors import BatchError, MegarlError
from megarl.rollout.environment import EnvironmentReturn, StopReason, Turn, number_of
from megarl.rollout.tools.parsers import BadCallError, parser_of

if TYPE_CHECKING:
    from megarl.data.datasets import Example
    from megarl.data.records import Doubt

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]
"""``role`` and ``content``; of the assistant also ``tool_calls``, of a tool ``name`` and ``tool_call_id``."""

# Failures of an environment that are reported one by one.
_TOLD = 3
# Characters of an exception that are logged.
_LONGEST_TOLD = 1000


class EnvironmentLostError(MegarlError):
    """An environment cannot answer, for a reason that no response can cause: the conversation is left out of
    training."""


LOST = (EnvironmentLostError, OSError, TimeoutError, MemoryError)
"""Errors that are held against no response: a server that is gone, a process that was killed, a full
machine."""


@dataclass(frozen=True, slots=True)
class Step:
    """Answer of an environment to a response.

    Attributes:
        messages: that the policy sees next: a text, which the user says, a message or several; read where the
            conversation goes on.
        reward: added to those of the other turns.
        done: the conversation ends.
        accuracy: from 0 to 1, how right the conversation is; None where the reward says it.
        metrics: figures that are summed over conversations and turns.
        reason: why a conversation ends, where it is not simply done.
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
        section: the ``env`` section, or that of the environment with a name in it; ``options`` has what only
            this environment reads.
        record: of the data that the conversation begins with; from ``reset`` on.
        tools: JSON schemas that the chat template shows the policy, in the form of OpenAI's functions. Calls
            of them come as ``message["tool_calls"]``.
    """

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, section: EnvConfig) -> None:
        self.section = section
        self.record: Example

    def reset(self, record: Example) -> Sequence[Message] | None:
        """Begin a conversation; messages take the place of the record's prompt."""
        return None

    def step(self, message: Message) -> Step:
        """Answer a response, ``{"role": "assistant", "content": text, "tool_calls": [...]}``.

        A response that a length limit truncated is answered too; its reward counts, and the conversation ends
        there whatever ``done`` says; so it does after the last of ``max_rollout_turns``.

        An exception is the response's fault, whose text the policy sees (``env.on_tool_error``), except for
        those in ``LOST``, which leave the conversation out of training.
        """
        raise NotImplementedError

    def close(self) -> None:
        """End the conversation, and give back what it holds."""

    @staticmethod
    def fault_of_reference(answer: str) -> str | None:
        """Why a record with this reference answer is of no use; None where it is of use."""
        return None


class MessageEnvironment:
    """An ``Environment`` of conversations that each have a ``MessageEnv``.

    Args:
        make: a new one; called with the section.
        section: of the environment.
        judge: scores whole conversations, once all have ended; None where the rewards of their turns are all.
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
        self._parse = parser_of(section["tool_parser"])
        # what a class inherits need not be called in a thread for every conversation
        self.begins_at_once = all(
            getattr(make, name, None) is getattr(MessageEnv, name) for name in ("__init__", "reset")
        )
        self.ends_at_once = getattr(make, "close", None) is MessageEnv.close
        self._told = 0
        # An attribute only then: whoever runs episodes asks whether there is one.
        if judge is not None:
            self.judge = judge

    def begin(self, record: Example) -> tuple[MessageEnv | None, Sequence[Message] | None]:
        """A conversation with a record, and the messages of its prompt where they are not the record's; None
        where it cannot begin."""
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
        """The answer to one response."""
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
            if self._section["on_tool_error"] == "end":
                return _answer(conversation, Step(done=True), StopReason.ERROR, {"tool_errors": 1})
            said = f"Error: {type(error).__name__}: {_text_of(error)}"
            return _answer(
                conversation, Step(_answers_to(message, said)), None, {"tool_errors": 1}, truncated
            )
        return _answer(conversation, step, None, {}, truncated)

    def close(self) -> None:
        """Nothing is held between conversations."""

    def _message(self, turn: Turn) -> Message | str:
        """The response as a message; what is wrong with a call in it, as the policy is told."""
        try:
            content, calls = self._parse(turn.responses[0], turn.full_responses)
        except BadCallError as error:
            return f"The tool call could not be read: {error}"
        return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}

    def _tell(self, record: Example, what: str, error: BaseException) -> None:
        self._told += 1
        if self._told <= _TOLD:
            # Half of a surrogate pair could not be written into a log.
            text = _text_of(error)[:_LONGEST_TOLD].encode("utf-8", "backslashreplace").decode()
            logger.warning(
                "record %s: its environment %s: %s: %s", record.index, what, type(error).__name__, text
            )


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    # An exception of a user's own may fail in its own __str__, which would end the run.
    except Exception as another:
        return f"(its text fails: {type(another).__name__})"


def _answers_to(message: Message, text: str) -> Sequence[Message]:
    """A text as what the tools answer that a message calls; as what the user says where it calls none."""
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
        raise BatchError(f"{name} returned a {type(step).__name__}. Fix: return a Step")
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
