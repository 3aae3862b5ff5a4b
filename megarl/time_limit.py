"""A time limit on a block of code that may never return by itself."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class OutOfTimeError(BaseException):
    """Raised in a block that exceeds its time limit. It is not an ``Exception``, because libraries catch
    those and continue."""


_depth = 0


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTimeError inside a block that takes longer.

    An alarm signal raises it, between two steps of the interpreter. Only the main thread receives signals, so
    there is no limit in other threads.
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
    """Pause the clock of the surrounding ``time_limit``, if there is one, while the block runs."""
    left, _ = signal.setitimer(signal.ITIMER_REAL, 0) if is_limited() else (0.0, 0.0)
    try:
        yield
    finally:
        if left:
            signal.setitimer(signal.ITIMER_REAL, left)


def is_limited() -> bool:
    """Return whether the current code runs inside a ``time_limit``."""
    return _depth > 0
