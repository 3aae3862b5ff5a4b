"""The shared memory of one node, in which its ranks leave their files of a checkpoint, and a process that
writes
them to disk.

The process starts before the ranks write, and waits until it is told the target directory. It ends with the
process that started it, and removes the memory, so a killed run leaves nothing, whatever it was doing. It is
not a child of the actor that started it, because Ray kills the children of its workers with them.

Each node writes and hashes its own files. The caller writes the manifest and gives the checkpoint its name:
the driver, which has the memory of its own node (``OwnMemory``), and for ranks elsewhere an actor on each
node
(``megarl.run.memory_of_nodes``).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from converters.files.atomic import fsync_directory
from megarl.checkpoint.atomic import remove_tree
from megarl.checkpoint.background import free_memory, memory_of, move_files, seal, take_memory, tidy_memory
from megarl.checkpoint.manifest import Entry
from megarl.checkpoint.staged_file import StagedFile, open_staged
from megarl.errors import CheckpointError

logger = logging.getLogger(__name__)
# Ignore these signals: Ctrl-C or a Slurm notice reaches the whole process group, and the save that it
# requests must not lose its writer.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_NOTHING = "no checkpoint waits in the memory of this node: its process has been restarted since"
_ANSWER, _ERRORS = 1, 2
# The process may take this time to start and to open the memory of the ranks.
_HOLD_S = 60.0
# After this time a process that is no longer wanted is killed; after the same time again, a killed process is
# no longer waited for.
_END_S = 2.0
_REMOVALS, _REMOVAL_S = 50, 0.1
"""Attempts to remove memory that ranks may still write to, and the seconds between two attempts."""


class NodeMemory:
    """Memory of one node, for one checkpoint at a time. Methods may be called from several threads: all but
    ``write`` return soon.

    Args:
        checkpoint_dir: directory of the checkpoints. The caller's run holds the run's lock.
        node: name that distinguishes this node's memory.
        has_child: the writing process is a child of this one, which waits for its end, so that no zombie is
            left where nobody else reaps it.
    """

    def __init__(self, checkpoint_dir: str, node: str, *, has_child: bool = False) -> None:
        self._checkpoint_dir, self._node, self._has_child = Path(checkpoint_dir), node, has_child
        self._process: Writer | None = None
        self._kept_bytes = 0

    def tidy(self) -> None:
        """Remove what killed launches have left on this machine."""
        tidy_memory(self._checkpoint_dir)

    def take(self, needed: int) -> str | None:
        """Return the path of an empty directory for ``needed`` bytes and a little more, or None if there is
        no room."""
        self.free()
        path = take_memory(self._checkpoint_dir, needed, self._node, self._kept_bytes)
        if path is None:
            return None
        try:
            self._process = Writer(path, is_child=self._has_child)
        except OSError:
            free_memory(self._checkpoint_dir, self._node)
            raise
        return str(path)

    def hold(self) -> int:
        """Open what the ranks have staged. Afterwards the ranks may die without loss.

        Returns:
            Bytes of memory that they keep for the next checkpoint.

        Raises:
            CheckpointError: a file cannot be opened, or is no longer wanted; without the node's name.
        """
        if self._process is None:
            raise CheckpointError(_NOTHING)
        self._kept_bytes = self._process.hold()
        return self._kept_bytes

    def write(self, target: str) -> dict[str, Entry]:
        """Move the files in the directory to a directory on disk. After an error ``free`` removes what is
        left.

        Returns:
            Size and hash of each file, by its path below the directory. The files and their directories are
            on disk.

        Raises:
            CheckpointError: the files could not be written, or are no longer wanted; without the node's name.
        """
        return self.begin(target).files()

    def begin(self, target: str) -> Writer:
        """Begin ``write`` without waiting for it.

        Raises:
            CheckpointError: no checkpoint waits here.
        """
        # Keep a reference, because ``free`` may run in between.
        process = self._process
        if process is None:
            raise CheckpointError(_NOTHING)
        process.write(target)
        return process

    def free(self) -> None:
        """End the writing process, whatever it is doing, and remove what is left."""
        # Clear the attribute first, so that a second call from another thread finds no process to end.
        process, self._process = self._process, None
        if process is not None:
            process.end()
        free_memory(self._checkpoint_dir, self._node)


class OwnMemory:
    """The ``CheckpointMemory`` of a run whose ranks are all on this node.

    Args:
        checkpoint_dir: directory of the checkpoints. The caller holds the run's lock.
    """

    def __init__(self, checkpoint_dir: Path) -> None:
        self._place, self._memory = (
            memory_of(checkpoint_dir),
            NodeMemory(str(checkpoint_dir), "", has_child=True),
        )

    def take(self, needed: int) -> bool:
        try:
            return self._memory.take(needed) is not None
        except OSError as error:
            logger.warning(
                "a checkpoint cannot wait in memory: its writer process cannot be started (%s)", error
            )
            return False

    def directories(self, role: str) -> Path:
        return self._place

    def hold(self) -> None:
        self._memory.hold()

    def write(self, target: Path) -> OwnWrite:
        return OwnWrite(self._memory, target)

    def free(self) -> None:
        self._memory.free()


class OwnWrite:
    """The ``Write`` of a checkpoint from this node's memory.

    Args:
        memory: the memory that the checkpoint waits in.
        target: directory on disk.

    Raises:
        CheckpointError: no checkpoint waits there.
    """

    def __init__(self, memory: NodeMemory, target: Path) -> None:
        self._memory, self._target, self._begun = memory, target, time.monotonic()
        self._writer = memory.begin(str(target))

    def has_ended(self) -> bool:
        """Return whether the write has ended, successfully or not."""
        return self._writer.has_ended()

    def wait(self, longest_s: float) -> float:
        """Wait for the write, see ``Write.wait``."""
        try:
            files = self._writer.files(longest_s)
        except TimeoutError:
            self.abort()
            late = f"{self._target} was not written within {longest_s:g} s"
            raise CheckpointError(f"{late}. Fix: a faster disk, or a larger deadlines.save_s") from None
        except CheckpointError as error:
            self.abort()
            raise CheckpointError(f"{self._target} could not be written: {error}") from None
        seal(self._target, files)
        return time.monotonic() - self._begun

    def abort(self) -> None:
        """End the write, see ``Write.abort``."""
        self._memory.free()


class Writer:
    """The process that writes to disk, as seen from the other end of its pipes."""

    def __init__(self, source: Path, *, is_child: bool) -> None:
        # The process reports its own number. If it must not be a child, the process that is started forks it
        # and exits at once.
        begin = "print('{\"process_id\": %d}' % os.getpid(), flush=True)"
        program = (
            f"import os, sys; {'' if is_child else 'os.fork() and os._exit(0); '}{begin}; "
            f"sys.path[:] = {sys.path!r}; from megarl.checkpoint.node_memory import main; main(*sys.argv[1:])"
        )
        # Start a new session, so that signals to the run's process group do not reach the process, and a new
        # interpreter, because a fork would copy the state of CUDA and the locks of threads.
        self._first = subprocess.Popen(
            [sys.executable, "-c", program, str(source)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._said: dict[str, Any] = {}
        self._has_begun, self._holds, self._has_ended = (
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )
        # Let a thread read the output at once: the writer would block in its answer when the pipe is full.
        threading.Thread(
            target=self._listen, name="listens to the writer of checkpoints", daemon=True
        ).start()

    def hold(self) -> int:
        """Have the process open the memory of the ranks, and return the bytes of that memory.

        Raises:
            CheckpointError: the process cannot open it, is gone, or does not reply.
        """
        self._tell(None)
        if not self._holds.wait(_HOLD_S):
            raise CheckpointError(f"its writer process does not respond within {_HOLD_S:g} s")
        return int(self._said_of("kept_bytes"))

    def write(self, target: str) -> None:
        """Have the process begin to write to a directory."""
        self._tell(target)

    def has_ended(self) -> bool:
        """Return whether the write has ended, successfully or not."""
        return self._has_ended.is_set()

    def files(self, longest_s: float | None = None) -> dict[str, Entry]:
        """Wait for the process, and return the entries of the files that it has written.

        Raises:
            TimeoutError: that takes longer than ``longest_s``.
            CheckpointError: the files could not be written.
        """
        if not self._has_ended.wait(longest_s):
            raise TimeoutError
        return self._said_of("files")

    def _tell(self, order: str | None) -> None:
        assert self._first.stdin is not None
        # Ignore errors: the end of its output shows that a process is gone.
        with contextlib.suppress(OSError, ValueError):
            self._first.stdin.write(f"{json.dumps(order)}\n".encode())
            self._first.stdin.flush()

    def _said_of(self, answer: str) -> Any:
        if answer not in self._said:
            raise CheckpointError(self._said.get("reason", "its writer process was killed"))
        return self._said[answer]

    def end(self) -> None:
        """Close the process's standard input, upon which it ends."""
        assert self._first.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._first.stdin.close()
        if not self._has_ended.wait(_END_S) and self._has_begun.wait(_END_S):
            with contextlib.suppress(OSError):
                os.kill(self._said["process_id"], signal.SIGKILL)
            # A process that hangs in the file system ends only when its system call returns.
            self._has_ended.wait(_END_S)

    def _listen(self) -> None:
        assert self._first.stdout is not None
        with self._first.stdout:
            for line in self._first.stdout:
                with contextlib.suppress(ValueError):
                    self._said |= json.loads(line)
                    self._has_begun.set()
                    if "kept_bytes" in self._said:
                        self._holds.set()
        self._first.wait()
        self._holds.set()
        self._has_ended.set()


