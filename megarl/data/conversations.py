"""Token ids of whole conversations, and the spans of them that the assistant says.

The ids come from one tokenization of the chat template's text for the whole conversation, so nothing is
trained
on that the template would write differently. The assistant's turns are found in that text as spans of
characters:

* A turn begins where the template's text for the preceding turns ends, as when a response is generated. A
  template may rewrite turns once others follow (Qwen3 drops reasoning, Phi ends the last turn differently).
  Then the turn begins after the text that the template writes between the previous message and a generated
  response.
* It includes the token with which the template ends the turn. If generation does not stop at that token, such
  as Harmony's ``<|end|>``, the token is not learned.

A message's part of the text is found by rendering the conversation once more with a mark in its place: the
text
after the mark is the text after the message.
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

from megarl.data.chat_template import ChatMessage, ChatTemplate
from megarl.errors import RecordError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Names of the field in DeepSeek's API, in vLLM and in Harmony's template.
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
_REASONING_MARK = re.compile(r"\s*[<\[|/]+(?:start_|begin_of_)?th(?:ink|ought)", re.IGNORECASE)
_SHOWN = 40
# Minimum length in characters of a content that identifies its position in the rendered text.
_TELLING = 16


@dataclass(frozen=True, slots=True)
class EncodedConversation:
    """A whole conversation as a model is trained on it.

    Attributes:
        ids: its tokens.
        targets: spans [start, end) of the tokens that the assistant says: disjoint, in order.
        dropped_reasoning: turns whose reasoning the template leaves out, because a later user's turn follows.
    """

    ids: list[int]
    targets: list[tuple[int, int]]
    dropped_reasoning: int = 0


@dataclass(frozen=True, slots=True)
class ConversationEncoder:
    """Encodes conversations with a chat template.

    Attributes:
        tokenizer: from ``get_tokenizer``.
        template: of the tokenizer.
        stop_tokens: ids that end a response when it is generated.
        leading_tokens: tokens before every text.
    """

    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate
    stop_tokens: frozenset[int]
    leading_tokens: list[int]

    def led(self, ids: list[int]) -> list[int]:
        """Return the tokens of a text with those that begin every text, unless it begins with them: a text
        that a template rendered has its own begin token, and a model knows only one."""
        leading = self.leading_tokens
        return ids if ids[: len(leading)] == leading else leading + ids

    def encode(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], origin: str
    ) -> EncodedConversation:
        """Return the tokens of a conversation and the spans that the assistant says.

        If the template has ``{% generation %}`` marks, they define the targets.

        Args:
            messages: of any roles; the last one is the assistant's.
            tools: given to the template.
            origin: names the record in errors.

        Raises:
            RecordError: the template cannot be applied, leaves out what a turn says, or the positions of
                turns are ambiguous.
        """
        spoken = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        if self.template.marks_turns:
            return self._by_marks(messages, tools, origin, spoken)
        whole = _Whole(self.template, messages, tools, origin)
        # Encode the whole text at once: parts that are encoded separately have other tokens at their borders.
        text = _TokenizedText.of(self.tokenizer, whole.text, origin)
        spans, dropped = list[tuple[int, int]](), 0
        floor = 0
        for place in spoken:
            start = whole.start_of_turn(place)
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
        """End the last turn with a token at which generation stops, if the template writes none after it."""
        first, end = spans[-1]
        if end > first and ids[end - 1] in self._all_stops:
            return
        # White space after the turn, such as a line feed, is not part of what a model generates before it
        # stops.
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
        """Return the first token of a turn, the token after its last one, and where its text ends."""
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
        # No token ends the turn, so that its text reaches to where the template's own text of the turn ends.
        end = whole.end_of_turn(place, said)
        return first, text.last_token_up_to(end), end

    def _by_marks(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        origin: str,
        spoken: Sequence[int],
    ) -> EncodedConversation:
        ids, mask = self.template.encode_marked(messages, tools, origin)
        spans = list(_runs_of_ones(mask))
        # A span that begins at the first token leaves no prompt, and an example needs one.
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
    """Return whether each text is the content of one of the assistant's turns; a template may mark only some
    of them."""
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
    """Refuse spans that are empty, overlap or are out of order."""
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
    """The tokens of a text.

    Attributes:
        ids: token ids.
        starts, ends: first character of each token, and the one after its last.
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
        """Tokenize as ``of`` does with a tokenizer without offsets: the characters of each token are counted
        by decoding.

        Raises:
            RecordError: the tokens do not decode to the text.
        """
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        # Decode prefixes, because a single token may be part of a character, or lose its space when it is
        # decoded alone.
        ends = [len(tokenizer.decode(ids[: number + 1], **options)) for number in range(len(ids))]
        if tokenizer.decode(ids, **options) != text:
            raise RecordError(
                f"{origin}: the tokens of the conversation do not decode to its text, and this "
                "tokenizer gives no offsets, so the tokens of the assistant are unknown. Fix: use "
                "a fast tokenizer (tokenizer.json)"
            )
        return cls(ids, [0, *ends[:-1]], ends)

    def first_token_from(self, character: int) -> int:
        """Return the first token that begins at or after a character."""
        return bisect.bisect_left(self.starts, character)

    def first_token_saying(self, text: str, character: int) -> int:
        """Return the first token that stands for a visible character of the text from ``character`` on.

        If a prompt ends in a space (``Assistant: ``), that space and the first word of the response are often
        one token.
        """
        token = self.first_token_from(character)
        while token and text[character : self.ends[token - 1]].strip():
            token -= 1
        return token

    def last_token_up_to(self, character: int) -> int:
        """Return the position after the last token that ends at or before a character."""
        return bisect.bisect_right(self.ends, character)


