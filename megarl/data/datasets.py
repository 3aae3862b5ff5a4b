"""Tokenized data sets: prompts with reference answers (reinforcement learning), and prompts with answers to
train on (supervised fine-tuning, preferences)."""

from __future__ import annotations

import bisect
import contextlib
import datetime
import functools
import hashlib
import itertools
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from megarl import env
from megarl.config.data_sources import (
    DEFAULT_CACHE_GIB,
    FIELD_KEYS,
    PAIR_KEYS,
    DataConfig,
    DataSource,
    fields_of_key,
    set_module,
)
from megarl.config.nested import at
from megarl.data.columns import Kind, complete_source
from megarl.data.records import Doubt, Fingerprint, Record, read_preferences, read_records, refuse, texts_of
from megarl.data.rows import (
    Fields,
    changed_while_read,
    content_digest,
    named_set,
    number_of_rows,
    source_name,
)
from megarl.data.table import Column, Table, TableWriter, bound_tables, read_table
from megarl.data.tokenization import NO_TEMPLATE, PromptEncoder, encode_answers, long_text
from megarl.errors import DataError, RecordError
from megarl.observe.progress import Phase, phase

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.data.messages import ToolDeclaration

logger = logging.getLogger(__name__)

# Maximum records per tokenizer call: fast tokenizers use several threads for a batch.
_CHUNK = 1024
# Maximum characters per tokenizer call, because each takes hundreds of bytes.
_CHUNK_CHARACTERS = 2**21
# Longer answers are not tokenized unless the model's input includes them.
_LONGEST_KEPT_ANSWER = 2**18
_SHOWN = 5
# Tokens of a source are kept in memory up to this number of bytes, and in files beyond.
_MOST_IN_MEMORY = 8 * 2**20

# Format version of stored tables. Tables of another version are rebuilt.
_FORM = 8

_COLUMNS = {
    "prompt": "int32",
    "answer": "int32",
    "text": "uint8",
    "targets": "int32",
    "fields": "uint8",
    "chat": "uint8",
}
_REMEMBERED_ANSWERS = 100_000

FaultOfAnswer = Callable[..., str | Doubt | None]
# Token ids of the prompt, token ids of the answer, and the spans with a loss, flattened as start, end, start,
# end, ... Without spans the whole answer has a loss.
_Tokens = tuple[list[int], list[int], list[int]]


@dataclass(frozen=True, slots=True)
class Example:
    """One tokenized record.

    Attributes:
        index: index of the record in the data set, from 0.
        prompt_ids: tokens up to where the answer starts.
        answer_ids: tokens of the answer, with the EOS token. For a conversation in SFT, all tokens from the
            first assistant turn on. For a preference pair, all tokens from its last turn on. Only the EOS
            token if the answer is longer than 262,144 characters and is not part of the model's input.
        answer: text of the reference answer.
        targets: token spans [start, end) within prompt plus answer that have a loss; None for the whole
            answer.
        env_name: environment that the source names.
        fields: further fields of the record, listed in the source's ``extra_keys``.
        is_chat: the data store the prompt as messages.
    """

    index: int
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    answer: str
    targets: tuple[tuple[int, int], ...] | None = None
    env_name: str | None = None
    fields: Fields = field(default_factory=dict)
    is_chat: bool = False


@dataclass(frozen=True, slots=True)
class SourceRange:
    """The records of a data set that come from one source.

    Attributes:
        name: name of the source, for messages.
        start, end: range [start, end) of its records in the data set; repeats are counted.
        weight: relative share of the source in the sampled records; None if each record appears once per
            epoch.
        env_name: environment that the source names.
    """

    name: str
    start: int
    end: int
    weight: float | None = None
    env_name: str | None = None


# Number of tokens searched at a time, so that a stored column is never fully in memory.
_TOKENS_AT_ONCE = 2**22


