"""The child process of a library call. It reads its command from standard input, and stops the command
cleanly when the calling process ends."""

from __future__ import annotations

import base64
import json
import os
import signal
import sys
import threading
from typing import IO

from megarl.cli import main as command
from megarl.cli import report
from megarl.errors import ConfigError
from megarl.import_path import unpickle_object


def main() -> int:
    """Run the command and return its exit code."""
    # End-of-file on this pipe means that the calling process has ended. Keep the pipe under another
    # descriptor and give the command an empty standard input, so that the command cannot consume it.
    told = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    call = json.loads(told.readline())
    # End-of-file arrives however the caller ends, even if a notebook kernel is killed. The command then gets
    # SIGTERM, on which a run saves a checkpoint and stops.
    threading.Thread(target=_stop_at_end, args=(told,), name="life of the caller", daemon=True).start()
    try:
        for path, pickled in call["given"].items():
            unpickle_object(path, base64.b64decode(pickled))
    except ConfigError as error:
        return report(error)
    return command(call["words"])


def _stop_at_end(told: IO[bytes]) -> None:
    told.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
