"""Calls of Ray with a time limit: every start, query and end in a cluster goes through these functions.

Ray's own calls wait without limit if one of its processes is stopped or does not get to reply: ``ray.put``
waits for the raylet and ``ray.nodes`` for the control process, in C++, where no signal is handled. So a
thread
watches the calls in progress, and the caller of ``bounded`` is notified of a call that has not returned.
Outside of ``bounded`` no call is watched.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray

_LOOK_SECONDS = 1.0


class _Watch:
    """The watching thread, and each thread's call in progress: when it is late (monotonic seconds), its time
    limit, and its name."""

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
        # Check at a tenth of a short limit, so that no call exceeds the limit by much more than that.
        while not self._closed.wait(min(_LOOK_SECONDS, self.least_s / 10)):
            # Iterate over a copy, because other threads begin and end calls meanwhile.
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
    """Limit the time of this process's calls of Ray inside the block.

    Args:
        least_s: seconds that a call gets in addition to what it may take by its own arguments.
        on_late: called once, in another thread, with the name of a call that has not returned.
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
    """Mark the block as a call of Ray; a block inside it has the outer block's limit.

    Args:
        what: for the message.
        may_take_s: seconds that the call may wait by its own arguments, or that its phase has; None for no
            limit.
    """
    watch = _watch
    if watch is None or may_take_s is None:
        yield
        return
    # The outer block has a better name for the call, and its limit includes the time of all calls inside it.
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
    """Call ``ray.get`` for a result that exists, or arrives within ``timeout`` seconds."""
    with calling("ray.get", timeout or 0.0):
        return ray.get(reference, timeout=timeout)


def wait(references: Sequence[Any], num_returns: int, timeout: float | None) -> tuple[list[Any], list[Any]]:
    """Call ``ray.wait``; without a timeout it has no limit."""
    with calling("ray.wait", timeout):
        return ray.wait(list(references), num_returns=num_returns, timeout=timeout)


def submit(remote: Any, *args: Any, **kwargs: Any) -> Any:
    """Start a task, an actor or an actor's method: ``remote.remote(*args, **kwargs)``, which first stores
    large arguments."""
    with calling("the start of a task or an actor"):
        return remote.remote(*args, **kwargs)


def kill(actor: Any, no_restart: bool = True) -> None:
    """Call ``ray.kill``."""
    with calling("ray.kill"):
        ray.kill(actor, no_restart=no_restart)


def nodes() -> list[dict[str, Any]]:
    """Call ``ray.nodes``: one entry for each node that exists or has existed."""
    with calling("ray.nodes"):
        return ray.nodes()


def cluster_resources() -> dict[str, float]:
    """Call ``ray.cluster_resources``: the resources of all living nodes, by kind."""
    with calling("ray.cluster_resources"):
        return ray.cluster_resources()


def available_resources() -> dict[str, float]:
    """Call ``ray.available_resources``: the part of them that is not reserved."""
    with calling("ray.available_resources"):
        return ray.available_resources()
