"""Token ids of an environment's messages, appended to what the policy sampled: no sampled token is encoded
again.

The suffix of an observation is the text that the chat template writes after a turn of the assistant. A short
conversation is rendered with a mark in the assistant's turn, the observation after it, and up to where the
assistant speaks next; the text after the mark is tokenized. Sampled tokens usually end with the token that
ends
the turn, which the suffix then does not repeat.

Some templates render an earlier response differently once a user's turn follows it: they leave its reasoning
out. The model's next prompt then does not begin with the sampled tokens, and ``History`` returns that prompt.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megarl.data.chat_template import (
    ASKED,
    FOLLOWING,
    PROBE,
    REASONED,
    ChatMessage,
    ChatTemplate,
    special_ids,
)
from megarl.data.conversations import shared_length
from megarl.data.tokenization import text_encoder
from megarl.errors import DataError, RecordError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ORIGIN = "an observation"

# A content with characters that a template may change.
_ODD_CONTENT = 'a "b" {c}, [d]\n\n\\e é 你|f: g'

# Limit the number of frames: a kind of message includes the names and ids of calls, and their number in a run
# is unbounded.
_MOST_FRAMES = 256


@dataclass(frozen=True, slots=True)
class _Frame:
    """Text and tokens that a template writes around a content.

    Attributes:
        head: tokens up to, but without, the mark before the content.
        before: text from that mark to the content.
        behind: text from the content to the mark after it.
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
    """Encodes observations with a chat template.

    Attributes:
        tokenizer: from ``get_tokenizer``.
        template: of the tokenizer, with the run's values.
        stop_token_ids: tokens that end a sampled response.
        rewritten: the template's rendering of an earlier response once a user's turn follows, if it differs
            from the response itself, for example without reasoning; None if both are equal.
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
        """Return the tokens between a response and the beginning of the next one.

        Args:
            messages: the environment's messages, with ``role`` and ``content``.
            last: last token of the response; None for a response without tokens.

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
        """Refuse a template that silently leaves out messages of a role after a response.

        Raises:
            RecordError: it does, or cannot write them.
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
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], origin: str
    ) -> list[int]:
        """Return the tokens of a conversation up to where the assistant speaks."""
        return self.tokens(self.template.render(messages, tools, origin, for_generation=True))

    @property
    def is_harmony(self) -> bool:
        """True if a response consists of messages of several channels, which the template writes from
        fields."""
        return "<|channel|>" in self.template.text

    def history(self, prompt: Sequence[int]) -> History | None:
        """Return the history of a conversation that begins with a prompt; None if the template keeps earlier
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
            # Expect a response as the template writes a last turn. Templates that never write reasoning, such
            # as R1's, are an exception.
            is_written = last.startswith(before) and (REASONED in last or REASONED not in said)
            shown = last[: last.rfind(PROBE) + len(PROBE)] if is_written else before + said
            if not later.startswith(shown):
                begin = min(len(before), shared_length(shown, later))
                return f"{shown[begin:]!r} becomes {later[begin : later.find(FOLLOWING)]!r}"
        return None

    def _framed(self, messages: Sequence[ChatMessage]) -> list[int] | None:
        """Return the tokens after a response without rendering, if the template writes a fixed frame around
        the content of this kind of message.

        Rendering takes ten times as long as the rest of a turn. Contents that a template might inspect are
        rendered.
        """
        if len(messages) != 1:
            return None
        message = messages[0]
        content = message.get("content")
        # A template may parse JSON, look for markup or trim white space, so that such contents are rendered.
        if (
            not isinstance(content, str)
            or content != content.strip()
            or content[:1] in {"", "[", "{"}
            or "<" in content
        ):
            return None
        # Use a list instead of a generator: this runs once per turn, and a generator takes longer for a few
        # items. Texts identify a kind, because other values may equal each other and be written differently.
        kind = tuple([item for item in message.items() if item[0] != "content"])
        try:
            frame = self._frames[kind]
        except (KeyError, TypeError):
            if len(self._frames) >= _MOST_FRAMES or not all(isinstance(value, str) for _, value in kind):
                return None
            # A template that leaves the role out has no frame for it, and one that fails has its own error.
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
        """Return a frame, encoded once up to the last mark before the content and from the first mark after
        it."""
        marks = self._marks
        last = max(marks.finditer(before), key=lambda match: match.start(), default=None)
        first = marks.search(behind)
        start, end = (0 if last is None else last.start()), (len(behind) if first is None else first.start())
        # Include the mark on both sides: a text that begins with a mark is encoded as text that follows one.
        head = self.tokens(before[: last.end()])[:-1] if last is not None else []
        return _Frame(head, before[start:], behind[:end], self.tokens(behind[end:]))

    def _behind_response(self, messages: Sequence[ChatMessage]) -> str:
        """Return the text that the template writes for messages after a response.

        A tool's message follows a call if the template can write one: some templates refuse it after anything
        else.
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
        """Return a suffix without the end of the turn if that was sampled, and with it if it was not.

        The text between the mark and the end of the turn closes a call, which the response has written
        itself.
        """
        if last in self.stop_token_ids and last in ids:
            return ids[ids.index(last) + 1 :]
        end = 0
        # Loop instead of asking a generator, which takes longer: usually the first token is special.
        for place, token in enumerate(ids):
            if token in self._special:
                end = place
                break
        # Harmony ends a last turn with a different token from the one that it writes if a turn follows, and
        # the sampled token replaces it. A token at which generation stops is kept: GLM's turns end with the
        # mark of the next role, and the policy may have sampled another role's.
        is_other_end = (
            last in self.stop_token_ids and bool(ids) and ids[end] in self._special - set(self.stop_token_ids)
        )
        return ids[end + is_other_end :]

    def added_places(self, text: str) -> list[int]:
        """Return where added tokens begin that a tokenizer recognises as a whole, independently of their
        surroundings."""
        names = sorted(map(str, self.tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
        return (
            [match.start() for match in re.finditer("|".join(map(re.escape, names)), text)] if names else []
        )

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a part of a rendered text."""
        return self._encode(text)


