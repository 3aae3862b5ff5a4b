"""Refuses what stands in the place of a file and is none: opening a named pipe waits for ever, opening a device may do anything."""

from __future__ import annotations

import stat
from pathlib import Path

from converters.errors import ConversionError

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}


def special_kind(path: Path) -> str | None:
    """What a path leads to, where that is neither a file nor a directory; None for these and where there is nothing."""
    try:
        return _KINDS.get(stat.S_IFMT(path.stat().st_mode))
    except OSError:
        return None


def require_regular(path: Path) -> Path:
    """The path, where opening it opens a file, or fails as usual.

    Raises:
        ConversionError: it leads to a named pipe, a socket or a device.
    """
    kind = special_kind(path)
    if kind is not None:
        raise ConversionError(f"{path} is {kind}, not a file", "put the file itself there")
    return path
