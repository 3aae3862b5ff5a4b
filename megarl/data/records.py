"""Prompt and answer records: reading them from JSON lines or from a `datasets` data set, and refusing what is not one."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.errors import DataError

if TYPE_CHECKING:
    from megarl.config.sections import DataSource

ChatMessage = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Record:
    """One problem.

    Attributes:
        prompt: plain text, or chat messages with ``role`` and ``content``.
        answer: what the model should say, or what a reward compares with.
        origin: where it stands, for messages: ``train.jsonl line 7``.
    """

    prompt: str | tuple[ChatMessage, ...]
    answer: str
    origin: str


def load_records(source: DataSource) -> list[Record]:
    """All records of a source in their stored order, at most ``max_samples``.

    Raises:
        DataError: nothing is there, nothing is in it, or a record is broken; the message names the file and the line (or the row).
    """
    rows = _json_lines(Path(source["path"])) if source.get("path") is not None else _dataset_rows(source)
    limited = itertools.islice(rows, source.get("max_samples"))
    records = [_record(row, source["prompt_key"], source["answer_key"], origin) for origin, row in limited]
    if not records:
        raise DataError(f"{_source_name(source)} holds 0 records, at least 1 is needed. Fix: point the data source at records")
    return records


def fingerprint(records: Sequence[Record]) -> str:
    """Hexadecimal digest of all prompts and answers in order. A resumed run compares it, so that it never goes on with other data."""
    digest = hashlib.blake2b(digest_size=16)
    for record in records:
        digest.update(json.dumps([record.prompt, record.answer], sort_keys=True, default=dict).encode())
        digest.update(b"\n")
    return digest.hexdigest()


def _source_name(source: DataSource) -> str:
    return f"data file {source['path']}" if source.get("path") is not None else f"data set {source['name']}"


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """(origin, JSON value) of every line that is not blank."""
    if not path.is_file():
        raise DataError(f"data file {path} does not exist or is not a file. Fix: give the path of a JSON lines file")
    try:
        with path.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{path} line {number}", _parse(line, f"{path} line {number}")
    except UnicodeDecodeError as error:
        raise DataError(f"data file {path} is not UTF-8 text: {error}. Fix: convert it to UTF-8") from error
    except OSError as error:
        raise DataError(f"data file {path} cannot be read: {error}. Fix: make it readable") from error


def _parse(line: str, origin: str) -> Any:
    try:
        return json.loads(line)
    # json gives up with a RecursionError on what nests too deeply
    except (ValueError, RecursionError) as error:
        problem = "it nests too deeply" if isinstance(error, RecursionError) else str(error)
        raise DataError(f"{origin} is not JSON: {problem}; it starts {line[:60]!r}. Fix: write one JSON object a line") from error


def _dataset_rows(source: DataSource) -> Iterable[tuple[str, Any]]:
    """(origin, row) of a data set by name, of a local folder of data files, or of one written by ``save_to_disk``."""
    import datasets

    name, split = source["name"], source.get("split") or "train"
    try:
        if _was_saved_to_disk(Path(name)):
            loaded = datasets.load_from_disk(name)
            rows = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            rows = datasets.load_dataset(name, source.get("subset"), split=split)
    except Exception as error:
        # The library and its transports raise errors of many unrelated classes.
        raise DataError(
            f"data set {name} (subset {source.get('subset')}, split {split}) cannot be loaded: {type(error).__name__}: {error}. "
            "Fix: give a known name, or a local folder"
        ) from error
    return ((f"{name}[{split}] row {number}", row) for number, row in enumerate(rows))


def _was_saved_to_disk(path: Path) -> bool:
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def _record(row: Any, prompt_key: str, answer_key: str, origin: str) -> Record:
    if not isinstance(row, Mapping):
        raise DataError(f"{origin} is a {type(row).__name__}, expected an object. Fix: write {{{prompt_key!r}: ..., {answer_key!r}: ...}}")
    for key in (prompt_key, answer_key):
        if key not in row:
            raise DataError(f"{origin} has no key {key!r}; it has {sorted(map(str, row))}. Fix: add it, or set prompt_key and answer_key")
    answer = row[answer_key]
    if not isinstance(answer, str):
        raise DataError(f"{origin}: {answer_key!r} = {answer!r} is a {type(answer).__name__}, expected a string. Fix: put it in quotes")
    prompt = _prompt(row[prompt_key], prompt_key, origin)
    for key, text in [(answer_key, answer), *((prompt_key, text) for text in texts_of(prompt))]:
        _refuse_half_characters(text, key, origin)
    return Record(prompt, answer, origin)


def texts_of(prompt: str | Sequence[ChatMessage]) -> list[str]:
    """The text of a prompt, or the contents of its messages."""
    return [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]


def _refuse_half_characters(text: str, key: str, origin: str) -> None:
    """Refuse a surrogate without the other half, which JSON can write and no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        shown = text[error.start].encode("unicode_escape").decode()
        raise DataError(
            f"{origin}: {key!r} has {shown} at character {error.start}, which is half of a surrogate pair and no character. "
            "Fix: write the text again with its encoding intact, or remove it"
        ) from error


def _prompt(value: Any, key: str, origin: str) -> str | tuple[ChatMessage, ...]:
    if isinstance(value, str):
        return value
    is_chat = isinstance(value, list) and bool(value)
    if not is_chat or not all(isinstance(message, Mapping) and _is_message(message) for message in value):
        shown = repr(value)[:80]
        raise DataError(
            f"{origin}: {key!r} = {shown} is neither a string nor a list of messages. "
            "Fix: write a string, or [{'role': 'user', 'content': '...'}]"
        )
    return tuple(value)


def _is_message(message: Mapping[str, Any]) -> bool:
    return isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
