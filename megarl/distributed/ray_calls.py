"""Ray calls with a time limit. All of megarl's starts, queries and shutdowns in a cluster go through these
functions.

Ray's own calls wait indefinitely if one of its processes is stopped or too busy to reply: ``ray.put`` waits
for the raylet and ``ray.nodes`` for the control process, in C++ code that handles no signals. So a thread
watches the calls in progress, and notifies the caller of ``bounded`` if one has not returned. Outside
``bounded``, calls are not watched.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypedDict

import ray

_LOOK_SECONDS = 1.0


class _Watch:
    """The watching thread, and the Ray call that is in progress in each other thread: its deadline (monotonic
    seconds), its time limit and its name."""

    def __init__(self, least_s: float, on_late: Callable[[str], None]) -> None:
        self.least_s, self._on_late = least_s, on_late
        self.calls: dict[int, tuple[float, float, str]] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="bounds of Ray's calls", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _look(self) -> None:
        # Check often enough that a call exceeds a short limit by at most about a tenth.
        while not self._closed.wait(min(_LOOK_SECONDS, self.least_s / 10)):
            # Iterate over a copy, because other threads add and remove calls meanwhile.
            for late, seconds, what in list(self.calls.values()):
                if time.monotonic() > late:
                    self._on_late(
                        f"{what}: Ray did not return within {seconds:g} s. Fix: check whether its "
                        "processes (gcs_server, raylet) run, and whether their node swaps; then "
                        "start the run again: it continues from its last checkpoint"
                    )
                    return


_watch: _Watch | None = None


@contextlib.contextmanager
def bounded(least_s: float, on_late: Callable[[str], None]) -> Iterator[None]:
    """Limit the duration of this process's Ray calls inside the block.

    Args:
        least_s: seconds that a call may take in addition to its own timeout.
        on_late: called once, in another thread, with a message about a call that has not returned.
    """
    global _watch
    before, _watch = _watch, _Watch(least_s, on_late)
    try:
        yield
    finally:
        _watch.close()
        _watch = before


@contextlib.contextmanager
def calling(what: str, may_take_s: float | None = 0.0) -> Iterator[None]:
    """Mark the block as a Ray call. A nested block is covered by the time limit of the outer one.

    Args:
        what: name of the call, for the message.
        may_take_s: timeout of the call itself, or of its phase, in seconds; None for no limit.
    """
    watch = _watch
    if watch is None or may_take_s is None:
        yield
        return
    # The outer block has a better name for the call, and its limit covers the calls inside it.
    if threading.get_ident() in watch.calls:
        yield
        return
    seconds = may_take_s + watch.least_s
    watch.calls[threading.get_ident()] = time.monotonic() + seconds, seconds, what
    try:
        yield
    finally:
        del watch.calls[threading.get_ident()]


def put(value: Any) -> ray.ObjectRef[Any]:
    """Call ``ray.put``."""
    with calling("ray.put"):
        return ray.put(value)


def get(reference: Any, timeout: float | None = None) -> Any:
    """Call ``ray.get`` for a result that exists already, or arrives within ``timeout`` seconds."""
    with calling("ray.get", timeout or 0.0):
        return ray.get(reference, timeout=timeout)


def wait(references: Sequence[Any], num_returns: int, timeout: float | None) -> tuple[list[Any], list[Any]]:
    """Call ``ray.wait``. Without a timeout, its duration is not limited."""
    with calling("ray.wait", timeout):
        return ray.wait(list(references), num_returns=num_returns, timeout=timeout)


def submit(remote: Any, *args: Any, **kwargs: Any) -> Any:
    """Start a task, an actor or an actor's method: ``remote.remote(*args, **kwargs)``. This can block,
    because Ray stores large arguments first."""
    with calling("the start of a task or an actor"):
        return remote.remote(*args, **kwargs)


def kill(actor: Any, no_restart: bool = True) -> None:
    """Call ``ray.kill``."""
    with calling("ray.kill"):
        ray.kill(actor, no_restart=no_restart)


class NodeRecord(TypedDict):
    """The fields of ``ray.nodes`` that megarl reads."""

    NodeID: str
    NodeName: str
    NodeManagerAddress: str
    NodeManagerPort: int
    Alive: bool
    Resources: dict[str, float]


def nodes() -> list[NodeRecord]:
    """Call ``ray.nodes``, which returns one entry for each node, alive or dead."""
    with calling("ray.nodes"):
        return ray.nodes()


def cluster_resources() -> dict[str, float]:
    """Call ``ray.cluster_resources``, which returns the total resources of all nodes that are alive."""
    with calling("ray.cluster_resources"):
        return ray.cluster_resources()


def available_resources() -> dict[str, float]:
    """Call ``ray.available_resources``, which returns the resources that are not reserved."""
    with calling("ray.available_resources"):
        return ray.available_resources()
