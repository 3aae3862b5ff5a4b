"""Tokenized data sets: prompts to answer (reinforcement learning) and prompts with answers (supervised fine-tuning)."""

from __future__ import annotations

import bisect
import contextlib
import functools
import hashlib
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from megarl import env
from megarl.config.data_sources import DEFAULT_CACHE_GIB, FIELD_KEYS, set_module
from megarl.data.records import Fingerprint, Record, read_records, texts_of
from megarl.data.rows import content_digest, source_name
from megarl.data.table import Table, TableWriter, bound_tables, read_table
from megarl.data.tokenization import PromptEncoder, encode_answers
from megarl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.config.sections import DataConfig, DataSource

logger = logging.getLogger(__name__)

_CHUNK = 1024
_PROGRESS_EVERY = 100_000
_SHOWN = 5
_MOST_IN_MEMORY = 8 * 2**20
"""Bytes of a source's tokens above which they go to files."""

_FORM = 3
"""Number of the form of a kept table; another one is made anew."""

_COLUMNS = {"prompt": "int32", "answer": "int32", "text": "uint8", "targets": "int32", "fields": "uint8"}
_REMEMBERED_ANSWERS = 100_000

FaultOfAnswer = Callable[..., str | None]


@dataclass(frozen=True, slots=True)
class Example:
    """One tokenized record.

    Attributes:
        index: its place in the data set, counted from 0.
        prompt_ids: tokens up to where the answer starts.
        answer_ids: the reference answer's tokens with the end-of-sequence token; of a conversation in SFT all tokens from the first that
            the assistant says.
        answer: the reference answer as text.
        targets: [start, end) of the spans of prompt and answer that are learned; None for the whole answer.
        env_name: the environment that its source names.
        fields: further fields of the record, by the keys that the source gives (``extra_keys``).
    """

    index: int
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    answer: str
    targets: tuple[tuple[int, int], ...] | None = None
    env_name: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SourceRange:
    """Source range: the examples of a data set that come from one source.

    Attributes:
        name: of the source, for messages.
        start, end: its examples have the places [start, end); repeats are counted.
        weight: its share of what is drawn, in proportion to the other weights; None where each example comes once an epoch.
        env_name: the environment that the source names.
    """

    name: str
    start: int
    end: int
    weight: float | None = None
    env_name: str | None = None


class Examples(Sequence[Example]):
    """The examples of tables one after another, each made when it is asked for.

    Args:
        parts: tables, each with how often its rows come and the environment of its source.
    """

    def __init__(self, parts: Sequence[tuple[Table, int, str | None]]) -> None:
        self._parts = parts
        self._ends = list(itertools.accumulate(len(table) * repeat for table, repeat, _ in parts))

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, place: int) -> Example: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[Example, ...]: ...

    def __getitem__(self, place: int | slice) -> Example | tuple[Example, ...]:
        if isinstance(place, slice):
            return tuple(self[each] for each in range(*place.indices(len(self))))
        index = range(len(self))[place]
        part = bisect.bisect_right(self._ends, index)
        table, _, env_name = self._parts[part]
        row = (index - (self._ends[part - 1] if part else 0)) % len(table)
        prompt, answer, text, targets, fields = (table.columns[name][row] for name in _COLUMNS)
        spans = targets.reshape(-1, 2).tolist()
        learned = tuple((start, end) for start, end in spans) or None
        further = json.loads(fields.tobytes()) if len(fields) else {}
        return Example(index, tuple(prompt.tolist()), tuple(answer.tolist()), text.tobytes().decode(), learned, env_name, further)

    def lengths(self, with_answers: bool) -> np.ndarray:
        """Tokens of each example, [examples] int64."""
        columns = ("prompt", "answer") if with_answers else ("prompt",)
        lengths = [sum(table.columns[name].lengths for name in columns) for table, _, _ in self._parts]
        return np.concatenate([np.tile(each, repeat) for each, (_, repeat, _) in zip(lengths, self._parts, strict=True)])

    def largest_token(self, with_answers: bool) -> int:
        """The largest token id; -1 where there are no tokens."""
        columns = ("prompt", "answer") if with_answers else ("prompt",)
        return max(table.meta["largest"][name] for table, _, _ in self._parts for name in columns)


@dataclass(frozen=True, slots=True)
class Dataset:
    """Examples in stored order, the digest of the records they came from, and the sources of these."""

    examples: Examples
    fingerprint: str
    sources: tuple[SourceRange, ...] = ()

    def __len__(self) -> int:
        return len(self.examples)

    def select(self, indices: Iterable[int]) -> list[Example]:
        """The examples at these places, in this order."""
        return [self.examples[index] for index in indices]


