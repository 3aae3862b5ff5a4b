"""Readers of data sources, which yield rows as stored: JSON Lines or one JSON list, parquet and CSV files,
and data sets of the ``datasets`` library."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, TypeAlias

from converters.errors import ConversionError
from converters.files.reading import DEEPEST, check_depth, first_special, special_kind
from megarl.config.data_sources import FIELD_KEYS, PAIR_KEYS, DataSource, fields_of_key, key_steps, set_module
from megarl.errors import DataError, RecordError

Fields: TypeAlias = Mapping[str, Any]
"""An object of a data file: the value of each of its fields, whose names and types only its author knows."""

Row = tuple[str, Any]
"""A row's location for messages (``train.jsonl line 7``) and its value. The value is usually an object; for a
line that could not be parsed it is the error."""

# Rows per parquet batch, and lines between two checks of a file's size.
_READ_TOGETHER = 1024
LONGEST_LINE = 2**24
"""Maximum characters of a line in a data file. Four million tokens, more than any context, have fewer."""
_NAMING = "such as prompt_key, answer_key or messages_key"
_NAMING_FIELDS = frozenset({*FIELD_KEYS, *PAIR_KEYS, "extra_keys"})
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
AS_LINES = "; jq -c '.[]' makes lines of one list"
_IN_ONE_LINE = "; jq -c . makes a line of each object"


@dataclass(frozen=True, slots=True)
class NamedSet:
    """Published format of a known data set, which a source can select by ``name``.

    Attributes:
        hub: id on the Hugging Face hub.
        prompt_key: field of the prompt, or a path into objects and lists.
        answer_key: field of the answer, or a path.
        split: default split.
        subsets: default subsets, which are concatenated.
        answer: converts the answer's text to the reference answer; raises ValueError for a text in another
            format.
        once: drop rows with the same prompt and answer as an earlier row, because the set is published with
            copies of each problem.
    """

    hub: str
    prompt_key: str
    answer_key: str
    split: str = "train"
    subsets: tuple[str | None, ...] = (None,)
    answer: Callable[[str], str] | None = None
    once: bool = False


def named_set(source: DataSource) -> NamedSet | None:
    """Return the known data set that a source selects, or None if the source has field keys of its own."""
    module = set_module(source)
    if module is None:
        return None
    return importlib.import_module(module).SET


def source_name(source: DataSource) -> str:
    """Describe a source for messages."""
    return f"data set {source['name']}" if source.get("path") is None else f"data file {source['path']}"


def rows_of(source: DataSource) -> Iterator[Row]:
    """Yield all rows of a source in stored order.

    Raises:
        DataError: the source does not exist or cannot be read; the message names file and line (or row).
    """
    path = source.get("path")
    if path is None or Path(path).is_dir():
        for part, loaded in _loaded(source):
            for number, row in enumerate(loaded):
                yield f"{part} row {number}", row
    elif Path(path).suffix.lower() == ".parquet":
        yield from _parquet_rows(_file(path))
    elif Path(path).suffix.lower() in _DELIMITERS:
        yield from _csv_rows(_file(path))
    else:
        yield from _json_rows(_file(path))


def number_of_rows(source: DataSource) -> int:
    """Return an upper bound on the number of rows of a source; blank lines of JSON Lines count too.

    Raises:
        DataError: see ``rows_of``.
    """
    path = source.get("path")
    if path is None or Path(path).is_dir():
        return sum(len(rows) for _, rows in _loaded(source))
    if Path(path).suffix.lower() == ".parquet":
        import pyarrow.parquet

        return int(pyarrow.parquet.ParquetFile(_file(path)).metadata.num_rows)
    if Path(path).suffix.lower() not in _DELIMITERS and _holds_list(_file(path)):
        return sum(1 for _ in rows_of(source))
    with _file(path).open("rb") as lines:
        # Plus one: the last line may lack a line feed.
        return sum(piece.count(b"\n") for piece in iter(lambda: lines.read(1 << 20), b"")) + 1


def is_table(source: DataSource) -> bool:
    """Return whether a source is read as an Arrow table, in which every row has the keys of all rows."""
    path = source.get("path")
    return path is None or Path(path).is_dir() or Path(path).suffix.lower() == ".parquet"


def content_digest(source: DataSource) -> str:
    """Return the hexadecimal digest of a source's stored bytes.

    Raises:
        DataError: see ``rows_of``.
    """
    path = source.get("path")
    digest = hashlib.blake2b(digest_size=16)
    if path is not None and not Path(path).is_dir():
        files = [_file(path)]
    else:
        files, parts, selections = [], list[Any](), list[str]()
        for part, rows in _loaded(source):
            files += [Path(each["filename"]) for each in rows.cache_files]
            parts.append([part, len(rows), str(rows.features)])
            # Add the library's own digest, which alone identifies rows that were selected from the files.
            if rows._indices is not None or not rows.cache_files:
                selections.append(rows._fingerprint)
        digest.update(json.dumps(parts).encode())
        digest.update(json.dumps(selections).encode())
    for file in files:
        digest.update(_file_digest(file))
    return digest.hexdigest()


def _file_digest(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).digest()
    except OSError as error:
        raise DataError(f"data file {file} cannot be read: {error}. Fix: make it readable") from error


def _file(path: str) -> Path:
    kind = special_kind(Path(path))
    if kind is not None:
        # Reading a pipe would block, and a second reading would fail.
        raise DataError(
            f"data file {path} is {kind}, not a file. Fix: write its output into a file, and give "
            "the path of that file"
        )
    if not Path(path).is_file():
        raise DataError(
            f"data file {path} does not exist or is not a file. Fix: give the path of a JSON, parquet, CSV "
            "or TSV file"
        )
    return Path(path)


def _json_rows(path: Path) -> Iterator[Row]:
    """Yield (origin, JSON value) for each line that is not blank, or for each element of a JSON list."""
    try:
        yield from (_json_items if _holds_list(path) else _json_lines)(path)
    except UnicodeDecodeError as error:
        fix = (
            "convert it to UTF-8, or unpack it where it is compressed; of a parquet file the name ends in "
            ".parquet"
        )
        raise DataError(f"data file {path} is not UTF-8 text: {error}. Fix: {fix}") from error
    except OSError as error:
        raise DataError(f"data file {path} cannot be read: {error}. Fix: make it readable") from error


def _open_json(path: Path) -> TextIO:
    # utf-8-sig, because Windows programs start files with a byte order mark, which is not JSON.
    return path.open(encoding="utf-8-sig")


def _holds_list(path: Path) -> bool:
    """Return whether a JSON file is a single list, as opposed to JSON Lines whose values may be lists."""
    try:
        with _open_json(path) as lines:
            texts = filter(str.strip, iter(lambda: lines.readline(LONGEST_LINE + 1), ""))
            first = next(texts, "")
            # A one-line list is validated with its rows. If more lines follow, the first line decides.
            return first.lstrip().startswith("[") and (next(texts, None) is None or not _is_json(first))
    except (UnicodeDecodeError, OSError):
        # The reader of the rows reports the error.
        return False


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _json_items(path: Path) -> Iterator[Row]:
    with _open_json(path) as file:
        size = os.fstat(file.fileno()).st_size
        text = file.read()
        _require_size(path, file.fileno(), size)
    try:
        items = json.loads(text)
    except (ValueError, RecursionError) as error:
        place, problem = "", "it nests too deeply" if isinstance(error, RecursionError) else str(error)
        if isinstance(error, json.JSONDecodeError):
            place, problem = f" line {error.lineno} column {error.colno}", error.msg
        raise DataError(
            f"data file {path}{place} is not JSON: {problem}; the file starts {text[:20]!r} like one list. "
            "Fix: write one list of JSON objects, or one object a line"
        ) from error
    for number, item in enumerate(items, start=1):
        origin = f"{path} item {number}"
        try:
            check_depth(item, "it")
        except ConversionError:
            item = RecordError(
                f"{origin} cannot be used: it nests deeper than {DEEPEST} levels. Fix: correct the record"
            )
        yield origin, item


def _json_lines(path: Path) -> Iterator[Row]:
    number = 0
    with _open_json(path) as lines:
        size = os.fstat(lines.fileno()).st_size
        # Read at most one character more than allowed, so that a line that is too long is detected without
        # reading all of it.
        while line := lines.readline(LONGEST_LINE + 1):
            number += 1
            origin = f"{path} line {number}"
            if len(line) > LONGEST_LINE:
                raise DataError(
                    f"{origin} has more than {LONGEST_LINE:,} characters, which no record has; it "
                    f"starts {line[:60]!r}. Fix: write one JSON object a line"
                )
            if number % _READ_TOGETHER == 0:
                # A file to which another program appends faster than it is read would never end.
                _require_size(path, lines.fileno(), size)
            if line.strip():
                yield origin, _parse(line, origin)
        _require_size(path, lines.fileno(), size)


def _require_size(path: Path, descriptor: int, size: int) -> None:
    now = os.fstat(descriptor).st_size
    if now != size:
        raise changed_while_read(path, f"it had {size:,} bytes and has {now:,}")


def changed_while_read(path: str | Path, how: str) -> DataError:
    """Build the error for a file that was modified while it was read, so that its rows may come from
    different versions."""
    return DataError(
        f"data file {path} changed while it was read: {how}. Fix: let its writer finish, or give a copy of "
        "the file"
    )


def _parse(line: str, origin: str) -> Any:
    """Parse a line of JSON. Return the error instead of raising it, because the reader may go on with the
    next line."""
    try:
        value = json.loads(line)
        # A value that can be parsed may still be nested too deeply to be written or shown.
        if line.count("[") + line.count("{") > DEEPEST:
            check_depth(value, "it")
        return value
    # json raises RecursionError if a value is nested too deeply.
    except (ValueError, RecursionError, ConversionError) as error:
        too_deep = isinstance(error, RecursionError | ConversionError)
        problem = f"it nests deeper than {DEEPEST} levels" if too_deep else str(error)
        fix = "write one JSON object a line" + (_IN_ONE_LINE if line.strip() == "{" else "")
        return RecordError(
            f"{origin} is not JSON{' that can be used' if too_deep else ''}: {problem}; it starts "
            f"{line[:60]!r}. Fix: {fix}"
        )


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            # In batches, because a file may be larger than memory.
            for batch in file.iter_batches(_READ_TOGETHER):
                for row in batch.to_pylist():
                    yield f"{path} row {number}", row
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"data file {path} cannot be read as parquet, after {number} rows: {type(error).__name__}: "
            f"{error}. "
            "Fix: write or fetch the file again"
        ) from error


def _csv_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a CSV file with a header line. All cells stay text, so that 007 does not become a
    number."""
    import pyarrow
    from pyarrow import csv

    # Cells may contain whole texts and programs, whose lines Arrow would otherwise read as rows.
    parsing = csv.ParseOptions(delimiter=_DELIMITERS[path.suffix.lower()], newlines_in_values=True)
    # A row must fit into a block.
    reading = csv.ReadOptions(block_size=LONGEST_LINE)
    number = 0
    try:
        # Open the file twice: column types need column names, which are in the first line.
        with csv.open_csv(path, read_options=reading, parse_options=parsing) as header:
            names = header.schema.names
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise DataError(
                f"data file {path}: its first line, which has to name the columns, has {twice[0]!r} "
                f"{names.count(twice[0])} times. Fix: "
                "give each column a name of its own, in a first line"
            )
        # An empty cell is an empty text and not null: null would be an error in a required field.
        texts = csv.ConvertOptions(
            column_types=dict.fromkeys(names, pyarrow.string()), strings_can_be_null=False
        )
        with csv.open_csv(
            path, read_options=reading, parse_options=parsing, convert_options=texts
        ) as batches:
            for batch in batches:
                for row in batch.to_pylist():
                    yield f"{path} row {number}", row
                    number += 1
    # Arrow raises UnicodeDecodeError if a column name is not UTF-8.
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        raise DataError(
            f"data file {path} cannot be read as CSV, after {number} rows: {error}. Fix: write UTF-8 with a "
            "first line that names the "
            "columns, as many cells in every row, and quotes around a cell with a delimiter, a quote or a "
            "newline"
        ) from error


