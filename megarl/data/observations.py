"""Tokenization of an environment's messages as a suffix of the sampled tokens, which are not tokenized again.

The suffix of an observation is the text that the chat template writes after an assistant turn. To find it, a
short conversation is rendered: a mark as the assistant's turn, the observation, and the header of the
assistant's next turn. The text after the mark is tokenized. Sampled tokens usually end with the token that
ends the turn, and the suffix then does not repeat it.

Some templates render an earlier response differently once a user turn follows, without its reasoning. The
next prompt then does not start with the sampled tokens, and ``History`` computes it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megarl.data.chat_template import (
    ASKED,
    FOLLOWING,
    PROBE,
    REASONED,
    ChatTemplate,
    special_ids,
)
from megarl.data.conversations import shared_length
from megarl.data.tokenization import text_encoder
from megarl.errors import DataError, RecordError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.data.messages import ChatMessage, ToolDeclaration

_ORIGIN = "an observation"

# A test content with characters that a template may escape or trim.
_ODD_CONTENT = 'a "b" {c}, [d]\n\n\\e é 你|f: g'

# Limit the frame cache: its keys contain the names and ids of tool calls, and a run makes new ones without
# end.
_MOST_FRAMES = 256


@dataclass(frozen=True, slots=True)
class _Frame:
    """The fixed text and tokens that a template writes around an observation's content.

    Attributes:
        head: tokens before the last special mark that precedes the content.
        before: text from that mark to the content.
        behind: text from the content to the next special mark.
        tail: tokens from that mark on.
    """

    head: list[int]
    before: str
    behind: str
    tail: list[int]

    def around(self, content: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Return the tokens of a content inside the frame."""
        return [*self.head, *encode(f"{self.before}{content}{self.behind}"), *self.tail]