class Examples(Sequence[Example]):
    """The examples of several tables, concatenated. An example is created when it is accessed.

    Args:
        parts: for each source its table, the number of repeats of its rows, and the environment that it
            names.
        of_record: consecutive examples per record: 1, or 2 for the chosen and the rejected answer of a pair.
    """

    def __init__(self, parts: Sequence[tuple[Table, int, str | None]], of_record: int = 1) -> None:
        self._parts = parts
        self._of_record = of_record
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
        # Indexing a range handles negative indices and raises IndexError, as for a list.
        index = range(len(self))[place]
        part, row = self.origin(index)
        table, _, env_name = self._parts[part]
        prompt, answer, text, targets, fields, chat = (table.columns[name][row] for name in _COLUMNS)
        borders = targets.tolist()
        learned = tuple(zip(borders[::2], borders[1::2], strict=True)) or None
        further = json.loads(fields.tobytes()) if len(fields) else {}
        record = index // self._of_record
        ids = tuple(prompt.tolist()), tuple(answer.tolist())
        return Example(
            record, *ids, text.tobytes().decode(), learned, env_name, further, is_chat=bool(len(chat))
        )

    def origin(self, place: int) -> tuple[int, int]:
        """Return the index of the source that contains an example, and the example's index within that
        source, without repeats."""
        part = bisect.bisect_right(self._ends, place)
        return part, (place - (self._ends[part - 1] if part else 0)) % len(self._parts[part][0])

    def by_source(self) -> list[Examples]:
        """Return the examples of each source separately, without repeats."""
        return [Examples([(table, 1, env_name)], self._of_record) for table, _, env_name in self._parts]

    def digest(self, first: int, last: int) -> str:
        """Return the hexadecimal digest of the tokens and targets of the examples [first, last). There must
        be exactly one source."""
        [(table, _, _)] = self._parts
        digest = hashlib.blake2b(digest_size=16)
        for name in ("prompt", "answer", "targets"):
            column = table.columns[name]
            # Include the lengths: equal tokens may be divided into rows differently.
            digest.update(column.lengths[first:last].tobytes())
            starts = column.starts[first : last + 1]
            digest.update(column.values[int(starts[0]) : int(starts[-1])].tobytes())
        return digest.hexdigest()

    def lengths(self, with_answers: bool) -> np.ndarray:
        """Return the number of tokens of each example, [examples] int64. Answers count only if
        ``with_answers``."""
        found: list[np.ndarray] = []
        for table, repeat, _ in self._parts:
            lengths = sum(table.columns[name].lengths for name in _token_columns(with_answers))
            found.append(np.tile(lengths, repeat))
        return np.concatenate(found)

    def largest_token(self, with_answers: bool) -> int:
        """Return the largest token id in prompts (and in answers if ``with_answers``); -1 if there are no
        tokens."""
        largest = -1
        for table, _, _ in self._parts:
            for name in _token_columns(with_answers):
                largest = max(largest, table.meta["largest"][name])
        return largest

    def first_with(self, tokens: Collection[int], with_answers: bool) -> tuple[Example, int] | None:
        """Return the first example that contains one of the given token ids, and that token id. Return None
        if there is none."""
        first = 0
        for table, repeat, _ in self._parts:
            found = [_first_row(table.columns[name], tokens) for name in _token_columns(with_answers)]
            if any(found):
                row, token = min(filter(None, found))
                return self[first + row], token
            first += len(table) * repeat
        return None


def _token_columns(with_answers: bool) -> tuple[str, ...]:
    return ("prompt", "answer") if with_answers else ("prompt",)


def _first_row(column: Column, tokens: Collection[int]) -> tuple[int, int] | None:
    """Return the first row of a column that contains one of the given token ids, and that token id."""
    for start in range(0, len(column.values), _TOKENS_AT_ONCE):
        values = column.values[start : start + _TOKENS_AT_ONCE]
        places = np.flatnonzero(np.isin(values, list(tokens)))
        if len(places):
            row = np.searchsorted(column.starts[:], start + places[0], side="right") - 1
            return int(row), int(values[places[0]])
    return None


@dataclass(frozen=True, slots=True)
class Dataset:
    """Tokenized records in stored order. Its length is the number of records.

    Attributes:
        examples: examples of all records.
        fingerprint: digest of the records.
        sources: the sources of the records, in order.
        of_record: consecutive examples per record: 1, or 2 for the two answers of a pair.
    """

    examples: Examples
    fingerprint: str
    sources: tuple[SourceRange, ...] = ()
    of_record: int = 1

    def __len__(self) -> int:
        return len(self.examples) // self.of_record

    def select(self, indices: Iterable[int]) -> list[Example]:
        """Return the examples of the records with these indices, in this order."""
        return [self.examples[place] for place in self.places(indices)]

    def places(self, indices: Iterable[int]) -> list[int]:
        """Convert record indices to the indices of their examples."""
        places: list[int] = []
        for index in indices:
            places += range(index * self.of_record, (index + 1) * self.of_record)
        return places


