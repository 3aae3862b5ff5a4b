"""Recognise files with unexpected contents, as failed downloads and saves leave them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_BEGINNING = 512
_GIT_LFS = b"version https://git-lfs.github.com/spec/"
_UNFINISHED = (".incomplete", ".part", ".crdownload", ".aria2", ".download", ".tmp")
_TORCH = (
    "a file of torch.save, which may run code",
    "save the model with save_pretrained of a recent transformers",
)


def misplaced_kind(path: Path) -> tuple[str, str] | None:
    """Return (description, fix) for a file that should be safetensors or JSON but is something else; None if
    nothing else is recognised.

    Args:
        path: the file; may be missing.
    """
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            return "a directory", "put the file itself there"
        with path.open("rb") as file:
            beginning = file.read(_BEGINNING)
    except PermissionError:
        return _unreadable(path)
    except OSError:
        return None
    return _kind_of(beginning, status.st_size, path.name)


def unfinished_download(path: Path) -> str | None:
    """Return the name of the file that marks an unfinished download of ``path``, or None."""
    return next(
        (f"{path.name}{suffix}" for suffix in _UNFINISHED if path.with_name(f"{path.name}{suffix}").exists()),
        None,
    )


def _unreadable(path: Path) -> tuple[str, str]:
    status = path.stat() if os.access(path.parent, os.X_OK) else None
    mode = (
        ""
        if status is None
        else (
            f" (mode {stat.S_IMODE(status.st_mode):04o}, owner {status.st_uid}; this process is user "
            f"{os.geteuid()})"
        )
    )
    return f"a file that may not be read{mode}", f"chmod a+r {path}, or read it as its owner"


def _kind_of(beginning: bytes, size: int, name: str) -> tuple[str, str] | None:
    # HTML may begin with blanks, and its tags are case-insensitive.
    text = beginning.lstrip().lower()
    if size == 0:
        return "empty", "fetch or write the file again"
    if beginning.startswith(_GIT_LFS):
        return (
            "a pointer of git-lfs, not the file that it stands for",
            "run git lfs pull in the repository, or fetch it with hf download",
        )
    if text.startswith((b"<!doctype html", b"<html", b"<?xml")):
        return (
            "a page of a web site, not the file",
            f"fetch the file itself, as hf download does (.../resolve/main/{name})",
        )
    if not any(beginning):
        return "a file that begins with zeros, as an unfinished download leaves it", "fetch the file again"
    if beginning.startswith(b"GGUF"):
        return "a GGUF file of llama.cpp", "give the safetensors model that it was made of"
    # A ZIP archive of torch.save, or a bare pickle of protocol 2, 3 or 4.
    if beginning.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04")):
        return _TORCH
    if name.endswith(".safetensors") and _is_text(beginning):
        words = " ".join(beginning.decode("utf-8", errors="replace").split())
        return f"a text: {words[:80]!r}", "fetch the file again; this is what the server said"
    return None


def _is_text(beginning: bytes) -> bool:
    """Return whether a file begins with text. safetensors files begin with a length of eight bytes, mostly
    zeros."""
    return b"\0" not in beginning and all(byte >= 9 for byte in beginning)
