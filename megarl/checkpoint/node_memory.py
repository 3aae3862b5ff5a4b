"""One node's shared memory, in which its ranks leave their files of a checkpoint, and the process that writes
them to disk.

The process starts before the ranks write, and waits for the target directory. It ends with the process that
started it and then removes the memory, so a killed run leaves nothing. It is not a child of the Ray actor
that started it, because Ray kills its workers' children with them.

Each node writes and hashes its own files. The caller writes the manifest and renames the checkpoint: the
driver, which uses its own node's memory (``OwnMemory``), and for ranks elsewhere an actor on each node
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
# Signals to ignore: Ctrl-C or a Slurm signal reaches the whole process group, but the save that it triggers
# needs its writer.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_NOTHING = "no checkpoint waits in the memory of this node: its process has been restarted since"
_ANSWER, _ERRORS = 1, 2
# Seconds that the process may take to start and to open the ranks' memory.
_HOLD_S = 60.0
# Seconds until a process that should end is killed, and again until a killed process is no longer waited for.
_END_S = 2.0
_REMOVALS, _REMOVAL_S = 50, 0.1
"""Attempts to remove memory that ranks may still write to, and seconds between two attempts."""


class NodeMemory:
    """One node's shared memory for one checkpoint at a time. Methods may be called from several threads; all
    but ``write`` return soon.

    Args:
        checkpoint_dir: directory of the checkpoints; the caller's run must hold its lock.
        node: name of the node; see ``memory_of``.
        has_child: start the writing process as a child and reap it, so that no zombie remains where nobody
            else reaps orphans.
    """

    def __init__(self, checkpoint_dir: str, node: str, *, has_child: bool = False) -> None:
        self._checkpoint_dir, self._node, self._has_child = Path(checkpoint_dir), node, has_child
        self._process: Writer | None = None
        self._kept_bytes = 0

    def tidy(self) -> None:
        """Remove the files that killed launches left on this machine."""
        tidy_memory(self._checkpoint_dir)

    def take(self, needed: int) -> str | None:
        """Create an empty directory for ``needed`` bytes plus a margin and return its path; None if there is
        too little memory."""
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
        """Open the files that the ranks have staged. From then on the ranks may die without loss.

        Returns:
            Bytes of memory that the ranks keep for the next checkpoint.

        Raises:
            CheckpointError: a file cannot be opened, or the checkpoint was discarded. The message does not
                name the node.
        """
        if self._process is None:
            raise CheckpointError(_NOTHING)
        self._kept_bytes = self._process.hold()
        return self._kept_bytes

    def write(self, target: str) -> dict[str, Entry]:
        """Move the files to a directory on disk and sync them. After an error call ``free`` to remove the
        rest.

        Returns:
            Size and hash of each file, by relative path.

        Raises:
            CheckpointError: the files could not be written, or the checkpoint was discarded. The message does
                not name the node.
        """
        return self.begin(target).files()

    def begin(self, target: str) -> Writer:
        """Begin ``write`` without waiting for it.

        Raises:
            CheckpointError: no checkpoint waits here.
        """
        # Keep a reference, because ``free`` may run concurrently.
        process = self._process
        if process is None:
            raise CheckpointError(_NOTHING)
        process.write(target)
        return process

    def free(self) -> None:
        """Stop the writing process at any point and remove the remaining files."""
        # Clear the attribute first, so that a concurrent second call finds no process to end.
        process, self._process = self._process, None
        if process is not None:
            process.end()
        free_memory(self._checkpoint_dir, self._node)


class OwnMemory:
    """``CheckpointMemory`` for a run whose ranks are all on this node.

    Args:
        checkpoint_dir: directory of the checkpoints; the caller must hold the run's lock.
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
    """``Write`` of a checkpoint from this node's memory.

    Args:
        memory: memory in which the checkpoint waits.
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
        """Wait for the write; see ``Write.wait``."""
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
        """Stop the write; see ``Write.abort``."""
        self._memory.free()


class Writer:
    """Handle of the writing process, connected by pipes."""

    def __init__(self, source: Path, *, is_child: bool) -> None:
        # The process reports its own id. If it must not be a child, the started process forks it and exits at
        # once.
        begin = "print('{\"process_id\": %d}' % os.getpid(), flush=True)"
        program = (
            f"import os, sys; {'' if is_child else 'os.fork() and os._exit(0); '}{begin}; "
            f"sys.path[:] = {sys.path!r}; from megarl.checkpoint.node_memory import main; main(*sys.argv[1:])"
        )
        # A new session keeps signals to the run's process group away. A new interpreter, because a fork would
        # copy CUDA's state and locks of threads.
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
        # A thread reads the output at once: the process would block on a full pipe.
        threading.Thread(
            target=self._listen, name="listens to the writer of checkpoints", daemon=True
        ).start()

    def hold(self) -> int:
        """Make the process open the ranks' memory, and return the bytes of that memory.

        Raises:
            CheckpointError: the process cannot open it, has ended, or does not respond.
        """
        self._tell(None)
        if not self._holds.wait(_HOLD_S):
            raise CheckpointError(f"its writer process does not respond within {_HOLD_S:g} s")
        return int(self._said_of("kept_bytes"))

    def write(self, target: str) -> None:
        """Make the process begin to write to the directory ``target``."""
        self._tell(target)

    def has_ended(self) -> bool:
        """Return whether the process has ended, successfully or not."""
        return self._has_ended.is_set()

    def files(self, longest_s: float | None = None) -> dict[str, Entry]:
        """Wait for the process and return the entries of the files that it wrote.

        Raises:
            TimeoutError: it takes longer than ``longest_s`` seconds.
            CheckpointError: the files could not be written.
        """
        if not self._has_ended.wait(longest_s):
            raise TimeoutError
        return self._said_of("files")

    def _tell(self, order: str | None) -> None:
        assert self._first.stdin is not None
        # Ignore errors: if the process has ended, the end of its output shows it.
        with contextlib.suppress(OSError, ValueError):
            self._first.stdin.write(f"{json.dumps(order)}\n".encode())
            self._first.stdin.flush()

    def _said_of(self, answer: str) -> Any:
        if answer not in self._said:
            raise CheckpointError(self._said.get("reason", "its writer process was killed"))
        return self._said[answer]

    def end(self) -> None:
        """Close the process's standard input, which makes it end; kill it if it does not."""
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
    """Entry point of the writing process: open the ranks' memory on request, wait for the target directory,
    move the files to it, and report on standard output."""
    for each in _IGNORED:
        signal.signal(each, signal.SIG_IGN)
    # Replies get their own descriptor; what libraries print goes to standard error.
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
    # A normal exit of the interpreter may fail while a daemon thread reads standard input.
    os._exit(0)


def _order(source: Path) -> str | None:
    """Return the next request from standard input: a target directory, or None to open memory. Exit if the
    requesting process is gone."""
    line = sys.stdin.buffer.readline()
    if not line:
        _leave(source, 2)
    return json.loads(line)


def written(source: Path, target: Path, staged: Mapping[str, StagedFile]) -> dict[str, Entry]:
    """Move the files of this node to disk and sync their directories.

    Args:
        source, target: directories.
        staged: the ranks' staged files, from ``open_staged``.

    Returns:
        Size and hash of each file as it was in memory, by relative path.

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
    # Ignore errors: the memory must be removed even if nobody reads the reply.
    with contextlib.suppress(OSError), open(answer, "w", closefd=False) as stream:
        stream.write(f"{json.dumps(said)}\n")


def _end_with_asker(source: Path) -> None:
    """Exit when standard input is closed: the requesting process is gone or gave up, so nobody would commit
    the checkpoint."""
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
    """Delete the copy of the checkpoint in host memory, and exit the process with status ``code``."""
    # Repeat the removal: ranks that do not know of the end yet may still create files.
    for _ in range(_REMOVALS):
        _remove(source)
        if not source.exists():
            break
        time.sleep(_REMOVAL_S)
    os._exit(code)
