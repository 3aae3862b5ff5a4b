"""Checkpoints that are written while training goes on: their files lie in shared memory, and a process of its own brings them to the disk.

The workers write them there with the code that otherwise writes to the disk, but for tensors, which they stage (``staging``); the files are
the same to the last byte. The process writes them, waits until they are on the disk, and writes the manifest. Whoever started it gives the
checkpoint its name. It ends with whoever started it, and what it has not written is lost then.

That is so where all ranks are on the driver's node. Where they are not, each node has such memory and such a process (``node_memory``).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from megarl.checkpoint.atomic import fsync_directory, fsync_tree, in_parallel, remove_tree
from megarl.checkpoint.host_memory import available_bytes
from megarl.checkpoint.manifest import Entry, entry_of, write_manifest
from megarl.checkpoint.staged_file import close_all, memory_bytes, open_memory, plain_name, staged_files
from megarl.errors import CheckpointError

SHARED_MEMORY = Path("/dev/shm")
_NAME = "megarl-checkpoint-"
_SPARE = 1.25
"""A checkpoint may be so much larger than the one before, or than it was estimated."""
_ANSWER, _ERRORS = 1, 2
_KILL_WAIT_S = 5.0


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
        """Whether it is through, well or not."""

    def wait(self, longest_s: float) -> float:
        """Wait until all is on the disk, with its manifest; the seconds since the beginning. Afterwards nothing is left in shared memory.

        Raises:
            CheckpointError: it could not be written, or took longer than ``longest_s`` from now on.
            OSError: the manifest could not be written.
        """

    def abort(self) -> None:
        """End it, whatever it is doing, and forget the checkpoint."""


class CheckpointMemory(Protocol):
    """The shared memory in which a checkpoint waits for its way to the disk; one at a time."""

    def take(self, needed: int) -> bool:
        """Make empty directories for a checkpoint of so many bytes; False where there is no room for them."""

    def directories(self, role: str) -> Path | list[Path]:
        """Where the ranks of a role write, after ``take``: one directory for all of them, or a list with one for each."""

    def hold(self) -> None:
        """Open what the ranks have left, which is all there then: from now on it does not matter what becomes of them.

        Raises:
            CheckpointError: that cannot be opened.
        """

    def write(self, target: Path) -> Write:
        """Begin to bring what they have written to a directory on the disk, which may hold further files of the checkpoint. After ``hold``.

        Raises:
            CheckpointError: that cannot be begun.
        """

    def free(self) -> None:
        """Forget what is there, also where it is being written."""


class OwnMemory:
    """``CheckpointMemory`` of this node alone, for ranks that are all on it.

    Args:
        checkpoint_dir: directory of the checkpoints. Hold the run's lock.
    """

    def __init__(self, checkpoint_dir: Path) -> None:
        self._checkpoint_dir = checkpoint_dir
        self._descriptors: dict[str, int] = {}
        self._kept_bytes = 0

    def take(self, needed: int) -> bool:
        return take_memory(self._checkpoint_dir, needed, kept_bytes=self._kept_bytes) is not None

    def directories(self, role: str) -> Path:
        return memory_of(self._checkpoint_dir)

    def hold(self) -> None:
        self._descriptors = open_memory(memory_of(self._checkpoint_dir))
        self._kept_bytes = memory_bytes(self._descriptors)

    def write(self, target: Path) -> BackgroundWrite:
        descriptors, self._descriptors = self._descriptors, {}
        return BackgroundWrite(memory_of(self._checkpoint_dir), target, descriptors)

    def free(self) -> None:
        close_all(self._descriptors)
        self._descriptors = {}
        free_memory(self._checkpoint_dir)


def memory_of(checkpoint_dir: Path, node: str = "") -> Path:
    """Where the checkpoints of a directory wait in shared memory; the same name in every launch of a run.

    Args:
        checkpoint_dir: directory of the checkpoints.
        node: tells apart those of several nodes, which may have their memory in common, and be one machine.
    """
    digest = hashlib.sha256(os.fsencode(checkpoint_dir)).hexdigest()[:16]
    return SHARED_MEMORY / f"{_NAME}{os.getuid()}-{digest}{f'-{node}' if node else ''}"


def waits_in_memory(path: Path) -> bool:
    """Whether a directory of a checkpoint is one that waits in shared memory."""
    return any(parent.parent == SHARED_MEMORY and parent.name.startswith(_NAME) for parent in (path, *path.parents))


def take_memory(checkpoint_dir: Path, needed: int, node: str = "", kept_bytes: int = 0) -> Path | None:
    """An empty directory in shared memory that only this user may open; None where there is no room for ``needed`` bytes and a little more.

    Hold the run's lock: there is one for a directory of checkpoints, and what a killed launch left there goes.

    Args:
        checkpoint_dir: directory of the checkpoints.
        needed: bytes of the checkpoint on this node.
        node: as of ``memory_of``.
        kept_bytes: that the ranks have kept for it from an earlier one.
    """
    path = memory_of(checkpoint_dir, node)
    try:
        free_memory(checkpoint_dir, node)
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
    """Remove what launches that were killed have left in this machine's shared memory of a directory of checkpoints, whichever node it was
    called then."""
    own = memory_of(checkpoint_dir)
    for path in (own, *own.parent.glob(f"{own.name}-*")):
        _free(path)


def _free(path: Path) -> None:
    """Remove a directory of this user's."""
    with contextlib.suppress(OSError):
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
            remove_tree(path)