@dataclass(frozen=True, slots=True)
class Reading:
    """Settings that determine how the records of a run become examples.

    Attributes:
        config: the ``data`` section: templates, ``max_input_seq_length``, and what to do with longer records.
        tokenizer: tokenizer from ``get_tokenizer``.
        with_answers: the answer is part of the model's input, so it counts towards ``max_input_seq_length``.
        fault_of_answer: returns why a reference answer cannot be used, a ``Doubt`` about a usable one, or
            None. It gets the answer and, with ``names_environments``, the name of the record's environment or
            None.
        judge: everything on which the results of ``fault_of_answer`` depend, as JSON types. If it is
            unchanged, cached answers are not checked again.
        template_kwargs: variables for the chat template.
        names_environments: the run's environments have names.
        pairs: a record is a prompt with a chosen and a rejected answer.
        stop_tokens: token ids that end a generated response.
        template_date: fixed date for chat templates that read the clock.
        tools: maps environment names to the tools that the chat template shows; the key None stands for an
            only environment.
    """

    config: DataConfig
    tokenizer: PreTrainedTokenizerBase
    with_answers: bool
    fault_of_answer: FaultOfAnswer | None = None
    judge: Any = None
    template_kwargs: Mapping[str, Any] | None = None
    names_environments: bool = False
    pairs: bool = False
    stop_tokens: tuple[int, ...] = ()
    template_date: datetime.date | None = None
    tools: Mapping[str | None, Sequence[ToolDeclaration]] = field(default_factory=dict)

    def encoder(self, env_name: str | None = None) -> PromptEncoder:
        """Return the encoder for a source that names the environment ``env_name``."""
        templates = self.config.get("prompt_template"), self.config.get("system_prompt")
        tools = self.tools.get(env_name, ())
        # Without a name in the source, each record may name one of several environments.
        named = {} if env_name is not None or None in self.tools else self.tools
        return PromptEncoder(
            self.tokenizer,
            *templates,
            self.template_kwargs,
            self.stop_tokens,
            self.template_date,
            tools,
            named,
        )

    @property
    def skips_bad_records(self) -> bool:
        """True if unusable records are skipped; False if they are errors."""
        return self.config.get("on_bad_record") == "skip"

    @property
    def kind(self) -> Kind:
        """The use of the records, which decides the columns to look for."""
        return Kind.PAIRS if self.pairs else Kind.ANSWERS if self.with_answers else Kind.REFERENCES

    @property
    def of_record(self) -> int:
        """Number of examples per record."""
        return 2 if self.pairs else 1

    def judge_of(self, env_name: str | None) -> Callable[[str, Fields], str | Doubt | None] | None:
        """Return a function of an answer and its record's further fields that checks the answer, or None if
        answers are not checked.

        ``env_name`` is the environment that the source names. If it is None, the record's own field
        ``env_name`` or ``task_name`` names the environment.
        """
        if self.fault_of_answer is None:
            return None
        # Thousands of records share an answer (0, A, yes), and a check may involve another process.
        find = functools.lru_cache(_REMEMBERED_ANSWERS)(self.fault_of_answer)
        if not self.names_environments:
            return lambda answer, fields: find(answer)
        return lambda answer, fields: find(
            answer, env_name or fields.get("env_name") or fields.get("task_name")
        )


def load_dataset(sources: DataSource | Sequence[DataSource], reading: Reading) -> Dataset:
    """Read and tokenize data sources, or reuse the tables that an earlier run has cached.

    If a source does not name the fields of its records, its missing keys are filled in from the columns
    found.

    Raises:
        DataError: a record is broken, empty or too long, or its answer is unusable; the message names the
            record.
    """
    given: Sequence[DataSource] = [sources] if isinstance(sources, Mapping) else sources
    # Complete all sources before tokenizing any, so that a source without known columns is rejected within
    # seconds.
    for source in given:
        complete_source(source, reading.kind, reading.skips_bad_records)
    tables = []
    for source in given:
        with phase(source_name(source), "records") as shown:
            tables.append(_read_source(source, reading, shown))
    # Trim the cache only after all tables of this run are open: an open table is never deleted.
    if any(table.directory is not None for table in tables):
        bound_cache(reading.config)
    parts, ranges, start = [], [], 0
    for source, table in zip(given, tables, strict=True):
        repeat, env_name = source.get("repeat") or 1, source.get("env_name")
        parts.append((table, repeat, env_name))
        end = start + len(table) // reading.of_record * repeat
        ranges.append(SourceRange(source_name(source), start, end, source.get("weight"), env_name))
        start = end
    fingerprint = _fingerprint([(table.meta["fingerprint"], repeat) for table, repeat, _ in parts])
    return Dataset(Examples(parts, reading.of_record), fingerprint, tuple(ranges), reading.of_record)


def _fingerprint(parts: Sequence[tuple[str, int]]) -> str:
    """Combine the digests of all sources. A single source without repeats keeps its own digest, so that runs
    of older versions can resume."""
    if len(parts) == 1 and parts[0][1] == 1:
        return parts[0][0]
    return _digest(parts)


def _read_source(source: DataSource, reading: Reading, shown: Phase) -> Table:
    encoder = reading.encoder(source.get("env_name"))
    digest = content_digest(source)
    # The key covers everything that determines the tokens.
    directory = cache_directory(reading.config) / _cache_key(source, reading, encoder, digest)
    table = read_table(directory)
    doubts = None
    if table is not None:
        shown.done, shown.detail = len(table) // reading.of_record, "tokenized before"
    else:
        shown.total = number_of_rows(source)
        tokenization = _Tokenization(source, reading, encoder, directory, digest, shown)
        table, doubts = tokenization.run(), tokenization.doubts()
    doubts = "" if reading.fault_of_answer is None else _doubts_about(table, source, reading, doubts)
    for note in filter(None, [doubts, *table.meta["notes"]]):
        logger.warning("%s: %s", source_name(source), note)
    return table