def main(source: str) -> None:
    """Serve one node: open the memory of ranks when standard input asks for it, wait for a directory there,
    move the files to it, and report on standard output."""
    for each in _IGNORED:
        signal.signal(each, signal.SIG_IGN)
    # Give answers their own descriptor, and redirect what libraries print to standard error.
    answer = os.dup(_ANSWER)
    os.dup2(_ERRORS, _ANSWER)
    staged: dict[str, StagedFile] = {}
    try:
        while (target := _order(Path(source))) is None:
            staged = open_staged(Path(source))
            _say(answer, kept_bytes=sum(each.kept_bytes for each in staged.values()))
        threading.Thread(target=_end_with_asker, args=(Path(source),), daemon=True).start()
        files = written(Path(source), Path(target), staged)
        _remove(Path(source))
    except Exception as error:
        _say(answer, reason=_reason_of(error))
        _leave(Path(source), 1)
    _say(answer, files=files)
    # Do not end the interpreter normally, which may fail while a daemon thread waits in a read of standard
    # input.
    os._exit(0)


def _order(source: Path) -> str | None:
    """Return the next order: a directory to write to, or None to open memory. Exit if the process that gives
    orders is gone."""
    line = sys.stdin.buffer.readline()
    if not line:
        _leave(source, 2)
    return json.loads(line)


