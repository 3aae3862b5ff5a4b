"""Records (prompt and answer) and preference pairs: how they are read from the fields of a row, and which
rows are rejected."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, TypeVar

from megarl.config.data_sources import DataSource, fields_of_key, key_steps
from megarl.data.messages import (
    ChatMessage,
    ToolDeclaration,
    advice_for_text,
    are_messages,
    as_messages,
    as_prompt,
    messages_in_json,
)
from megarl.data.rows import (
    AS_LINES,
    Fields,
    NamedSet,
    Row,
    is_table,
    named_set,
    rows_of,
    source_name,
    value_at,
)
from megarl.data.unread_columns import refuse_media
from megarl.errors import DataError, RecordError

Found = TypeVar("Found")

_SYSTEM = frozenset({"system", "developer"})
# Roles that may follow each role; None is the start. An assistant turn may call several tools, each with a
# result of its own.
_FOLLOWS: Mapping[str | None, frozenset[str]] = {
    None: _SYSTEM | {"user"},
    "system": frozenset({"user"}),
    "developer": frozenset({"user"}),
    "user": frozenset({"assistant"}),
    "assistant": frozenset({"user", "tool"}),
    "tool": frozenset({"tool", "assistant"}),
}

# float64 represents every integer up to this one exactly.
_EXACT_WHOLE = 2**53
_RECORD_KEYS = ("messages_key", "prompt_key", "answer_key")
_STATEMENT = re.compile(r"^\s*assert\b", re.MULTILINE)
_FIELDS_WITH_TESTS = frozenset(
    {
        "test_list",
        "challenge_test_list",
        "public_test_cases",
        "private_test_cases",
        "test_cases",
        "tests",
        "input_output",
    }
)


@dataclass(frozen=True, slots=True)
class Doubt:
    """A warning about a usable reference answer. Records with a doubt are counted and reported, but not
    rejected."""

    why: str


@dataclass(frozen=True, slots=True)
class Record:
    """One prompt with its answer, before tokenization.

    Attributes:
        prompt: plain text, or chat messages with ``role`` and ``content``; () if the answer is a text without
            a prompt.
        answer: the answer to train on, or the reference answer for a reward.
        origin: location for messages, such as ``train.jsonl line 7``.
        last: the assistant's last turn of a conversation, as stored; None if the answer is not a turn.
        tools: tools that the chat template shows.
        system: system message from a field of the row, which replaces the run's; None if there is no such
            field.
        fields: further fields of the row, by the source's keys, as JSON types.
    """

    prompt: str | tuple[ChatMessage, ...]
    answer: str
    origin: str
    last: ChatMessage | None = None
    tools: tuple[ToolDeclaration, ...] = ()
    system: str | None = None
    fields: Fields = field(default_factory=dict)

    @property
    def has_system(self) -> bool:
        """True if the prompt's messages start with a system message."""
        return not isinstance(self.prompt, str) and bool(self.prompt) and self.prompt[0]["role"] in _SYSTEM


OnBadRecord = Callable[[RecordError], None]
"""Function that is called with the error of an unusable record. It raises the error, unless such records are
skipped."""


def refuse(error: RecordError) -> None:
    """Raise the error of an unusable record: the default ``on_bad``."""
    raise error


def read_records(source: DataSource, on_bad: OnBadRecord = refuse) -> Iterator[Record]:
    """Yield a source's records in stored order, at most ``max_samples``. Rows are read lazily.

    Args:
        source: the data source.
        on_bad: called with the error of each broken record.

    Raises:
        DataError: the source does not exist or is empty, or a record is broken; the message names file and
            line (or row).
    """
    return _some_of(_all_records(source, named_set(source), on_bad), source, on_bad, "records")


def _some_of(found: Iterator[Found], source: DataSource, on_bad: OnBadRecord, what: str) -> Iterator[Found]:
    """Yield at most ``max_samples`` elements.

    Raises:
        DataError: there are none, and no records were skipped.
    """
    one = None
    for one in itertools.islice(found, source.get("max_samples")):
        yield one
    if one is None and on_bad is refuse:
        raise DataError(
            f"{source_name(source)} holds 0 {what}, at least 1 is needed. Fix: point the data source at "
            f"{what}"
        )


