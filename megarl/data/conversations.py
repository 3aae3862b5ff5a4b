"""Token ids of complete conversations, and the spans of the assistant's turns in them.

The ids come from a single tokenization of the rendered conversation, so no text is trained on that the
template would render differently. The assistant's turns are located in the rendered text as character spans:

* A turn starts where the rendering of the preceding turns ends, as it does when a response is generated. A
  template may render a turn differently once others follow (Qwen3 drops reasoning, Phi ends the last turn
  differently). Then the turn starts after the header that the template writes between the previous message
  and a generated response.
* A turn includes the token with which the template ends it. If generation does not stop at that token, as
  with Harmony's ``<|end|>``, the token has no loss.

To locate a message, the conversation is rendered again with a mark in place of the message: the text after
the mark is the text after the message.
"""

from __future__ import annotations

import bisect
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from megarl.data.chat_template import ChatTemplate
from megarl.errors import RecordError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.data.messages import ChatMessage, ToolCall, ToolDeclaration

# Field names of reasoning in DeepSeek's API, in vLLM, and in Harmony's template.
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_REASONING_MARK = re.compile(r"\s*[<\[|/]+(?:start_|begin_of_)?th(?:ink|ought)", re.IGNORECASE)
_SHOWN = 40
# A content with at least this many characters hardly occurs in the rendered text by chance.
_TELLING = 16


@dataclass(frozen=True, slots=True)
class EncodedConversation:
    """A tokenized conversation for training.

    Attributes:
        ids: token ids.
        targets: token spans [start, end) of the assistant's turns, disjoint and in order.
        dropped_reasoning: number of turns whose reasoning the template omits, because a user turn follows.
    """

    ids: list[int]
    targets: list[tuple[int, int]]
    dropped_reasoning: int = 0