@dataclass(frozen=True, slots=True)
class Reading:
    """Reading: how the records of a run are made examples.

    Attributes:
        config: the ``data`` section: templates, ``max_input_seq_length`` and what becomes of longer records.
        tokenizer: from ``get_tokenizer``.
        with_answers: True when the answer is part of the model's input, and so counts towards ``max_input_seq_length``.
        fault_of_answer: says why a reference answer is of no use, None for one that is; called with the answer and, with
            ``names_environments``, with the name of the environment that the record meets or None.
        judge: of the types of JSON; what ``fault_of_answer`` depends on, so that answers need not be asked for again at the next start.
        template_kwargs: values that the chat template reads.
        names_environments: the run's environments have names.
    """

    config: DataConfig
    tokenizer: PreTrainedTokenizerBase
    with_answers: bool
    fault_of_answer: FaultOfAnswer | None = None
    judge: Any = None
    template_kwargs: Mapping[str, Any] | None = None
    names_environments: bool = False

    def judge_of(self, env_name: str | None) -> Callable[[str, Mapping[str, Any]], str | None] | None:
        """Return what says the fault of an answer to a record with further fields, of a source that names an environment; None for none.

        A record's own field ``env_name`` or ``task_name`` says which environment it meets where its source does not.
        """
        if self.fault_of_answer is None:
            return None
        find = functools.lru_cache(_REMEMBERED_ANSWERS)(self.fault_of_answer)
        if not self.names_environments:
            return lambda answer, fields: find(answer)
        return lambda answer, fields: find(answer, env_name or fields.get("env_name") or fields.get("task_name"))


def load_dataset(sources: DataSource | Sequence[DataSource], reading: Reading) -> Dataset:
    """Read and tokenize data sources, or take what an earlier start has left of them.

    Raises:
        DataError: a record is broken, empty or too long, or its answer is of no use; the message says which.
    """
    given: Sequence[DataSource] = [sources] if isinstance(sources, Mapping) else sources
    tables = [_load_source(source, reading) for source in given]
    if any(table.directory is not None for table in tables):
        _bound_cache(reading.config)
    parts = [(table, source.get("repeat") or 1, source.get("env_name")) for table, source in zip(tables, given, strict=True)]
    ranges, start = [], 0
    for source, (table, repeat, env_name) in zip(given, parts, strict=True):
        end = start + len(table) * repeat
        ranges.append(SourceRange(source_name(source), start, end, source.get("weight"), env_name))
        start = end
    return Dataset(Examples(parts), _fingerprint([(table.meta["fingerprint"], repeat) for table, repeat, _ in parts]), tuple(ranges))


def _fingerprint(parts: Sequence[tuple[str, int]]) -> str:
    """Of one source that is not repeated its own, so that runs of it go on whatever version they began with."""
    if len(parts) == 1 and parts[0][1] == 1:
        return parts[0][0]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def _load_source(source: DataSource, reading: Reading) -> Table:
    encoder = PromptEncoder.from_config(reading.tokenizer, reading.config, reading.template_kwargs)
    directory = _cache_directory(reading.config) / _cache_key(source, reading, encoder)
    table = read_table(directory)
    if table is None:
        table = _Tokenization(source, reading, encoder, directory).run()
    elif reading.fault_of_answer is not None and not _marker(table, source, reading).exists():
        _refuse_useless_answers(Examples([(table, 1, source.get("env_name"))]), reading.judge_of(source.get("env_name")))
    if table.directory is not None and reading.fault_of_answer is not None:
        # a cache that others have made may be closed to writing: then the answers are judged at every start
        with contextlib.suppress(OSError):
            _marker(table, source, reading).touch()
    for note in table.meta["notes"]:
        logger.warning("%s: %s", source_name(source), note)
    return table


def _marker(table: Table, source: DataSource, reading: Reading) -> Path:
    """The file whose presence says that the answers of a kept table have been found to be of use."""
    assert table.directory is not None
    return table.directory / f"checked-{_digest([reading.judge, source.get('env_name')])}"