def _all_records(source: DataSource, known: NamedSet | None, on_bad: OnBadRecord) -> Iterator[Record]:
    """Yield the records of all rows. If a known data set contains duplicates (``NamedSet.once``), only the
    first row of each problem is used."""
    seen = set[bytes]()
    for origin, row in rows_of(source):
        try:
            record = _with_system(_record(row, source, known, origin), row, source)
            refuse_media(row, texts_of(record.prompt), origin)
            if source.get("extra_keys"):
                record = replace(record, fields=_fields(row, source, origin))
        except RecordError as error:
            on_bad(error)
            continue
        if known is not None and known.once:
            # A 16-byte digest per record takes less memory than its texts.
            said = hashlib.blake2b(
                json.dumps([record.prompt, record.answer], default=_in_json).encode(), digest_size=16
            ).digest()
            if said in seen:
                continue
            seen.add(said)
        yield record


def read_preferences(source: DataSource, on_bad: OnBadRecord = refuse) -> Iterator[tuple[Record, Record]]:
    """Yield a source's preference pairs in stored order, at most ``max_samples``. A pair is two records: the
    prompt with the chosen answer, and with the rejected one.

    Args:
        source: data source whose rows have a prompt and two answers (texts or messages), or two conversations
            that differ only in the last turn.
        on_bad: called with the error of each broken row.

    Raises:
        DataError: the source does not exist, or a row is broken or has answers to different prompts; the
            message names file and line.
    """
    return _some_of(_all_pairs(source, on_bad), source, on_bad, "pairs")


def _all_pairs(source: DataSource, on_bad: OnBadRecord) -> Iterator[tuple[Record, Record]]:
    for row in rows_of(source):
        try:
            yield _pair(row, source)
        except RecordError as error:
            on_bad(error)


def _without_weights(prompt: str | Sequence[Any]) -> Any:
    """Remove the message field ``weight``, which only SFT reads, from a prompt."""
    if isinstance(prompt, str):
        return prompt
    turns = list[Any]()
    for turn in prompt:
        turns.append(
            {key: value for key, value in turn.items() if key != "weight"}
            if isinstance(turn, Mapping)
            else turn
        )
    return turns


def _pair(stored: Row, source: DataSource) -> tuple[Record, Record]:
    origin, row = stored
    require_object(row, "a prompt and two answers a row", origin)
    # A user's own keys may be paths into the completions, so leave the row as it is then.
    row = ranked_pair(row, origin) if source["chosen_key"] == "chosen" else row
    chosen, rejected = (
        _with_system(_answered_record(row, key, source, origin), row, source)
        for key in (source["chosen_key"], source["rejected_key"])
    )
    refuse_media(row, texts_of(chosen.prompt), origin)
    if _without_weights(chosen.prompt) != _without_weights(rejected.prompt):
        raise RecordError(
            f"{origin}: {source['chosen_key']!r} and {source['rejected_key']!r} differ in more than their "
            "last turn. "
            "Fix: give both the same prompt"
        )
    return chosen, rejected


def ranked_pair(row: Fields, origin: str) -> Fields:
    """Convert a row in NeMo-RL's format (a context with two ranked completions) to a prompt with a chosen and
    a rejected answer. Any other row is returned unchanged.

    Raises:
        RecordError: there are not exactly two completions, or their ranks do not order them.
    """
    completions = row.get("completions")
    if not {"context", "completions"} <= row.keys() or "chosen" in row or not isinstance(completions, list):
        return row
    ranks: list[Any] = [each.get("rank") if isinstance(each, Mapping) else None for each in completions]
    are_numbers = all(isinstance(rank, int | float) for rank in ranks)
    # NaN ranks compare as neither lower nor higher.
    if len(ranks) != 2 or not are_numbers or not (ranks[0] < ranks[1] or ranks[1] < ranks[0]):
        raise RecordError(
            f"{origin}: 'completions' has the ranks {str(ranks)[:60]}, and a pair has two completions, the "
            "better one with the lower rank. Fix: keep two whose ranks are different numbers, or leave such "
            "records out with data.on_bad_record=skip"
        )
    better, worse = completions if ranks[0] < ranks[1] else completions[::-1]
    rest = {key: value for key, value in row.items() if key not in ("context", "completions")}
    return {
        **rest,
        "prompt": row["context"],
        "chosen": value_of(better, "completion", origin),
        "rejected": value_of(worse, "completion", origin),
    }