class BackgroundWrite:
    """Brings a checkpoint from shared memory to the disk.

    Args:
        source: its files, which are removed as they are written.
        target: a directory on the disk, which may hold further files of the checkpoint.
        descriptors: of the memory of ranks, as of ``open_memory``; they are closed.

    Raises:
        CheckpointError: no process can be started.
    """

    def __init__(self, source: Path, target: Path, descriptors: Mapping[str, int]) -> None:
        self._source, self._target, self._begun = source, target, time.monotonic()
        program = f"import sys; sys.path[:] = {sys.path!r}; from megarl.checkpoint.background import main; main(*sys.argv[1:])"
        try:
            # a session of its own: a signal to the driver's group is the driver's to act upon
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, str(source), str(target), json.dumps(descriptors)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                pass_fds=tuple(descriptors.values()),
            )
        except OSError as error:
            remove_tree(source)
            raise CheckpointError(f"no process can be started that writes {target}: {error}. Fix: see to memory and processes") from error
        finally:
            close_all(descriptors)

    @property
    def process_id(self) -> int:
        """Of the process that writes."""
        return self._process.pid

    def has_ended(self) -> bool:
        """Whether it is through, well or not."""
        return self._process.poll() is not None

    def wait(self, longest_s: float) -> float:
        """Wait until all is on the disk; the seconds since the beginning. Afterwards nothing is left in shared memory.

        Raises:
            CheckpointError: it could not be written, or took longer than ``longest_s`` from now on.
        """
        try:
            # it takes the end of its standard input for the end of this process
            self._process.wait(timeout=longest_s)
        except subprocess.TimeoutExpired:
            self.abort()
            bound = f"{self._target} was not written within {longest_s:g} s"
            raise CheckpointError(f"{bound}. Fix: a faster disk, or a larger deadlines.save_s") from None
        said, _ = self._process.communicate()
        remove_tree_if_there(self._source)
        if self._process.returncode:
            reason = json.loads(said)["reason"] if said else f"its process ended with {self._process.returncode}"
            raise CheckpointError(f"{self._target} could not be written: {reason}")
        return time.monotonic() - self._begun

    def abort(self) -> None:
        """End the process, whatever it is doing, and forget the checkpoint."""
        self._process.kill()
        # one that hangs in the file system ends when that lets it go
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=_KILL_WAIT_S)
        remove_tree_if_there(self._source)


def remove_tree_if_there(directory: Path) -> None:
    """Remove a directory that somebody else may remove too."""
    if directory.exists():
        remove_tree(directory)


def main(source: str, target: str, descriptors: str) -> None:
    """What the process does. Whoever started it reads the reason from its standard output, where it fails.

    Args:
        source, target: directories.
        descriptors: of memory of ranks, as JSON.
    """
    answer = take_standard_output()
    threading.Thread(target=_end_with_parent, args=(Path(source),), daemon=True).start()
    try:
        seal(Path(target), move_files(Path(source), Path(target), json.loads(descriptors)))
    except Exception as error:
        os.write(answer, json.dumps({"reason": reason_of(error)}).encode())
        os._exit(1)
    os._exit(0)


def reason_of(error: Exception) -> str:
    """Why files could not be written, in one line."""
    text = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
    return f"{type(error).__name__}: {text}"


def take_standard_output() -> int:
    """A descriptor of standard output, over which answers go; what libraries print goes to standard error from now on."""
    answer = os.dup(_ANSWER)
    os.dup2(_ERRORS, _ANSWER)
    return answer


def move_files(source: Path, target: Path, descriptors: Mapping[str, int]) -> dict[str, Entry]:
    """Bring all files below ``source`` to the same places below ``target``, and make those that ranks have staged; each is on the disk
    before it leaves shared memory.

    Args:
        source, target: directories.
        descriptors: of memory of ranks, as of ``open_memory``; they are closed.

    Returns:
        Size and hash of each, as it was in memory, by its path below ``target``.

    Raises:
        OSError: a file cannot be written.
        CheckpointError: there is none, or one is staged in memory that is not open.
    """
    names = files_to_move(source, target)
    with staged_files(source, names, descriptors) as staged:

        def moved(name: str) -> tuple[str, Entry]:
            if name not in staged:
                entry = entry_of(source / name)
                _copy(source / name, target / name)
            else:
                entry = staged[name].write((target / name).parent)
            (source / name).unlink()
            return plain_name(name), entry

        return dict(in_parallel(moved, names))


def files_to_move(source: Path, target: Path) -> list[str]:
    """The files below ``source``, by their paths there; the directories that they are in are made below ``target``.

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
            f"no rank has written a file to {source}. Fix: let the ranks of a node have the same {SHARED_MEMORY} as each other, or write "
            "checkpointing.async_save=false"
        )
    return found


def _copy(source: Path, target: Path) -> None:
    """Copy a file, and wait until the copy is on the disk."""
    shutil.copyfile(source, target)
    descriptor = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _end_with_parent(source: Path) -> None:
    """End when whoever holds the other end of standard input is gone: nobody would give the checkpoint its name."""
    sys.stdin.buffer.read()
    remove_tree_if_there(source)
    os._exit(2)