def _loaded(source: DataSource) -> list[tuple[str, Any]]:
    """Load a data set by name, from a local folder of data files, or from a folder written by
    ``save_to_disk``. Return its parts with their names."""
    known = named_set(source)
    place = source.get("path") or (known.hub if known is not None else source["name"])
    split = source.get("split") or (known.split if known is not None else "train")
    own = source.get("subset")
    # A local folder has no subsets.
    subsets = known.subsets if known is not None and own is None and source.get("path") is None else (own,)
    found: list[tuple[str, Any]] = []
    for subset in subsets:
        loaded = _load(place, subset, split)
        _refuse_guesses(loaded, source, known, hub=None if Path(place).is_dir() else place)
        part = f"{place}[{split}]" if subset is None or own else f"{place}[{subset}, {split}]"
        found.append((part, loaded))
    return found


def _refuse_guesses(loaded: Any, source: DataSource, known: NamedSet | None, hub: str | None) -> None:
    """Reject JSON files in a folder or on the hub if the ``datasets`` library converts a field that is read.

    If a field is a text in some records and a number in others, the library turns the text 08 into 8 and 1e3
    into 1000. A field whose texts all look like dates becomes dates.

    Raises:
        DataError: it converts a field that is read.
    """
    if loaded.info.builder_name != "json":
        return
    keys: list[Any] = [value for key, value in source.items() if key in _NAMING_FIELDS and value is not None]
    keys += [known.prompt_key, known.answer_key] if known is not None else []
    for key in itertools.chain.from_iterable(map(fields_of_key, keys)):
        column = key if key in loaded.features else (key_steps(key) or (key,))[0]
        if _is_guessed(loaded.features.get(column)):
            first = "" if hub is None else f"hf download {hub} --repo-type dataset --local-dir DIR, and "
            raise DataError(
                f"{source_name(source)}: {column!r} holds texts in some records and something else in "
                "others, or texts that look like dates, and the datasets library changes them (08 becomes "
                f"8). Fix: {first}give the path of each file, as a list of sources"
            )


