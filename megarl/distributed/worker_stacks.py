"""Python stacks of processes that hang, taken from outside: what the operator needs when a call passed its deadline.

A process that registers opens an unnamed file and lets ``faulthandler`` write all its threads' stacks there on SIGUSR2, which works also
while it waits in C++ code or for the interpreter's lock. Another process of the same user finds the file in ``/proc``, sends the signal and
reads it; nothing is left on disk.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import signal
import time
from pathlib import Path

_READ_WAIT_S = 2.0
_LONGEST_STACK = 6000
_FILE_NAME = "megarl-stacks"


@functools.cache
def register_stacks() -> None:
    """Prepare this process; without ``/proc`` or unnamed files its stacks are simply not reported."""
    if hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir():
        # a bare descriptor, open as long as the process lives: a file object would buffer what the signal handler writes
        faulthandler.register(signal.SIGUSR2, file=os.memfd_create(_FILE_NAME), all_threads=True)


def read_stack(process_id: int) -> str:
    """Signal one process of this host and return what it wrote, at most 6000 characters; ``""`` when it is gone or was not prepared."""
    with contextlib.suppress(OSError):
        path = _stack_file(process_id)
        # without its file it would take the signal for its end
        if path is None:
            return ""
        before = os.stat(path).st_size
        os.kill(process_id, signal.SIGUSR2)
        deadline, size = time.monotonic() + _READ_WAIT_S, before
        while time.monotonic() < deadline:
            time.sleep(0.02)
            now = os.stat(path).st_size
            if now == size and now > before:
                break
            size = now
        with open(path, "rb") as file:
            file.seek(before)
            return file.read().decode(errors="replace")[-_LONGEST_STACK:]
    return ""


def _stack_file(process_id: int) -> Path | None:
    for path in Path(f"/proc/{process_id}/fd").iterdir():
        # others come and go meanwhile
        with contextlib.suppress(OSError):
            if os.readlink(path).startswith(f"/memfd:{_FILE_NAME} "):
                return path
    return None
