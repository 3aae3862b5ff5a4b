"""Open checkpoint files safely: only regular files, because a named pipe blocks and a device may do anything.
JSON files must contain an object."""

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
    """Return the kind of special file at a path, such as ``a named pipe``; None for files, directories and
    missing paths."""
    try:
        return _KINDS.get(stat.S_IFMT(path.stat().st_mode))
    except OSError:
        return None


def first_special(directory: Path) -> tuple[Path, str] | None:
    """Return the first special file in a directory (by name) and its kind, or None.

    Raises:
        OSError: the directory cannot be read.
    """
    for path in sorted(directory.iterdir()):
        kind = special_kind(path)
        if kind is not None:
            return path, kind
    return None


def require_regular(path: Path) -> Path:
    """Check that a path is not a special file, and return it. It may be missing.

    Raises:
        ConversionError: the path is a named pipe, a socket or a device.
    """
    kind = special_kind(path)
    if kind is not None:
        raise ConversionError(f"{path} is {kind}, not a file", "put the file itself there")
    return path


DEEPEST = 64
"""Maximum nesting of lists and objects in JSON; configs have a few levels."""


def read_json_object(path: Path, absent: tuple[str, str] | None = None) -> dict[str, Any]:
    """Return the object in a JSON file.

    Args:
        path: the file.
        absent: (message, fix) for a missing file.

    Raises:
        FileNotFoundError: the file is missing and ``absent`` is None.
        ConversionError: the file is missing, unreadable, not a JSON object, or nested too deeply.
    """
    try:
        content = json.loads(require_regular(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if absent is None:
            raise
        raise ConversionError(*absent) from error
    # Re-raise it: a ConversionError is a ValueError, which the next clause would report as damaged JSON.
    except ConversionError:
        raise
    # json raises RecursionError if the content nests too deeply.
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
    """Reject JSON that is nested so deeply that comparing or printing it would fail.

    Args:
        content: parsed JSON.
        what: name for the error message.

    Raises:
        ConversionError: the nesting exceeds ``DEEPEST``.
    """
    # Check level by level, because recursion would fail on deep contents.
    level, depth = [content], 0
    while level:
        if depth > DEEPEST:
            raise ConversionError(
                f"{what} nests deeper than {DEEPEST} levels", "fetch or write the file again"
            )
        children: list[Any] = []
        for value in level:
            if isinstance(value, Mapping):
                children += value.values()
            elif isinstance(value, (list, tuple)):
                children += value
        level, depth = children, depth + 1


def unusable_names(directory: Path, names: Iterable[str], kind: str = "file", suffix: str = "") -> list[str]:
    """Check the file names in an index, and return the problems. Each must be a plain name with the suffix,
    of a file that exists in the directory."""
    problems = []
    for name in sorted(names):
        # The names come from an untrusted index and must not lead out of the directory.
        if PurePosixPath(name).name != name or "\\" in name or not name.endswith(suffix):
            problems.append(f"{name!r} is not the plain name of a {kind} in the directory")
        elif not (directory / name).is_file():
            problems.append(f"{name} does not exist")
    return problems


def identity_of(paths: Iterable[Path]) -> list[list[str | int]]:
    """Return name, size and modification time of each file; they change when a file changes."""
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in paths]


def require_space(directory: Path, needed: int) -> None:
    """Check that a disk has enough free space.

    Args:
        directory: directory on the disk.
        needed: required bytes.

    Raises:
        ConversionError: fewer bytes are free.
    """
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise ConversionError(
            f"{directory}: {needed / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free",
            "free space or choose another disk",
        )
