"""The tokenizer, and the encoding of records as token ids."""

from __future__ import annotations

import copy
import datetime
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from converters.files.reading import first_special
from megarl.config.policy import TokenizerConfig
from megarl.data.chat_template import PASSTHROUGH_TEMPLATE, ChatTemplate
from megarl.data.conversations import ConversationEncoder, EncodedConversation
from megarl.data.messages import ChatMessage, ToolDeclaration
from megarl.data.records import Record
from megarl.errors import DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)

Prompt = str | Sequence[ChatMessage]
"""Plain text or chat messages."""

_CHARACTERS_A_TOKEN, _FEW_CHARACTERS, _FEW_TOKENS = 8, 4096, 64
"""Length of the beginning, in characters, from which a text is found to be too long."""

# Attribute in which ``get_tokenizer`` records its changes to a tokenizer.
_CHANGES = "changes_of_a_run"

# Test text with white space that a tokenizer may drop or merge: two spaces, a line feed, a tab.
_ALL_KEPT = "a  b\n\tc"


def long_text(limit: int) -> int:
    """Return the number of characters above which only the beginning of a text is tokenized first, given a
    limit of ``limit`` tokens."""
    return _CHARACTERS_A_TOKEN * limit + _FEW_CHARACTERS


def get_tokenizer(
    tokenizer_config: TokenizerConfig, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, and set its padding token and chat template.

    Args:
        tokenizer_config: ``name`` (model name or directory) and optionally ``chat_template``. ``"default"``
            (or an absent key) takes the tokenizer's own template, and falls back to concatenating the
            messages. None always concatenates the messages. Any other string is a Jinja template.
        trust_remote_code: run tokenizer code that comes with the model.

    Raises:
        ModelError: there is no tokenizer with this name, it has no EOS token, or the chat template is not a
            template.
    """
    from transformers import AutoTokenizer

    name = tokenizer_config["name"]
    _refuse_special_files(name)
    try:
        # If mistral_common is installed, as with vLLM, transformers would load tekken.json as a class without
        # chat templates and other methods.
        tokenizer = AutoTokenizer.from_pretrained(
            name, trust_remote_code=trust_remote_code, mistral_format=False
        )
    # Raised for files that are missing, damaged or of an unknown kind.
    except (OSError, ValueError, ImportError, KeyError, RecursionError) as error:
        fix = "set policy.tokenizer.name to the model that has the tokenizer, by name or directory"
        raise ModelError(
            f"policy.tokenizer.name = {name!r}: its tokenizer cannot be loaded: {error}. Fix: {fix}"
        ) from error
    tokenizer, loaded = _as_its_file_says(tokenizer, name), tokenizer
    if not tokenizer("0 a", add_special_tokens=False)["input_ids"]:
        # For a directory without tokenizer files, transformers builds a tokenizer with an empty vocabulary.
        raise ModelError(
            f"policy.tokenizer.name = {name!r}: there is no tokenizer. Fix: copy the files of the tokenizer "
            "there (tokenizer.json, "
            "tokenizer_config.json), or give policy.tokenizer.name the model that this one was made from"
        )
    if tokenizer.eos_token_id is None:
        raise ModelError(
            f"tokenizer {name!r} has no eos_token, generation could not stop. Fix: set eos_token in its "
            "tokenizer_config.json"
        )
    template = tokenizer_config.get("chat_template", "default")
    changes = _Changes(
        template=None if template in (None, "default") else template,
        own_template=tokenizer.chat_template,
        is_padded=tokenizer.pad_token_id is None,
        is_plain=tokenizer is not loaded,
    )
    setattr(tokenizer, _CHANGES, changes)
    # Any token can serve as padding: lengths and masks exclude it.
    if changes.is_padded:
        tokenizer.pad_token = tokenizer.eos_token
    if template is None:
        tokenizer.chat_template = PASSTHROUGH_TEMPLATE
    elif template != "default":
        _refuse_plain_text(template)
        tokenizer.chat_template = template
    elif not tokenizer.chat_template:
        logger.info("tokenizer %s has no chat template; messages are joined as they are", name)
        tokenizer.chat_template = PASSTHROUGH_TEMPLATE
    return tokenizer


@dataclass(frozen=True)
class _Changes:
    """Changes that ``get_tokenizer`` has made to a tokenizer.

    Attributes:
        template: the run's chat template; None if it does not set one.
        own_template: original chat template.
        is_padded: the padding token was added.
        is_plain: the original class drops spaces, so the tokenizer was rebuilt from ``tokenizer.json`` alone.
    """

    template: str | None
    own_template: Any
    is_padded: bool
    is_plain: bool


def write_tokenizer(tokenizer: PreTrainedTokenizerBase, directory: Path, *, scores: bool = False) -> None:
    """Write the tokenizer of a trained model into the model's directory, in place of the one there.

    The original files are copied, because files written by transformers 5 cannot be read by earlier releases.
    The run's chat template is then written into them.

    Args:
        tokenizer: tokenizer from ``get_tokenizer``; any other one is saved as it is.
        directory: directory with the files of the trained model.
        scores: see ``as_published``.
    """
    from converters.checkpoint.artifacts import change_tokenizer, replace_tokenizer

    changes: _Changes | None = getattr(tokenizer, _CHANGES, None)
    source = None if changes is None else _directory_of(tokenizer.name_or_path)
    replace_tokenizer(directory, source)
    if changes is None or source is None:
        as_published(tokenizer, scores=scores).save_pretrained(directory)
        return
    keys = {"pad_token": str(tokenizer.pad_token)} if scores and changes.is_padded else {}
    if changes.is_plain:
        keys["tokenizer_class"] = "PreTrainedTokenizerFast"
    change_tokenizer(directory, keys, changes.template)


def _directory_of(name: str) -> Path | None:
    """Return the local directory of a tokenizer's files, or None if they are not on this host."""
    from transformers.utils import cached_file

    directory = Path(name).expanduser()
    if directory.is_dir():
        return directory
    try:
        found = cached_file(name, "tokenizer_config.json", local_files_only=True)
    # The name may be a directory on the driver's disk, which is not a hub id.
    except (OSError, ValueError):
        return None
    return None if found is None else Path(found).parent


def as_published(tokenizer: PreTrainedTokenizerBase, *, scores: bool = False) -> PreTrainedTokenizerBase:
    """Return the tokenizer for publication with a trained model: with the run's chat template, else the
    original one.

    ``chat_template: null`` means that the prompts of the run were already rendered. A server of the model
    renders prompts itself, so the original template is kept then.

    Args:
        tokenizer: tokenizer from ``get_tokenizer``; any other one is returned as it is.
        scores: the model is a reward model. Its users pad batches, so an added padding token is kept. A
            language model without an original padding token gets none.
    """
    changes: _Changes | None = getattr(tokenizer, _CHANGES, None)
    if changes is None:
        return tokenizer
    # Deep copy: the run keeps its own tokenizer, and a shallow copy would share the special tokens.
    published = copy.deepcopy(tokenizer)
    published.chat_template = changes.template or changes.own_template
    if changes.is_padded and not scores:
        published.pad_token = None
    return published


def _refuse_plain_text(template: str) -> None:
    """Reject a chat template without any Jinja syntax, such as the path of a file: it would write the same
    text for all messages.

    Raises:
        ModelError: it has none.
    """
    if "{{" not in template and "{%" not in template:
        raise ModelError(
            f"policy.tokenizer.chat_template = {template[:80]!r} is no Jinja template: it would write this "
            "text for any messages. Fix: write the text of the template, or put its file as "
            "chat_template.jinja into the directory of the tokenizer"
        )


def _as_its_file_says(tokenizer: PreTrainedTokenizerBase, name: str) -> PreTrainedTokenizerBase:
    """Rebuild a tokenizer from ``tokenizer.json`` if it drops white space that this file keeps.

    transformers 5 builds the class named in ``tokenizer_config.json`` from the vocabulary alone. Many
    DeepSeek models name Llama's class. It searches a byte-level vocabulary for SentencePiece's space mark,
    finds none, and silently drops every space.
    """
    from transformers import PreTrainedTokenizerFast

    if not tokenizer.is_fast or _keeps_all(tokenizer):
        return tokenizer
    try:
        plain = PreTrainedTokenizerFast.from_pretrained(name)
    # No tokenizer.json, so nothing says that white space must be kept.
    except (OSError, ValueError):
        return tokenizer
    if not _keeps_all(plain):
        return tokenizer
    logger.warning(
        "tokenizer %s: %s, which its tokenizer_config.json names, drops spaces that its tokenizer.json "
        "keeps; tokenizer.json is used as it is",
        name,
        type(tokenizer).__name__,
    )
    return plain


def _keeps_all(tokenizer: PreTrainedTokenizerBase) -> bool:
    ids = tokenizer(_ALL_KEPT, add_special_tokens=False)["input_ids"]
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False) == _ALL_KEPT