@dataclass(frozen=True, slots=True)
class ConversationEncoder:
    """Tokenizes conversations with a chat template.

    Attributes:
        tokenizer: tokenizer from ``get_tokenizer``.
        template: the tokenizer's chat template.
        stop_tokens: token ids that end a generated response.
        leading_tokens: token ids (BOS) that precede every text.
    """

    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate
    stop_tokens: frozenset[int]
    leading_tokens: list[int]

    def led(self, ids: list[int]) -> list[int]:
        """Prepend the leading tokens (BOS) unless the ids already start with them. A chat template may write
        BOS itself, and models are trained with exactly one."""
        leading = self.leading_tokens
        return ids if ids[: len(leading)] == leading else leading + ids

    def encode(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolDeclaration], origin: str
    ) -> EncodedConversation:
        """Tokenize a conversation, and locate the assistant's turns.

        If the template has ``{% generation %}`` marks, these define the targets.

        Args:
            messages: messages of any roles; the last one is the assistant's.
            tools: tools that the template shows.
            origin: location of the record, for error messages.

        Raises:
            RecordError: the template fails, omits part of what the assistant says, or the position of a turn
                is ambiguous.
        """
        spoken = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        if self.template.marks_turns:
            return self._by_marks(messages, tools, origin, spoken)
        whole = _Whole(self.template, messages, tools, origin)
        # Tokenize the text as a whole: tokens at borders differ if parts are tokenized separately.
        text = _TokenizedText.of(self.tokenizer, whole.text, origin)
        spans, dropped = list[tuple[int, int]](), 0
        floor = 0
        for place in spoken:
            start = whole.start_of_turn(place)
            # Overlapping turns mean that a position was found wrongly. Training on them would train on user
            # text.
            if start < floor:
                raise whole.fault(place, "begins before the end of the turn before it")
            first, end, over = self._tokens_of_turn(whole, text, place, start)
            dropped += not is_reasoning_written(messages, place, whole.text[start:over], origin)
            spans.append((first, end))
            floor = over
        ids = list(text.ids)
        self._close(ids, spans)
        _check_spans(spans, origin)
        led = self.led(ids)
        shift = len(led) - len(ids)
        return EncodedConversation(led, [(start + shift, end + shift) for start, end in spans], dropped)

    def _close(self, ids: list[int], spans: list[tuple[int, int]]) -> None:
        """Append a stop token to the last turn, if the template does not write one after it."""
        first, end = spans[-1]
        if end > first and ids[end - 1] in self._all_stops:
            return
        # Drop white space after the turn, which a model would not generate before it stops.
        del ids[end:]
        ids.append(self._closing_token)
        spans[-1] = (first, len(ids))

    @property
    def _all_stops(self) -> frozenset[int]:
        return self.stop_tokens | set(self.template.stop_tokens)

    @property
    def _closing_token(self) -> int:
        token = self.tokenizer.eos_token_id
        assert isinstance(token, int)
        return token

    def _tokens_of_turn(
        self, whole: _Whole, text: _TokenizedText, place: int, start: int
    ) -> tuple[int, int, int]:
        """Return the index of a turn's first token, the index after its last token, and the character offset
        of its end."""
        first = text.first_token_saying(whole.text, start)
        said = whole.end_of_said(place, start)
        bound = whole.start_of_content(place + 1)
        if said > bound:
            raise whole.fault(place, "is written again after the next message, so its end is unknown")
        stops = self._all_stops
        token = text.first_token_from(said)
        while token < len(text.ids) and text.starts[token] < bound:
            if text.ids[token] in stops:
                return first, token + 1, text.starts[token]
            token += 1
        # Without an end token, the turn ends where the template's own text for it ends.
        end = whole.end_of_turn(place, said)
        return first, text.last_token_up_to(end), end

    def _by_marks(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolDeclaration],
        origin: str,
        spoken: Sequence[int],
    ) -> EncodedConversation:
        ids, mask = self.template.encode_marked(messages, tools, origin)
        spans = list(_runs_of_ones(mask))
        # A span that starts at the first token leaves no prompt, which an example needs.
        if not spans or len(spans) > len(spoken) or spans[0][0] == 0:
            raise RecordError(
                f"{origin}: the conversation has {len(spoken)} turns of the assistant, in the text of the "
                f"chat template {len(spans)} were "
                "found. Fix: correct the marks {% generation %} of policy.tokenizer.chat_template"
            )
        texts = [self.tokenizer.decode(ids[start:end], skip_special_tokens=False) for start, end in spans]
        dropped = 0
        if len(spans) == len(spoken):
            for place, text in zip(spoken, texts, strict=True):
                dropped += not is_reasoning_written(messages, place, text, origin)
        elif not _are_said_in_order(texts, [messages[place] for place in spoken]):
            raise RecordError(
                f"{origin}: the chat template marks {len(spans)} texts, the conversation has "
                f"{len(spoken)} turns of the assistant, and not all marked texts are such turns; "
                f"the first marked text is {texts[0][:_SHOWN]!r}. Fix: correct the marks {{% "
                "generation %} of policy.tokenizer.chat_template"
            )
        for number, (start, end) in enumerate(spans):
            # Include the end token: marks are often put around the content alone, and a model that never
            # learns the end of a turn does not stop.
            if end < len(ids) and ids[end - 1] not in self._all_stops and ids[end] in self._all_stops:
                spans[number] = start, end + 1
        return EncodedConversation(ids, spans, dropped)


def _are_said_in_order(texts: Sequence[str], turns: Sequence[ChatMessage]) -> bool:
    """Return whether each marked text contains the content of an assistant turn, in order. A template may
    mark only some turns."""
    left = iter(turns)
    for text in texts:
        written = _joined(text)
        # Each search starts after the turn that the previous one found.
        if not any(_joined(visible_text(turn)) in written for turn in left):
            return False
    return True


def _runs_of_ones(mask: Sequence[int]) -> Iterator[tuple[int, int]]:
    start = None
    for place, marked in enumerate([*mask, 0]):
        if marked and start is None:
            start = place
        elif not marked and start is not None:
            yield start, place
            start = None


def _check_spans(spans: Sequence[tuple[int, int]], origin: str) -> None:
    """Check that no span is empty, overlaps another or is out of order.

    Raises:
        RecordError: one is.
    """
    before = 0
    for number, (start, end) in enumerate(spans, 1):
        if not before <= start < end:
            raise RecordError(
                f"{origin}: the assistant's turn {number} of {len(spans)} has no tokens of its own in the "
                "text of the chat template. "
                "Fix: give policy.tokenizer.chat_template a template that writes it, or take the turn out "
                "of the record"
            )
        before = end


