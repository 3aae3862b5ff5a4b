"""A tokenizer's chat template: rendering of messages, the format of tool calls that it expects, and the
tokens with which it ends a turn."""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import resource
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from converters.files.process import status_bytes
from megarl.data.records import refuse_half_characters
from megarl.errors import DataError, RecordError
from megarl.time_limit import OutOfTimeError, is_limited, time_limit

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.data.messages import ChatMessage, ToolCall, ToolDeclaration


PASSTHROUGH_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Chat template that concatenates the contents of the messages and adds nothing."""

RENDER_SECONDS = 10.0
"""Time limit in seconds for rendering one conversation."""

# Address space in bytes that rendering may add to the process.
_RENDER_BYTES = 4 << 30

_FREE_CHARACTERS, _CHARACTERS_A_CHARACTER = 1 << 20, 100
"""Limit on the length of a rendered text: the first number of characters, plus the second for each character
of its messages and tools."""

# Function with which transformers gives templates the date.
_CLOCK = re.compile(r"\bstrftime_now\b")
_RESULT_MARKS = "<tool_response>", "</tool_response>"
_MARKS_TURNS = re.compile(r"\{%-?\s*generation\s*-?%\}")

# Probe texts of letters and digits, which no template writes by itself, trims or escapes.
PROBE, FOLLOWING, REASONED = "probed1value", "following2turn", "reasoned3text"
ASKED = {"role": "user", "content": "asked0first"}
_NAME, _IDENTIFIER = "look_up", "call00001"


def shows_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template uses the variable ``tools``."""
    return re.search(r"\btools\b", str(tokenizer.chat_template)) is not None


