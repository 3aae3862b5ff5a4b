"""Store data that the caller holds in memory as a file in the run directory, so that later launches can read
it."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megarl.config.data_sources import NAMED_SETS, DataSource, is_file, key_steps
from megarl.errors import ConfigError, DataError, Violation

# Methods by which tables write themselves to a file: ``to_parquet`` of ``datasets.Dataset`` and pandas,
# ``write_parquet`` of polars.
_TABLES = {"to_parquet": ".parquet", "write_parquet": ".parquet"}
_ROWS_LOOKED_AT = 1000


def source_of(argument: str, data: Any, directory: Path, made: list[Path]) -> DataSource:
    """Return the data source, in the configuration's form, for data that the caller passed.

    Args:
        argument: name of the caller's argument, for error messages.
        data: a path, the name or hub id of a data set, a data source, a table, or rows.
        directory: directory for files of rows and tables.
        made: list to which a newly created file is appended; a file with equal contents is reused.

    Raises:
        ConfigError: ``data`` has none of these forms, or cannot be stored.
    """
    if isinstance(data, str | os.PathLike):
        return _named(argument, os.fspath(data))
    if isinstance(data, Mapping):
        if "path" in data or "name" in data:
            given: Any = dict(data)
            return given
        splits = ", ".join(map(repr, data)) or "nothing"
        raise _refused(
            argument,
            splits,
            "it is a mapping and neither rows nor a source with path or name",
            f"give one: {argument}[NAME]",
        )
    method = next((name for name in _TABLES if callable(getattr(data, name, None))), None)
    if method is None and not isinstance(data, Iterable):
        bound = "it must be rows (dictionaries), a datasets.Dataset, a table of pandas or polars, or a path"
        raise _refused(
            argument, type(data).__name__, bound, 'give for example [{"prompt": "2+2=", "answer": "4"}]'
        )
    directory.mkdir(parents=True, exist_ok=True)
    temporary = directory / f".{argument}.tmp"
    try:
        if method is None:
            _write_rows(argument, data, temporary)
        else:
            _write_table(argument, data, method, temporary)
        with temporary.open("rb") as file:
            digest = hashlib.file_digest(file, "blake2b").hexdigest()[:16]
        # Name the file by a digest of its content. A later call with other rows then gets another file, and
        # does not replace one that a checkpoint refers to.
        path = directory / f"{argument}-{digest}{_TABLES[method] if method else '.jsonl'}"
        _keep(temporary, path, made)
    finally:
        temporary.unlink(missing_ok=True)
    return {"path": str(path)}


def _keep(temporary: Path, path: Path, made: list[Path]) -> None:
    """Rename a temporary file to its content-based name. If that file exists already, it has the same content
    and a run may be reading it, so it is kept."""
    if not path.exists():
        temporary.replace(path)
        made.append(path)


def _write_table(argument: str, table: Any, method: str, path: Path) -> None:
    try:
        getattr(table, method)(str(path))
    # Arrow raises these if a column has values of several types.
    except (TypeError, ValueError) as error:
        fix = "give each column values of one type, or the rows: table.to_dict('records')"
        bound = f"it cannot be stored as a table: {error}"
        raise _refused(argument, type(table).__name__, bound, fix) from error


def require_columns(argument: str, source: DataSource, kind: Any) -> None:
    """Set a source's missing field keys from common column names such as ``prompt``; existing keys are kept.

    Args:
        argument: name of the caller's argument, for error messages.
        source: data source to complete, in place.
        kind: ``megarl.data.columns.Kind``, which decides the required columns.

    Raises:
        ConfigError: the columns have none of the common names, or the source cannot be read.
    """
    from megarl.data.columns import complete_source
    from megarl.data.rows import source_name

    try:
        complete_source(source, kind)
    except DataError as error:
        what, _, fix = str(error).partition(" Fix: ")
        # The caller passed rows and does not know the name of the file, so omit it from the message.
        what = what.removeprefix(f"{source_name(source)}: ").rstrip(".")
        raise _refused(argument, ", ".join(columns_of(source)), what, fix) from error


def write_empty_answers(source: DataSource, made: list[Path]) -> None:
    """Write the rows of a source to a new file with empty reference answers, and point the source to it. The
    original file is deleted if this call has created it.

    Args:
        source: source made by ``source_of``; changed in place.
        made: files that this call has created; the new file is appended.
    """
    from megarl.data.rows import rows_of

    path = Path(source["path"])
    answered = path.with_name(f"{path.stem}-without-answers.jsonl")
    temporary = path.with_name(f".{answered.name}.tmp")
    rows = rows_of(source)
    try:
        _write_rows(
            path.name, ({**row, "answer": ""} for _, row in rows if isinstance(row, Mapping)), temporary
        )
        _keep(temporary, answered, made)
    finally:
        temporary.unlink(missing_ok=True)
    if path in made:
        path.unlink()
    source["path"] = str(answered)


def columns_of(source: DataSource) -> list[str]:
    """Return the column names of a source's first row; empty if there is none."""
    from megarl.data.rows import rows_of

    _, row = next(iter(rows_of(source)), ("", {}))
    return list(row) if isinstance(row, Mapping) else []


def passable_columns(source: DataSource) -> set[str]:
    """Return the columns that can be passed to a reward function: present in each of the first 1,000 rows,
    with values that JSON can represent."""
    from megarl.data.rows import rows_of

    found: set[str] | None = None
    for _, row in itertools.islice(rows_of(source), _ROWS_LOOKED_AT):
        if isinstance(row, Mapping):
            of_row = {name for name, value in row.items() if key_steps(name) == (name,) and _is_plain(value)}
            found = of_row if found is None else found & of_row
    return found or set()


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _named(argument: str, text: str) -> DataSource:
    path = Path(text).expanduser()
    if path.exists():
        return {"path": str(path)}
    if text in NAMED_SETS:
        return {"name": text}
    # A hub id has the form NAME or OWNER/NAME, so anything else was meant as a path.
    if is_file(text) or path.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1:
        raise _refused(
            argument,
            text,
            f"there is no such file or directory in {Path.cwd()}",
            "give a path that exists, or the rows",
        )
    return {"name": text}


def _write_rows(argument: str, rows: Iterable[Any], path: Path) -> None:
    number = 0
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows, 1):
            if not isinstance(row, Mapping):
                fix = 'give dictionaries, for example {"prompt": "2+2=", "answer": "4"}'
                raise _refused(
                    f"{argument}[{number - 1}]",
                    repr(row)[:80],
                    f"it is {type(row).__name__}, not a dictionary",
                    fix,
                )
            try:
                file.write(json.dumps(dict(row), ensure_ascii=False, default=_plain) + "\n")
            except (TypeError, ValueError) as error:
                raise _refused(
                    f"{argument}[{number - 1}]",
                    repr(row)[:80],
                    str(error),
                    "give texts, numbers, lists and dictionaries",
                ) from error
    if not number:
        raise _refused(argument, [], "it has no rows", "give at least as many as a step takes prompts")


def _plain(value: Any) -> Any:
    """Convert a NumPy or torch value to numbers, and a date to a string, for ``json.dumps``."""
    for method in ("tolist", "isoformat"):
        if callable(getattr(value, method, None)):
            return getattr(value, method)()
    raise TypeError(f"a value of type {type(value).__name__} cannot be written as JSON")


def _refused(argument: str, value: object, bound: str, fix: str) -> ConfigError:
    return ConfigError([Violation(argument, value, bound, fix)])
