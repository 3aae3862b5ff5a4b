"""Files of a checkpoint, opened with care.

Only regular files are opened: opening a named pipe waits indefinitely, opening a device may do anything. JSON
files hold an object, or the error says which file is wrong and how.
"""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from converters.errors import ConversionError
from converters.files.kinds import misplaced_kind

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def special_kind(path: Path) -> str | None:
    """Return what a path leads to, where that is neither a file nor a directory; None for these and where
    there is nothing."""
    try:
        return _KINDS.get(stat.S_IFMT(path.stat().st_mode))
    except OSError:
        return None


def first_special(directory: Path) -> tuple[Path, str] | None:
    """Return a path in a directory, in its order, that leads to neither a file nor a directory, and to what;
    None where there is none.

    Raises:
        OSError: the directory cannot be read.
    """
    found = ((path, special_kind(path)) for path in sorted(directory.iterdir()))
    return next(((path, kind) for path, kind in found if kind is not None), None)


def require_regular(path: Path) -> Path:
    """Return the path, where opening it opens a file, or fails as usual.

    Raises:
        ConversionError: it leads to a named pipe, a socket or a device.
    """
    kind = special_kind(path)
    if kind is not None:
        raise ConversionError(f"{path} is {kind}, not a file", "put the file itself there")
    return path


DEEPEST = 64
"""Levels of lists and objects in each other that a file may have; no config has more than a few."""


def read_json_object(path: Path, absent: tuple[str, str] | None = None) -> dict[str, Any]:
    """Return the object in a JSON file.

    Args:
        path: of the file.
        absent: what to say where there is no such file, and what to do about it.

    Raises:
        FileNotFoundError: there is no such file, and nothing to say of it.
        ConversionError: it cannot be read, holds something else, or nests deeper than ``DEEPEST`` levels.
    """
    try:
        content = json.loads(require_regular(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if absent is None:
            raise
        raise ConversionError(*absent) from error
    # It is a ValueError, which the next clause would report as damaged JSON.
    except ConversionError:
        raise
    # json gives up with a RecursionError on what nests too deeply
    except (OSError, ValueError, RecursionError) as error:
        kind = misplaced_kind(path)
        if kind is not None:
            raise ConversionError(f"{path} is {kind[0]}", kind[1]) from error
        raise ConversionError(
            f"{path} cannot be read as JSON ({error})", "fetch or write the file again"
        ) from error
    if not isinstance(content, dict):
        raise ConversionError(
            f"{path} holds a {type(content).__name__}, not a JSON object", "fetch or write the file again"
        )
    check_depth(content, str(path))
    return content


def check_depth(content: Any, what: str) -> None:
    """Refuse what nests so deeply that comparing or printing it fails.

    Args:
        content: of parsed JSON.
        what: to call it by in errors.

    Raises:
        ConversionError: it nests deeper than ``DEEPEST`` levels.
    """
    # Level by level: a recursion would fail on just what is looked for.
    level, depth = [content], 0
    while level:
        if depth > DEEPEST:
            raise ConversionError(
                f"{what} nests deeper than {DEEPEST} levels", "fetch or write the file again"
            )
        children = [
            value.values() if isinstance(value, Mapping) else value
            for value in level
            if isinstance(value, (Mapping, list, tuple))
        ]
        level, depth = [child for several in children for child in several], depth + 1


def unusable_names(directory: Path, names: Iterable[str], kind: str = "file", suffix: str = "") -> list[str]:
    """Return what is wrong with names of files that an index gives: each has to be plain, with the suffix,
    and in the directory."""
    problems = []
    for name in sorted(names):
        if PurePosixPath(name).name != name or "\\" in name or not name.endswith(suffix):
            problems.append(f"{name!r} is not the plain name of a {kind} in the directory")
        elif not (directory / name).is_file():
            problems.append(f"{name} does not exist")
    return problems


def identity_of(paths: Iterable[Path]) -> list[list[str | int]]:
    """Changes when one of the files does: name, size and time of change of each."""
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in paths]


def require_space(directory: Path, needed: int) -> None:
    """Refuse work that cannot end.

    Args:
        directory: on the disk in question.
        needed: bytes.

    Raises:
        ConversionError: there are fewer free bytes.
    """
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise ConversionError(
            f"{directory}: {needed / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free",
            "free space or choose another disk",
        )
