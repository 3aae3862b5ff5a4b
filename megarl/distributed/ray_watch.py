"""Detection of a lost, stopped or silent control process (GCS) of Ray, or raylet of the driver's node.

Ray waits a minute for a lost GCS, and then aborts the driver. If the raylet is lost, Ray ends the driver at
its next message to the raylet, with exit code 1 and without an entry in the run's launches. If one of the two
is stopped, or its node swaps, calls of Ray wait indefinitely. In all these cases nothing can be started,
queried or ended in the cluster, so raising an error is no use: a thread reports the loss and ends the
process.
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
from collections.abc import Callable, Iterator
from subprocess import Popen
from typing import Any

import psutil
import ray

from megarl.distributed import ray_calls
from megarl.errors import DeadlineError, MegarlError, WorkerLostError
from megarl.observe.launches import end_open_launches

logger = logging.getLogger(__name__)

REFUSED_SECONDS = 10.0
"""Seconds after which a process whose port refuses connections counts as lost. A restarted process listens
again by then."""

SILENT_SECONDS = 40.0
"""Maximum seconds without a reply of a process whose port is open, because the network may be the cause. Ray
itself waits 60 s for the GCS."""

# Fraction of ``deadlines.least_s`` after which a silent process counts as lost. The rest is for the last
# check and for ending this process.
_SHARE_OF_LEAST = 0.7

CONTROL, RAYLET = "Ray's control process (GCS)", "Ray's process of this node (raylet)"
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""First bytes of an HTTP/2 client: the preface and an empty SETTINGS frame (RFC 9113, section 3.4). A gRPC
server replies with its own settings before it asks for credentials, so neither a token nor a message of Ray
is needed. A TCP connection alone proves nothing, because the kernel accepts it even for a stopped process."""
_LOOK_SECONDS = 2.0
_ANSWER_SECONDS = 5.0
_SILENT = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ECONNRESET, errno.ECONNABORTED)


def leave(message: str, kind: type[MegarlError] = WorkerLostError) -> None:
    """End this process at once, with the exit code of ``kind``, after recording the reason in its launches.

    A normal exit would need replies from Ray. Workers, and a local Ray, end with their driver.
    """
    end_open_launches(f"{kind.__name__}: {message}")
    # Write to the descriptor, because os._exit does not flush the buffer of sys.stderr.
    with contextlib.suppress(OSError):
        os.write(2, f"megarl: {message}\n".encode())
    # sys.exit would run Ray's exit handlers, which wait for the lost process.
    os._exit(kind.exit_code)


def leave_late(message: str) -> None:
    """Call ``leave`` because a call of Ray has not returned in time."""
    leave(message, DeadlineError)


def silent_seconds(least_s: float) -> float:
    """Return how many seconds a process may be silent before it counts as lost, if this process must have
    ended ``least_s`` seconds after the loss."""
    return min(SILENT_SECONDS, _SHARE_OF_LEAST * least_s)


class PortWatch:
    """Contacts one of Ray's processes every two seconds, in a thread, and reports if it does not reply.

    Args:
        name: name of the process, for messages.
        address: ``host:port`` of its gRPC server.
        silent_s: seconds without a reply after which it counts as lost; at most ``REFUSED_SECONDS`` if its
            port refuses connections.
        on_lost: called once, in another thread, with a message; None ends this process (``leave``).
    """

    def __init__(
        self,
        name: str,
        address: str,
        silent_s: float = SILENT_SECONDS,
        on_lost: Callable[[str], None] | None = None,
    ) -> None:
        self._name, self._address, self._silent_s, self._on_lost = name, address, silent_s, on_lost or leave
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"watch over {name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching. Call this before Ray is shut down."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        seen = time.monotonic()
        while not self._closed.wait(min(_LOOK_SECONDS, self._silent_s / 10)):
            fault = self._look()
            # Measure the time since the last reply was seen, rather than count failed checks: if this process
            # is held up, its checks are late too.
            gone = time.monotonic() - seen
            if fault == 0:
                seen = time.monotonic()
            elif gone > (
                min(REFUSED_SECONDS, self._silent_s) if fault == errno.ECONNREFUSED else self._silent_s
            ):
                self._on_lost(self._message(gone, fault))
                return

    def _look(self) -> int:
        return greet(self._address, min(_ANSWER_SECONDS, self._silent_s / 4))

    def _message(self, seconds: float, fault: int) -> str:
        if fault == errno.ECONNREFUSED:
            what = f"is gone: nobody has listened there for {seconds:.0f} s"
        else:
            what = f"has not answered for {seconds:.0f} s: it is stopped, its node swaps or cannot be reached"
        return _lost(f"{self._name} at {self._address} {what}")