def written(source: Path, target: Path, staged: Mapping[str, StagedFile]) -> dict[str, Entry]:
    """Move the files of this node to disk.

    Args:
        source, target: directories.
        staged: files of its ranks, as returned by ``open_staged``.

    Returns:
        Size and hash of each file as it was in memory, by its path below ``target``.

    Raises:
        OSError: a file cannot be written.
        CheckpointError: there is no file.
    """
    entries = move_files(source, target, staged)
    directories: set[Path] = set()
    for name in entries:
        directories.update(map(target.joinpath, Path(name).parents))
    # Sync the deepest directories first: the entry of a directory is in its parent, which is synced after it.
    for directory in sorted(directories, reverse=True):
        fsync_directory(directory)
    return entries


def _say(answer: int, **said: Any) -> None:
    # Ignore errors: even if nobody reads the answer, the memory has to be removed.
    with contextlib.suppress(OSError), open(answer, "w", closefd=False) as stream:
        stream.write(f"{json.dumps(said)}\n")


def _end_with_asker(source: Path) -> None:
    """End when the process at the other end of standard input is gone or has closed it: nobody would give the
    checkpoint its name."""
    sys.stdin.buffer.read()
    _leave(source, 2)


def _reason_of(error: Exception) -> str:
    """Return in one line why files could not be written."""
    text = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
    return f"{type(error).__name__}: {text}"


def _remove(directory: Path) -> None:
    """Remove a directory that another process may be removing too."""
    if directory.exists():
        remove_tree(directory)


def _leave(source: Path, code: int) -> None:
    """Remove what is in memory, although ranks that do not know of the end yet may still write there, and
    exit."""
    # Repeat the removal, because ranks that do not know of the end yet may create files meanwhile.
    for _ in range(_REMOVALS):
        _remove(source)
        if not source.exists():
            break
        time.sleep(_REMOVAL_S)
    os._exit(code)
