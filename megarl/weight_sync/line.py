"""Message connection between two processes that also reveals when the other process is gone."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import Iterable
from typing import Any

# Messages of a few hundred bytes fit into the kernel's buffers, so a receiver that blocks a send for this
# long has stopped.
_SAY_SECONDS = 5.0
# Limit the message size, so that a program outside the run cannot fill this process's memory.
_LONGEST_BYTES = 2**24
# Detect a host that vanished silently after about half a minute. The probes also keep firewalls from dropping
# the idle connection.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 15, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}


def can_be_read(descriptors: Iterable[int], seconds: float) -> bool:
    """Return whether any of the file descriptors becomes readable or reaches end of file within
    ``seconds``."""
    # Not select(), which accepts no descriptor above 1,023.
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * max(seconds, 0.0)))


class Line:
    """A socket connection whose messages are lines of JSON. It ends when the process on the other side ends,
    in whatever way."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._heard = connection, b""
        self._ended = False
        # A Unix socket ends with its process; only a network connection needs keep-alive probes.
        if connection.family == socket.AF_UNIX:
            return
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    @property
    def descriptor(self) -> int:
        """File descriptor of the connection, for polling."""
        return self._socket.fileno()

    def say(self, message: Any) -> None:
        """Send a message.

        Raises:
            OSError: the connection has ended.
        """
        self._socket.settimeout(_SAY_SECONDS)
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def hear(self, seconds: float) -> Any:
        """Wait up to ``seconds`` for a message and return it.

        Raises:
            OSError: no message arrived in time, or the connection has ended.
            ValueError: the message is not JSON.
        """
        ends = time.monotonic() + seconds
        while b"\n" not in self._heard:
            # Never 0, which makes the socket non-blocking and turns a timeout into BlockingIOError.
            self._socket.settimeout(max(0.01, ends - time.monotonic()))
            more = self._socket.recv(2**16)
            if not more or len(self._heard) > _LONGEST_BYTES:
                raise ConnectionError("the connection ended")
            self._heard += more
        message, _, self._heard = self._heard.partition(b"\n")
        return json.loads(message)

    def pending(self) -> list[Any]:
        """Return the messages that have arrived, without waiting.

        Raises:
            ConnectionError: there are no messages, and the connection has ended.
            ValueError: a message is not JSON.
        """
        self._socket.settimeout(0)
        try:
            while more := self._socket.recv(2**16):
                self._heard += more
            self._ended = True
        except BlockingIOError:
            pass
        except OSError:
            self._ended = True
        # Bytes after the last line feed are the start of an incomplete message.
        *messages, self._heard = self._heard.split(b"\n")
        # Deliver messages that were sent before the end, because a rank may report a failure and leave.
        if self._ended and not messages:
            raise ConnectionError("the connection ended")
        return list(map(json.loads, messages))

    def is_gone(self) -> bool:
        """Return whether the process on the other side has ended or closed the connection."""
        self._socket.settimeout(0)
        try:
            # Peek, so that a waiting message stays in the socket.
            return not self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        """Close the connection; the other side is notified."""
        # Shut down first: close() alone sends nothing while a forked process still has the socket.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
