"""The child process that runs the command of a library call; its output is passed on to the caller."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megarl import env
from megarl.errors import ConfigError, MegarlError, MissingNodesError, WorkerLostError

STOPPED, INTERRUPTED = 75, 130
_ERRORS: Mapping[int, type[MegarlError]] = {2: ConfigError, 3: MissingNodesError, 4: WorkerLostError}
_BEGINS_ERROR = re.compile(r"megarl: (?!warning:|SIG)|Traceback \(most recent call last\)")


def run_command(
    words: Sequence[str], given: Mapping[str, bytes], *, shows: bool, keeps_all: bool = False
) -> tuple[int, str]:
    """Run a megarl command in a child process and wait for it. Ctrl-C asks the command to stop; a second
    Ctrl-C ends it at once.

    Args:
        words: the command's arguments.
        given: pickled objects, by the names (``given:NAME``) under which its configuration refers to them.
        shows: print each output line as it arrives.
        keeps_all: return all output instead of the last 201 lines; JSON output may have thousands.

    Returns:
        The exit code and the output. If the command failed with an error message, only that message.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed; raised after the child process has ended.
    """
    child = subprocess.Popen(
        [sys.executable, "-m", "megarl.library"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # A terminal and Jupyter send Ctrl-C to the whole process group. In a session of its own the child
        # gets SIGINT only from here, and not twice.
        start_new_session=True,
        env=_environment(),
    )
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_read_lines, args=(child, lines), name="output of megarl", daemon=True).start()
    assert child.stdin is not None
    told = {
        "words": list(words),
        "given": {path: base64.b64encode(pickled).decode() for path, pickled in given.items()},
    }
    last: deque[str] = deque(maxlen=None if keeps_all else 201)
    error: list[str] = []
    interrupted = False
    try:
        child.stdin.write(json.dumps(told).encode() + b"\n")
        child.stdin.flush()
    # The child exited before reading its command; its output gives the reason.
    except BrokenPipeError:
        pass
    while True:
        try:
            line = lines.get()
            if line is None:
                break
            if error or _BEGINS_ERROR.match(line):
                error.append(line)
                continue
            last.append(line)
            if shows:
                show(line)
        except KeyboardInterrupt:
            interrupted = True
            child.send_signal(signal.SIGINT)
    code = child.wait()
    # Closing flushes the buffer, which fails if the child has not read all of it.
    with contextlib.suppress(BrokenPipeError):
        child.stdin.close()
    # The command succeeded, so lines that looked like an error message were ordinary output.
    if code == 0 and error:
        last += error
        if shows:
            show("\n".join(error))
    if interrupted or code == INTERRUPTED:
        raise KeyboardInterrupt
    return code, "\n".join(error if code and error else last)


def show(text: str) -> None:
    # Look up ``sys.stdout`` at each call, because a notebook replaces it by its own stream.
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def error_of(code: int, text: str) -> MegarlError:
    """Return the exception for a failed command.

    Args:
        code: exit code, which decides the class.
        text: error message that the command printed.
    """
    kind = _ERRORS.get(code, MegarlError)
    return kind(text.removeprefix("megarl: ") or f"the process ended with {code}")


def _read_lines(child: subprocess.Popen[bytes], lines: queue.SimpleQueue[str | None]) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        lines.put(line.decode(errors="replace").rstrip("\n"))
    lines.put(None)


def _environment() -> dict[str, str]:
    """Return the environment variables for the child process."""
    kept = dict(env.snapshot())
    # Remove these: Jupyter requests colours, which make rich treat the pipe as a terminal and redraw its
    # lines indefinitely.
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE"):
        kept.pop(name, None)
    # Disable buffering, so that the caller shows each line as soon as it is printed.
    return {**kept, "PYTHONPATH": os.pathsep.join(_import_places()), "PYTHONUNBUFFERED": "1"}


def _import_places() -> Iterator[str]:
    """Yield the ``sys.path`` entries outside of the Python installation. The child process needs them to
    import megarl and the caller's modules."""
    prefixes = tuple(str(Path(prefix).resolve()) + os.sep for prefix in {sys.prefix, sys.base_prefix})
    for place in sys.path:
        path = str(Path(place).resolve())
        if not path.startswith(prefixes):
            yield path