def _with_system(record: Record, row: Fields, source: DataSource) -> Record:
    """Set a record's system message from the field that the source names, if the field is not null.

    Raises:
        RecordError: the conversation has a different system message of its own.
    """
    key = source.get("system_key")
    value = None if key is None else value_of(row, key, record.origin)
    if key is None or value is None:
        return record
    if value != "" and record.has_system and not isinstance(record.prompt, str):
        # Some data sets store a conversation's system message twice.
        if record.prompt[0].get("content") == value:
            return record
        raise RecordError(
            f"{record.origin}: the conversation has a system message, and so has {key!r}. Fix: remove one "
            "of them, or name messages_key and no system_key"
        )
    return replace(record, system=text_of(value, key, record.origin))


def require_object(row: Any, form: str, origin: str) -> None:
    """Check that a row is a JSON object. For a line that could not be parsed, the row is the error itself,
    which is raised.

    Raises:
        RecordError: it is not.
    """
    if isinstance(row, RecordError):
        raise row
    if not isinstance(row, Mapping):
        lines = AS_LINES if isinstance(row, list) else ""
        raise RecordError(f"{origin} is a {type(row).__name__}, expected an object. Fix: write {form}{lines}")


def _answered_record(row: Fields, key: str, source: DataSource, origin: str) -> Record:
    """Build the record of a row's prompt with one of its two answers."""
    value, tools = value_of(row, key, origin), tools_of(row, source, origin)
    prompt_key = source.get("prompt_key")
    before: str | tuple[ChatMessage, ...] = (
        () if prompt_key is None else _prompt_in(row, prompt_key, origin, is_table(source))
    )
    if isinstance(value, str):
        value = messages_in_json(value) or value
    # Some data sets store an answer as one message without a list.
    elif are_messages([value]):
        value = [value]
    if isinstance(value, list) or prompt_key is None:
        value = as_messages(value, key, origin)
    if prompt_key is not None and not isinstance(value, list):
        return Record(before, text_of(value, key, origin), origin, tools=tools)
    asked = [{"role": "user", "content": before}] if isinstance(before, str) else list(before)
    if isinstance(value, list) and not _begins_with(value, asked):
        value = [*asked, *value]
    messages = conversation(value, key, origin, is_table(source))
    if messages[-1]["role"] != "assistant":
        raise RecordError(
            f"{origin}: {key!r} ends with a turn of {messages[-1]['role']!r}. Fix: end it with the answer, "
            "a turn of 'assistant'"
        )
    return Record(messages[:-1], messages[-1].get("content") or "", origin, messages[-1], tools)


def _begins_with(value: Sequence[Any], asked: Sequence[ChatMessage]) -> bool:
    """Return whether a conversation starts with the prompt, as in preference sets that store the prompt
    twice."""
    if not asked or len(value) <= len(asked):
        return False
    for message, each in zip(value, asked, strict=False):
        if not isinstance(message, Mapping):
            return False
        if message.get("role") != each["role"] or message.get("content") != each.get("content"):
            return False
    return True


def _in_json(value: Any) -> Any:
    """Convert a value that JSON lacks, such as a date in a table, for serialization."""
    return dict(value) if isinstance(value, Mapping) else str(value)