@dataclass(frozen=True, slots=True)
class _TokenizedText:
    """Token ids of a text with their character offsets.

    Attributes:
        ids: token ids.
        starts, ends: offset of each token's first character, and the offset after its last one.
    """

    ids: Sequence[int]
    starts: Sequence[int]
    ends: Sequence[int]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, text: str, origin: str) -> _TokenizedText:
        if not tokenizer.is_fast:
            return cls._by_prefixes(tokenizer, text, origin)
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        starts, ends = list[int](), list[int]()
        for start, end in found["offset_mapping"]:
            # A token without characters (an inserted space) starts where the token before it ends.
            starts.append(start if end > start or not starts else max(start, starts[-1]))
            ends.append(end)
        return cls(list(found["input_ids"]), starts, ends)

    @classmethod
    def _by_prefixes(cls, tokenizer: PreTrainedTokenizerBase, text: str, origin: str) -> _TokenizedText:
        """Do what ``of`` does for a tokenizer without offsets: count the characters of each token by decoding
        prefixes.

        Raises:
            RecordError: the tokens do not decode to the text.
        """
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        # Decode prefixes: a single token may be part of a character, or lose its space when decoded alone.
        ends = [len(tokenizer.decode(ids[: number + 1], **options)) for number in range(len(ids))]
        if tokenizer.decode(ids, **options) != text:
            raise RecordError(
                f"{origin}: the tokens of the conversation do not decode to its text, and this "
                "tokenizer gives no offsets, so the tokens of the assistant are unknown. Fix: use "
                "a fast tokenizer (tokenizer.json)"
            )
        return cls(ids, [0, *ends[:-1]], ends)

    def first_token_from(self, character: int) -> int:
        """Return the index of the first token that starts at or after a character offset."""
        return bisect.bisect_left(self.starts, character)

    def first_token_saying(self, text: str, character: int) -> int:
        """Return the index of the first token that contains a visible character at or after a character
        offset.

        It may start before the offset: if a prompt ends with a space (``Assistant: ``), the space and the
        first word of the response are often one token.
        """
        token = self.first_token_from(character)
        while token and text[character : self.ends[token - 1]].strip():
            token -= 1
        return token

    def last_token_up_to(self, character: int) -> int:
        """Return the index after the last token that ends at or before a character offset."""
        return bisect.bisect_right(self.ends, character)