class History:
    """A conversation under a template that renders earlier responses differently, followed from turn to turn.

    The conversation's own prompt stays the same, token by token, except for the text that the template writes
    at its end for the response alone, such as the mark that opens reasoning. The rest is what the template
    writes after a short prompt that replaces it.

    Args:
        encoder: with the template.
        prompt: first tokens of the conversation.
    """

    def __init__(self, encoder: ObservationEncoder, prompt: Sequence[int]) -> None:
        self._encoder, self._prompt = encoder, list(prompt)
        self._asked = encoder.template.render([ASKED], origin=_ORIGIN, for_generation=True)
        self._messages: list[ChatMessage] = [ASKED]
        self._shown = self._asked
        self._is_apart = False

    def follow(self, said: Sequence[int], messages: Sequence[ChatMessage]) -> list[int] | None:
        """Return the model's prompt after messages follow a response.

        Args:
            said: tokens of the response.
            messages: the environment's messages.

        Returns:
            None if the prompt begins with everything that was sampled since the last prompt, so that the
            messages are only appended.
        """
        tokenizer = self._encoder.tokenizer
        # Remove the stop token, because the template writes the end of the turn itself.
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
            # The template cannot write the whole conversation, so that only the suffix is used.
            self._shown = shown
            return None
        if self._encoder.is_harmony and all(message.get("role") == "tool" for message in messages):
            # Only append here: Harmony models write a call differently from their template, and keep the
            # reasoning before calls until they have given their final answer.
            self._is_apart = True
            return None
        goes_on, self._is_apart = self._shown.startswith(shown) and not self._is_apart, False
        return None if goes_on else self._rewritten_prompt()

    def _rewritten_prompt(self) -> list[int] | None:
        # Split at a position where tokens do not depend on the text before it.
        for begin in reversed(self._encoder.added_places(self._asked)):
            end_of_prompt = self._encoder.tokens(self._asked[begin:])
            if (
                self._shown.startswith(self._asked[:begin])
                and self._prompt[-len(end_of_prompt) :] == end_of_prompt
            ):
                return self._prompt[: -len(end_of_prompt)] + self._encoder.tokens(self._shown[begin:])
        return None


def _marks_of(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Return a pattern of the added tokens that split a text before any other processing: the tokens on one
    side do not depend on the other side.

    Left out are those that absorb the spaces around them, that are searched in the normalized text or between
    words, and that share characters with the begin or end of another one.
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
    """Return whether a text may contain two tokens at positions that share characters."""
    for size in range(1, min(len(one), len(other)) + 1):
        if one[-size:] == other[:size] or other[-size:] == one[:size]:
            return True
    return one in other


_FINAL = re.compile(r"<\|channel\|>final<\|message\|>(.*?)(?=<\||\Z)", re.DOTALL)
_ANALYSIS = re.compile(r"<\|channel\|>analysis<\|message\|>(.*?)(?=<\||\Z)", re.DOTALL)
# Atomic groups, and ``match`` rather than ``search``: a text without a call is read once.
_CALL = re.compile(r"(?>.*?to=functions\.([\w.-]++))(?>.*?<\|message\|>)(.*?)(?=<\||\Z)", re.DOTALL)


def _harmony_turn(text: str) -> ChatMessage:
    """Return a response of several channels as the template expects it: the final message, or the call, and
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