def _refuse_special_files(name: str) -> None:
    """Reject a directory that contains a named pipe or similar in place of a file, because transformers would
    block on it.

    Raises:
        ModelError: there is one; the message names it.
    """
    directory = Path(name).expanduser()
    found = first_special(directory) if directory.is_dir() else None
    if found is not None:
        raise ModelError(
            f"policy.tokenizer.name = {name!r}: {found[0]} is {found[1]}, not a file. Fix: put the file "
            "itself there"
        )


NO_TEMPLATE = "{prompt}"


class PromptEncoder:
    """Encodes records as token ids: applies prompt template, system prompt, chat template and tokenizer."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_template: str | None = None,
        system_prompt: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        stop_tokens: Sequence[int] = (),
        date: datetime.date | None = None,
        tools: Sequence[ToolDeclaration] = (),
        named_tools: Mapping[str | None, Sequence[ToolDeclaration]] = MappingProxyType({}),
    ) -> None:
        """Args:
            tokenizer: tokenizer from ``get_tokenizer``.
            prompt_template: text in which ``{prompt}`` is replaced by a plain-text prompt; not applied to
                chat messages.
            system_prompt: prepended as a system message, unless the conversation has one.
            template_kwargs: variables for the chat template.
            stop_tokens: token ids that end a generated response (``stop_tokens_of``); the EOS token is always
                included.
            date: fixed date for chat templates that read the clock; None for the current time.
            tools: tools for the chat template, for records without tools of their own.
            named_tools: tools by environment, for records that name one.

        Raises:
            DataError: the prompt template lacks ``{prompt}``, or the chat template does not use a variable.
        """
        if prompt_template is not None and "{prompt}" not in prompt_template:
            raise DataError(
                f"data.prompt_template = {prompt_template!r} has no {{prompt}}, all prompts would be equal. "
                "Fix: add {prompt}"
            )
        self._tokenizer = tokenizer
        self.prompt_template = prompt_template or NO_TEMPLATE
        self._system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self.chat_template = ChatTemplate(tokenizer, template_kwargs, date)
        self._tools, self._named_tools = tuple(tools), named_tools
        self._begin = _begin_token(tokenizer)
        leading = self._begin if self.chat_template.is_passthrough else []
        stops = frozenset({int(tokenizer.eos_token_id), *stop_tokens})
        self._conversations = ConversationEncoder(tokenizer, self.chat_template, stops, leading)
        self._answers_are_turns = (
            not self.chat_template.is_passthrough and self.chat_template.writes_responses()
        )

    @property
    def identity(self) -> list[Any]:
        """Everything that determines the tokens except the records and the tokenizer's vocabulary, as JSON
        types, for cache keys."""
        return [
            self.prompt_template,
            self._system,
            self._conversations.leading_tokens,
            self.chat_template.identity,
            sorted(self._conversations.stop_tokens),
            *([list(self._tools)] if self._tools else []),
            *([dict(self._named_tools)] if self._named_tools else []),
        ]

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt, up to where the answer starts.

        A real chat template writes BOS itself if the model wants it. For the template that only concatenates
        messages, the BOS that the tokenizer would add is prepended.
        """
        return self.encode_records(
            [Record(prompt if isinstance(prompt, str) else tuple(prompt), "", "the prompt")]
        )[0]

    def encode_records(self, records: Sequence[Record]) -> list[list[int]]:
        """Return the token ids of many prompts. Tokenizing them together is much faster than one by one.

        Raises:
            DataError: the chat template fails on a prompt; the message names the record.
        """
        return self.encode_texts(list(map(self.text, records)))

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenize texts that ``text`` has rendered."""
        return list(map(self._conversations.led, _tokens(self._tokenizer, texts)))

    def beginning(self, text: str, limit: int) -> str:
        """Return the text unchanged, or only its beginning if that alone exceeds ``limit`` tokens.

        This bounds the memory of the tokenizer, which takes hundreds of bytes per character. The beginning
        has more than twice the limit of tokens, so that a token merged across its end does not matter.
        """
        size = long_text(limit)
        while size < len(text):
            if len(_tokens(self._tokenizer, [text[:size]])[0]) > 2 * limit + _FEW_TOKENS:
                return text[:size]
            # A text may have few tokens per character, such as long runs of spaces: try a longer beginning.
            size *= 2
        return text

    def as_conversation(self, record: Record) -> Record:
        """Convert a record with a plain-text answer to a conversation, if the chat template can render
        assistant turns.

        The answer is then encoded like one that the data store as a message. With a template for prompts
        only, or one that concatenates messages, the answer stays a text that follows the prompt.
        """
        if record.last is not None or record.prompt == () or not self._answers_are_turns:
            return record
        return replace(
            record,
            prompt=tuple(self._asked(record)),
            last={"role": "assistant", "content": record.answer},
        )

    def split(self, record: Record, prompt: list[int], answer: list[int]) -> tuple[list[int], list[int]]:
        """Return the prompt tokens, which have no loss, and the answer tokens, which have a loss.

        If the record is a text without a prompt, its first token serves as the prompt. The text may already
        contain BOS and EOS.
        """
        if record.prompt != ():
            return prompt, answer
        ids = answer if answer[: len(self._begin)] == self._begin else self._begin + answer
        # The answer ends with an appended EOS; drop it if the text itself already ended with EOS.
        ids = ids[:-1] if ids[-2:-1] == ids[-1:] else ids
        return (ids[:1], ids[1:]) if min(len(answer), len(ids)) > 1 else ([], [])

    def whole_text(self, record: Record) -> str:
        """Render a complete conversation.

        Raises:
            DataError: the chat template fails; the message names the record.
        """
        return self.chat_template.render(self._all_messages(record), record.tools, record.origin)

    def encode_conversation(self, record: Record) -> EncodedConversation:
        """Tokenize a complete conversation, and locate the assistant's turns (see
        ``ConversationEncoder.encode``).

        Args:
            record: a record with ``last``.

        Raises:
            RecordError: the template fails, or the position of a turn is ambiguous; the message names the
                record.
        """
        return self._conversations.encode(self._all_messages(record), record.tools, record.origin)

    def _all_messages(self, record: Record) -> list[ChatMessage]:
        assert record.last is not None and not isinstance(record.prompt, str)
        return self._messages(record, (*record.prompt, record.last))

    def unwritten_role(self, record: Record, text: str) -> str | None:
        """Return the role of a prompt message that the rendered ``text`` lacks, or None if all are there.
        Only system and user messages are checked."""
        for message in self._prompt_messages(record):
            # Do not check the other roles: tool calls and results may be written in another form, and
            # reasoning may be left out.
            if message["role"] in {"assistant", "tool"}:
                continue
            if (message.get("content") or "").strip() not in text:
                return str(message["role"])
        return None

    def text(self, record: Record) -> str:
        """Render a record's prompt, up to where the answer starts.

        Raises:
            DataError: the chat template fails; the message names the record.
        """
        if record.prompt == ():
            return ""
        name = record.fields.get("env_name") or record.fields.get("task_name")
        named = self._named_tools.get(name) if isinstance(name, str) else None
        tools = record.tools or named or self._tools
        return self.chat_template.render(
            self._prompt_messages(record), tools, record.origin, for_generation=True
        )

    def _prompt_messages(self, record: Record) -> list[ChatMessage]:
        return self._messages(record, self._asked(record))

    def _asked(self, record: Record) -> Sequence[ChatMessage]:
        """Return a record's prompt as messages."""
        if not isinstance(record.prompt, str):
            return record.prompt
        # Not str.format: other braces in the template or the prompt are ordinary text.
        return [{"role": "user", "content": self.prompt_template.replace("{prompt}", record.prompt)}]

    def _messages(self, record: Record, turns: Sequence[ChatMessage]) -> list[ChatMessage]:
        system = self._system if record.system is None else [{"role": "system", "content": record.system}]
        if record.has_system or record.system == "":
            system = []
        return [*system, *map(dict, turns)]