class _Whole:
    """A rendered conversation, in which messages can be located."""

    def __init__(
        self,
        template: ChatTemplate,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolDeclaration],
        origin: str,
    ) -> None:
        self.template, self.messages, self.tools, self.origin = template, messages, tools, origin
        self.text = self._render(messages)
        # Cached, because each entry takes one rendering of the whole conversation.
        self._around_marks: dict[int, tuple[str, str] | None] = {}

    def _render(self, messages: Sequence[ChatMessage], *, for_generation: bool = False) -> str:
        return self.template.render(messages, self.tools, self.origin, for_generation=for_generation)

    @cached_property
    def _mark(self) -> str:
        mark = "mark7here"
        # A conversation may contain the mark itself; a random one then takes its place.
        while mark in self.text:
            mark = f"mark{os.urandom(8).hex()}here"
        return mark

    def start_of_turn(self, place: int) -> int:
        """Return the offset at which an assistant turn starts, after everything that the template writes
        before a generated response.

        Raises:
            RecordError: the offset is ambiguous.
        """
        prompt = self._render(self.messages[:place], for_generation=True)
        # Usual case: earlier turns are rendered the same when others follow.
        if self.text.startswith(prompt):
            return len(prompt)
        after = self._end_of_content(place - 1)
        marked = self._render([*self.messages[: place - 1], self._with_mark(place - 1)], for_generation=True)
        if after is None or self._mark not in marked:
            raise self.fault(
                place, "is written differently when other turns follow, so its tokens are unknown"
            )
        header = marked.rpartition(self._mark)[2]
        shared = shared_length(self.text[after:], header)
        if shared < len(header):
            shared = self.template.last_boundary(header[:shared])
            if not _is_prefill(header[:shared], header[shared:]):
                return self._end_of_header(place, after, header[shared:], self.text[after + shared :])
        return after + shared

    def _end_of_header(self, place: int, after: int, expected: str, found: str) -> int:
        """Return the offset after the header that the template writes before a generated response, if the
        header occurs exactly once after the preceding message.

        This is needed if a template ends the preceding message differently once others follow (Hermes: a line
        feed after tool results).

        Raises:
            RecordError: it does not occur exactly once; the message shows the expected and the found text.
        """
        before = self.messages[:place]
        plain = self._render(before, for_generation=False)
        prompt = self._render(before, for_generation=True)
        # Render with and without the generation prompt: the difference is what the template adds before a
        # response.
        header = prompt.removeprefix(plain)
        opened = _REASONING_MARK.search(header)
        if opened and "</" not in header[opened.start() :] and header not in self.text[after:]:
            header = header[: opened.end() - len(opened[0].lstrip())]
        other = self._with_mark(place)
        if other.get("tool_calls"):
            other = {
                **other,
                "tool_calls": [with_arguments(call, {"key": self._mark}) for call in other["tool_calls"]],
            }
        between = self.text[after : shared_length(self.text, self._text_with(place, other))]
        if header == prompt or not header.strip() or between.count(header) != 1:
            raise self.fault(
                place,
                (
                    f"begins with {found[:_SHOWN]!r} in the conversation, but a generated turn "
                    f"follows {expected[-_SHOWN:]!r}"
                ),
            )
        return after + between.index(header) + len(header)

    def end_of_said(self, place: int, start: int) -> int:
        """Return an offset after everything that an assistant message says, but before the end of its turn.

        Raises:
            RecordError: the template does not write the message.
        """
        calls = self.messages[place].get("tool_calls")
        found = self._end_of_calls(place) if calls else None
        if found is None and not (calls and arguments_of(calls[-1])):
            found = self._end_of_content(place)
        if found is None or found < start:
            raise self.fault(
                place, "is not written by the template, or is written differently when other turns follow"
            )
        around = self._around_marks.get(place)
        if around is not None and self._mark in around[0]:
            raise self.fault(place, "is written more than once by the template, so its end is unknown")
        return found

    def start_of_content(self, place: int) -> int:
        """Return the offset at which a message's content starts, or the end of the text if there is no such
        message."""
        if place >= len(self.messages):
            return len(self.text)
        found = self._only_place_of(place)
        if found is not None:
            return found
        around = self._around_mark(place)
        if around is None or not self.text.startswith(around[0]):
            raise self.fault(place - 1, "is followed by a message that the template changes")
        return len(around[0])

    def end_of_turn(self, place: int, said: int) -> int:
        """Return the offset at which a turn without an end token ends."""
        if place == len(self.messages) - 1:
            return len(self.text)
        alone = self._render(self.messages[: place + 1])
        return len(alone) if self.text.startswith(alone) else said

    def _end_of_content(self, place: int) -> int | None:
        found = self._only_place_of(place)
        if found is not None:
            return found + len(self.messages[place]["content"])
        around = self._around_mark(place)
        return (
            len(self.text) - len(around[1]) if around is not None and self.text.endswith(around[1]) else None
        )

    def _only_place_of(self, place: int) -> int | None:
        """Return the offset of a message's content if it occurs exactly once in the text, else None. This
        saves another rendering.

        Contents with surrounding white space are excluded, because the template may have added it; so are
        short contents, which may occur by chance.
        """
        content = self.messages[place].get("content") or ""
        is_telling = len(content) >= _TELLING and content == content.strip()
        return self.text.find(content) if is_telling and self.text.count(content) == 1 else None

    def _end_of_calls(self, place: int) -> int | None:
        """Return the offset from which the text no longer depends on the arguments of the last tool call.
        Return None if the template does not write them exactly once."""
        *calls, last = self.messages[place]["tool_calls"]
        marked = self._text_with(
            place, {**self.messages[place], "tool_calls": [*calls, with_arguments(last, {"key": self._mark})]}
        )
        if marked.count(self._mark) != 1:
            return None
        behind = marked.rpartition(self._mark)[2]
        shared = shared_length(self.text[::-1], behind[::-1])
        return len(self.text) - shared

    def _around_mark(self, place: int) -> tuple[str, str] | None:
        """Render with a mark in place of a message's content. Return the text before and after the mark, or
        None if the template omits it."""
        if place not in self._around_marks:
            before, mark, behind = self._text_with(place, self._with_mark(place)).rpartition(self._mark)
            self._around_marks[place] = (before, behind) if mark else None
        return self._around_marks[place]

    def _text_with(self, place: int, message: ChatMessage) -> str:
        return self._render([*self.messages[:place], message, *self.messages[place + 1 :]])

    def _with_mark(self, place: int) -> ChatMessage:
        return {**self.messages[place], "content": self._mark}

    def fault(self, place: int, what: str) -> RecordError:
        """Build the error for an assistant turn."""
        return _fault(self.origin, place, len(self.messages), what)


