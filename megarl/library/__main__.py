"""The process of a call: it reads its command from standard input, and stops cleanly when the caller
is gone."""

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
    # The end of this pipe shows that the caller is gone. The command itself gets an empty standard input.
    told = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    call = json.loads(told.readline())
    # Watch for the end of the caller's process, however it ends: even after a killed notebook the run then
    # saves a checkpoint and stops.
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
