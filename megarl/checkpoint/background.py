"""Checkpoints that are written while training goes on: their files lie in shared memory, and a process of its own brings them to the disk.

The workers write them there with the code that otherwise writes to the disk, so that they are the same to the last byte. The process copies
them, waits until they are on the disk, and writes the manifest. Whoever started it gives the checkpoint its name. It ends with whoever
started it, and what it has not written is lost then.
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
from pathlib import Path

from megarl.checkpoint.atomic import fsync_directory, fsync_tree, remove_tree
from megarl.checkpoint.manifest import write_manifest
from megarl.errors import CheckpointError

SHARED_MEMORY = Path("/dev/shm")
_SPARE = 1.25
"""A checkpoint may be so much larger than the one before, or than it was estimated."""
_KILL_WAIT_S = 5.0


def seal(directory: Path) -> None:
    """Wait until all files below ``directory`` are on the disk, and write their manifest.

    Raises:
        OSError: a file cannot be read or written.
        CheckpointError: there is something that is no file.
    """
    fsync_tree(directory)
    write_manifest(directory)
    fsync_directory(directory)


def memory_of(checkpoint_dir: Path) -> Path:
    """Where the checkpoints of a directory wait in shared memory; the same name in every launch of a run."""
    digest = hashlib.sha256(os.fsencode(checkpoint_dir)).hexdigest()[:16]
    return SHARED_MEMORY / f"megarl-checkpoint-{os.getuid()}-{digest}"


def take_memory(checkpoint_dir: Path, needed: int) -> Path | None:
    """An empty directory in shared memory that only this user may open; None where there is no room for ``needed`` bytes and a little more.

    Hold the run's lock: there is one for a directory of checkpoints, and what a killed launch left there goes.
    """
    path = memory_of(checkpoint_dir)
    try:
        free_memory(checkpoint_dir)
        if shutil.disk_usage(SHARED_MEMORY).free < _SPARE * needed:
            return None
        # whatever another user has put there under this name is not ours to use
        path.mkdir(mode=0o700)
    except OSError:
        return None
    return path


def free_memory(checkpoint_dir: Path) -> None:
    """Remove what waits in shared memory for a directory of checkpoints."""
    path = memory_of(checkpoint_dir)
    with contextlib.suppress(OSError):
        status = path.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid():
            remove_tree(path)


class BackgroundWrite:
    """Brings a checkpoint from shared memory to the disk.

    Args:
        source: its files, which are removed as they are written.
        target: a directory on the disk, which may hold further files of the checkpoint.

    Raises:
        CheckpointError: no process can be started.
    """

    def __init__(self, source: Path, target: Path) -> None:
        self._source, self._target, self._begun = source, target, time.monotonic()
        program = f"import sys; sys.path[:] = {sys.path!r}; from megarl.checkpoint.background import main; main(*sys.argv[1:])"
        try:
            # a session of its own: a signal to the driver's group is the driver's to act upon
            self._process = subprocess.Popen(
                [sys.executable, "-c", program, str(source), str(target)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            remove_tree(source)
            raise CheckpointError(f"no process can be started that writes {target}: {error}. Fix: see to memory and processes") from error

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


def main(source: str, target: str) -> None:
    """What the process does. Whoever started it reads the reason from its standard output, where it fails."""
    threading.Thread(target=_end_with_parent, args=(Path(source),), daemon=True).start()
    try:
        move_files(Path(source), Path(target))
        seal(Path(target))
    except Exception as error:
        text = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        sys.stdout.write(json.dumps({"reason": f"{type(error).__name__}: {text}"}))
        sys.stdout.flush()
        os._exit(1)
    os._exit(0)


def move_files(source: Path, target: Path) -> None:
    """Copy all files below ``source`` to the same places below ``target``; each is on the disk before it leaves shared memory.

    Raises:
        OSError: a file cannot be written.
    """
    for directory, subdirectories, names in os.walk(source):
        here = target / Path(directory).relative_to(source)
        for name in subdirectories:
            (here / name).mkdir(exist_ok=True)
        for name in names:
            shutil.copyfile(Path(directory) / name, here / name)
            descriptor = os.open(here / name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            (Path(directory) / name).unlink()


def _end_with_parent(source: Path) -> None:
    """End when whoever holds the other end of standard input is gone: nobody would give the checkpoint its name."""
    sys.stdin.buffer.read()
    remove_tree_if_there(source)
    os._exit(2)
