"""Checkpoints that are written while training continues: workers leave the files in shared memory, and a
process
writes them from there to disk.

The workers use the code that otherwise writes to disk, except for tensors, which they stage (``staging``);
the files are the same to the last byte. Each node has such memory and such a process (``node_memory``).
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
# A checkpoint may be larger than the previous one, or than estimated, by this factor.
_SPARE = 1.25


def seal(directory: Path, known: Mapping[str, Entry] | None = None) -> None:
    """Wait until all files below ``directory`` are on disk, and write their manifest.

    Args:
        directory: of a checkpoint.
        known: entries of files, by their paths below ``directory``; these files are not read again.

    Raises:
        OSError: a file cannot be read or written.
        CheckpointError: there is something that is not a file.
    """
    fsync_tree(directory)
    write_manifest(directory, known)
    fsync_directory(directory)


class Write(Protocol):
    """A write of a checkpoint from shared memory to disk, in progress."""

    def has_ended(self) -> bool:
        """Return whether the write has ended, successfully or not."""

    def wait(self, longest_s: float) -> float:
        """Wait until everything is on disk, with its manifest, and return the seconds since the write began.
        Afterwards nothing is left in shared memory.

        Raises:
            CheckpointError: the checkpoint could not be written, or took longer than ``longest_s`` from now
                on.
            OSError: the manifest could not be written.
        """

    def abort(self) -> None:
        """End the write, whatever it is doing, and discard the checkpoint."""


class CheckpointMemory(Protocol):
    """The shared memory in which a checkpoint waits to be written to disk; it holds one at a time."""

    def take(self, needed: int) -> bool:
        """Make empty directories for a checkpoint of that size, and return whether there is room for them."""

    def directories(self, role: str) -> Path | list[Path]:
        """Return where the ranks of a role write, after ``take``: one directory for all of them, or a list
        with one directory for each."""

    def hold(self) -> None:
        """Open the files that the ranks have left, which are complete by then. From now on the ranks may die
        without loss.

        Raises:
            CheckpointError: a file cannot be opened.
        """

    def write(self, target: Path) -> Write:
        """Begin to write the ranks' files to a directory on disk, which may hold further files of the
        checkpoint. Call it after ``hold``.

        Raises:
            CheckpointError: the write cannot begin.
        """

    def free(self) -> None:
        """Discard what is in the memory, even while it is being written."""


def memory_of(checkpoint_dir: Path, node: str = "") -> Path:
    """Return where the checkpoints of a directory wait in shared memory. The path is the same in every launch
    of a run.

    Args:
        checkpoint_dir: directory of the checkpoints.
        node: distinguishes the nodes of a run, which may share this memory, or be one machine.
    """
    # Use a digest instead of the path, which may be longer than a file name can be. The user's number
    # separates users of one machine.
    digest = hashlib.sha256(os.fsencode(checkpoint_dir)).hexdigest()[:16]
    return SHARED_MEMORY / f"{_NAME}{os.getuid()}-{digest}{f'-{node}' if node else ''}"


def waits_in_memory(path: Path) -> bool:
    """Return whether a checkpoint's directory is one that waits in shared memory."""
    return any(
        parent.parent == SHARED_MEMORY and parent.name.startswith(_NAME) for parent in (path, *path.parents)
    )


def take_memory(checkpoint_dir: Path, needed: int, node: str = "", kept_bytes: int = 0) -> Path | None:
    """Return an empty directory in shared memory that only this user may open, or None if there is no room
    for ``needed`` bytes and a little more.

    The caller holds the run's lock: a directory of checkpoints has one such memory, and what a killed launch
    left there is removed.

    Args:
        checkpoint_dir: directory of the checkpoints.
        needed: bytes of the checkpoint on this node.
        node: as in ``memory_of``.
        kept_bytes: bytes that the ranks have kept for it from an earlier checkpoint.
    """
    path = memory_of(checkpoint_dir, node)
    try:
        # Free memory first: what a killed launch left there does not count as available.
        free_memory(checkpoint_dir, node)
        # Check the available memory: when shared memory is full, a write to it kills the process with a
        # signal instead of raising an error.
        if available_bytes() < _SPARE * needed - kept_bytes:
            return None
        # ``mkdir`` fails if another user has created something under this name, which this run must not use.
        path.mkdir(mode=0o700)
    except OSError:
        return None
    return path


def free_memory(checkpoint_dir: Path, node: str = "") -> None:
    """Remove what waits in shared memory for a directory of checkpoints."""
    _free(memory_of(checkpoint_dir, node))


def tidy_memory(checkpoint_dir: Path) -> None:
    """Remove what killed launches have left in this machine's shared memory for a directory of checkpoints,
    whatever the node was called then."""
    own = memory_of(checkpoint_dir)
    for path in (own, *own.parent.glob(f"{own.name}-*")):
        _free(path)


def _free(path: Path) -> None:
    """Remove a directory that belongs to this user."""
    with contextlib.suppress(OSError):
        status = path.lstat()
        # Everybody may write to /dev/shm: leave another user's link or directory of this name alone.
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
            remove_tree(path)


def move_files(source: Path, target: Path, staged: Mapping[str, StagedFile]) -> dict[str, Entry]:
    """Move all files below ``source`` to the same paths below ``target``, and create those that ranks have
    staged. Each file is on disk before it leaves shared memory.

    Args:
        source, target: directories.
        staged: as returned by ``open_staged``.

    Returns:
        Size and hash of each file as it was in memory, by its path below ``target``.

    Raises:
        OSError: a file cannot be written.
        CheckpointError: there is no file, or one is staged in memory that is not open.
    """

    def moved(name: str) -> tuple[str, Entry]:
        if not name.endswith(SUFFIX):
            # Hash the file in memory before the copy, so that bytes that the disk corrupts are detected when
            # the checkpoint is read.
            entry = entry_of(source / name)
            shutil.copyfile(source / name, target / name)
            fsync_file(target / name)
        elif name in staged:
            entry = staged[name].write((target / name).parent)
        else:
            raise CheckpointError(f"the memory that holds {plain_name(name)} is not open; a defect of megarl")
        # Remove the source only after the copy is on disk: until then the memory holds the only copy.
        (source / name).unlink()
        return plain_name(name), entry

    # Move several files at a time, because fsync of a single file leaves the disk idle between its flushes.
    return dict(in_parallel(moved, files_to_move(source, target)))


def files_to_move(source: Path, target: Path) -> list[str]:
    """Return the paths of the files below ``source``, and create their directories below ``target``.

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