class ChatTemplate:
    """A tokenizer's chat template with the variables of a run.

    Args:
        tokenizer: tokenizer from ``get_tokenizer``.
        values: variables for the template, such as ``enable_thinking``.
        date: fixed date for ``strftime_now``; None for the current time.

    Raises:
        DataError: the template does not use one of the variables.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        values: Mapping[str, Any] | None = None,
        date: datetime.date | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._values = dict(values or {})
        self.text = str(tokenizer.chat_template)
        for name in self._values:
            if re.search(rf"\b{re.escape(name)}\b", self.text) is None:
                raise DataError(
                    f"policy.tokenizer.chat_template_kwargs.{name}: the chat template does not read it, so "
                    "that it would do nothing; the "
                    f"template begins {self.text[:60]!r}. Fix: remove it, or correct its name"
                )
        # A variable passed to the call hides transformers' own function of the same name.
        self._clock = {"strftime_now": date.strftime} if date is not None and self.reads_clock else {}
        self._date = date if self._clock else None

    @property
    def is_passthrough(self) -> bool:
        """True if the template only concatenates the contents of messages."""
        return self.text == PASSTHROUGH_TEMPLATE

    @property
    def reads_clock(self) -> bool:
        """True if the output depends on the date."""
        return reads_clock(self.text)

    @property
    def marks_turns(self) -> bool:
        """True if the template marks assistant turns with ``{% generation %}``."""
        return _MARKS_TURNS.search(self.text) is not None

    @property
    def identity(self) -> list[Any]:
        """All inputs of the rendered text other than the messages, as JSON types, for cache keys."""
        return [self.text, self._values, None if self._date is None else self._date.isoformat()]

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolDeclaration] = (),
        origin: str = "the conversation",
        *,
        for_generation: bool = False,
    ) -> str:
        """Render messages to text.

        Args:
            messages: messages as in a record; tool calls are converted to the format that the template
                expects.
            tools: tools that the template shows.
            origin: location of the record, for error messages.
            for_generation: add the header of the assistant's next turn.

        Raises:
            DataError: the template fails, exceeds ``RENDER_SECONDS`` or 4 GiB, or writes far more than its
                input.
        """
        options = {"tokenize": False, "add_generation_prompt": for_generation}
        text = str(self._apply(messages, tools, origin, options))
        if len(text) > _FREE_CHARACTERS:
            given = sum(len(str(each)) for each in (*messages, *tools))
            if len(text) > _FREE_CHARACTERS + _CHARACTERS_A_CHARACTER * given:
                raise RecordError(
                    f"{origin}: policy.tokenizer.chat_template writes {len(text)} characters for messages "
                    f"and tools of {given}; it begins "
                    f"{self.text[:60]!r}. Fix: correct the template, or leave the record out"
                )
        refuse_half_characters(text, "messages", origin)
        return text

    def encode_marked(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolDeclaration], origin: str
    ) -> tuple[list[int], list[int]]:
        """Return the token ids of a conversation, and a mask that is 1 on tokens inside ``{% generation %}``.
        Errors are those of ``render``."""
        options = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
        found = self._apply(messages, tools, origin, options)
        return list(found["input_ids"]), list(found["assistant_masks"])

    def _apply(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolDeclaration],
        origin: str,
        options: Mapping[str, Any],
    ) -> Any:
        given = [self._with_calls(message, origin) for message in messages]
        try:
            return self._call(given, tools, options)
        except OutOfTimeError:
            raise RecordError(
                f"{origin}: policy.tokenizer.chat_template took more than {RENDER_SECONDS:g} s for "
                f"{len(given)} messages; it begins "
                f"{self.text[:60]!r}. Fix: correct the template, or leave the record out"
            ) from None
        # A template is a program that may fail in any way.
        except (Exception, MemoryError) as error:
            where = self._failing_turn(given, tools, options) if len(given) > 1 else ""
            raise RecordError(
                f"{origin}: policy.tokenizer.chat_template cannot be applied{where} "
                f"({type(error).__name__}: {error}); it begins "
                f"{self.text[:60]!r}. Fix: correct the template or the record, or write null to join the "
                "messages as they are"
            ) from error

    def _call(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolDeclaration], options: Mapping[str, Any]
    ) -> Any:
        further = {"tools": list(map(dict, tools))} if tools else {}
        with _bounded():
            return self._tokenizer.apply_chat_template(
                list(map(dict, messages)), **options, **further, **self._clock, **self._values
            )

    def _failing_turn(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolDeclaration], options: Mapping[str, Any]
    ) -> str:
        """Describe the turn at which the template fails, for a message: the one after the longest prefix that
        can be rendered."""
        place = len(messages) - 1
        while place > 0:
            try:
                self._call(messages[:place], tools, options)
                break
            # OutOfTimeError does not derive from Exception, so that libraries cannot swallow it.
            except (Exception, OutOfTimeError):
                place -= 1
        return f" to turn {place + 1} of {len(messages)}, of {messages[place]['role']!r}"

    def _with_calls(self, message: ChatMessage, origin: str) -> ChatMessage:
        """Convert the tool calls and results in a message to the format that the template expects."""
        if message["role"] == "tool" and "<tool_response>" in self.text:
            # Hermes-style data already contain the marks, which the template would write a second time.
            content, (opening, closing) = str(message.get("content")).strip(), _RESULT_MARKS
            if not (content.startswith(opening) and content.endswith(closing)):
                return message
            return {**message, "content": content[len(opening) : -len(closing)].strip()}
        calls = message.get("tool_calls")
        if not calls:
            return message
        shaped = {**message, "tool_calls": [self._shaped_call(call, origin) for call in calls]}
        if message.get("content") is None and self._writes_none:
            shaped["content"] = ""
        return shaped

    def _shaped_call(self, call: Any, origin: str) -> Any:
        if not isinstance(call, Mapping):
            return call
        if isinstance(call.get("function"), Mapping):
            return {**call, "function": self._shaped_call(call["function"], origin)}
        if "arguments" not in call:
            return dict(call)
        return {**call, "arguments": self._shaped_arguments(call, origin)}

    def _shaped_arguments(self, call: ToolCall, origin: str) -> Any:
        given = call["arguments"]
        if self._wants_text:
            return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        if not isinstance(given, str):
            return given
        what = f"{origin}: the arguments {given[:60]!r} of the tool call {call.get('name')!r}"
        try:
            # An empty text means no arguments.
            parsed = json.loads(given or "{}")
        except (ValueError, RecursionError) as error:
            raise RecordError(f"{what} are no JSON: {error}. Fix: write a JSON object") from error
        if not isinstance(parsed, dict):
            raise RecordError(f"{what} are no JSON object. Fix: write a JSON object")
        return parsed

    @cached_property
    def _wants_text(self) -> bool:
        """True if the template expects the arguments of a tool call as JSON text (as DeepSeek's does) rather
        than as an object."""
        as_object = self._probe(_call_turn({"key": PROBE}))
        # A dictionary's repr in the output shows that the template expected text.
        if as_object is not None and PROBE in as_object and f"'{PROBE}'" not in as_object:
            return False
        as_text = self._probe(_call_turn(json.dumps({"key": PROBE})))
        return as_text is not None and PROBE in as_text

    @cached_property
    def _writes_none(self) -> bool:
        """True if the template fails on a tool call without content, or writes the word None for it."""
        turn = self.call_of(PROBE)
        with_none = self._probe({**turn, "content": None})
        return self._probe(turn) is not None and (with_none is None or "None" in with_none)

    def _probe(self, *turns: ChatMessage) -> str | None:
        """Render a user turn followed by these turns. Return None if the template cannot."""
        try:
            return str(self._call([ASKED, *turns], (), {"tokenize": False, "add_generation_prompt": False}))
        except (Exception, OutOfTimeError):
            return None

    @cached_property
    def stop_tokens(self) -> tuple[int, ...]:
        """Token ids with which the template ends the assistant's last turn, with and without a tool call.
        Empty if it writes none.

        They are found by rendering short conversations. A token that ends an earlier turn does not count:
        Harmony's ``<|end|>``, for example, does not stop generation.
        """
        if self.is_passthrough:
            return ()
        said = {"role": "assistant", "content": PROBE}
        last = self._specials_after(self._probe(said))
        followed = self._probe(said, {"role": "user", "content": FOLLOWING})
        if followed is not None:
            between = followed.rpartition(FOLLOWING)[0]
            if last:
                # Keep the tokens that both ends share: Command A closes a response and then the turn, whereas
                # Phi ends the turn, and then the text if no turn follows.
                shared = list[int]()
                for token, other in zip(last, self._specials_after(between), strict=False):
                    if token != other:
                        break
                    shared.append(token)
                last = shared or last[:1]
            else:
                # GLM writes no end of a turn: its models stop at the mark of the next role, which directly
                # follows the turn.
                last = self._specials_after(between)[:1]
                if last and not self._follows_directly(between, last[0]):
                    last = []
        last = last[-1:]
        call = self._probe(self.call_of(PROBE))
        return tuple(dict.fromkeys([*last, *self._specials_after(call)[-1:]]))

    def _specials_after(self, text: str | None) -> list[int]:
        """Return the ids of the special tokens that follow the probe in a rendered text."""
        if text is None or PROBE not in text:
            return []
        rest = text.rpartition(PROBE)[2]
        ids = self._tokenizer(rest, add_special_tokens=False)["input_ids"]
        special = special_ids(self._tokenizer)
        return [number for number in ids if number in special]

    def _follows_directly(self, text: str, token: int) -> bool:
        """Return whether a token directly follows the probe, so that nothing else can end the turn."""
        rest = text.rpartition(PROBE)[2]
        return rest.lstrip().startswith(str(self._tokenizer.convert_ids_to_tokens(token)))

    def last_boundary(self, text: str) -> int:
        """Return the end of the last special token, markup tag or white space in a text; 0 if there is none.

        The common prefix of two rendered texts may end inside a token, such as ``<t`` for ``<think>`` and
        ``<tool_call>``. This finds the last safe position.
        """
        end = 0
        for match in self._markup.finditer(text):
            end = match.end()
        return end

    @cached_property
    def _markup(self) -> re.Pattern[str]:
        # Longest first: a pattern takes the first alternative that matches, and one token may be a prefix of
        # another.
        added = sorted(map(str, self._tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
        return re.compile("|".join([*map(re.escape, filter(None, added)), r"\s+"]))

    def call_of(self, value: str, names: Sequence[tuple[str, str]] = ((_NAME, _IDENTIFIER),)) -> ChatMessage:
        """Build an assistant turn that calls tools, in the format that the template expects.

        Args:
            value: value of each call's only argument.
            names: name of each tool, and the id of its call.
        """
        arguments: Any = {"key": value}
        return _call_turn(json.dumps(arguments) if self._wants_text else arguments, names)

    def writes_responses(self) -> bool:
        """Return whether the template renders assistant turns. Templates for prompts only do not."""
        return PROBE in (self._probe({"role": "assistant", "content": PROBE}) or "")


def _call_turn(arguments: Any, names: Sequence[tuple[str, str]] = ((_NAME, _IDENTIFIER),)) -> dict[str, Any]:
    calls = [
        {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}
        for name, number in names
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def reads_clock(template: str) -> bool:
    """Return whether a template's output depends on the date of rendering."""
    return _CLOCK.search(template) is not None


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of all special tokens, including those that only a template writes."""
    added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(tokenizer.all_special_ids))


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    """Limit the time and memory of a template, which is untrusted code that comes with a model.

    The address space limit applies to the whole process while the context is active. It is far above the
    current size, so that other threads do not reach it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = status_bytes("VmSize") + _RENDER_BYTES
    # Only lower the limit: a stricter one may already be set.
    lowers = soft == resource.RLIM_INFINITY or wanted < soft
    if lowers:
        resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
    try:
        # No nested time limit: a process has a single alarm, which the end of the inner limit would cancel.
        with contextlib.nullcontext() if is_limited() else time_limit(RENDER_SECONDS):
            yield
    finally:
        if lowers:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