def _is_guessed(feature: Any) -> bool:
    if isinstance(feature, Mapping):
        return any(map(_is_guessed, feature.values()))
    if hasattr(feature, "feature"):
        return _is_guessed(feature.feature)
    return type(feature).__name__ == "Json" or str(getattr(feature, "dtype", "")).startswith("timestamp")


def _load(place: str, subset: str | None, split: str) -> Any:
    import datasets

    found = first_special(Path(place)) if Path(place).is_dir() else None
    if found is not None:
        raise DataError(
            f"data set {place}: {found[0].name} in it is {found[1]}, not a file. Fix: take it out of the "
            "directory"
        )
    if Path(place).is_dir() and any(each.suffix.lower() in _DELIMITERS for each in Path(place).rglob("*")):
        # load_dataset would guess types, and turn the answer 007 into 7.
        fix = "give the path of each file, as a list of sources"
        raise DataError(
            f"data set {place} has CSV files, whose cells stay text only if each file is read by "
            f"itself. Fix: {fix}"
        )
    try:
        if _was_saved_to_disk(Path(place)):
            loaded = datasets.load_from_disk(place)
            return loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        return datasets.load_dataset(place, subset, split=split)
    except Exception as error:
        # The datasets library and its transports raise errors of many unrelated classes.
        of_subset = "" if subset is None else f"subset {subset}, "
        raise DataError(
            f"data set {place} ({of_subset}split {split}) cannot be loaded: {type(error).__name__}: "
            f"{error}. "
            "Fix: give a known name, or a local folder"
        ) from error