class Fingerprint:
    """Digest of all prompts and answers, in order. A resumed run compares it to detect that the data have
    changed."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)

    def add(self, record: Record) -> None:
        """Add the next record to the digest."""
        # Only fields that a record has, so that digests of plain records match those in older checkpoints.
        content: list[Any] = [record.prompt, record.answer]
        if record.last is not None or record.tools:
            content += [record.last, record.tools]
        if record.fields:
            content.append({"fields": record.fields})
        if record.system:
            content.append({"system": record.system})
        self._digest.update(json.dumps(content, sort_keys=True, default=_in_json).encode())
        self._digest.update(b"\n")

    def hexdigest(self) -> str:
        """Return the digest in hexadecimal."""
        return self._digest.hexdigest()


def _record(row: Any, source: DataSource, known: NamedSet | None, origin: str) -> Record:
    named = [source[key] for key in _RECORD_KEYS if source.get(key)]  # type: ignore[literal-required]
    given = named if known is None else (known.prompt_key, known.answer_key)
    fields = list[str]()
    for key in given:
        fields += (f"{name!r}: ..." for name in fields_of_key(key))
    require_object(row, "{" + ", ".join(fields) + "}", origin)
    if source.get("messages_key") is not None:
        return _conversation_record(row, source, origin)
    prompt_key, answer_key = (
        (known.prompt_key, known.answer_key)
        if known is not None
        else (source["prompt_key"], source["answer_key"])
    )
    prompt = _prompt_in(row, prompt_key, origin, is_table(source))
    answer = _answer_in(row, answer_key, origin)
    if known is not None and known.answer is not None:
        try:
            answer = known.answer(answer)
        except ValueError as error:
            raise RecordError(
                f"{origin}: {answer_key!r} is not of the form of {source.get('name')}: {error}. Fix: "
                "correct the record"
            ) from error
    return Record(prompt, answer, origin, tools=tools_of(row, source, origin))


def _prompt_in(
    row: Fields, key: str | list[str], origin: str, is_padded: bool
) -> str | tuple[ChatMessage, ...]:
    """Return the prompt of a row. Texts of several fields are joined by blank lines; empty ones are
    dropped."""
    if not key:
        return ()
    first, *others = fields_of_key(key)
    if not others:
        return prompt_of(value_of(row, first, origin), first, origin, is_padded)
    values = {name: value_of(row, name, origin) for name in others}
    texts = [text_of(value_of(row, first, origin), first, origin)]
    for name, value in values.items():
        if value is not None:
            texts.append(text_of(value, name, origin))
    return "\n\n".join(filter(str.strip, texts))


def _answer_in(row: Fields, key: str | list[str], origin: str) -> str:
    """Return the reference answer of a row. Several fields become a JSON object whose keys are the last parts
    of the field names."""
    if isinstance(key, str):
        return answer_of(value_of(row, key, origin), key, origin)
    found = {str(_steps(name)[-1]): value_of(row, name, origin) for name in key}
    try:
        return json.dumps(found)
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordError(
            f"{origin}: {', '.join(key)} cannot be written as JSON: {error}. Fix: store them as text and "
            "numbers"
        ) from error


def value_of(row: Fields, key: str, origin: str) -> Any:
    """Return the value of a row at a key, which may be a path into objects and lists. Errors are those of
    ``value_at``."""
    return value_at(row, key, _steps(key), origin)


@functools.cache
def _steps(key: str) -> tuple[str | int, ...]:
    return key_steps(key) or (key,)


def text_of(value: Any, key: str, origin: str) -> str:
    """Return a text or a number as text. An integral number has no fraction; any other is the shortest text
    that parses to the same number.

    Raises:
        RecordError: the value is neither a text nor a finite number.
    """
    if isinstance(value, str):
        refuse_half_characters([value], key, origin)
        return value
    # bool is a subclass of int, but true is not an answer.
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, float) and math.isfinite(value):
        # Arrow stores integers as floats as soon as one row is empty, so write 3.0 as 3. From 2**53 on, a
        # float may stand for several integers.
        return str(int(value)) if value.is_integer() and abs(value) < _EXACT_WHOLE else repr(value)
    if isinstance(value, Decimal) and value.is_finite():
        # Decimal columns pad values with zeros to the column's scale.
        text = f"{value or Decimal(0):f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    fix = "write a text or a number"
    if isinstance(value, list) and value:
        fix = f"name one of its members, for example by {key}[0]"
    elif isinstance(value, Mapping) and value:
        fix = f"name one of its fields, for example by {key}.{next(iter(value))}"
    found = "is null" if value is None else f"= {repr(value)[:80]} is a {type(value).__name__}"
    raise RecordError(f"{origin}: {key!r} {found}, expected a string or a number. Fix: {fix}")


def answer_of(value: Any, key: str, origin: str) -> str:
    """Convert a reference answer to text. It may be a text, a number, a single assistant message, or tests,
    which become the JSON that the reward ``code`` reads.

    Raises:
        RecordError: it is none of them.
    """
    messages = messages_in_json(value) if isinstance(value, str) else value if are_messages(value) else None
    if messages is not None:
        return _text_of_turn(as_messages(messages, key, origin), key, origin)
    return json.dumps(value) if _are_tests(value) else text_of(value, key, origin)


def _text_of_turn(messages: Sequence[ChatMessage], key: str, origin: str) -> str:
    if len(messages) == 1 and messages[0]["role"] == "assistant" and not messages[0].get("tool_calls"):
        return text_of(messages[0].get("content"), key, origin)
    raise RecordError(
        f"{origin}: {key!r} holds {len(messages)} messages, and an answer is one text of the assistant. "
        "Fix: store prompt and answer "
        "together as one list of messages, and name it by messages_key"
    )


def _are_tests(value: Any) -> bool:
    """Return whether a value holds tests of a program: statements (MBPP), inputs with outputs (APPS, PRIME),
    or lists of them (LiveCodeBench)."""
    if isinstance(value, Mapping):
        return {"inputs", "outputs"} <= value.keys() or not _FIELDS_WITH_TESTS.isdisjoint(value)
    if not isinstance(value, list) or not value:
        return False
    if all(isinstance(each, str) for each in value):
        return all(map(_STATEMENT.search, value))
    return all(isinstance(each, Mapping) and {"input", "output"} <= each.keys() for each in value)


def texts_of(prompt: str | Sequence[ChatMessage]) -> list[str]:
    """Return the text of a prompt, or the contents of its messages."""
    return [prompt] if isinstance(prompt, str) else [message.get("content") or "" for message in prompt]


def refuse_half_characters(texts: str | Sequence[str], key: str, origin: str) -> None:
    """Reject texts with a lone surrogate, which JSON can contain and no tokenizer accepts.

    Raises:
        RecordError: a text contains one.
    """
    for text in [texts] if isinstance(texts, str) else texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            shown = text[error.start].encode("unicode_escape").decode()
            raise RecordError(
                f"{origin}: {key!r} has {shown} at character {error.start}, which is half of a surrogate "
                "pair and no character. "
                "Fix: write the text again with its encoding intact, or remove it"
            ) from error


def prompt_of(value: Any, key: str, origin: str, is_padded: bool = False) -> str | tuple[ChatMessage, ...]:
    """Convert a stored prompt to a text or to messages of any roles.

    Args:
        value: the stored value.
        key: its field, for error messages.
        origin: location of the record, for error messages.
        is_padded: see ``conversation``.

    Raises:
        DataError: it is neither; the message names the key.
    """
    value = as_prompt(value, key, origin)
    if isinstance(value, str) or (isinstance(value, int | float | Decimal) and not isinstance(value, bool)):
        return text_of(value, key, origin)
    is_chat = isinstance(value, list) and bool(value)
    if not is_chat or not all(isinstance(message, Mapping) and _is_message(message) for message in value):
        shown = repr(value)[:80]
        raise RecordError(
            f"{origin}: {key!r} = {shown} is neither a string nor a list of messages. "
            "Fix: write a string, or [{'role': 'user', 'content': '...'}]"
        )
    refuse_half_characters(texts_of(value), key, origin)
    return tuple(_without_nulls(message, is_padded) for message in value)


def _is_message(message: ChatMessage) -> bool:
    content = message.get("content")
    is_said = isinstance(content, str) or (content is None and bool(message.get("tool_calls")))
    return isinstance(message.get("role"), str) and is_said


def _conversation_record(row: Fields, source: DataSource, origin: str) -> Record:
    key = source["messages_key"]
    messages = conversation(value_of(row, key, origin), key, origin, is_table(source))
    tools = tools_of(row, source, origin)
    has_last = messages[-1]["role"] == "assistant"
    prompt = messages[:-1] if has_last else messages
    if source.get("answer_key") is not None:
        answer = _answer_in(row, source["answer_key"], origin)
        return Record(prompt, answer, origin, tools=tools)
    if not has_last:
        raise RecordError(
            f"{origin}: {key!r} ends with a turn of {messages[-1]['role']!r}, so that there is no answer. "
            "Fix: end it with a turn of 'assistant', or set answer_key to the field that has the answer"
        )
    return Record(prompt, messages[-1].get("content") or "", origin, messages[-1], tools)


def conversation(value: Any, key: str, origin: str, is_padded: bool = False) -> tuple[ChatMessage, ...]:
    """Check a conversation, and return its messages without null fields.

    Args:
        value: the stored value.
        key: its field, for error messages.
        origin: location of the record, for error messages.
        is_padded: the row comes from an Arrow table, in which every tool call has the argument keys of all
            calls, with null for missing ones.

    Raises:
        DataError: it is not a list of messages, a message is empty, or the roles are in an invalid order; the
            message names the position.
    """
    value = as_messages(value, key, origin)
    if not isinstance(value, list) or not value:
        fix = (
            advice_for_text(value)
            if isinstance(value, str)
            else "write [{'role': 'user', 'content': '...'}, ...]"
        )
        raise RecordError(f"{origin}: {key!r} = {repr(value)[:80]} is not a list of messages. Fix: {fix}")
    found: list[ChatMessage] = []
    before: str | None = None
    for place, message in enumerate(value):
        where = f"{origin}: {key}[{place}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RecordError(
                f"{where} = {repr(message)[:80]} is no message. Fix: write {{'role': 'user', 'content': "
                "'...'}"
            )
        role, content = message["role"], message.get("content")
        if role not in _FOLLOWS[before]:
            after = f"after {before!r}" if before else "at the beginning"
            raise RecordError(
                f"{where} has the role {role!r} {after}, where only "
                f"{', '.join(sorted(_FOLLOWS[before]))} may stand. Fix: correct the order of the "
                "turns"
            )
        if not isinstance(content, str) and (content is not None or not message.get("tool_calls")):
            kind = "no content" if content is None else f"content of the type {type(content).__name__}"
            raise RecordError(f"{where} ({role}) has {kind}. Fix: write the content as text")
        refuse_half_characters(content or "", f"{key}[{place}].content", origin)
        found.append(_without_nulls(message, is_padded))
        before = role
    if before in _SYSTEM:
        raise RecordError(f"{origin}: {key!r} has no turn of the user. Fix: add one")
    return tuple(found)


def _without_nulls(message: ChatMessage, is_padded: bool) -> ChatMessage:
    """Remove null fields from a message, except ``content``. For a message from a table, also from its tool
    calls."""
    kept = {name: each for name, each in message.items() if each is not None or name == "content"}
    if is_padded and "tool_calls" in kept:
        kept["tool_calls"] = without_padding(kept["tool_calls"])
    return kept


def without_padding(value: Any) -> Any:
    """Remove null keys from a value of an Arrow table, at any depth.

    Arrow gives every row the keys of all rows: next to ``{"zone": "UTC"}``, the arguments ``{"city":
    "Rome"}`` are read as ``{"city": "Rome", "zone": None}``.
    """
    if isinstance(value, Mapping):
        return {key: without_padding(inner) for key, inner in value.items() if inner is not None}
    return list(map(without_padding, value)) if isinstance(value, list) else value


def _fields(row: Fields, source: DataSource, origin: str) -> dict[str, Any]:
    """Return the further fields of a record (``extra_keys``).

    Raises:
        RecordError: a value cannot be represented as JSON.
    """
    found = {key: value_of(row, key, origin) for key in source.get("extra_keys", [])}
    for key, value in found.items():
        try:
            json.dumps(value).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise RecordError(
                f"{origin}: {key!r} = {repr(value)[:80]} cannot be passed on: {error}. Fix: store "
                "it as text, numbers, lists and objects"
            ) from error
    return found


def tools_of(row: Fields, source: DataSource, origin: str) -> tuple[ToolDeclaration, ...]:
    """Return the tools of a record. Empty if the source names no field for them, or the field is empty.

    Raises:
        RecordError: the field is neither a list of objects nor JSON of one.
    """
    key = source.get("tools_key")
    if key is None:
        return ()
    value = value_of(row, key, origin)
    # Arrow gives every tool the parameters of all tools, with null for missing ones.
    if is_table(source):
        value = without_padding(value)
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RecordError(
                f"{origin}: {key!r} = {value[:60]!r} is not JSON: {error}. Fix: write a JSON list of tools"
            ) from error
    if not value:
        return ()
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise RecordError(
            f"{origin}: {key!r} = {repr(value)[:80]} is no list of objects. Fix: write a list of tools, or "
            "null"
        )
    return tuple(map(_tool, value))


def _tool(given: ToolDeclaration) -> ToolDeclaration:
    """Return a tool in OpenAI's format, which templates expect: a bare function (``functions``, ShareGPT's
    ``tools``) is wrapped."""
    is_bare = (
        isinstance(given.get("name"), str)
        and "parameters" in given
        and not given.keys() & {"type", "function"}
    )
    return {"type": "function", "function": given} if is_bare else given