class _Whole:
    """The text of a whole conversation, and the positions of its messages in it."""

    def __init__(
        self,
        template: ChatTemplate,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]],
        origin: str,
    ) -> None:
        self.template, self.messages, self.tools, self.origin = template, messages, tools, origin
        self.text = self._render(messages)
        # Cache these, because each one takes a rendering of the whole conversation.
        self._around_marks: dict[int, tuple[str, str] | None] = {}

    def _render(self, messages: Sequence[ChatMessage], *, for_generation: bool = False) -> str:
        return self.template.render(messages, self.tools, self.origin, for_generation=for_generation)

    @cached_property
    def _mark(self) -> str:
        mark = "mark7here"
        while mark in self.text:
            mark = f"mark{os.urandom(8).hex()}here"
        return mark

    def start_of_turn(self, place: int) -> int:
        """Return where the assistant's turn begins, after everything that the template writes before a
        generated response.

        Raises:
            RecordError: the position is ambiguous.
        """
        prompt = self._render(self.messages[:place], for_generation=True)
        # In the usual case the earlier turns are written as they were when this one was generated.
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
        """Return where the text that the template adds before a generated response ends, if it occurs once
        after the preceding message.

        A template may end the preceding message differently if others follow (Hermes: a line feed after the
        results of tools).

        Raises:
            RecordError: it does not; with the expected and the found text.
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
        """Return a character after everything that an assistant's message says, but before the end of its
        turn.

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
        """Return where the content of a message begins, or the end of the text if there is no such
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
        """Return where a turn ends that no token ends."""
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
        """Return where a message's content begins if it occurs once in the text, so that no further rendering
        is needed; else None.

        White space around it might be the template's, and a short content may occur in the text by chance.
        """
        content = self.messages[place].get("content") or ""
        is_telling = len(content) >= _TELLING and content == content.strip()
        return self.text.find(content) if is_telling and self.text.count(content) == 1 else None

    def _end_of_calls(self, place: int) -> int | None:
        """Return the start of the text of tool calls that stays the same when the last argument changes."""
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
        """Return the text that the template writes before and after a mark that replaces a message's content;
        None if the template leaves the mark out."""
        if place not in self._around_marks:
            before, mark, behind = self._text_with(place, self._with_mark(place)).rpartition(self._mark)
            self._around_marks[place] = (before, behind) if mark else None
        return self._around_marks[place]

    def _text_with(self, place: int, message: ChatMessage) -> str:
        return self._render([*self.messages[:place], message, *self.messages[place + 1 :]])

    def _with_mark(self, place: int) -> ChatMessage:
        return {**self.messages[place], "content": self._mark}

    def fault(self, place: int, what: str) -> RecordError:
        """Return the error for a turn of the assistant."""
        return _fault(self.origin, place, len(self.messages), what)


def _fault(origin: str, place: int, turns: int, what: str) -> RecordError:
    return RecordError(
        f"{origin}: turn {place + 1} of {turns}, the assistant's, {what}. Fix: give "
        "policy.tokenizer.chat_template a template that writes "
        "it, or one that marks what the assistant says by {% generation %}, or leave such records out by "
        "data.on_bad_record=skip"
    )


def is_reasoning_written(messages: Sequence[ChatMessage], place: int, text: str, origin: str) -> bool:
    """Return whether the reasoning of a turn, if any, is in its text.

    Args:
        messages: of the conversation.
        place: position of the assistant's message.
        text: the chat template's text for it.
        origin: names the record in errors.

    Raises:
        RecordError: the template left out a part that is to be learned: the turn's content, its tool calls,
            or reasoning that no user's turn follows. Templates leave earlier reasoning out on purpose.
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
    """Return whether a turn differs from a generated one only by an opened block of reasoning.

    Templates of reasoning models begin a response for them (``<think>``), and leave that out of turns without
    reasoning.

    Args:
        shared: common beginning of both.
        left_out: continuation of only the generated one.
    """
    is_inside_block = "<think>" in shared.rpartition("</think>")[2] and "</think>" in left_out
    return not is_inside_block and _REASONING_MARK.match(left_out) is not None


