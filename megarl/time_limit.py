"""A time limit on a block of code that may never come back by itself."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class OutOfTimeError(BaseException):
    """Raised in a block whose time is over. No ``Exception``: libraries catch those and go on."""


_depth = 0


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises OutOfTimeError inside a block that takes longer.

    An alarm does it, between two steps of the interpreter; outside the main thread, which alone gets signals,
    there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(signum: int, frame: object) -> None:
        raise OutOfTimeError

    global _depth
    before = signal.signal(signal.SIGALRM, ring)
    _depth += 1
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        _depth -= 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def unlimited() -> Iterator[None]:
    """Stop the clock of the ``time_limit`` that the code stands under, if it does, while the block runs."""
    left, _ = signal.setitimer(signal.ITIMER_REAL, 0) if is_limited() else (0.0, 0.0)
    try:
        yield
    finally:
        if left:
            signal.setitimer(signal.ITIMER_REAL, left)


def is_limited() -> bool:
    """Return whether the code that runs now stands under a ``time_limit``."""
    return _depth > 0