def greet(address: str, timeout_s: float = _ANSWER_SECONDS) -> int:
    """Contact the gRPC server at ``host:port``. Return 0 if it replies, or for an error that says nothing
    about the server; otherwise the errno."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s) as connected:
            connected.sendall(GREETING)
            # A server that closes the connection, because it requires TLS, is alive too.
            connected.recv(1)
    except TimeoutError:
        return errno.ETIMEDOUT
    except OSError as error:
        if error.errno == errno.ECONNREFUSED or error.errno in _SILENT:
            return int(error.errno)
        logger.warning("it is unknown whether Ray still runs at %s: %s", address, error)
    return 0


class ProcessWatch:
    """Waits, in a thread, for one of Ray's processes on this host to end or to be stopped, and reports it.

    Args:
        name: name of the process, for messages.
        process_id: id of the process.
        silent_s: seconds after which it counts as lost if a signal has stopped it; None does not check this.
        on_lost: as in ``PortWatch``.
        is_lost: called when the process has ended; returns whether this counts as a loss. None means always.
    """

    def __init__(
        self,
        name: str,
        process_id: int,
        silent_s: float | None = SILENT_SECONDS,
        on_lost: Callable[[str], None] | None = None,
        is_lost: Callable[[], bool] | None = None,
    ) -> None:
        self._name, self._process_id, self._silent_s, self._on_lost = (
            name,
            process_id,
            silent_s,
            on_lost or leave,
        )
        self._is_lost = is_lost or (lambda: True)
        self._process = os.pidfd_open(process_id)
        # A pipe rather than an event, so that poll can wait for it and for the process at the same time.
        self._closed, self._close = os.pipe()
        self._thread = threading.Thread(
            target=self._watch, name=f"watch over process {process_id}", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop watching. Call this before Ray is shut down."""
        os.write(self._close, b".")
        self._thread.join()
        for descriptor in (self._process, self._closed, self._close):
            os.close(descriptor)

    def _watch(self) -> None:
        # Wait for the process instead of polling it: the loss must be reported before this process's next
        # message to the raylet, at which Ray would end this process.
        waiting = select.poll()
        waiting.register(self._process, select.POLLIN)
        waiting.register(self._closed, select.POLLIN)
        look_s = None if self._silent_s is None else min(_LOOK_SECONDS, self._silent_s / 10)
        ran = time.monotonic()
        while not (ready := waiting.poll(None if look_s is None else look_s * 1000)):
            if not self._is_stopped():
                ran = time.monotonic()
            elif self._silent_s is not None and (stopped_s := time.monotonic() - ran) > self._silent_s:
                self._on_lost(
                    _lost(
                        f"{self._name}, process {self._process_id}, has been stopped by a signal for "
                        f"{stopped_s:.0f} s"
                    )
                )
                return
        if self._closed not in dict(ready) and self._is_lost():
            self._on_lost(_lost(f"{self._name}, process {self._process_id}, is gone"))

    def _is_stopped(self) -> bool:
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self._process_id).status() in (
                psutil.STATUS_STOPPED,
                psutil.STATUS_TRACING_STOP,
            )
        return False


def _lost(what: str) -> str:
    return (
        f"{what}. Without it no worker can be reached. Fix: find out what stopped or ended it, for "
        "example the kernel when memory ran out (MEGARL_KEEP_RAY_FILES=1 keeps the logs of a "
        "local Ray); then start the run again: it continues from its last checkpoint"
    )