def _was_saved_to_disk(path: Path) -> bool:
    # load_dataset rejects directories written by save_to_disk, so recognise these by their files.
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def value_at(row: Fields, key: str, steps: tuple[str | int, ...], origin: str) -> Any:
    """Return the value of a row at a key. A field whose name is the whole key takes precedence over the path.

    Raises:
        RecordError: there is no such value; the message tells how far the path leads and what is found there.
    """
    if key in row:
        return row[key]
    value: Any = row
    walked = ""
    for step in steps:
        where = f"{walked!r} " if walked else "it "
        if isinstance(step, int) and isinstance(value, list):
            if not -len(value) <= step < len(value):
                raise RecordError(
                    f"{origin} has no key {key!r}: {where}has {len(value)} members. Fix: correct the record "
                    "or the key"
                )
        elif not isinstance(step, str) or not isinstance(value, Mapping):
            wanted = "a list" if isinstance(step, int) else "an object"
            raise RecordError(
                f"{origin} has no key {key!r}: {where}is {type(value).__name__}, not {wanted}. Fix: correct "
                "the record or the key"
            )
        elif step not in value:
            has = f"{where}has {sorted(map(str, value))}"
            raise RecordError(
                f"{origin} has no key {key!r}; {has}. Fix: add it, or correct the key of the source that "
                f"names it, {_NAMING}"
            )
        value = value[step]
        walked += f"[{step}]" if isinstance(step, int) else f".{step}" if walked else step
    return value
