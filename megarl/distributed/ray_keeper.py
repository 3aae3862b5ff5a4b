"""Cleanup after a local Ray, even if its driver is killed: a small process next to the driver, which runs
this file as a program.

Ray's processes run in their own sessions, so a signal to the driver's process group, or a closing terminal,
does not reach them. The keeper gets the ids of these sessions. When the driver is gone or closes the pipe,
the keeper gives them a moment to exit, kills the rest, and removes Ray's directory. Ray's own agents check
only after a minute whether their node is still alive. The keeper needs Linux, and only Python's standard
library.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

GRACE_SECONDS = 3.0
"""Seconds between the end of the driver and the kill of the remaining processes."""

_LOOK_SECONDS = 0.02
# Seconds for which killing is repeated before the directory is removed.
_KILL_SECONDS = 10.0
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
SESSION, DIRECTORY, DONE = "session", "directory", "done"
"""First words of the lines that the driver sends to the keeper. A session id, a path or nothing follows."""


@dataclass
class Kept:
    """The data that the driver has sent.

    Attributes:
        sessions: ids of the sessions of Ray's processes.
        directory: directory to remove at the end; empty for none.
        is_done: Ray was shut down normally.
    """

    sessions: set[int] = field(default_factory=set)
    directory: str = ""
    is_done: bool = False

    def take(self, line: str) -> None:
        """Apply one line from the driver."""
        word, _, rest = line.partition(" ")
        if word == SESSION:
            self.sessions.add(int(rest))
        elif word == DIRECTORY:
            self.directory = rest
        elif word == DONE:
            self.is_done = True


def members(sessions: Collection[int]) -> Iterator[int]:
    """Yield the ids of all running processes in the given sessions. Zombies are omitted."""
    for name in os.listdir("/proc"):
        if name.isdecimal():
            # Ignore errors, because processes may end meanwhile.
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{name}/stat", "rb") as file:
                    # Split after the last parenthesis: the program name is in parentheses and may contain any
                    # character.
                    state, _, _, session = file.read().rpartition(b")")[2].split()[:4]
                if state not in (b"Z", b"X") and int(session) in sessions:
                    yield int(name)


def end(kept: Kept, grace_s: float = GRACE_SECONDS) -> None:
    """Wait until no process runs in the sessions, kill those that remain after ``grace_s`` seconds, and
    remove the directory."""
    begun = time.monotonic()
    # List the processes again each time, because a process may have started another one just before it was
    # killed.
    while (left := list(members(kept.sessions))) and time.monotonic() < begun + grace_s + _KILL_SECONDS:
        if time.monotonic() > begun + grace_s:
            for process in left:
                with contextlib.suppress(OSError):
                    os.kill(process, signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)
    if kept.directory:
        shutil.rmtree(kept.directory, ignore_errors=True)


def listen(driver: int) -> Kept:
    """Read the driver's lines until the driver is gone, closes the pipe, or sends ``done``."""
    kept, said = Kept(), b""
    poll = select.poll()
    poll.register(sys.stdin.fileno(), select.POLLIN)
    # Watch the driver too, because a process that it forked may keep the pipe open after the driver has
    # ended. pidfd_open needs Linux 5.3; without it, only the end of the pipe is detected.
    with contextlib.suppress(OSError, AttributeError):
        poll.register(os.pidfd_open(driver), select.POLLIN)
    while True:
        ready = dict(poll.poll())
        data = os.read(sys.stdin.fileno(), 1 << 16) if sys.stdin.fileno() in ready else b""
        said += data
        *lines, said = said.split(b"\n")
        for line in lines:
            kept.take(os.fsdecode(line))
        # Without data, either the pipe has been closed, or the driver has ended while a child of it keeps the
        # pipe open.
        if kept.is_done or not data:
            return kept


if __name__ == "__main__":
    # The keeper must outlive the driver, even if one of these signals ends the driver and reaches the keeper
    # too.
    for each in _IGNORED:
        signal.signal(each, signal.SIG_IGN)
    end(listen(int(sys.argv[1])))