def _doubts_about(table: Table, source: DataSource, reading: Reading, doubts: str | None) -> str:
    """Return the warnings about a table's reference answers. They are stored in a marker file, so that the
    next run need not check the answers again.

    Args:
        table: the table.
        source, reading: what it was built from.
        doubts: warnings from the check while the table was built; None if it was loaded from the cache.

    Raises:
        DataError: answers had to be checked, and some are unusable.
    """
    # The marker file exists only if the answers were checked and are usable; it contains the warnings.
    mark = (
        table.directory / f"judged-{_digest([reading.judge, source.get('env_name')])}"
        if table.directory is not None
        else None
    )
    if doubts is None:
        if mark is not None and mark.exists():
            return mark.read_text(encoding="utf-8")
        doubts = _judged(
            Examples([(table, 1, source.get("env_name"))]), reading.judge_of(source.get("env_name")), source
        )
    if mark is not None:
        # Another user's cache may be read-only; answers are then checked in every run.
        with contextlib.suppress(OSError):
            # Write and rename, because another run may read the marker at any time.
            unfinished = mark.with_name(f"{mark.name}.{os.getpid()}")
            unfinished.write_text(doubts, encoding="utf-8")
            unfinished.replace(mark)
    return doubts


def cache_directory(config: DataConfig) -> Path:
    """Return the directory of cached tables."""
    own = config.get("cache_dir")
    if own is not None:
        return Path(own).expanduser()
    return Path(env.text("XDG_CACHE_HOME") or Path("~/.cache").expanduser()) / "megarl" / "data"


def bound_cache(config: DataConfig) -> None:
    """Delete the least recently used tables while the cache exceeds its size limit."""
    most = config.get("cache_gib", DEFAULT_CACHE_GIB)
    if most is None:
        return
    removed = bound_tables(cache_directory(config), most * 2**30)
    if removed:
        logger.info(
            "data.cache_gib = %g: removed the %d tables that were unused for longest", most, len(removed)
        )


def _cache_key(source: DataSource, reading: Reading, encoder: PromptEncoder, digest: str) -> str:
    """Return a digest of everything that determines the token ids and the set of rejected records: tokenizer,
    templates, length limits, and the source's stored bytes."""
    keys = (*FIELD_KEYS, "extra_keys", "max_samples", *(PAIR_KEYS if reading.pairs else ()))
    fields = {key: source.get(key) for key in keys} | {"set": set_module(source)}
    limits: list[Any] = [
        reading.config["max_input_seq_length"],
        bool(reading.config.get("filter_overlong_prompts")),
        reading.with_answers,
    ]
    if reading.skips_bad_records:
        # The answer check decides which records are skipped, so its inputs are part of the key.
        limits += ["skip", reading.judge, at(source, "env_name")]
    # Include the user id: another user's table is not trusted, and must not take the name of this user's.
    return _digest(
        [
            os.geteuid(),
            _FORM,
            fields,
            limits,
            _tokenizer_identity(reading.tokenizer),
            encoder.identity,
            digest,
        ]
    )


def _tokenizer_identity(tokenizer: PreTrainedTokenizerBase) -> list[Any]:
    # Hash the tokenizer's content, not its path: the same name may later refer to other files.
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    names = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    # Include the library versions: a bug fix there may change tokens although the files are the same.
    installed = list(map(env.installed_version, ("transformers", "tokenizers")))
    return [
        type(tokenizer).__name__,
        hashlib.blake2b(content.encode(), digest_size=16).hexdigest(),
        names,
        installed,
    ]


def _digest(content: Any) -> str:
    return hashlib.blake2b(
        json.dumps(content, sort_keys=True, default=str).encode(), digest_size=16
    ).hexdigest()


