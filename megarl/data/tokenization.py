"""The tokenizer and its chat template: how a record becomes token ids."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.checkpoint.files import first_special
from megarl.data.records import ChatMessage, Record
from megarl.errors import DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.config.sections import DataConfig

logger = logging.getLogger(__name__)

Prompt = str | Sequence[ChatMessage]
"""Plain text, or chat messages."""

PASSTHROUGH_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Chat template that joins the contents of the messages and adds nothing."""

_CHARACTERS_A_TOKEN, _FEW_CHARACTERS, _FEW_TOKENS = 8, 4096, 64
"""Of the beginnings by which a long text is judged."""


def long_text(limit: int) -> int:
    """Characters above which the beginning of a text is looked at before the whole, where it may have ``limit`` tokens."""
    return _CHARACTERS_A_TOKEN * limit + _FEW_CHARACTERS


def get_tokenizer(tokenizer_config: Mapping[str, Any], trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, with a padding token and a chat template.

    Args:
        tokenizer_config: ``name`` (model name or directory) and, optionally, ``chat_template``: None joins the messages and adds nothing,
            ``"default"`` (or leaving the key out) takes the tokenizer's own, any other string is a Jinja template. A tokenizer that has no
            template of its own joins the messages.
        trust_remote_code: run tokenizer code that comes with the model.

    Raises:
        ModelError: there is no tokenizer under that name, or it has no end-of-sequence token.
    """
    from transformers import AutoTokenizer

    name = tokenizer_config["name"]
    _refuse_special_files(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError, RecursionError) as error:
        fix = "set policy.tokenizer.name to the model that has the tokenizer, by name or directory"
        raise ModelError(f"policy.tokenizer.name = {name!r}: its tokenizer cannot be loaded: {error}. Fix: {fix}") from error
    if not tokenizer("0 a", add_special_tokens=False)["input_ids"]:
        # of a directory without a tokenizer's files, transformers makes one that knows no token
        raise ModelError(
            f"policy.tokenizer.name = {name!r}: there is no tokenizer. Fix: copy the files of the tokenizer there (tokenizer.json, "
            "tokenizer_config.json), or give policy.tokenizer.name the model that this one was made from"
        )
    if tokenizer.eos_token_id is None:
        raise ModelError(f"tokenizer {name!r} has no eos_token, generation could not stop. Fix: set eos_token in its tokenizer_config.json")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    template = tokenizer_config.get("chat_template", "default")
    if template is None:
        tokenizer.chat_template = PASSTHROUGH_TEMPLATE
    elif template != "default":
        tokenizer.chat_template = template
    elif not tokenizer.chat_template:
        logger.info("tokenizer %s has no chat template; messages are joined as they are", name)
        tokenizer.chat_template = PASSTHROUGH_TEMPLATE
    return tokenizer


def _refuse_special_files(name: str) -> None:
    """Refuse a directory with a named pipe or the like in place of a file, which transformers would wait for without end.

    Raises:
        ModelError: says which.
    """
    directory = Path(name).expanduser()
    found = first_special(directory) if directory.is_dir() else None
    if found is not None:
        raise ModelError(f"policy.tokenizer.name = {name!r}: {found[0]} is {found[1]}, not a file. Fix: put the file itself there")


@dataclass(frozen=True, slots=True)
class EncodedConversation:
    """A whole conversation as a model is trained on it.

    Attributes:
        ids: its tokens.
        targets: first and last but one place of each span of tokens that the assistant says, in order: [start, end).
    """

    ids: list[int]
    targets: list[tuple[int, int]]


class PromptEncoder:
    """Turns a record into token ids: prompt template, system prompt, chat template, tokenizer."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_template: str | None = None,
        system_prompt: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Args:
            tokenizer: from ``get_tokenizer``.
            prompt_template: text with ``{prompt}`` where a string prompt goes; chat messages are left as they are.
            system_prompt: put first as a system message, but not before a conversation that has one.
            template_kwargs: values that the chat template reads.

        Raises:
            DataError: the prompt template has no ``{prompt}``, or the chat template does not read a value.
        """
        if prompt_template is not None and "{prompt}" not in prompt_template:
            raise DataError(
                f"data.prompt_template = {prompt_template!r} has no {{prompt}}, all prompts would be equal. Fix: add {{prompt}}"
            )
        self._tokenizer = tokenizer
        self._template = prompt_template or "{prompt}"
        self._system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._leading_tokens = _begin_token(tokenizer) if tokenizer.chat_template == PASSTHROUGH_TEMPLATE else []
        self._template_kwargs = dict(template_kwargs or {})
        self._marks_turns = re.search(r"\{%-?\s*generation\s*-?%\}", str(tokenizer.chat_template)) is not None
        for name in self._template_kwargs:
            if re.search(rf"\b{re.escape(name)}\b", str(tokenizer.chat_template)) is None:
                raise DataError(
                    f"policy.tokenizer.chat_template_kwargs.{name}: the chat template does not read it, so that it would do nothing; the "
                    f"template begins {str(tokenizer.chat_template)[:60]!r}. Fix: remove it, or correct its name"
                )

    @classmethod
    def from_config(
        cls, tokenizer: PreTrainedTokenizerBase, config: DataConfig, template_kwargs: Mapping[str, Any] | None = None
    ) -> PromptEncoder:
        """An encoder by the ``data`` section of a run's config."""
        return cls(tokenizer, config.get("prompt_template"), config.get("system_prompt"), template_kwargs)

    @property
    def identity(self) -> list[Any]:
        """What the tokens depend on besides the records and the tokenizer's vocabulary; of the types of JSON."""
        return [self._template, self._system, self._leading_tokens, self._template_kwargs, str(self._tokenizer.chat_template)]

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt up to where the answer starts.

        A chat template writes special tokens itself. A template that only joins messages does not, so the tokenizer adds the
        begin-of-sequence token that it puts in front of a text.
        """
        return self.encode_records([Record(prompt if isinstance(prompt, str) else tuple(prompt), "", "the prompt")])[0]

    def encode_records(self, records: Sequence[Record]) -> list[list[int]]:
        """As ``encode``, for the prompts of many records at once, which is much faster.

        Raises:
            DataError: the chat template cannot be applied to a prompt; names the record.
        """
        return self.encode_texts([self.text(record) for record in records])

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """As ``encode_records``, for what ``text`` made of them."""
        return [self._leading_tokens + row for row in _tokens(self._tokenizer, texts)]

    def beginning(self, text: str, limit: int) -> str:
        """A text, or of one that certainly has more than ``limit`` tokens only a beginning that has more.

        A tokenizer takes hundreds of bytes for each character. The beginning has twice as many tokens as the limit, so that it does not
        matter what its end would be merged with.
        """
        size = long_text(limit)
        while size < len(text):
            if len(_tokens(self._tokenizer, [text[:size]])[0]) > 2 * limit + _FEW_TOKENS:
                return text[:size]
            size *= 2
        return text

    def whole_text(self, record: Record) -> str:
        """What the chat template makes of a whole conversation.

        Raises:
            DataError: it cannot be applied; names the record.
        """
        assert record.last is not None and not isinstance(record.prompt, str)
        return str(self._rendered(record, self._messages(record, (*record.prompt, record.last)), tokenize=False))

    def encode_conversation(self, record: Record) -> EncodedConversation:
        """Tokens of a whole conversation, and where the assistant speaks.

        Where the chat template has ``{% generation %}`` marks, these say it. Elsewhere a turn of the assistant begins where the template
        ends that is applied to the turns before it, as when it is generated, and goes up to its end-of-sequence token, or to its end. The
        text before each turn has to be the beginning of the whole text for that, and the turn be found after it, which is checked. The
        last turn gets an end-of-sequence token where the template writes none.

        Args:
            record: with ``last``.

        Raises:
            DataError: the template cannot be applied, or where the turns lie cannot be told; names the record.
        """
        assert record.last is not None and not isinstance(record.prompt, str)
        messages = self._messages(record, (*record.prompt, record.last))
        spoken = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        found = self._by_marks(record, messages) if self._marks_turns else self._by_beginnings(record, messages, spoken)
        if not found.targets or len(found.targets) > len(spoken) or found.targets[0][0] == 0:
            raise DataError(
                f"{record.origin}: the conversation has {len(spoken)} turns of the assistant, in the text of the chat template "
                f"{len(found.targets)} were found. Fix: correct the marks {{% generation %}} of policy.tokenizer.chat_template"
            )
        return found

    def _by_marks(self, record: Record, messages: Sequence[ChatMessage]) -> EncodedConversation:
        answer = self._rendered(record, messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = list(answer["input_ids"]), list(answer["assistant_masks"])
        edges = [place for place in range(len(mask) + 1) if (mask[place - 1] if place else 0) != (mask[place] if place < len(mask) else 0)]
        return EncodedConversation(ids, list(zip(edges[::2], edges[1::2], strict=True)))

    def _by_beginnings(self, record: Record, messages: Sequence[ChatMessage], spoken: Sequence[int]) -> EncodedConversation:
        whole = str(self._rendered(record, messages, tokenize=False))
        ids, targets, done = list(self._leading_tokens), [], 0
        for place in spoken:
            before = str(self._rendered(record, messages[:place], tokenize=False, add_generation_prompt=True))
            after = self._end_of_turn(record, messages[: place + 1], whole, len(before)) if whole.startswith(before) else None
            if after is None:
                raise DataError(
                    f"{record.origin}: the chat template writes the first {place + 1} messages in another way when more follow, so that it "
                    "cannot be told which tokens the assistant says. Fix: give policy.tokenizer.chat_template a template that marks them "
                    "by {% generation %}, or split the record into one for each turn"
                )
            ids += self._pieces(whole[done : len(before)])
            said = self._pieces(whole[len(before) : after])
            end = self._tokenizer.eos_token_id
            stop = said.index(end) + 1 if end in said else len(said)
            if stop == len(said) and end not in said and place == spoken[-1]:
                said, stop = [*said, end], stop + 1
            targets.append((len(ids), len(ids) + stop))
            ids += said
            done = after
        return EncodedConversation(ids, targets)

    def _end_of_turn(self, record: Record, turns: Sequence[ChatMessage], whole: str, start: int) -> int | None:
        """Where the last of some turns, which begins at ``start``, ends in the text of the whole conversation.

        A template may leave reasoning out once the user speaks again, as that of Qwen3 does: then at the end-of-sequence token, if the
        content stands before it. None where that cannot be told.
        """
        after = str(self._rendered(record, turns, tokenize=False))
        if whole.startswith(after):
            return len(after)
        end = whole.find(str(self._tokenizer.eos_token), start)
        content = str(turns[-1].get("content") or "").rpartition("</think>")[2].strip()
        return end + len(str(self._tokenizer.eos_token)) if end >= 0 and content and content in whole[start:end] else None

    def _pieces(self, text: str) -> list[int]:
        return _tokens(self._tokenizer, [text])[0] if text else []

    def unwritten_role(self, record: Record, text: str) -> str | None:
        """The role of a turn of the prompt, the system's or the user's, that is not in its ``text``; None where all are there."""
        messages = self._prompt_messages(record)
        # calls and answers of tools may be written in another form, and reasoning be left out
        asked = [message for message in messages if message["role"] not in {"assistant", "tool"}]
        return next((message["role"] for message in asked if (message.get("content") or "").strip() not in text), None)

    def text(self, record: Record) -> str:
        """What the chat template makes of a record's prompt, up to where the answer starts.

        Raises:
            DataError: it cannot be applied; names the record.
        """
        return str(self._rendered(record, self._prompt_messages(record), tokenize=False, add_generation_prompt=True))

    def _prompt_messages(self, record: Record) -> list[ChatMessage]:
        prompt: Prompt = record.prompt
        if isinstance(prompt, str):
            # Not str.format: braces elsewhere in the template or the prompt are ordinary text.
            prompt = [{"role": "user", "content": self._template.replace("{prompt}", prompt)}]
        return self._messages(record, prompt)

    def _messages(self, record: Record, turns: Sequence[ChatMessage]) -> list[ChatMessage]:
        system = [] if record.has_system else self._system
        return [*system, *(dict(turn) for turn in turns)]

    def _rendered(self, record: Record, messages: Sequence[ChatMessage], **options: Any) -> Any:
        """What the chat template makes of messages."""
        if record.tools:
            options["tools"] = [dict(tool) for tool in record.tools]
        try:
            return self._tokenizer.apply_chat_template(list(messages), **options, **self._template_kwargs)
        # a template is a program, and may fail in whatever way it does
        except Exception as error:
            where = self._failing_turn(messages, options) if len(messages) > 1 else ""
            raise DataError(
                f"{record.origin}: policy.tokenizer.chat_template cannot be applied{where} ({type(error).__name__}: {error}); it begins "
                f"{str(self._tokenizer.chat_template)[:60]!r}. Fix: correct the template or the record, or write null to join the messages "
                "as they are"
            ) from error

    def _failing_turn(self, messages: Sequence[ChatMessage], options: Mapping[str, Any]) -> str:
        """Which turn a template fails at that cannot be applied to some messages, for a message: the first one after the most turns that
        it can be applied to."""
        place = len(messages) - 1
        while place > 0:
            try:
                self._tokenizer.apply_chat_template(list(messages[:place]), **options, **self._template_kwargs)
                break
            except Exception:
                place -= 1
        return f" to turn {place + 1} of {len(messages)}, of {messages[place]['role']!r}"


def encode_answers(tokenizer: PreTrainedTokenizerBase, answers: Sequence[str]) -> list[list[int]]:
    """Token ids of answers, each with the end-of-sequence token at its end."""
    return [[*row, tokenizer.eos_token_id] for row in _tokens(tokenizer, answers)]


def _tokens(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    return [list(row) for row in tokenizer(list(texts), add_special_tokens=False)["input_ids"]] if texts else []


def _begin_token(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The begin-of-sequence token, where the tokenizer puts it in front of every text."""
    bos = tokenizer.bos_token_id
    starts_with_it = bos is not None and list(tokenizer("")["input_ids"])[:1] == [bos]
    return [bos] if starts_with_it and bos != tokenizer.eos_token_id else []
