"""Find the ``torch_dist`` checkpoint for a path: the checkpoint itself, or a trainer's directory that
contains it."""

from __future__ import annotations

import re
from pathlib import Path

from converters.errors import ConversionError

INDEX_FILE = ".metadata"
TRACKER_FILE = "latest_checkpointed_iteration.txt"
_INSIDE = ("dist_ckpt", "actor/dist_ckpt", "release", "weights", "policy/weights")
_ITERATION = re.compile(r"iter_\d{7,}")


def is_checkpoint(directory: Path) -> bool:
    """Return whether a directory itself is a distributed checkpoint."""
    return (directory / INDEX_FILE).is_file()


def find_checkpoint(directory: Path) -> Path:
    """Return the distributed checkpoint in a directory: the directory itself, the iteration that the tracker
    file names, or a subdirectory with a name that trainers use (``release``, ``dist_ckpt``, ``weights``).

    Raises:
        ConversionError: there is no checkpoint, or the tracker names a missing one.
    """
    if is_checkpoint(directory):
        return directory
    tracker = directory / TRACKER_FILE
    if tracker.is_file():
        named = tracker.read_text(encoding="utf-8", errors="replace").strip()
        # Megatron-LM writes at least seven digits.
        found = directory / (named if named == "release" else f"iter_{named:0>7}")
        if not (named == "release" or named.isdigit()) or not found.is_dir():
            raise ConversionError(
                f"{tracker} names {named!r}, which does not exist",
                "give the directory of the iteration itself",
            )
        return find_checkpoint(found)
    for name in _INSIDE:
        if is_checkpoint(directory / name):
            return directory / name
    iterations = (
        sorted(path.name for path in directory.glob("iter_*") if _ITERATION.fullmatch(path.name))
        if directory.is_dir()
        else []
    )
    if iterations:
        raise ConversionError(
            f"{directory} has no {TRACKER_FILE}, but {', '.join(iterations)}",
            "give the directory of one iteration",
        )
    what, fix = f"{directory} holds no torch_dist checkpoint", "give the directory of a Megatron checkpoint"
    if directory.is_dir() and any(directory.glob("mp_rank_00*")):
        what = f"{directory} is in Megatron-LM's older format (mp_rank_00), which is not read"
        fix = "let Megatron-LM load it with --ckpt-convert-format torch_dist --ckpt-convert-save DIRECTORY"
    elif (directory / "config.json").is_file():
        fix = f"it looks like a Hugging Face model, which import converts; else {fix}"
    raise ConversionError(f"{what} (no {INDEX_FILE})", fix)


def holds_checkpoint(directory: Path) -> bool:
    """Return whether ``find_checkpoint`` succeeds."""
    try:
        find_checkpoint(directory)
    except (ConversionError, OSError):
        return False
    return True
