"""The tokenizer and its chat template: how a record becomes token ids."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError) as error:
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


class PromptEncoder:
    """Turns a record's prompt into token ids: prompt template, system prompt, chat template, tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_template: str | None = None, system_prompt: str | None = None) -> None:
        """Args:
            tokenizer: from ``get_tokenizer``.
            prompt_template: text with ``{prompt}`` where a string prompt goes; chat messages are left as they are.
            system_prompt: put first as a system message.

        Raises:
            DataError: the template has no ``{prompt}``.
        """
        if prompt_template is not None and "{prompt}" not in prompt_template:
            raise DataError(
                f"data.prompt_template = {prompt_template!r} has no {{prompt}}, all prompts would be equal. Fix: add {{prompt}}"
            )
        self._tokenizer = tokenizer
        self._template = prompt_template or "{prompt}"
        self._system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._leading_tokens = _begin_token(tokenizer) if tokenizer.chat_template == PASSTHROUGH_TEMPLATE else []

    @classmethod
    def from_config(cls, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> PromptEncoder:
        """An encoder by the ``data`` section of a run's config."""
        return cls(tokenizer, config.get("prompt_template"), config.get("system_prompt"))

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt up to where the answer starts.

        A chat template writes special tokens itself. A template that only joins messages does not, so the tokenizer adds the
        begin-of-sequence token that it puts in front of a text.
        """
        return self.encode_many([prompt])[0]

    def encode_many(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """As ``encode``, for many prompts at once, which is much faster."""
        return [self._leading_tokens + row for row in _tokens(self._tokenizer, [self._text(prompt) for prompt in prompts])]

    def _text(self, prompt: Prompt) -> str:
        if isinstance(prompt, str):
            # Not str.format: braces elsewhere in the template or the prompt are ordinary text.
            prompt = [{"role": "user", "content": self._template.replace("{prompt}", prompt)}]
        messages = [*self._system, *(dict(message) for message in prompt)]
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        # a template is a program, and may fail in whatever way it does
        except Exception as error:
            raise DataError(
                f"policy.tokenizer.chat_template cannot be applied to a prompt ({type(error).__name__}: {error}); it begins "
                f"{str(self._tokenizer.chat_template)[:60]!r}. Fix: correct the template, or write null to join the messages as they are"
            ) from error


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


def refuse_empty_and_long(lengths: Sequence[int], records: Sequence[Record], limit: int, what: str) -> None:
    """Refuse records without tokens and records longer than the limit; none is dropped or cut in silence.

    Raises:
        DataError: with the number of such records and the places of the first ones.
    """
    for offenders, fault in (
        ([place for place, length in enumerate(lengths) if length == 0], "have no tokens, at least 1 is needed. Fix: remove them"),
        (
            [place for place, length in enumerate(lengths) if length > limit],
            f"exceed data.max_input_seq_length = {limit}. Fix: raise it to {max(lengths, default=0)}, or remove those records",
        ),
    ):
        if offenders:
            shown = "; ".join(f"index {place} ({records[place].origin}): {lengths[place]} tokens" for place in offenders[:5])
            more = f" and {len(offenders) - 5} more" if len(offenders) > 5 else ""
            raise DataError(f"{len(offenders)} of {len(lengths)} {what} {fault}. They are: {shown}{more}")