def encode_answers(tokenizer: PreTrainedTokenizerBase, answers: Sequence[str]) -> list[list[int]]:
    """Tokenize answers, and append the EOS token to each."""
    return [[*row, tokenizer.eos_token_id] for row in _tokens(tokenizer, answers)]


def text_encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], list[int]]:
    """Return a function that tokenizes one text without special tokens.

    For short texts the overhead of transformers exceeds the tokenization itself. So the tokenizers library is
    called directly, if the tokenizer's class does not override the relevant methods.
    """
    from transformers import PreTrainedTokenizerFast

    kind: Any = type(tokenizer)
    names = ("__call__", "_encode_plus", "_batch_encode_plus")
    inherited = all(
        getattr(kind, name, None) is getattr(PreTrainedTokenizerFast, name, None) for name in names
    )
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or not inherited:
        return lambda text: _tokens(tokenizer, [text])[0]
    backend = tokenizer.backend_tokenizer

    def encode(text: str) -> list[int]:
        if backend.truncation is not None or backend.padding is not None:
            # Another call has set truncation or padding, which transformers resets.
            return _tokens(tokenizer, [text])[0]
        # The fast variant skips token offsets, which are not needed here.
        found: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return found

    return encode


def _tokens(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    return list(map(list, tokenizer(list(texts), add_special_tokens=False)["input_ids"])) if texts else []


def _begin_token(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return [BOS] if the tokenizer puts it before every text, else []."""
    bos = tokenizer.bos_token_id
    starts_with_it = list(tokenizer("")["input_ids"])[:1] == [bos]
    return [bos] if starts_with_it and bos != tokenizer.eos_token_id else []