class StartWatch:
    """Watches the control process of a local Ray while the driver connects to it.

    If the control process is killed, Ray would wait a minute and then end the driver with exit code 1 and no
    message. A control process that exits by itself is not reported here, because Ray reports the reason.

    Args:
        silent_s, on_lost: as in ``ProcessWatch``.
    """

    def __init__(
        self, silent_s: float = SILENT_SECONDS, on_lost: Callable[[str], None] | None = None
    ) -> None:
        self._silent_s, self._on_lost = silent_s, on_lost
        self._watches: list[ProcessWatch] = []

    def __enter__(self) -> StartWatch:
        return self

    def see(self, process: Popen[Any]) -> None:
        """Watch a process that Ray has just started, if it is the control process."""
        command = process.args if isinstance(process.args, list) else [process.args]
        if os.path.basename(str(command[0])) == "gcs_server" and hasattr(os, "pidfd_open"):
            name = f"while Ray started: {CONTROL}"
            # Popen's return code is negative if a signal ended the process.
            self._watches.append(
                ProcessWatch(
                    name, process.pid, self._silent_s, self._on_lost, lambda: (process.poll() or 0) < 0
                )
            )

    def __exit__(self, *_: object) -> None:
        for watch in self._watches:
            watch.close()
        self._watches.clear()


@contextlib.contextmanager
def watched_join(address: str, silent_s: float) -> Iterator[None]:
    """Watch the control process of an existing Ray cluster while this process connects to it. If it does not
    reply at the beginning, it is not watched, because Ray reports that itself.

    Args:
        address: ``host:port``; other forms that Ray accepts are not watched.
        silent_s: as in ``PortWatch``.
    """
    is_seen = address.rpartition(":")[2].isdecimal() and "/" not in address and not greet(address)
    watch = PortWatch(f"while Ray was joined: {CONTROL}", address, silent_s) if is_seen else None
    try:
        yield
    finally:
        if watch is not None:
            watch.close()


def watch_ray(least_s: float) -> contextlib.ExitStack:
    """Watch the Ray cluster that this process has joined, and limit the duration of its Ray calls, until the
    returned stack is closed.

    Args:
        least_s: seconds within which this process ends, with exit code 4, after Ray's control process or the
            raylet of this node is lost.
    """
    stack = contextlib.ExitStack()
    silent_s = silent_seconds(least_s)
    # Set this limit first, because the Ray calls below may hang too.
    stack.enter_context(ray_calls.bounded(least_s, leave_late))
    stack.callback(PortWatch(CONTROL, ray.get_runtime_context().gcs_address, silent_s).close)
    for node in ray_calls.nodes():
        if node["NodeID"] == ray.get_runtime_context().get_node_id():
            address = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
            stack.callback(PortWatch(RAYLET, address, silent_s).close)
    raylet = own_raylet()
    if raylet is not None:
        # Only detects that the process has ended, but at once. The watch of its port detects that it is
        # stopped.
        stack.callback(ProcessWatch(RAYLET, raylet, None).close)
    return stack


def own_raylet() -> int | None:
    """Return the process id of this node's raylet; None if it cannot be determined."""
    node = getattr(importlib.import_module("ray._private.worker"), "_global_node", None)
    path = getattr(node, "raylet_socket_name", None)
    if not path or not hasattr(os, "pidfd_open") or not hasattr(socket, "SO_PEERCRED"):
        return None
    try:
        with socket.socket(socket.AF_UNIX) as connected:
            connected.settimeout(_ANSWER_SECONDS)
            connected.connect(path)
            # Ray does not publish the raylet's process id, so ask the kernel which process has the other end
            # of the socket.
            credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    except OSError as error:
        logger.warning("the process of the raylet was not found: %s", error)
        return None
    # struct ucred contains process, user and group ids. The process id is 0 if it is in a namespace that is
    # not visible here.
    return int(struct.unpack("3i", credentials)[0]) or None
