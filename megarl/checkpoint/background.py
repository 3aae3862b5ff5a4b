"""Checkpoints that are written while training goes on: their files are in shared memory, from where a process
brings them to the disk.

The workers write them there with the code that otherwise writes to the disk, but for tensors, which they
stage (``staging``); the files are the same to the last byte. Each node has such memory and such a process
(``node_memory``).
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
# A checkpoint may be so much larger than the one before, or than it was estimated.
_SPARE = 1.25


def seal(directory: Path, known: Mapping[str, Entry] | None = None) -> None:
    """Wait until all files below ``directory`` are on the disk, and write their manifest.

    Args:
        directory: of a checkpoint.
        known: entries of files by their paths below it, which are not read again.

    Raises:
        OSError: a file cannot be read or written.
        CheckpointError: there is something that is no file.
    """
    fsync_tree(directory)
    write_manifest(directory, known)
    fsync_directory(directory)


class Write(Protocol):
    """Brings a checkpoint from shared memory to the disk."""

    def has_ended(self) -> bool:
        """Return whether it is through, well or not."""

    def wait(self, longest_s: float) -> float:
        """Wait until all is on the disk, with its manifest; the seconds since the beginning. Afterwards
        nothing is left in shared memory.

        Raises:
            CheckpointError: it could not be written, or took longer than ``longest_s`` from now on.
            OSError: the manifest could not be written.
        """

    def abort(self) -> None:
        """End it, whatever it is doing, and forget the checkpoint."""


class CheckpointMemory(Protocol):
    """The shared memory in which a checkpoint waits for its way to the disk; one at a time."""

    def take(self, needed: int) -> bool:
        """Make empty directories for a checkpoint of that size; False where there is no room for them."""

    def directories(self, role: str) -> Path | list[Path]:
        """Return where the ranks of a role write, after ``take``: one directory for all of them, or a list
        with one for each."""

    def hold(self) -> None:
        """Open what the ranks have left, which is all there then: from now on it does not matter what becomes
        of them.

        Raises:
            CheckpointError: that cannot be opened.
        """

    def write(self, target: Path) -> Write:
        """Begin to bring what they have written to a directory on the disk, which may hold further files of
        the checkpoint. After ``hold``.

        Raises:
            CheckpointError: that cannot be begun.
        """

    def free(self) -> None:
        """Forget what is there, also where it is being written."""


def memory_of(checkpoint_dir: Path, node: str = "") -> Path:
    """Return where the checkpoints of a directory wait in shared memory; the same name in every launch of a
    run.

    Args:
        checkpoint_dir: directory of the checkpoints.
        node: tells apart those of several nodes, which may have their memory in common, and be one machine.
    """
    # A digest instead of the path, which may be longer than a name can be; the user's number keeps users of
    # one machine apart.
    digest = hashlib.sha256(os.fsencode(checkpoint_dir)).hexdigest()[:16]
    return SHARED_MEMORY / f"{_NAME}{os.getuid()}-{digest}{f'-{node}' if node else ''}"


def waits_in_memory(path: Path) -> bool:
    """Return whether a directory of a checkpoint is one that waits in shared memory."""
    return any(
        parent.parent == SHARED_MEMORY and parent.name.startswith(_NAME) for parent in (path, *path.parents)
    )


def take_memory(checkpoint_dir: Path, needed: int, node: str = "", kept_bytes: int = 0) -> Path | None:
    """Return an empty directory in shared memory that only this user may open; None where there is no room
    for ``needed`` bytes and a little more.

    Hold the run's lock: there is one for a directory of checkpoints, and what a killed launch left there
    goes.

    Args:
        checkpoint_dir: directory of the checkpoints.
        needed: bytes of the checkpoint on this node.
        node: as of ``memory_of``.
        kept_bytes: that the ranks have kept for it from an earlier one.
    """
    path = memory_of(checkpoint_dir, node)
    try:
        # First: what a killed launch left there counts as used in what is available.
        free_memory(checkpoint_dir, node)
        # Shared memory that is full kills the process that writes to it, by a signal and without an error.
        if available_bytes() < _SPARE * needed - kept_bytes:
            return None
        # whatever another user has put there under this name is not ours to use
        path.mkdir(mode=0o700)
    except OSError:
        return None
    return path


def free_memory(checkpoint_dir: Path, node: str = "") -> None:
    """Remove what waits in shared memory for a directory of checkpoints."""
    _free(memory_of(checkpoint_dir, node))


def tidy_memory(checkpoint_dir: Path) -> None:
    """Remove what launches that were killed have left in this machine's shared memory of a directory of
    checkpoints, whichever node it was called then."""
    own = memory_of(checkpoint_dir)
    for path in (own, *own.parent.glob(f"{own.name}-*")):
        _free(path)


def _free(path: Path) -> None:
    """Remove a directory of this user's."""
    with contextlib.suppress(OSError):
        status = path.lstat()
        # /dev/shm can be written by everybody: another user's link or directory of this name stays as it is.
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
            remove_tree(path)


def move_files(source: Path, target: Path, staged: Mapping[str, StagedFile]) -> dict[str, Entry]:
    """Bring all files below ``source`` to the same places below ``target``, and make those that ranks have
    staged; each is on the disk before it leaves shared memory.

    Args:
        source, target: directories.
        staged: as of ``open_staged``.

    Returns:
        Size and hash of each, as it was in memory, by its path below ``target``.

    Raises:
        OSError: a file cannot be written.
        CheckpointError: there is none, or one is staged in memory that is not open.
    """

    def moved(name: str) -> tuple[str, Entry]:
        if not name.endswith(SUFFIX):
            # Hashed in memory, before the copy: a disk that garbles bytes is found when the checkpoint is
            # read.
            entry = entry_of(source / name)
            shutil.copyfile(source / name, target / name)
            fsync_file(target / name)
        elif name in staged:
            entry = staged[name].write((target / name).parent)
        else:
            raise CheckpointError(f"the memory that {plain_name(name)} is in is not open; a defect of megarl")
        # Only after the copy is on the disk: until then the memory is the only one.
        (source / name).unlink()
        return plain_name(name), entry

    # Several at a time, because fsync of one file leaves the disk idle between its flushes.
    return dict(in_parallel(moved, files_to_move(source, target)))


def files_to_move(source: Path, target: Path) -> list[str]:
    """Return the files below ``source``, by their paths there; the directories that they are in are made
    below ``target``.

    Raises:
        OSError: a directory cannot be made.
        CheckpointError: there is no file.
    """
    found: list[str] = []
    for directory, subdirectories, names in os.walk(source):
        here = Path(directory).relative_to(source)
        for name in subdirectories:
            (target / here / name).mkdir(exist_ok=True)
        found += [(here / name).as_posix() for name in names]
    if not found:
        raise CheckpointError(
            f"no rank has written a file to {source}. Fix: let the ranks of a node have the same "
            f"{SHARED_MEMORY} as each other, or write "
            "checkpointing.async_save=false"
        )
    return found
