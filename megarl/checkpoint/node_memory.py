"""The shared memory of one node, in which its ranks leave their files of a checkpoint, and a process that brings them to the disk.

The process begins before the ranks write, and waits to be told where to. It ends with whoever has started it, and takes the memory along:
a run that is killed leaves nothing, whatever it was doing. It is no child of who started it: Ray kills the children of its workers with
them.

Each node writes and hashes its own files. Who has asked all nodes writes the manifest (``megarl.algorithms.memory_of_nodes``).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.checkpoint.atomic import fsync_directory
from megarl.checkpoint.background import (
    free_memory,
    move_files,
    reason_of,
    remove_tree_if_there,
    take_memory,
    take_standard_output,
    tidy_memory,
)
from megarl.checkpoint.manifest import Entry
from megarl.checkpoint.staged_file import memory_bytes, open_memory
from megarl.errors import CheckpointError

_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_NOTHING = "nothing waits in the memory of this node: its process was begun anew since"
_END_S = 2.0
"""Until a process that is no longer wanted is killed, and until one that was killed is given up."""
_REMOVALS, _REMOVAL_S = 50, 0.1
"""Tries to remove memory that ranks may still write to, and the time between two."""


class NodeMemory:
    """Memory of one node, for one checkpoint at a time. Safe to call from several threads: all but ``write`` return soon.

    Args:
        checkpoint_dir: directory of the checkpoints. Somebody holds the run's lock.
        node: that tells this node's memory apart.
    """

    def __init__(self, checkpoint_dir: str, node: str) -> None:
        self._checkpoint_dir, self._node = Path(checkpoint_dir), node
        self._process: _Writer | None = None
        self._kept_bytes = 0

    def tidy(self) -> None:
        """Remove what killed launches have left on this machine."""
        tidy_memory(self._checkpoint_dir)

    def take(self, needed: int) -> str | None:
        """The path of an empty directory for ``needed`` bytes and a little more; None where there is no room."""
        self.free()
        path = take_memory(self._checkpoint_dir, needed, self._node, self._kept_bytes)
        if path is None:
            return None
        try:
            self._process = _Writer(path)
        except OSError:
            free_memory(self._checkpoint_dir, self._node)
            raise
        return str(path)

    def hold(self) -> int:
        """Open what the ranks have staged. Afterwards it does not matter what becomes of them.

        Returns:
            Bytes of memory that they keep for the next checkpoint.

        Raises:
            CheckpointError: that cannot be opened, or is no longer wanted; without the node's name.
        """
        if self._process is None:
            raise CheckpointError(_NOTHING)
        self._kept_bytes = self._process.hold()
        return self._kept_bytes

    def write(self, target: str) -> dict[str, Entry]:
        """Bring what is in the directory to one on the disk, and remove it here. After an error ``free`` removes it.

        Returns:
            By path below it, size and hash of each file. They, and the directories that they are in, are on the disk.

        Raises:
            CheckpointError: they could not be written, or are no longer wanted; without the node's name.
        """
        if self._process is None:
            raise CheckpointError(_NOTHING)
        files: dict[str, Entry] = self._process.write(target)
        return files

    def free(self) -> None:
        """End the process, whatever it is doing, and remove what is left."""
        process, self._process = self._process, None
        if process is not None:
            process.end()
        free_memory(self._checkpoint_dir, self._node)


class _Writer:
    """The process, from the other end of its pipes."""

    def __init__(self, source: Path) -> None:
        # the one that is started leaves at once another one, which is nobody's child, and says which
        program = (
            "import os; child = os.fork(); child and (os.write(1, b'{\"process_id\": %d}\\n' % child), os._exit(0)); "
            f"import sys; sys.path[:] = {sys.path!r}; from megarl.checkpoint.node_memory import main; main(*sys.argv[1:])"
        )
        self._first = subprocess.Popen(
            [sys.executable, "-c", program, str(source)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._said: dict[str, Any] = {}
        self._has_begun, self._holds, self._has_ended = threading.Event(), threading.Event(), threading.Event()
        threading.Thread(target=self._listen, name="listens to the writer of checkpoints", daemon=True).start()

    def hold(self) -> int:
        """Have it open the memory of ranks; the bytes of that."""
        return int(self._told(None, self._holds, "kept_bytes"))

    def write(self, target: str) -> Any:
        """Have it write to a directory; the entries of the files."""
        return self._told(target, self._has_ended, "files")

    def _told(self, order: str | None, answered: threading.Event, answer: str) -> Any:
        assert self._first.stdin is not None
        # one that is gone is told by the end of what it says
        with contextlib.suppress(OSError, ValueError):
            self._first.stdin.write(f"{json.dumps(order)}\n".encode())
            self._first.stdin.flush()
        answered.wait()
        if answer not in self._said:
            raise CheckpointError(self._said.get("reason", "the process that writes there was killed"))
        return self._said[answer]

    def end(self) -> None:
        """Take what it is to read from it: that is its end."""
        assert self._first.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._first.stdin.close()
        if not self._has_ended.wait(_END_S) and self._has_begun.wait(_END_S):
            with contextlib.suppress(OSError):
                os.kill(self._said["process_id"], signal.SIGKILL)
            # one that hangs in the file system ends when that lets it go
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
    """What the process does: open the memory of ranks when that is asked for on standard input, wait for a directory there, move the files
    to it, and say on standard output what it has done."""
    for each in _IGNORED:
        signal.signal(each, signal.SIG_IGN)
    answer = take_standard_output()
    descriptors: dict[str, int] = {}
    try:
        while (target := _order(Path(source))) is None:
            descriptors = open_memory(Path(source))
            _say(answer, kept_bytes=memory_bytes(descriptors))
        threading.Thread(target=_end_with_asker, args=(Path(source),), daemon=True).start()
        files = written(Path(source), Path(target), descriptors)
        remove_tree_if_there(Path(source))
    except Exception as error:
        _say(answer, reason=reason_of(error))
        _leave(Path(source), 1)
    _say(answer, files=files)
    os._exit(0)


def _order(source: Path) -> str | None:
    """What is asked for next: a directory to write to, or, None, that memory be opened. Leaves where whoever asks is gone."""
    line = sys.stdin.buffer.readline()
    if not line:
        _leave(source, 2)
    order: str | None = json.loads(line)
    return order


def written(source: Path, target: Path, descriptors: Mapping[str, int]) -> dict[str, Entry]:
    """Move the files of this node to the disk.

    Args:
        source, target: directories.
        descriptors: of the memory of its ranks, as of ``open_memory``; they are closed.

    Returns:
        Size and hash of each, as it was in memory, by its path below ``target``.

    Raises:
        OSError: one cannot be written.
        CheckpointError: there is none.
    """
    entries = move_files(source, target, descriptors)
    directories = {parent for name in entries for parent in (target / name).parents if parent == target or target in parent.parents}
    for directory in sorted(directories, reverse=True):
        fsync_directory(directory)
    return entries


def _say(answer: int, **said: Any) -> None:
    # nobody may be there to hear it, and then the memory has to go all the same
    with contextlib.suppress(OSError), open(answer, "w", closefd=False) as stream:
        stream.write(f"{json.dumps(said)}\n")


def _end_with_asker(source: Path) -> None:
    """End when whoever holds the other end of standard input is gone, or wants nothing more: nobody would give the checkpoint its name."""
    sys.stdin.buffer.read()
    _leave(source, 2)


def _leave(source: Path, code: int) -> None:
    """Remove what is in memory, also where ranks that have not heard of the end still write there, and end."""
    for _ in range(_REMOVALS):
        remove_tree_if_there(source)
        if not source.exists():
            break
        time.sleep(_REMOVAL_S)
    os._exit(code)
