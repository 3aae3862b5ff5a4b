"""Storage of data that a caller holds in memory, as a file of the run's directory that any later launch can
read."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megarl.config.data_sources import NAMED_SETS, is_file, key_steps
from megarl.errors import ConfigError, DataError, Violation

# Tables write themselves to files by these methods: the first of ``datasets.Dataset`` and of pandas, the
# second of polars.
_TABLES = {"to_parquet": ".parquet", "write_parquet": ".parquet"}
_ROWS_LOOKED_AT = 1000


def source_of(argument: str, data: Any, directory: Path, made: list[Path]) -> dict[str, Any]:
    """Return the data source of a configuration for a caller's data.

    Args:
        argument: name of the argument, for errors.
        data: a path, the name or hub id of a set, a source as in a configuration, a table, or rows.
        directory: directory that rows and tables are written into.
        made: gets the file, unless an earlier call has written the same.

    Raises:
        ConfigError: the data are none of these.
    """
    if isinstance(data, str | os.PathLike):
        return _named(argument, os.fspath(data))
    if isinstance(data, Mapping):
        if "path" in data or "name" in data:
            return dict(data)
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
        # Name the file by its content, so that a later call with other rows replaces no file that a
        # checkpoint refers to.
        path = directory / f"{argument}-{digest}{_TABLES[method] if method else '.jsonl'}"
        _keep(temporary, path, made)
    finally:
        temporary.unlink(missing_ok=True)
    return {"path": str(path)}


def _keep(temporary: Path, path: Path, made: list[Path]) -> None:
    """Give a file its name, which is that of its content, unless there is one already: a run may read it."""
    if not path.exists():
        temporary.replace(path)
        made.append(path)


def _write_table(argument: str, table: Any, method: str, path: Path) -> None:
    try:
        getattr(table, method)(str(path))
    # Arrow's errors about a column of several types are of these classes.
    except (TypeError, ValueError) as error:
        fix = "give each column values of one type, or the rows: table.to_dict('records')"
        bound = f"it cannot be stored as a table: {error}"
        raise _refused(argument, type(table).__name__, bound, fix) from error


def require_columns(argument: str, source: dict[str, Any], kind: Any) -> None:
    """Fill in a source's missing field keys from the common column names; keys that the source sets are kept.

    Args:
        argument: name of the argument that the data came from, for errors.
        source: data source that gets the keys.
        kind: ``megarl.data.columns.Kind``.

    Raises:
        ConfigError: the source has none of the common column names, or cannot be read.
    """
    from megarl.data.columns import complete_source
    from megarl.data.rows import source_name

    try:
        complete_source(source, kind)  # type: ignore[arg-type]
    except DataError as error:
        what, _, fix = str(error).partition(" Fix: ")
        # Omit the name of the file of rows, which the caller does not know.
        what = what.removeprefix(f"{source_name(source)}: ").rstrip(".")  # type: ignore[arg-type]
        raise _refused(argument, ", ".join(columns_of(source)), what, fix) from error


def write_empty_answers(source: dict[str, Any], made: list[Path]) -> None:
    """Replace a file that ``source_of`` wrote by a new one whose rows have empty reference answers."""
    from megarl.data.rows import rows_of

    path = Path(source["path"])
    answered = path.with_name(f"{path.stem}-without-answers.jsonl")
    temporary = path.with_name(f".{answered.name}.tmp")
    rows = rows_of(source)  # type: ignore[arg-type]
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


def columns_of(source: Mapping[str, Any]) -> list[str]:
    """Return the columns of the first row of a source."""
    from megarl.data.rows import rows_of

    _, row = next(iter(rows_of(source)), ("", {}))  # type: ignore[arg-type]
    return list(row) if isinstance(row, Mapping) else []


def passable_columns(source: Mapping[str, Any]) -> set[str]:
    """Return the columns of a source that a reward can be given: those that each of its first rows has, with
    a value that JSON can represent."""
    from megarl.data.rows import rows_of

    found: set[str] | None = None
    for _, row in itertools.islice(rows_of(source), _ROWS_LOOKED_AT):  # type: ignore[arg-type]
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


def _named(argument: str, text: str) -> dict[str, Any]:
    path = Path(text).expanduser()
    if path.exists():
        return {"path": str(path)}
    if text in NAMED_SETS:
        return {"name": text}
    # An id of the hub is NAME or OWNER/NAME.
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
    """Return a NumPy or torch value as numbers, and a date as text."""
    for method in ("tolist", "isoformat"):
        if callable(getattr(value, method, None)):
            return getattr(value, method)()
    raise TypeError(f"a value of type {type(value).__name__} cannot be written as JSON")


def _refused(argument: str, value: object, bound: str, fix: str) -> ConfigError:
    return ConfigError([Violation(argument, value, bound, fix)])