def shared_length(first: str, second: str) -> int:
    """Return the length of the common prefix of two texts."""
    # Compare slices by bisection, because a loop over characters takes seconds for long conversations.
    alike, bound = 0, min(len(first), len(second))
    while alike < bound:
        middle = (alike + bound + 1) // 2
        if first[alike:middle] == second[alike:middle]:
            alike = middle
        else:
            bound = middle - 1
    return alike


def visible_text(message: ChatMessage) -> str:
    """Return what a message of the assistant says after its reasoning."""
    return str(message.get("content") or "").rpartition("</think>")[2].strip()


def reasoning_of(message: ChatMessage) -> str:
    """Return the reasoning of a message, from a field of its own or from a ``<think>`` block in its
    content."""
    for name in _REASONING_FIELDS:
        if isinstance(message.get(name), str):
            return str(message[name])
    inside = str(message.get("content") or "").rpartition("</think>")[0]
    return inside.rpartition("<think>")[2]


def with_arguments(call: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call with other arguments."""
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": {**call["function"], "arguments": arguments}}
    return {**call, "arguments": arguments}


def arguments_of(call: Mapping[str, Any]) -> Any:
    """Return the arguments of a tool call, parsed if they are JSON text. A template that writes them as they
    are needs no JSON."""
    function = call["function"] if isinstance(call.get("function"), Mapping) else call
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments


def _calls_of(message: ChatMessage) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the values of the arguments of each tool call."""
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
    """Return whether a text occurs in another one, unchanged or with the escapes of JSON."""
    # Include the capitalised form, because Jinja prints true and false as Python does.
    forms = (value, value.capitalize(), json.dumps(value, ensure_ascii=False)[1:-1], json.dumps(value)[1:-1])
    return any(_joined(form) in written for form in forms)


def _joined(text: str) -> str:
    """Return a text without white space, which templates strip and indent."""
    return "".join(text.split())