@dataclass(slots=True)
class _Offenders:
    """Counter of records with the same fault, with descriptions of the first few."""

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
    """Builds the table of one source, chunk by chunk. Empty, too long and unusable records are collected and
    reported together after all have been read.

    Args:
        source, reading, encoder: the source, and the settings for reading it.
        directory: directory of the finished table.
        digest: digest of the source's bytes before reading. If it differs at the end, the source was modified
            in the meantime, which is an error.
        shown: progress display of the number of records.
    """

    def __init__(
        self,
        source: DataSource,
        reading: Reading,
        encoder: PromptEncoder,
        directory: Path,
        digest: str,
        shown: Phase,
    ) -> None:
        self._source, self._reading, self._encoder, self._digest, self._shown = (
            source,
            reading,
            encoder,
            digest,
            shown,
        )
        self._tokenizer = reading.tokenizer
        self._limit = reading.config["max_input_seq_length"]
        self._filters = bool(reading.config.get("filter_overlong_prompts"))
        self._writer = TableWriter(_COLUMNS, directory, _MOST_IN_MEMORY)
        self._fingerprint = Fingerprint()
        self._find = reading.judge_of(source.get("env_name"))
        self._control = _control_tokens(self._tokenizer)
        self._seen = self._seen_bad = self._kept = self._longest = 0
        # Records that were tokenized only in part; their lengths are lower bounds.
        self._cut: set[int] = set()
        self._largest = dict.fromkeys(("prompt", "answer"), -1)
        self._empty, self._long, self._useless, self._controlled = (
            _Offenders(),
            _Offenders(),
            _Offenders(),
            _Offenders(),
        )
        self._unwritten, self._unlearned = _Offenders(), _Offenders()
        self._equal, self._silent, self._closed = _Offenders(), _Offenders(), _Offenders()
        self._bad, self._unreasoned, self._doubtful = _Offenders(), _Offenders(), _Offenders()
        self._untemplated = _Offenders()
        self._skips = reading.skips_bad_records
        # Cleared when the template fails to render a prompt alone, so that it is not tried again for every
        # record.
        self._writes_prompts = True

    def run(self) -> Table:
        """Build and return the table. If it fails, no files are left."""
        try:
            self._read()
            return self._writer.finish(
                {
                    "fingerprint": self._fingerprint.hexdigest(),
                    "largest": self._largest,
                    "notes": self._notes(),
                }
            )
        except OSError as error:
            raise DataError(
                f"data.cache_dir: the tokenized records cannot be written: {error}. Fix: give "
                "data.cache_dir a directory of your own with "
                "more space"
            ) from error
        finally:
            self._writer.discard()

    def doubts(self) -> str:
        """Return the warnings about the reference answers; empty for none."""
        return _in_words(self._doubtful, self._seen)

    def _read(self) -> None:
        """Tokenize all records.

        Raises:
            DataError: some records are unusable, or another process modified the source in the meantime.
        """
        try:
            for chunk in _chunks(self._records(), self._reading.of_record):
                self._add(chunk)
                self._shown.done = self._seen + self._seen_bad
            self._shown.total = None
            self._refuse()
        except DataError:
            # Check for changes first: the record may be incomplete only because the file is being written.
            self._require_unchanged()
            raise
        self._require_unchanged()

    def _require_unchanged(self) -> None:
        path = self._source.get("path")
        if path is not None and Path(path).is_file() and content_digest(self._source) != self._digest:
            raise changed_while_read(path, "its content has changed since the reading began")

    def _records(self) -> Iterator[Record]:
        """Yield the records of the source. A preference pair gives two: the prompt with the chosen and with
        the rejected answer."""
        on_bad = self._leave_out if self._skips else refuse
        if not self._reading.pairs:
            return read_records(self._source, on_bad)
        return itertools.chain.from_iterable(read_preferences(self._source, on_bad))

    def _leave_out(self, error: RecordError) -> None:
        self._seen_bad += 1
        self._bad.add(str(error))

    def _add(self, records: Sequence[Record]) -> None:
        of_record = self._reading.of_record
        dropped = self._unreasoned.count
        try:
            made = list(zip(records, *self._encoded(records), strict=True))
        except RecordError as error:
            if not self._skips:
                raise
            # Restore the counter: the chunk is encoded again record by record, and would count twice.
            self._unreasoned.count = dropped
            if len(records) == of_record:
                self._leave_out(error)
                return
            # One record of the chunk fails, so encode each by itself to find it.
            for first in range(0, len(records), of_record):
                self._add(records[first : first + of_record])
            return
        rows: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
        for first in range(0, len(made), of_record):
            self._add_record(made[first : first + of_record], rows)
        self._writer.append(rows)

    def _add_record(
        self, made: Sequence[tuple[Record, str | None, _Tokens]], rows: dict[str, list[Any]]
    ) -> None:
        """Append the examples of one record (two for a pair) to ``rows``, or nothing if the record is
        unusable."""
        place, self._seen = self._seen, self._seen + 1
        record, text, (prompt, _, targets) = made[0]
        where = f"index {place} ({record.origin})"
        length = max(
            len(prompt) + (len(answer) if self._reading.with_answers else 0)
            for _, _, (prompt, answer, _) in made
        )
        self._longest = max(self._longest, length)
        # Check the length first: a record that is left out for its length may have any other fault.
        if length > self._limit:
            self._long.add(f"{where}: {'more than ' if place in self._cut else ''}{length} tokens")
            return
        offenders, fault = self._fault_of(made, length, where)
        if fault is not None and self._skips:
            self._leave_out(RecordError(f"{record.origin}: {fault}"))
            return
        if fault is not None:
            offenders.add(f"{where}: {fault}")
        self._note(record, where, text)
        if self._reading.with_answers:
            self._note_silence(made, where)
        if (
            not self._reading.pairs
            and record.last is not None
            and targets
            and len(targets) // 2 < (turns := sum(_weights(record)))
        ):
            self._unlearned.add(f"{where}: {turns - len(targets) // 2} of {turns}")
        if not isinstance(record.prompt, str) and self._encoder.prompt_template != NO_TEMPLATE:
            self._untemplated.add(where)
        self._kept += 1
        for record, _, (prompt, answer, targets) in made:
            # Only kept records enter the fingerprint, because the data order is an order of these.
            self._fingerprint.add(record)
            fields = json.dumps(record.fields).encode() if record.fields else b""
            chat = b"" if isinstance(record.prompt, str) else b"\1"
            for name, value in zip(
                _COLUMNS, (prompt, answer, record.answer.encode(), targets, fields, chat), strict=True
            ):
                rows[name].append(value)
            for name, ids in (("prompt", prompt), ("answer", answer)):
                self._largest[name] = max(self._largest[name], max(ids, default=-1))

    def _fault_of(
        self, made: Sequence[tuple[Record, str | None, _Tokens]], length: int, where: str
    ) -> tuple[_Offenders, str | None]:
        """Return why a record is unusable (None if it is usable), and the counter for this kind of fault."""
        record, _, (prompt, _, _) = made[0]
        if not length or not prompt:
            return self._empty, "0 tokens"
        if self._reading.pairs and (fault := self._fault_of_pair(made)) is not None:
            return self._equal, fault
        said = None if self._find is None else self._find(record.answer, record.fields)
        if isinstance(said, Doubt):
            self._doubtful.add(f"{where}: {said.why}")
            return self._useless, None
        return self._useless, None if said is None else f"{record.answer[:80]!r}: {said}"

    def _encoded(self, records: Sequence[Record]) -> tuple[Iterable[str | None], Iterable[_Tokens]]:
        """Return the prompt text of each record, and its tokens."""
        of_record, with_answers = self._reading.of_record, self._reading.with_answers
        # For a prompt with an answer, and for a preference pair, only the last turn has a loss, whatever
        # turns the prompt contains.
        learned = [1 if self._reading.pairs or record.last is None else None for record in records]
        if with_answers:
            records = list(map(self._encoder.as_conversation, records))
        texts: list[str | None] = []
        plain_texts, plain_answers = list[str](), list[str]()
        for row, record in enumerate(records):
            if with_answers and record.last is not None:
                texts.append(self._text_of_turns(record))
                continue
            place = self._seen + row // of_record
            plain_texts.append(self._beginning(self._encoder.text(record), place))
            plain_answers.append(self._answer(record.answer, place))
            texts.append(plain_texts[-1])
        prompts = iter(self._encoder.encode_texts(plain_texts))
        answers = iter(encode_answers(self._tokenizer, plain_answers))

        # Return a generator: _add consumes it inside its try, where the error of a single conversation is
        # caught.
        def tokens() -> Iterator[_Tokens]:
            for row, (record, turns) in enumerate(zip(records, learned, strict=True)):
                if with_answers and record.last is not None:
                    yield self._conversation(record, self._seen + row // of_record, turns)
                else:
                    yield *self._encoder.split(record, next(prompts), next(answers)), []

        return texts, tokens()

    def _beginning(self, text: str, place: int) -> str:
        """Return a text, or only a beginning of it if that already exceeds the token limit."""
        beginning = self._encoder.beginning(text, self._limit)
        if len(beginning) < len(text):
            self._cut.add(place)
        return beginning

    def _beginning_of_turns(self, record: Record, place: int) -> list[int] | None:
        """Return the tokens of a conversation's beginning if it already exceeds the token limit, else
        None."""
        if _characters(record) <= long_text(self._limit):
            return None
        beginning = self._beginning(self._encoder.whole_text(record), place)
        return self._encoder.encode_texts([beginning])[0] if place in self._cut else None

    def _answer(self, answer: str, place: int) -> str:
        if self._reading.with_answers:
            return self._beginning(answer, place)
        return answer if len(answer) <= _LONGEST_KEPT_ANSWER else ""

    def _text_of_turns(self, record: Record) -> str | None:
        if self._writes_prompts:
            try:
                return self._encoder.text(record)
            except DataError:
                # Some templates cannot render the prompt alone. Callers that need it raise this error
                # themselves.
                self._writes_prompts = False
        return None

    def _conversation(self, record: Record, place: int, learned: int | None) -> _Tokens:
        """Return the tokens of a conversation. The last ``learned`` assistant turns have a loss; None means
        all."""
        beginning = self._beginning_of_turns(record, place)
        if beginning is not None:
            return beginning, [], []
        whole = self._encoder.encode_conversation(record)
        if whole.dropped_reasoning and not self._reading.pairs:
            self._unreasoned.add(f"index {place} ({record.origin})")
        targets = whole.targets[-learned:] if learned is not None else _weighed(whole.targets, record)
        first = targets[0][0]
        return whole.ids[:first], whole.ids[first:], list(itertools.chain.from_iterable(targets))

    def _fault_of_pair(self, made: Sequence[tuple[Record, str | None, _Tokens]]) -> str | None:
        (better, _, (prompt, chosen, spoken)), (_, _, (other_prompt, rejected, other_spoken)) = made
        if prompt != other_prompt:
            raise DataError(
                f"{better.origin}: the chat template writes the turns before the last one "
                "differently for the two answers. Fix: give policy.tokenizer.chat_template a "
                "template that writes them equally"
            )
        return f"{better.answer[:60]!r}" if (chosen, spoken) == (rejected, other_spoken) else None

    def _note_silence(self, made: Sequence[tuple[Record, str | None, _Tokens]], where: str) -> None:
        names = ("the chosen one", "the rejected one") if self._reading.pairs else ("its answer",)
        for name, (record, _, _) in zip(names, made, strict=True):
            if not record.answer.strip() and not (record.last or {}).get("tool_calls"):
                self._silent.add(f"{where}: {name}")

    def _note(self, record: Record, where: str, text: str | None) -> None:
        texts = [*texts_of(record.prompt), record.answer if self._reading.with_answers else ""]
        hit = None if self._control is None else self._control.search("\n".join(texts))
        if hit is not None:
            self._controlled.add(f"{where}: {hit[0]!r}")
        last = None if isinstance(record.prompt, str) or not record.prompt else record.prompt[-1]["role"]
        if (
            last == "assistant"
            and not self._reading.with_answers
            and not self._encoder.chat_template.is_passthrough
        ):
            self._closed.add(where)
        role = None if text is None else self._encoder.unwritten_role(record, text)
        if role is not None:
            self._unwritten.add(f"{where}: a turn of {role!r}")

    def _refuse(self) -> None:
        """Raise an error for unusable records, including those that exceed the length limit. No record is
        dropped or truncated silently.

        Raises:
            DataError: there are such records, and the configuration does not skip them; or no record is left.
        """
        _refuse_useless(self._useless, self._seen, self._source)
        what = (
            "pairs"
            if self._reading.pairs
            else "prompts with answers"
            if self._reading.with_answers
            else "prompts"
        )
        if self._empty.count:
            fix = "remove them"
            if self._empty.count == self._seen > 1:
                fix = (
                    "give policy.tokenizer.chat_template a template that writes the messages, where the "
                    "records have some"
                )
            raise DataError(
                f"{source_name(self._source)}: {self._empty.count} of {self._seen} {what} have no tokens, "
                "at least 1 is needed. "
                f"Fix: {fix}. They are: {self._empty}"
            )
        if self._equal.count:
            raise DataError(
                f"{self._equal.count} of {self._seen} pairs have two answers with the same tokens, "
                f"so neither is preferred. Fix: correct or remove them. They are: {self._equal}"
            )
        if self._long.count and not self._filters:
            raise DataError(
                f"{self._long.count} of {self._seen} {what} exceed data.max_input_seq_length = "
                f"{self._limit}. Fix: raise it to "
                f"{self._longest_in_words()}, remove those records, or set "
                f"data.filter_overlong_prompts=true. They are: {self._long}"
            )
        if not self._kept and self._bad.count:
            raise DataError(
                f"{source_name(self._source)}: data.on_bad_record = 'skip' leaves none of "
                f"{self._seen + self._seen_bad} records. They "
                f"are: {self._bad}"
            )
        if not self._kept:
            raise DataError(
                f"{source_name(self._source)}: all {self._seen} {what} exceed data.max_input_seq_length = "
                f"{self._limit}, and "
                "data.filter_overlong_prompts leaves none. Fix: raise the limit; the longest has "
                f"{self._longest_in_words()} tokens"
            )

    def _longest_in_words(self) -> str:
        """Format the longest record's length for a message. It is a lower bound if records were tokenized
        only in part."""
        return f"{'more than ' if self._cut else ''}{self._longest}"

    def _notes(self) -> list[str]:
        share = 100 * self._long.count / max(self._seen, 1)
        notes = (
            (
                self._bad,
                (
                    f"data.on_bad_record = 'skip': {self._bad.count} records are left out, {self._kept} are "
                    f"used: {self._bad}"
                ),
            ),
            (
                self._untemplated,
                f"data.prompt_template is not applied to {self._untemplated.count} of {self._seen} records, "
                f"whose prompts are no plain texts: {self._untemplated}. Write its text into them, or "
                "remove it",
            ),
            (
                self._unreasoned,
                f"the chat template leaves earlier reasoning out of {self._unreasoned.count} of "
                f"{self._seen} records, as it does when the "
                f"model generates, so that this reasoning is not learned: {self._unreasoned}. Split such "
                "records at the user's turns to "
                "learn it",
            ),
            (
                self._long,
                f"{self._long.count} of {self._seen} records ({share:.2f} %) are left out: they exceed "
                "data.max_input_seq_length = "
                f"{self._limit}; the longest has {self._longest_in_words()} tokens",
            ),
            (
                self._unwritten,
                f"policy.tokenizer.chat_template leaves turns out of {self._unwritten.count} of "
                f"{self._seen} records, so that the model "
                f"never sees them: {self._unwritten}. Give it a template that writes them, or take them out "
                "of the records",
            ),
            (
                self._unlearned,
                (
                    "the marks {% generation %} of policy.tokenizer.chat_template leave turns of "
                    f"the assistant out of {self._unlearned.count} of {self._seen} records, so that "
                    f"these turns are not learned: {self._unlearned}. Mark all of them, if this is not "
                    "intended"
                ),
            ),
            (
                self._silent,
                (
                    f"{self._silent.count} empty answers in {self._seen} records, of which only the end "
                    f"token is learned: {self._silent}. Remove these records if this is not intended"
                ),
            ),
            (
                self._closed,
                (
                    f"{self._closed.count} of {self._seen} prompts end with a turn of the assistant, which "
                    f"the chat template closes before a response begins: {self._closed}. End them with the "
                    "user's turn; a conversation whose last turn is the answer is named by messages_key"
                ),
            ),
            (
                self._controlled,
                (
                    f"{self._controlled.count} of {self._seen} records have a control token of the "
                    "tokenizer in their text, which it encodes as such; the first: "
                    f"{''.join(self._controlled.shown[:1])}. Remove it if it is meant as text"
                ),
            ),
        )
        return [text for found, text in notes if found.count]


def _weights(record: Record) -> list[bool]:
    """Return one flag per assistant turn of a conversation: false for a turn with ``"weight": 0``, as in
    OpenAI's files, which has no loss.

    Raises:
        RecordError: a weight is neither 0 nor 1, or all are 0.
    """
    assert record.last is not None
    are_learned: list[bool] = []
    for turn in (*record.prompt, record.last):
        if isinstance(turn, str) or turn["role"] != "assistant":
            continue
        weight = turn.get("weight")
        if weight not in (None, 0, 1):
            raise RecordError(
                f"{record.origin}: a message has weight = {weight!r}. Fix: write 1 for a turn that is "
                "learned, 0 for one that is not"
            )
        are_learned.append(weight != 0)
    if not any(are_learned):
        raise RecordError(
            f"{record.origin}: every turn of the assistant has weight 0, and nothing is learned. Fix: take "
            "the record out"
        )
    return are_learned


def _weighed(targets: Sequence[tuple[int, int]], record: Record) -> Sequence[tuple[int, int]]:
    """Return the token spans without those of assistant turns with weight 0.

    Raises:
        RecordError: there is not one span per turn, so the spans of weight 0 are unknown.
    """
    weights = _weights(record)
    if all(weights):
        return targets
    if len(targets) != len(weights):
        raise RecordError(
            f"{record.origin}: {weights.count(False)} turns of the assistant have weight 0, and the chat "
            f"template marks {len(targets)} "
            f"texts where there are {len(weights)} turns. Fix: mark each turn in "
            "policy.tokenizer.chat_template, or take the weights out"
        )
    return list(itertools.compress(targets, weights))


def _chunks(records: Iterator[Record], together: int) -> Iterator[list[Record]]:
    """Yield chunks with a limited number of records and characters. Groups of ``together`` consecutive
    records, such as the two of a pair, stay in the same chunk."""
    chunk, characters = list[Record](), 0
    for record in records:
        chunk.append(record)
        characters += _characters(record)
        is_full = len(chunk) >= _CHUNK or characters >= _CHUNK_CHARACTERS
        if is_full and len(chunk) % together == 0:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def _characters(record: Record) -> int:
    """Return the number of characters in a record's prompt and answer."""
    return sum(map(len, texts_of(record.prompt))) + len(record.answer)


def _judged(
    examples: Examples,
    find: Callable[[str, Fields], str | Doubt | None] | None,
    source: DataSource,
) -> str:
    """Check all answers of a table, and return the warnings about them.

    Raises:
        DataError: some answers are unusable.
    """
    useless, doubtful = _Offenders(), _Offenders()
    for example in examples:
        said = None if find is None else find(example.answer, example.fields)
        if isinstance(said, Doubt):
            doubtful.add(f"index {example.index}: {said.why}")
        elif said is not None:
            useless.add(f"index {example.index}: {example.answer[:80]!r}: {said}")
    _refuse_useless(useless, len(examples), source)
    return _in_words(doubtful, len(examples))


def _in_words(doubtful: _Offenders, seen: int) -> str:
    if not doubtful.count:
        return ""
    return f"{doubtful.count} of {seen} reference answers allow a reward without solving the task: {doubtful}"


def _refuse_useless(useless: _Offenders, seen: int, source: DataSource) -> None:
    if useless.count:
        known = named_set(source)
        key = (
            known.answer_key
            if known is not None
            else source.get("answer_key") or source.get("messages_key") or ""
        )
        fields = ", ".join(map(repr, fields_of_key(key)))
        raise DataError(
            f"{source_name(source)}: {useless.count} of {seen} reference answers cannot be used by "
            "env.reward: every response to those "
            f"prompts would be wrong. Fix: correct {fields} of these records, or remove them. They are: "
            f"{useless}"
        )


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str] | None:
    """Return a pattern of all texts that the tokenizer reads as special tokens, or None. Inside a prompt,
    such a text could end a turn or start another."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    names = sorted({*map(str, tokenizer.all_special_tokens), *added} - {""})
    return re.compile("|".join(map(re.escape, names))) if names else None
