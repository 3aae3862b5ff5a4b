"""The separate process that runs the command of a call, and what the caller sees of it."""

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
    """Run a command of megarl in a separate process. Ctrl-C asks it to stop; a second Ctrl-C ends it at once.

    Args:
        words: words of its command line.
        given: pickles of objects that its configuration names ``given:NAME``.
        shows: print what it prints, line by line.
        keeps_all: return all of its lines: an object of JSON may have thousands.

    Returns:
        Its exit code and its last 201 lines; if it failed with an error message, only that message.

    Raises:
        KeyboardInterrupt: Ctrl-C, after the process has ended.
    """
    child = subprocess.Popen(
        [sys.executable, "-m", "megarl.library"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # Use a new session: a terminal and Jupyter send Ctrl-C to the whole process group, so that the
        # process would receive the first one twice.
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
    # The process ended when it started, and its output gives the reason.
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
    # Closing the pipe flushes the buffer, which fails if the process did not read all of it.
    with contextlib.suppress(BrokenPipeError):
        child.stdin.close()
    # The command succeeded, so that the lines that looked like an error are ordinary output.
    if code == 0 and error:
        last += error
        if shows:
            show("\n".join(error))
    if interrupted or code == INTERRUPTED:
        raise KeyboardInterrupt
    return code, "\n".join(error if code and error else last)


def show(text: str) -> None:
    # Use sys.stdout, which a notebook has replaced by its own stream.
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def error_of(code: int, text: str) -> MegarlError:
    """Return the error that corresponds to a failed command."""
    kind = _ERRORS.get(code, MegarlError)
    return kind(text.removeprefix("megarl: ") or f"the process ended with {code}")


def _read_lines(child: subprocess.Popen[bytes], lines: queue.SimpleQueue[str | None]) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        lines.put(line.decode(errors="replace").rstrip("\n"))
    lines.put(None)


def _environment() -> dict[str, str]:
    """Return the environment variables of a command's process."""
    kept = dict(env.snapshot())
    # Remove these: Jupyter requests colours, which make rich treat the pipe as a terminal and redraw its
    # lines indefinitely.
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE"):
        kept.pop(name, None)
    # Disable buffering, so that the caller shows each line as soon as it is printed.
    return {**kept, "PYTHONPATH": os.pathsep.join(_import_places()), "PYTHONUNBUFFERED": "1"}


def _import_places() -> Iterator[str]:
    """Yield the import paths of this process that another Python would not have, so that the other process
    finds megarl and the caller's modules."""
    prefixes = tuple(str(Path(prefix).resolve()) + os.sep for prefix in {sys.prefix, sys.base_prefix})
    for place in sys.path:
        path = str(Path(place).resolve())
        if not path.startswith(prefixes):
            yield path
