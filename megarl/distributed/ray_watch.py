"""Notices that the control process of a Ray cluster, the GCS, is gone, before Ray itself gives up after a minute and aborts the driver; and
that the raylet of the driver's own node is, before Ray ends the driver with exit code 1 and no word in its launches.

Without it nothing can be started, asked or ended in the cluster, and every call may wait for it without end. So there is no error to raise:
whoever watches is told in a thread of its own, and leaves.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable

from megarl.errors import WorkerLostError
from megarl.observe.launches import end_open_launches

logger = logging.getLogger(__name__)

REFUSED_SECONDS = 10.0
"""After which a port that nobody listens on any more counts as a lost Ray; a control process that is started anew has come back by then."""

SILENT_SECONDS = 40.0
"""The same for a host that does not answer, which may be the network; Ray gives up after 60 s."""

_LOOK_SECONDS = 2.0
_CONNECT_SECONDS = 5.0
_SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ECONNRESET, errno.ECONNABORTED)


def leave(message: str) -> None:
    """End this process at once, with an exit code that says "start me again", and its launches with a reason: to end in order it would have
    to ask Ray. The workers, and a local Ray, end with their driver."""
    end_open_launches(f"{WorkerLostError.__name__}: {message}")
    with contextlib.suppress(OSError):
        os.write(2, f"megarl: {message}\n".encode())
    os._exit(WorkerLostError.exit_code)


class RayWatch:
    """Connects to the control process of a Ray cluster every other second, and says nothing to it.

    Args:
        address: ``host:port`` of it.
        on_lost: told once, in another thread, what to say about it; None ends this process (``leave``).
    """

    def __init__(self, address: str, on_lost: Callable[[str], None] | None = None) -> None:
        self._address, self._on_lost = address, on_lost or leave
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch over Ray", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Watch no longer: Ray will be ended. Where it is lost already, that is told now: to end it would take as long as to ask it."""
        self._closed.set()
        self._thread.join()
        if self._look() == errno.ECONNREFUSED:
            self._on_lost(self._message(0.0))

    def _watch(self) -> None:
        seen = time.monotonic()
        while not self._closed.wait(_LOOK_SECONDS):
            fault = self._look()
            if fault == 0:
                seen = time.monotonic()
            gone = time.monotonic() - seen
            if gone > (REFUSED_SECONDS if fault == errno.ECONNREFUSED else SILENT_SECONDS):
                self._on_lost(self._message(gone))
                return

    def _look(self) -> int:
        """0 where somebody listens, or this process cannot look; otherwise the error's number."""
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
        except TimeoutError:
            return errno.ETIMEDOUT
        except OSError as error:
            if error.errno == errno.ECONNREFUSED or error.errno in _SILENT:
                return int(error.errno)
            logger.warning("it cannot be seen whether Ray is still there: %s", error)
        return 0

    def _message(self, seconds: float) -> str:
        since = f" for {seconds:.0f} s" if seconds else ""
        return (
            f"Ray's control process (GCS) at {self._address} is gone: nobody has answered there{since}. Its workers are of no more use. "
            "Fix: see what ended it, for example the kernel when memory ran out (MEGARL_KEEP_RAY_FILES=1 keeps the logs of a local Ray); "
            "then start the run again: it goes on from its last checkpoint"
        )


class RayletWatch:
    """Waits for the end of the raylet that this process speaks to.

    Args:
        process_id: of the raylet, on this host.
        on_lost: told once, in another thread, what to say about it; None ends this process (``leave``).
    """

    def __init__(self, process_id: int, on_lost: Callable[[str], None] | None = None) -> None:
        self._process_id, self._on_lost = process_id, on_lost or leave
        self._raylet = os.pidfd_open(process_id)
        self._closed, self._close = os.pipe()
        self._thread = threading.Thread(target=self._watch, name="watch over the raylet", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Watch no longer: Ray will be ended."""
        os.write(self._close, b".")
        self._thread.join()
        for descriptor in (self._raylet, self._closed, self._close):
            os.close(descriptor)

    def _watch(self) -> None:
        # Ray ends this process at its next word to the raylet: no time to look now and then
        waiting = select.poll()
        waiting.register(self._raylet, select.POLLIN)
        waiting.register(self._closed, select.POLLIN)
        if all(descriptor != self._closed for descriptor, _ in waiting.poll()):
            self._on_lost(
                f"Ray's process of this node (raylet, process {self._process_id}) is gone, and with it every worker here. Fix: see what "
                "ended it, for example the kernel when memory ran out (MEGARL_KEEP_RAY_FILES=1 keeps the logs of a local Ray); then start "
                "the run again: it goes on from its last checkpoint"
            )


def own_raylet() -> int | None:
    """Process id of the raylet that this process speaks to; None where Ray or the system do not say it."""
    node = getattr(importlib.import_module("ray._private.worker"), "_global_node", None)
    path = getattr(node, "raylet_socket_name", None)
    if not path or not hasattr(os, "pidfd_open") or not hasattr(socket, "SO_PEERCRED"):
        return None
    try:
        with socket.socket(socket.AF_UNIX) as connected:
            connected.settimeout(_CONNECT_SECONDS)
            connected.connect(path)
            credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    except OSError as error:
        logger.warning("it cannot be seen which process the raylet is: %s", error)
        return None
    return int(struct.unpack("3i", credentials)[0]) or None
