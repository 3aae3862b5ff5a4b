"""Calls of Ray, each of which has a bound in time: what starts, asks and ends things in a cluster goes
through these functions.

Ray's own calls have no bound where one of its processes is stopped or does not get to answer: ``ray.put``
waits for the raylet and ``ray.nodes`` for the control process, in C++, where no signal is seen. So a thread
beside looks at the calls that are under way, and whoever has asked for it (``bounded``) is told of one that
has not come back. Outside of ``bounded`` nothing is looked at.
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
    """The thread that looks, and by thread the call that is under way: when it is late, monotonic seconds;
    its bound; what it is."""

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
        # A tenth of a short bound, so that no call exceeds it by a whole look.
        while not self._closed.wait(min(_LOOK_SECONDS, self.least_s / 10)):
            # A copy: other threads begin and end calls meanwhile.
            for late, seconds, what in list(self.calls.values()):
                if time.monotonic() > late:
                    self._on_late(
                        f"{what}: Ray has not come back within {seconds:g} s. Fix: see whether its "
                        "processes (gcs_server, raylet) run, and "
                        "whether their node swaps; then start the run again: it goes on from its last "
                        "checkpoint"
                    )
                    return


_watch: _Watch | None = None


@contextlib.contextmanager
def bounded(least_s: float, on_late: Callable[[str], None]) -> Iterator[None]:
    """Inside, calls of Ray by this process have a bound.

    Args:
        least_s: seconds that a call has beside what it may take by its own nature.
        on_late: called once, in another thread, with a call that has not come back.
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
    """The block calls Ray; a block inside it has its bound.

    Args:
        what: for the message.
        may_take_s: seconds that the call may wait by its own arguments, or that its phase has; None gives it
            no bound.
    """
    watch = _watch
    if watch is None or may_take_s is None:
        yield
        return
    # The outer block names the call better, and has allowed for the time of all calls within.
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
    """``ray.put``."""
    with calling("ray.put"):
        return ray.put(value)


def get(reference: Any, timeout: float | None = None) -> Any:
    """``ray.get`` of what is there, or comes within ``timeout`` seconds."""
    with calling("ray.get", timeout or 0.0):
        return ray.get(reference, timeout=timeout)


def wait(references: Sequence[Any], num_returns: int, timeout: float | None) -> tuple[list[Any], list[Any]]:
    """``ray.wait``; without a timeout it has no bound."""
    with calling("ray.wait", timeout):
        return ray.wait(list(references), num_returns=num_returns, timeout=timeout)


def submit(remote: Any, *args: Any, **kwargs: Any) -> Any:
    """Start a task, an actor or a method of one: ``remote.remote(*args, **kwargs)``, which stores large
    arguments first."""
    with calling("the start of a task or an actor"):
        return remote.remote(*args, **kwargs)


def kill(actor: Any, no_restart: bool = True) -> None:
    """``ray.kill``."""
    with calling("ray.kill"):
        ray.kill(actor, no_restart=no_restart)


def nodes() -> list[dict[str, Any]]:
    """``ray.nodes``: one entry for each node that is there or was."""
    with calling("ray.nodes"):
        return ray.nodes()


def cluster_resources() -> dict[str, float]:
    """``ray.cluster_resources``: what all living nodes have, by kind."""
    with calling("ray.cluster_resources"):
        return ray.cluster_resources()


def available_resources() -> dict[str, float]:
    """``ray.available_resources``: what of it nobody holds."""
    with calling("ray.available_resources"):
        return ray.available_resources()