def _cache_directory(config: DataConfig) -> Path:
    own = config.get("cache_dir")
    if own is not None:
        return Path(own).expanduser()
    return Path(env.text("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "megarl" / "data"


def _bound_cache(config: DataConfig) -> None:
    """Remove what was not used for the longest from the cache, where it has grown too large."""
    most = config.get("cache_gib", DEFAULT_CACHE_GIB)
    if most is None:
        return
    removed = bound_tables(_cache_directory(config), most * 2**30)
    if removed:
        logger.info("data.cache_gib = %g: removed %d tables of tokens that were not used for the longest", most, len(removed))


def _cache_key(source: DataSource, reading: Reading, encoder: PromptEncoder) -> str:
    """Digest of all that the tokens and what was refused depend on: tokenizer, templates, limits, and the stored bytes of the source."""
    fields = {key: source.get(key) for key in (*FIELD_KEYS, "extra_keys", "max_samples")} | {"set": set_module(source)}
    limits = [reading.config["max_input_seq_length"], bool(reading.config.get("filter_overlong_prompts")), reading.with_answers]
    return _digest([_FORM, fields, limits, _tokenizer_identity(reading.tokenizer), encoder.identity, content_digest(source)])


def _tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    names = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    installed = [env.installed_version(package) for package in ("transformers", "tokenizers")]
    return [type(tokenizer).__name__, hashlib.blake2b(content.encode(), digest_size=16).hexdigest(), names, installed]


def _digest(content: Any) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


@dataclass(slots=True)
class _Offenders:
    """Counts records of one fault, and keeps the first ones."""

    count: int = 0
    shown: list[str] = field(default_factory=list)

    def add(self, what: str) -> None:
        self.count += 1
        if len(self.shown) < _SHOWN:
            self.shown.append(what)

    def __str__(self) -> str:
        more = f" and {self.count - len(self.shown)} more" if self.count > len(self.shown) else ""
        return "; ".join(self.shown) + more


class _Tokenization:
    """Makes the table of a source, chunk by chunk, and refuses what is empty, too long or of no use once all of it has been seen."""

    def __init__(self, source: DataSource, reading: Reading, encoder: PromptEncoder, directory: Path) -> None:
        self._source, self._reading, self._encoder = source, reading, encoder
        self._tokenizer = reading.tokenizer
        self._limit = reading.config["max_input_seq_length"]
        self._filters = bool(reading.config.get("filter_overlong_prompts"))
        self._writer = TableWriter(_COLUMNS, directory, _MOST_IN_MEMORY)
        self._fingerprint = Fingerprint()
        self._find = reading.judge_of(source.get("env_name"))
        self._control = _control_tokens(self._tokenizer)
        self._seen = self._kept = self._longest = 0
        self._largest = dict.fromkeys(("prompt", "answer"), -1)
        self._empty, self._long, self._useless, self._controlled = _Offenders(), _Offenders(), _Offenders(), _Offenders()
        self._unwritten, self._unlearned = _Offenders(), _Offenders()
        self._writes_prompts = True

    def run(self) -> Table:
        """The table; on a refusal nothing of it is left."""
        try:
            for chunk in _chunks(read_records(self._source), _CHUNK):
                self._add(chunk)
                if self._seen % _PROGRESS_EVERY < _CHUNK and self._seen > _PROGRESS_EVERY:
                    logger.info("tokenized %d records", self._seen)
            self._refuse()
            return self._writer.finish({"fingerprint": self._fingerprint.hexdigest(), "largest": self._largest, "notes": self._notes()})
        except OSError as error:
            raise DataError(
                f"data.cache_dir: the tokenized records cannot be written: {error}. Fix: give data.cache_dir a directory with more space"
            ) from error
        finally:
            self._writer.discard()

    def _add(self, records: Sequence[Record]) -> None:
        rows: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
        for record, text, (prompt, answer, targets) in zip(records, *self._encoded(records), strict=True):
            place, self._seen = self._seen, self._seen + 1
            where = f"index {place} ({record.origin})"
            length = len(prompt) + (len(answer) if self._reading.with_answers else 0)
            if not length or not prompt:
                self._empty.add(f"{where}: 0 tokens")
            self._longest = max(self._longest, length)
            if length > self._limit:
                self._long.add(f"{where}: {length} tokens")
                continue
            self._judge(record, where, text)
            if targets and len(targets) // 2 < (turns := _turns_of_assistant(record)):
                self._unlearned.add(f"{where}: {turns - len(targets) // 2} of {turns}")
            self._kept += 1
            self._fingerprint.add(record)
            fields = json.dumps(record.fields).encode() if record.fields else b""
            for name, value in zip(_COLUMNS, (prompt, answer, record.answer.encode(), targets, fields), strict=True):
                rows[name].append(value)
            for name, ids in (("prompt", prompt), ("answer", answer)):
                self._largest[name] = max(self._largest[name], max(ids, default=-1))
        self._writer.append(rows)

    def _encoded(self, records: Sequence[Record]) -> tuple[Iterable[str | None], Iterable[tuple[list[int], list[int], list[int]]]]:
        """Text of the prompt of each record, and its tokens: prompt, answer and flat spans of targets."""
        if self._reading.with_answers and records[0].last is not None:
            return map(self._text_of_turns, records), map(self._conversation, records)
        texts = [self._encoder.text(record) for record in records]
        answers = encode_answers(self._tokenizer, [record.answer for record in records])
        return texts, ((prompt, answer, []) for prompt, answer in zip(self._encoder.encode_texts(texts), answers, strict=True))

    def _text_of_turns(self, record: Record) -> str | None:
        if self._writes_prompts:
            try:
                return self._encoder.text(record)
            except DataError:
                # whoever needs a prompt by itself says so
                self._writes_prompts = False
        return None

    def _conversation(self, record: Record) -> tuple[list[int], list[int], list[int]]:
        whole = self._encoder.encode_conversation(record)
        first = whole.targets[0][0]
        return whole.ids[:first], whole.ids[first:], [place for span in whole.targets for place in span]

    def _judge(self, record: Record, where: str, text: str | None) -> None:
        fault = None if self._find is None else self._find(record.answer, record.fields)
        if fault is not None:
            self._useless.add(f"{where}: {record.answer[:80]!r}: {fault}")
        hit = None if self._control is None else self._control.search("\n".join(texts_of(record.prompt)))
        if hit is not None:
            self._controlled.add(f"{where}: {hit[0]!r}")
        role = None if text is None else self._encoder.unwritten_role(record, text)
        if role is not None:
            self._unwritten.add(f"{where}: a turn of {role!r}")

    def _refuse(self) -> None:
        """Refuse records without tokens and records longer than the limit; none is dropped or cut in silence."""
        _refuse_useless(self._useless, self._seen)
        what = "prompts with answers" if self._reading.with_answers else "prompts"
        if self._empty.count:
            raise DataError(
                f"{self._empty.count} of {self._seen} {what} have no tokens, at least 1 is needed. Fix: remove them. "
                f"They are: {self._empty}"
            )
        if self._long.count and not self._filters:
            raise DataError(
                f"{self._long.count} of {self._seen} {what} exceed data.max_input_seq_length = {self._limit}. Fix: raise it to "
                f"{self._longest}, remove those records, or set data.filter_overlong_prompts=true. They are: {self._long}"
            )
        if not self._kept:
            raise DataError(
                f"{source_name(self._source)}: all {self._seen} {what} exceed data.max_input_seq_length = {self._limit}, and "
                f"data.filter_overlong_prompts leaves none. Fix: raise the limit; the longest has {self._longest} tokens"
            )

    def _notes(self) -> list[str]:
        notes = []
        if self._long.count:
            share = 100 * self._long.count / self._seen
            notes.append(
                f"{self._long.count} of {self._seen} records ({share:.2f} %) are left out: they exceed data.max_input_seq_length = "
                f"{self._limit}; the longest has {self._longest} tokens"
            )
        if self._unwritten.count:
            notes.append(
                f"policy.tokenizer.chat_template leaves turns out of {self._unwritten.count} of {self._seen} records, so that the model "
                f"never sees them: {self._unwritten}. Give it a template that writes them, or take them out of the records"
            )
        if self._unlearned.count:
            notes.append(
                f"the marks {{% generation %}} of policy.tokenizer.chat_template leave turns of the assistant out of "
                f"{self._unlearned.count} of {self._seen} records, so that these turns are not learned: {self._unlearned}. Mark all "
                "of them, where that is not meant"
            )
        if self._controlled.count:
            notes.append(
                f"{self._controlled.count} of {self._seen} prompts have a control token of the tokenizer in their text, which it reads as "
                f"such; the first: {self._controlled.shown[0]}. Take it out where it is meant as text"
            )
        return notes


def _turns_of_assistant(record: Record) -> int:
    """Of a conversation, its last turn included."""
    return 1 + sum(not isinstance(turn, str) and turn["role"] == "assistant" for turn in record.prompt)


def _chunks(records: Iterator[Record], size: int) -> Iterator[list[Record]]:
    while chunk := list(itertools.islice(records, size)):
        yield chunk


def _refuse_useless_answers(examples: Examples, find: Callable[[str, Mapping[str, Any]], str | None] | None) -> None:
    useless = _Offenders()
    for example in examples:
        fault = None if find is None else find(example.answer, example.fields)
        if fault is not None:
            useless.add(f"index {example.index}: {example.answer[:80]!r}: {fault}")
    _refuse_useless(useless, len(examples))


def _refuse_useless(useless: _Offenders, seen: int) -> None:
    if useless.count:
        raise DataError(
            f"{useless.count} of {seen} reference answers are of no use to env.reward: every answer to those prompts would be "
            f"wrong. Fix: correct or remove them. They are: {useless}"
        )


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Finds what the tokenizer reads as a control token in the text of a prompt, which can end a turn, or begin another."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    names = sorted({*map(str, tokenizer.all_special_tokens), *added} - {""})
    return re.compile("|".join(map(re.escape, names))) if names else None
