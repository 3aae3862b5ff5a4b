"""The command of a call in a process of its own, and what the caller sees of it."""

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


def run_command(words: Sequence[str], given: Mapping[str, bytes], *, shows: bool) -> tuple[int, str]:
    """Run a command of megarl in a process of its own; Ctrl-C asks it to stop, a second one ends it at once.

    Args:
        words: of its command line.
        given: pickles of objects that its configuration names ``given:NAME``.
        shows: print what it prints, line by line.

    Returns:
        Its exit code, and the last of its lines; an error's text alone where it failed.

    Raises:
        KeyboardInterrupt: Ctrl-C, after the process has ended.
    """
    child = subprocess.Popen(
        [sys.executable, "-m", "megarl.library"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        # A terminal and Jupyter send Ctrl-C to the whole group, and so would the first one count twice.
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
    # Of output that was shown, only the end is used again. Of the rest nothing may be lost: an object of JSON
    # may have thousands of lines.
    last: deque[str] = deque(maxlen=201 if shows else None)
    error: list[str] = []
    interrupted = False
    try:
        child.stdin.write(json.dumps(told).encode() + b"\n")
        child.stdin.flush()
    # it ended at its start; what it printed says why
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
    # What it did not read any more is still in the buffer, and goes by this too.
    with contextlib.suppress(BrokenPipeError):
        child.stdin.close()
    # What looked like an error was none.
    if code == 0 and error:
        last += error
        if shows:
            show("\n".join(error))
    if interrupted or code == INTERRUPTED:
        raise KeyboardInterrupt
    return code, "\n".join(error if code and error else last)


def show(text: str) -> None:
    # a notebook has put a stream of its own there
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def error_of(code: int, text: str) -> MegarlError:
    """Return the error that a failed command stands for."""
    kind = _ERRORS.get(code, MegarlError)
    return kind(text.removeprefix("megarl: ") or f"the process ended with {code}")


def _read_lines(child: subprocess.Popen[bytes], lines: queue.SimpleQueue[str | None]) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        lines.put(line.decode(errors="replace").rstrip("\n"))
    lines.put(None)


def _environment() -> dict[str, str]:
    """Return the variables of the process of a command."""
    # Jupyter asks for colours, by which rich takes a pipe for a terminal and redraws its lines indefinitely
    kept = {
        name: value
        for name, value in env.snapshot().items()
        if name not in ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE")
    }
    # Unbuffered: the caller shows each line as it is printed.
    return {**kept, "PYTHONPATH": os.pathsep.join(_import_places()), "PYTHONUNBUFFERED": "1"}


def _import_places() -> Iterator[str]:
    """Yield where this process imports from and another Python would not, so that it finds megarl and the
    modules of the caller."""
    prefixes = tuple(str(Path(prefix).resolve()) + os.sep for prefix in {sys.prefix, sys.base_prefix})
    for place in sys.path:
        path = str(Path(place).resolve())
        if not path.startswith(prefixes):
            yield path