@dataclass(frozen=True, slots=True)
class ObservationEncoder:
    """Tokenizes observations with a chat template.

    Attributes:
        tokenizer: tokenizer from ``get_tokenizer``.
        template: its chat template with the run's variables.
        stop_token_ids: token ids that end a sampled response.
        rewritten: description of how the template changes an earlier response once a user turn follows, such
            as dropping its reasoning; None if responses stay unchanged.
    """

    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate
    stop_token_ids: Collection[int]
    rewritten: str | None = field(init=False)
    _written_roles: set[str] = field(init=False, default_factory=set)
    _frames: dict[tuple[tuple[str, str], ...], _Frame | None] = field(init=False, default_factory=dict)

    _encode: Callable[[str], list[int]] = field(init=False)
    _special: frozenset[int] = field(init=False)
    _marks: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_encode", text_encoder(self.tokenizer))
        object.__setattr__(self, "_special", special_ids(self.tokenizer))
        object.__setattr__(self, "_marks", _marks_of(self.tokenizer))
        object.__setattr__(self, "rewritten", self._find_rewritten())

    def encode(self, messages: Sequence[ChatMessage], last: int | None) -> list[int]:
        """Return the tokens from the end of a response to the start of the next one.

        Args:
            messages: the environment's messages with ``role`` and ``content``.
            last: last token of the response; None for an empty response.

        Raises:
            RecordError: the template cannot write such messages after a response.
        """
        if self.template.is_passthrough:
            return self.tokens("".join(map(_text, messages)))
        ids = self._framed(messages)
        if ids is None:
            for message in messages:
                self.check_role(str(message.get("role")))
            ids = self.tokens(self._behind_response(messages))
        return self._behind_turn(ids, last)

    def check_role(self, role: str) -> None:
        """Check that the template writes messages of a role after a response.

        Raises:
            RecordError: it omits them silently, or cannot write them.
        """
        if role in self._written_roles or self.template.is_passthrough:
            return
        said = {
            "role": role,
            "content": FOLLOWING,
            **({"name": "look_up", "tool_call_id": "call00001"} if role == "tool" else {}),
        }
        if FOLLOWING not in self._behind_response([said]):
            raise RecordError(
                f"policy.tokenizer.chat_template leaves out a turn of {role!r} after a response: "
                f"it begins {self.template.text[:60]!r}. Fix: use the template of a model that is "
                "trained on such turns, or give the turn the role user"
            )
        self._written_roles.add(role)

    def encode_prompt(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolDeclaration], origin: str
    ) -> list[int]:
        """Tokenize a conversation, including the header of the assistant's next turn."""
        return self.tokens(self.template.render(messages, tools, origin, for_generation=True))

    @property
    def is_harmony(self) -> bool:
        """True if a response is a sequence of messages in channels (Harmony), which the template writes from
        message fields."""
        return "<|channel|>" in self.template.text

    def history(self, prompt: Sequence[int]) -> History | None:
        """Return the history of a conversation with this prompt, or None if the template keeps earlier
        responses unchanged."""
        return None if self.rewritten is None else History(self, prompt)

    def _find_rewritten(self) -> str | None:
        if self.template.is_passthrough:
            return None
        for said, fields in (
            (PROBE, {}),
            (f"<think>\n{REASONED}\n</think>\n\n{PROBE}", {}),
            (PROBE, {"thinking": REASONED}),
        ):
            if fields and not self.is_harmony:
                continue
            turn, following = (
                {"role": "assistant", "content": said, **fields},
                {"role": "user", "content": FOLLOWING},
            )
            try:
                before = self.template.render([ASKED], origin=_ORIGIN, for_generation=True)
                last = self.template.render([ASKED, turn], origin=_ORIGIN)
                later = self.template.render([ASKED, turn, following], origin=_ORIGIN)
            except DataError:
                continue
            # The reference is the response as a last turn. Templates that never write reasoning, such as
            # R1's, are an exception: for them it is the generated text itself.
            is_written = last.startswith(before) and (REASONED in last or REASONED not in said)
            shown = last[: last.rfind(PROBE) + len(PROBE)] if is_written else before + said
            if not later.startswith(shown):
                begin = min(len(before), shared_length(shown, later))
                return f"{shown[begin:]!r} becomes {later[begin : later.find(FOLLOWING)]!r}"
        return None

    def _framed(self, messages: Sequence[ChatMessage]) -> list[int] | None:
        """Tokenize an observation without rendering, if the template writes a fixed frame around the content
        of such messages. Return None otherwise.

        Rendering takes ten times as long as the rest of a turn. Contents that a template might inspect are
        always rendered.
        """
        if len(messages) != 1:
            return None
        message = messages[0]
        content = message.get("content")
        # A template may parse JSON, look for markup or trim white space, so render such contents.
        if (
            not isinstance(content, str)
            or content != content.strip()
            or content[:1] in {"", "[", "{"}
            or "<" in content
        ):
            return None
        # A list, because this runs every turn and a generator is slower for few items. Texts only: other
        # values may be equal and still be written differently, such as 1 and True.
        kind = tuple([item for item in message.items() if item[0] != "content"])
        try:
            frame = self._frames[kind]
        except (KeyError, TypeError):
            if len(self._frames) >= _MOST_FRAMES or not all(isinstance(value, str) for _, value in kind):
                return None
            # If the template omits the role, there is no frame; if it fails, it raises its own error.
            frame = self._frames[kind] = self._find_frame(dict(kind))
        return None if frame is None else frame.around(content, self._encode)

    def _find_frame(self, further: ChatMessage) -> _Frame | None:
        contents = (FOLLOWING, _ODD_CONTENT)
        texts = [self._behind_response([{**further, "content": content}]) for content in contents]
        before, _, behind = texts[0].partition(FOLLOWING)
        cut = self._cut_frame(before, behind)
        frame = cut
        for content, text in zip(contents, texts, strict=True):
            if text != f"{before}{content}{behind}":
                return None
            # The tokenizers library decides whether the parts may be encoded separately, by a comparison of
            # both results. Otherwise the frame stays text, which is encoded together with each content.
            if cut.around(content, self._encode) != self.tokens(text):
                frame = _Frame([], before, behind, [])
        return frame

    def _cut_frame(self, before: str, behind: str) -> _Frame:
        """Build a frame whose outer parts are tokenized once: up to the last special mark before the content,
        and from the first one after it."""
        marks = self._marks
        last = max(marks.finditer(before), key=lambda match: match.start(), default=None)
        first = marks.search(behind)
        start, end = (0 if last is None else last.start()), (len(behind) if first is None else first.start())
        # The mark is on both sides, because text at the very start may be tokenized differently from text
        # after a mark.
        head = self.tokens(before[: last.end()])[:-1] if last is not None else []
        return _Frame(head, before[start:], behind[:end], self.tokens(behind[end:]))

    def _behind_response(self, messages: Sequence[ChatMessage]) -> str:
        """Return the text that the template writes for messages after a response.

        Tool messages are rendered after a tool call if the template can write one, because some templates
        reject them after anything else.
        """
        names = [
            (str(message.get("name")), str(message.get("tool_call_id")))
            for message in messages
            if message.get("role") == "tool"
        ]
        said: ChatMessage = {"role": "assistant", "content": PROBE}
        turns = [self.template.call_of(PROBE, names), said] if names else [said]
        failure: DataError | None = None
        for turn in turns:
            try:
                text = self.template.render([ASKED, turn, *messages], origin=_ORIGIN, for_generation=True)
            except DataError as error:
                failure = failure or error
                continue
            if PROBE in text:
                return (
                    text[text.index(ASKED["content"]) :].rpartition(PROBE)[2]
                    if names
                    else text.partition(PROBE)[2]
                )
        raise failure or RecordError(
            "the chat template leaves out the assistant's turn before a turn of "
            f"{messages[0].get('role')!r}: it begins {self.template.text[:60]!r}. Fix: use a "
            "template for conversations of several turns, or grpo.max_rollout_turns: 1"
        )

    def _behind_turn(self, ids: list[int], last: int | None) -> list[int]:
        """Remove the end of the turn from a suffix if it was sampled, and keep it otherwise.

        The text before the end of the turn closes a tool call, which the response has written itself, so it
        is always removed.
        """
        if last in self.stop_token_ids and last in ids:
            return ids[ids.index(last) + 1 :]
        end = 0
        # A loop is faster than a generator here: usually the first token is special.
        for place, token in enumerate(ids):
            if token in self._special:
                end = place
                break
        # Harmony ends a last turn with another token than an earlier turn, and the sampled token replaces it.
        # But keep a token at which generation stops: GLM's turns end with the mark of the next role, and the
        # policy may have sampled the mark of another role.
        is_other_end = (
            last in self.stop_token_ids and bool(ids) and ids[end] in self._special - set(self.stop_token_ids)
        )
        return ids[end + is_other_end :]

    def added_places(self, text: str) -> list[int]:
        """Return the offsets of added tokens, which the tokenizer recognises as a whole, independently of
        their surroundings."""
        names = sorted(map(str, self.tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
        return (
            [match.start() for match in re.finditer("|".join(map(re.escape, names)), text)] if names else []
        )

    def tokens(self, text: str) -> list[int]:
        """Tokenize a part of a rendered text."""
        return self._encode(text)


class History:
    """Tracks a conversation under a template that renders earlier responses differently, and computes its
    next prompts.

    The original prompt is kept token by token, except for what the template writes at its end only for the
    response, such as an opening ``<think>``. Everything after it is rendered behind a short stand-in for the
    prompt.

    Args:
        encoder: encoder with the template.
        prompt: token ids of the conversation's first prompt.
    """

    def __init__(self, encoder: ObservationEncoder, prompt: Sequence[int]) -> None:
        self._encoder, self._prompt = encoder, list(prompt)
        self._asked = encoder.template.render([ASKED], origin=_ORIGIN, for_generation=True)
        self._messages: list[ChatMessage] = [ASKED]
        self._shown = self._asked
        self._is_apart = False

    def follow(self, said: Sequence[int], messages: Sequence[ChatMessage]) -> list[int] | None:
        """Add a response and the messages that follow it, and compute the next prompt.

        Args:
            said: token ids of the response.
            messages: the environment's messages.

        Returns:
            Token ids of the next prompt. None if it starts with everything sampled since the last prompt, so
            that the messages only need to be appended.
        """
        tokenizer = self._encoder.tokenizer
        # Drop the stop token: the template writes the end of the turn itself.
        kept = said[:-1] if len(said) and said[-1] in self._encoder.stop_token_ids else said
        text = str(
            tokenizer.decode(list(kept), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )
        turn = _harmony_turn(text) if self._encoder.is_harmony else {"role": "assistant", "content": text}
        self._messages += [turn, *messages]
        shown = self._shown + text
        try:
            self._shown = self._encoder.template.render(self._messages, origin=_ORIGIN, for_generation=True)
        except DataError:
            # The template cannot render the whole conversation, so only append the suffix.
            self._shown = shown
            return None
        if self._encoder.is_harmony and all(message.get("role") == "tool" for message in messages):
            # Only append: Harmony models write calls differently from their template, and keep the reasoning
            # before calls until the final answer.
            self._is_apart = True
            return None
        goes_on, self._is_apart = self._shown.startswith(shown) and not self._is_apart, False
        return None if goes_on else self._rewritten_prompt()

    def _rewritten_prompt(self) -> list[int] | None:
        # Split where tokens do not depend on the preceding text.
        for begin in reversed(self._encoder.added_places(self._asked)):
            end_of_prompt = self._encoder.tokens(self._asked[begin:])
            if (
                self._shown.startswith(self._asked[:begin])
                and self._prompt[-len(end_of_prompt) :] == end_of_prompt
            ):
                return self._prompt[: -len(end_of_prompt)] + self._encoder.tokens(self._shown[begin:])
        return None


def _marks_of(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Return a pattern of the added tokens at which the tokenizer always splits a text, so that tokens on one
    side do not depend on the other side.

    Excluded are tokens that absorb surrounding spaces, that are matched in normalised text or as whole words
    only, and that overlap with another added token.
    """
    added = list(tokenizer.added_tokens_decoder.values())
    names = list(map(str, added))
    found: list[str] = []
    for token, name in zip(added, names, strict=True):
        if token.normalized or token.lstrip or token.rstrip or token.single_word:
            continue
        if not any(_overlap(name, other) for other in names if other != name):
            found.append(name)
    return re.compile("|".join(map(re.escape, sorted(found, key=len, reverse=True))) or r"(?!)")


def _overlap(one: str, other: str) -> bool:
    """Return whether two tokens may occur in a text at positions that share characters."""
    for size in range(1, min(len(one), len(other)) + 1):
        if one[-size:] == other[:size] or other[-size:] == one[:size]:
            return True
    return one in other


_FINAL = re.compile(r"<\|channel\|>final<\|message\|>(.*?)(?=<\||\Z)", re.DOTALL)
_ANALYSIS = re.compile(r"<\|channel\|>analysis<\|message\|>(.*?)(?=<\||\Z)", re.DOTALL)
# Atomic groups, and ``match`` rather than ``search``, so that a text without a call is scanned only once.
_CALL = re.compile(r"(?>.*?to=functions\.([\w.-]++))(?>.*?<\|message\|>)(.*?)(?=<\||\Z)", re.DOTALL)


def _harmony_turn(text: str) -> ChatMessage:
    """Parse a Harmony response into the message that the template expects: the final answer or the call, and
    the reasoning before it."""
    final, call, analysis = _FINAL.findall(text), _CALL.match(text), _ANALYSIS.findall(text)
    thinking = {"thinking": analysis[-1]} if analysis else {}
    if final or call is None:
        return {"role": "assistant", "content": final[-1] if final else "", **thinking}
    named = {"name": call[1], "arguments": call[2].strip() or "{}"}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": named}],
        **thinking,
    }


def _text(message: ChatMessage) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""