def _fault(origin: str, place: int, turns: int, what: str) -> RecordError:
    return RecordError(
        f"{origin}: turn {place + 1} of {turns}, the assistant's, {what}. Fix: give "
        "policy.tokenizer.chat_template a template that writes "
        "it, or one that marks what the assistant says by {% generation %}, or leave such records out by "
        "data.on_bad_record=skip"
    )


def is_reasoning_written(messages: Sequence[ChatMessage], place: int, text: str, origin: str) -> bool:
    """Return whether the template wrote the reasoning of an assistant turn. True if the turn has none.

    Templates omit the reasoning of earlier turns on purpose; everything else that is trained on must be
    written.

    Args:
        messages: the conversation.
        place: index of the assistant's message.
        text: the template's text for that message.
        origin: location of the record, for error messages.

    Raises:
        RecordError: the template omits the turn's content, its tool calls, or reasoning that no user turn
            follows.
    """
    message, written = messages[place], _joined(text)
    visible = visible_text(message)
    if _joined(visible) not in written:
        raise _fault(
            origin, place, len(messages), f"says {visible[:_SHOWN]!r}, but the template does not write it"
        )
    for name, values in _calls_of(message):
        for each in (name, *values):
            if not _is_written(each, written):
                given = "" if each is name else f" with {each[:_SHOWN]!r}"
                what = f"calls the tool {name!r}{given}, but the template does not write it"
                raise _fault(origin, place, len(messages), what)
    reasoning = reasoning_of(message)
    if _joined(reasoning) in written:
        return True
    if not any(each["role"] == "user" for each in messages[place:]):
        raise _fault(
            origin,
            place,
            len(messages),
            f"has the reasoning {reasoning.strip()[:_SHOWN]!r}, but the template leaves it out",
        )
    return False


def _is_prefill(shared: str, left_out: str) -> bool:
    """Return whether a turn differs from a generated one only by an opened reasoning block.

    Templates of reasoning models open a generated response with ``<think>``, and omit this in turns without
    reasoning.

    Args:
        shared: common prefix of both texts.
        left_out: continuation that only the generated turn has.
    """
    is_inside_block = "<think>" in shared.rpartition("</think>")[2] and "</think>" in left_out
    return not is_inside_block and _REASONING_MARK.match(left_out) is not None


def shared_length(first: str, second: str) -> int:
    """Return the length of the common prefix of two texts."""
    # Bisection over slices; a loop over characters would take seconds for long conversations.
    alike, bound = 0, min(len(first), len(second))
    while alike < bound:
        middle = (alike + bound + 1) // 2
        if first[alike:middle] == second[alike:middle]:
            alike = middle
        else:
            bound = middle - 1
    return alike


def visible_text(message: ChatMessage) -> str:
    """Return the content of an assistant message after its reasoning."""
    return str(message.get("content") or "").rpartition("</think>")[2].strip()


def reasoning_of(message: ChatMessage) -> str:
    """Return the reasoning of a message, from a separate field or from a ``<think>`` block in its content."""
    for name in _REASONING_FIELDS:
        if isinstance(message.get(name), str):
            return str(message[name])
    inside = str(message.get("content") or "").rpartition("</think>")[0]
    return inside.rpartition("<think>")[2]


def with_arguments(call: ToolCall, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a tool call with its arguments replaced."""
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": {**call["function"], "arguments": arguments}}
    return {**call, "arguments": arguments}


def arguments_of(call: ToolCall) -> Any:
    """Return the arguments of a tool call. JSON text is parsed; a text that is not JSON is returned
    unchanged, because a template may write it as it is."""
    function = call["function"] if isinstance(call.get("function"), Mapping) else call
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments


def _calls_of(message: ChatMessage) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each tool call, and the values of its arguments as texts."""
    for call in message.get("tool_calls") or ():
        function = call["function"] if isinstance(call.get("function"), Mapping) else call
        yield str(function.get("name", "")), list(_leaves(arguments_of(call)))


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for inner in value.values():
            yield from _leaves(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)
    elif isinstance(value, str):
        yield value
    elif value is not None:
        yield json.dumps(value)


def _is_written(value: str, written: str) -> bool:
    """Return whether a rendered text contains a value, unchanged or with JSON escapes. White space is
    ignored."""
    # Jinja prints true and false capitalised, as Python does.
    forms = (value, value.capitalize(), json.dumps(value, ensure_ascii=False)[1:-1], json.dumps(value)[1:-1])
    return any(_joined(form) in written for form in forms)


def _joined(text: str) -> str:
    """Remove all white space, since templates strip and indent texts."""
    return "".join(text.split())
