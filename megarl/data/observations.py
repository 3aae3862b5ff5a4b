"""Token ids of what an environment says, to go behind what the policy sampled: nothing sampled is encoded again.

The suffix of an observation is what the chat template writes behind a turn of the assistant: a short conversation is rendered with a mark
in the assistant's turn, the observation behind it, and up to where the assistant speaks next; what stands behind the mark is tokenized.
Sampled tokens mostly end with the token that ends the turn, which the suffix then does not repeat.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megarl.data.chat_template import ASKED, FOLLOWING, PROBE, REASONED, ChatMessage, ChatTemplate, special_ids
from megarl.errors import DataError, RecordError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ORIGIN = "an observation"


@dataclass(frozen=True, slots=True)
class ObservationEncoder:
    """Encodes observations by a chat template.

    Attributes:
        tokenizer: from ``get_tokenizer``.
        template: of it, with the run's values.
        stop_token_ids: tokens that end a sampled response.
    """

    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate
    stop_token_ids: Collection[int]

    def encode(self, messages: Sequence[ChatMessage], last: int | None) -> list[int]:
        """Return the tokens that go behind a response, up to where the next one begins.

        Args:
            messages: what the environment says, with ``role`` and ``content``.
            last: token that the response ends with; None for one without tokens.

        Raises:
            RecordError: the template cannot write such messages behind a response.
        """
        if self.template.is_passthrough:
            return self._tokens("".join(_text(message) for message in messages))
        ids = self._tokens(self._behind_response(messages))
        return self._behind_turn(ids, last)

    def encode_prompt(self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], origin: str) -> list[int]:
        """Return the tokens of a conversation up to where the assistant speaks."""
        return self._tokens(self.template.render(messages, tools, origin, for_generation=True))

    def rewritten(self) -> str | None:
        """Return what the template makes of an earlier response once a user's turn follows, where that is not the response itself: it may
        leave reasoning out, or end the turn by another token. A conversation keeps what was sampled. None where both are the same."""
        if self.template.is_passthrough:
            return None
        for said in (PROBE, f"<think>\n{REASONED}\n</think>\n\n{PROBE}"):
            turn, following = {"role": "assistant", "content": said}, {"role": "user", "content": FOLLOWING}
            try:
                before = self.template.render([ASKED], origin=_ORIGIN, for_generation=True)
                last = self.template.render([ASKED, turn], origin=_ORIGIN)
                later = self.template.render([ASKED, turn, following], origin=_ORIGIN)
            except DataError:
                continue
            end = last.rfind(PROBE) + len(PROBE)
            if last.startswith(before) and not later.startswith(last[:end]):
                shared = next(place for place, (one, other) in enumerate(zip(last, later, strict=False)) if one != other)
                begin = min(len(before), shared)
                return f"{last[begin:end]!r} becomes {later[begin : later.find(FOLLOWING)]!r}"
        return None

    def _behind_response(self, messages: Sequence[ChatMessage]) -> str:
        """Return the text behind a response that the messages follow.

        What a tool says follows a call, where the template can write one: some templates refuse it behind anything else.
        """
        names = [(str(message.get("name")), str(message.get("tool_call_id"))) for message in messages if message.get("role") == "tool"]
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
                return text[text.index(ASKED["content"]) :].rpartition(PROBE)[2] if names else text.partition(PROBE)[2]
        raise failure or RecordError(
            f"the chat template does not write what the assistant says before {messages[0].get('role')!r}: it begins "
            f"{self.template.text[:60]!r}. Fix: take a template of conversations of several turns, or grpo.max_rollout_turns: 1"
        )

    def _behind_turn(self, ids: list[int], last: int | None) -> list[int]:
        """Return a suffix without the end of the turn that was sampled, and with the one that was not.

        Between the mark and the end of the turn stands what closes a call, which the response has written itself.
        """
        if last in self.stop_token_ids and last in ids:
            return ids[ids.index(last) + 1 :]
        special = special_ids(self.tokenizer)
        end = next((place for place, token in enumerate(ids) if token in special), 0)
        # Harmony ends a last turn by another token than one that others follow, and the sampled one stands for it. A token that
        # generation stops at is kept: GLM's turns end with the mark of the next role, and the policy may have guessed another one.
        is_other_end = last in self.stop_token_ids and bool(ids) and ids[end] in special - set(self.stop_token_ids)
        return ids[end + is_other_end :]

    def _tokens(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def _text(message: ChatMessage) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""
