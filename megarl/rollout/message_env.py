"""MessageEnv: base class of environments with one object per conversation, which reads and writes messages.

A user-defined class (``env.environment: path/to/file.py:Name``) implements ``step``::

    class Guess(MessageEnv):
        def step(self, message):
            if message["content"].strip() == self.record.answer:
                return Step(reward=1.0, done=True)
            return Step("No. Guess again.")

Conversations are stepped in threads, so a slow one does not delay the others. Objects of different
conversations must therefore share no mutable state.
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
    from megarl.data.messages import ChatMessage, ToolDeclaration
    from megarl.data.records import Doubt

logger = logging.getLogger(__name__)

# Failures of an environment that are logged one by one; later ones are only counted.
_TOLD = 3
# Number of failures after which the run fails, if no response has succeeded yet: a bad response can cause one
# failure, but hardly all of them. It is the number of responses of a step, within these bounds.
_FEWEST_FAILED, _MOST_FAILED = 32, 256
# Maximum characters of an exception's text in the log.
_LONGEST_TOLD = 1000


class EnvironmentLostError(MegarlError):
    """An environment cannot continue for a reason that no response can cause. The conversation is left out of
    training."""


LOST = (EnvironmentLostError, OSError, TimeoutError, MemoryError)
"""Exceptions that are not blamed on the response: a server is down, a process was killed, or the machine is
out of memory or disk space."""


@dataclass(frozen=True, slots=True)
class Step:
    """Result of ``MessageEnv.step`` for one response.

    Attributes:
        messages: input that the policy sees next: a text (which becomes a user message), a message, or
            several messages. Ignored if the conversation ends.
        reward: reward of this turn; the rewards of all turns are added.
        done: true ends the conversation.
        accuracy: accuracy of the conversation, from 0 to 1; None if the reward is the accuracy.
        metrics: metrics that are summed over turns and conversations.
        reason: why the conversation ended; None means done.
    """

    messages: str | ChatMessage | Sequence[ChatMessage] = ()
    reward: float = 0.0
    done: bool = False
    accuracy: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    reason: StopReason | None = None


class MessageEnv:
    """Base class of a user-defined environment. Each conversation gets its own instance.

    Attributes:
        section: the ``env`` section, or the section of one named environment in it. Its ``options`` hold the
            keys that only this environment reads.
        record: data record from which the conversation starts; set before ``reset`` is called.
        tools: JSON schemas of the tools in OpenAI's function format. The chat template shows them to the
            policy; its calls arrive as ``message["tool_calls"]``.
    """

    tools: Sequence[ToolDeclaration] = ()

    def __init__(self, section: EnvConfig) -> None:
        self.section = section
        self.record: Example

    def reset(self, record: Example) -> Sequence[ChatMessage] | None:
        """Start a conversation. Return messages to replace the record's prompt, or None to keep it."""
        return None

    def step(self, message: ChatMessage) -> Step:
        """Process one response and return its result.

        A response that was truncated by a length limit is passed too. Its reward counts, but the conversation
        ends even if ``done`` is false. The same holds for the last of ``max_rollout_turns`` responses.

        An exception is blamed on the response, and the policy sees its text (see ``env.on_tool_error``). For
        the exceptions in ``LOST`` the conversation is left out of training instead. If each of the first 256
        responses raises an exception, the run fails.

        Args:
            message: the response, ``{"role": "assistant", "content": text, "tool_calls": [...]}``.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release the resources of the conversation. Called when it ends."""

    @staticmethod
    def fault_of_reference(answer: str) -> str | None:
        """Return why a record with this reference answer cannot be used, or None."""
        return None


class MessageEnvironment:
    """Adapter that runs one ``MessageEnv`` per conversation as an ``Environment``.

    Args:
        make: builds a ``MessageEnv`` from the section.
        section: configuration section of the environment.
        judge: scores complete conversations after all have ended; None if only turns have rewards.
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
        # If the class does not override these methods, they are trivial, and the runner need not call them in
        # a thread.
        self.begins_at_once = all(
            getattr(make, name, None) is getattr(MessageEnv, name) for name in ("__init__", "reset")
        )
        self.ends_at_once = getattr(make, "close", None) is MessageEnv.close
        self._told = self._failed = 0
        self._most_failed = _MOST_FAILED
        self._works = False
        # Set the attribute only if there is a judge: the runner tests for it with `hasattr`.
        if judge is not None:
            self.judge = judge

    @cached_property
    def _parse(self) -> Callable[[str, Sequence[str]], tuple[str, Calls]]:
        return parser_of(self._section["tool_parser"], self.tools)

    def judges_groups(self, step_rows: int) -> None:
        """Set the number of responses per step. The run fails if the environment raises on all of those of
        the first step, or on more."""
        self._most_failed = min(max(step_rows, _FEWEST_FAILED), _MOST_FAILED)

    def begin(self, record: Example) -> tuple[MessageEnv | None, Sequence[ChatMessage] | None]:
        """Start a conversation from a record.

        Returns:
            The conversation, and the messages that replace the record's prompt (None keeps it). Both are None
            if ``reset`` or the constructor failed; the failure is logged.
        """
        try:
            conversation = self._make(self._section)
            conversation.record = record
            return conversation, conversation.reset(record)
        except (Exception, SystemExit) as error:
            self._tell(record, "cannot begin", error)
            return None, None

    def end(self, conversation: MessageEnv | None) -> None:
        """Close a conversation. None, for one that could not start, is ignored."""
        if conversation is not None:
            conversation.close()

    def step(self, turn: Turn) -> EnvironmentReturn:
        """Step the one conversation of a turn (B = 1), and turn exceptions of the user's code into a result.

        Raises:
            RewardError: the environment has raised on each of its first 256 responses.
            BatchError: the user's ``step`` returned an invalid value.
        """
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
            if self._failed >= self._most_failed and not self._works:
                raise RewardError(
                    f"{type(conversation).__name__}.step raised on each of the first {self._failed} "
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
        """Do nothing: all resources belong to conversations, which ``end`` closes."""

    def _message(self, turn: Turn) -> ChatMessage | str:
        """Convert the response to an assistant message. Return an error text for the policy if a tool call in
        the response cannot be parsed."""
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
    """Format an exception as its class, its text and the line that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    # Escape lone surrogates, because writing them to a UTF-8 log would fail.
    text = _text_of(error)[:_LONGEST_TOLD].encode("utf-8", "backslashreplace").decode()
    return f"{type(error).__name__}: {text} ({frame.filename}:{frame.lineno})"


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    # The `__str__` of a user's exception may itself raise, which must not end the run.
    except Exception as another:
        return f"(its text fails: {type(another).__name__})"


def _answers_to(message: ChatMessage, text: str) -> Sequence[ChatMessage]:
    """Wrap a text as the reply of every tool that the message calls, or as a user message if it calls
    none."""
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
