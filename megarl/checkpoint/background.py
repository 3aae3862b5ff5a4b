"""Asynchronous checkpoints: workers leave the files in shared memory, from which a process writes them to
disk while training continues.

Workers run the code that otherwise writes to disk, except that they stage tensors (``staging``); the
resulting files are identical. Each node has its own shared memory and writing process (``node_memory``).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from converters.files.atomic import fsync_directory, fsync_file, fsync_tree, in_parallel
from megarl.checkpoint.atomic import remove_tree
from megarl.checkpoint.host_memory import available_bytes
from megarl.checkpoint.manifest import Entry, entry_of, write_manifest
from megarl.checkpoint.staged_file import SUFFIX, StagedFile, plain_name
from megarl.errors import CheckpointError

SHARED_MEMORY = Path("/dev/shm")
_NAME = "megarl-checkpoint-"
# Factor by which a checkpoint may be larger than the previous one, or than estimated.
_SPARE = 1.25


def seal(directory: Path, known: Mapping[str, Entry] | None = None) -> None:
    """Sync all files below ``directory`` to disk and write their manifest.

    Args:
        directory: directory of a checkpoint.
        known: manifest entries of files, by relative path; these files are not read again.

    Raises:
        OSError: a file cannot be read or written.
        CheckpointError: the directory contains a link or special file.
    """
    fsync_tree(directory)
    write_manifest(directory, known)
    fsync_directory(directory)


class Write(Protocol):
    """A write of a checkpoint from shared memory to disk, in progress."""

    def has_ended(self) -> bool:
        """Return whether the write has ended, successfully or not."""

    def wait(self, longest_s: float) -> float:
        """Wait until everything is on disk, with its manifest; return the seconds since the write began.
        Afterwards shared memory is empty.

        Raises:
            CheckpointError: the checkpoint could not be written, or not within ``longest_s`` seconds of this
                call.
            OSError: the manifest could not be written.
        """

    def abort(self) -> None:
        """Stop the write at any point and discard the checkpoint."""


class CheckpointMemory(Protocol):
    """Shared memory in which one checkpoint at a time waits to be written to disk."""

    def take(self, needed: int) -> bool:
        """Create empty directories for a checkpoint of ``needed`` bytes; return False if there is too little
        memory."""

    def directories(self, role: str) -> Path | list[Path]:
        """Return where the ranks of a role write after ``take``: one directory for all, or a list with one
        per rank."""

    def hold(self) -> None:
        """Open the files that the ranks have left, which must be complete. From then on the ranks may die
        without loss.

        Raises:
            CheckpointError: a file cannot be opened.
        """

    def write(self, target: Path) -> Write:
        """Begin writing the ranks' files to a directory on disk, which may already contain other files of the
        checkpoint. Call it after ``hold``.

        Raises:
            CheckpointError: the write cannot begin.
        """

    def free(self) -> None:
        """Discard the content of the memory, even during a write."""


def memory_of(checkpoint_dir: Path, node: str = "") -> Path:
    """Return the path of a checkpoint directory's shared memory, equal in every launch of a run.

    Args:
        checkpoint_dir: directory of the checkpoints.
        node: name that distinguishes the nodes of a run, which may be one machine; empty for a single node.
    """
    # A digest, because a path may exceed the maximum length of a file name. The user id separates users of
    # one machine.
    digest = hashlib.sha256(os.fsencode(checkpoint_dir)).hexdigest()[:16]
    return SHARED_MEMORY / f"{_NAME}{os.getuid()}-{digest}{f'-{node}' if node else ''}"


def waits_in_memory(path: Path) -> bool:
    """Return whether a checkpoint's directory is in shared memory."""
    return any(
        parent.parent == SHARED_MEMORY and parent.name.startswith(_NAME) for parent in (path, *path.parents)
    )


def take_memory(checkpoint_dir: Path, needed: int, node: str = "", kept_bytes: int = 0) -> Path | None:
    """Create an empty directory in shared memory that only this user may open; return None if ``needed``
    bytes plus a margin are not available.

    The caller must hold the run's lock: a checkpoint directory has one such memory, and what a killed launch
    left in it is removed.

    Args:
        checkpoint_dir: directory of the checkpoints.
        needed: bytes of the checkpoint on this node.
        node: as in ``memory_of``.
        kept_bytes: bytes of memory that the ranks reuse from an earlier checkpoint.
    """
    path = memory_of(checkpoint_dir, node)
    try:
        # Free memory first, because files left by a killed launch do not count as available.
        free_memory(checkpoint_dir, node)
        # Check the available memory: with shared memory full, a write kills the process with a signal instead
        # of raising an error.
        if available_bytes() < _SPARE * needed - kept_bytes:
            return None
        # ``mkdir`` fails if another user has created this name, which this run must not use.
        path.mkdir(mode=0o700)
    except OSError:
        return None
    return path


def free_memory(checkpoint_dir: Path, node: str = "") -> None:
    """Remove the files in shared memory for a checkpoint directory."""
    _free(memory_of(checkpoint_dir, node))


def tidy_memory(checkpoint_dir: Path) -> None:
    """Remove the files that killed launches left in this machine's shared memory for a checkpoint directory,
    under any node name."""
    own = memory_of(checkpoint_dir)
    for path in (own, *own.parent.glob(f"{own.name}-*")):
        _free(path)


def _free(path: Path) -> None:
    """Remove a directory if it belongs to this user."""
    with contextlib.suppress(OSError):
        status = path.lstat()
        # Every user may write to /dev/shm: do not touch another user's link or directory of this name.
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
            remove_tree(path)


def move_files(source: Path, target: Path, staged: Mapping[str, StagedFile]) -> dict[str, Entry]:
    """Move all files below ``source`` to the same paths below ``target``, and create the staged ones there.
    Each file is synced to disk before it is removed from shared memory.

    Args:
        source, target: directories.
        staged: result of ``open_staged``.

    Returns:
        Size and hash of each file as it was in memory, by relative path.

    Raises:
        OSError: a file cannot be written.
        CheckpointError: there is no file, or the memory of a staged file is not open.
    """

    def moved(name: str) -> tuple[str, Entry]:
        if not name.endswith(SUFFIX):
            # Hash in memory before the copy, so that corruption on the disk is detected when the checkpoint
            # is read.
            entry = entry_of(source / name)
            shutil.copyfile(source / name, target / name)
            fsync_file(target / name)
        elif name in staged:
            entry = staged[name].write((target / name).parent)
        else:
            raise CheckpointError(f"the memory that holds {plain_name(name)} is not open; a defect of megarl")
        # Until the copy is on disk, memory has the only one.
        (source / name).unlink()
        return plain_name(name), entry

    # Several files at a time, because the fsync of a single file leaves the disk idle between flushes.
    return dict(in_parallel(moved, files_to_move(source, target)))


def files_to_move(source: Path, target: Path) -> list[str]:
    """Return the relative paths of the files below ``source``, and create their directories below
    ``target``.

    Raises:
        OSError: a directory cannot be created.
        CheckpointError: there is no file.
    """
    found: list[str] = []
    for directory, subdirectories, names in os.walk(source):
        here = Path(directory).relative_to(source)
        for name in subdirectories:
            (target / here / name).mkdir(exist_ok=True)
        for name in names:
            found.append((here / name).as_posix())
    if not found:
        raise CheckpointError(
            f"no rank has written a file to {source}. Fix: give all ranks of a node the same "
            f"{SHARED_MEMORY}, or write checkpointing.async_save=false"
        )
    return found
