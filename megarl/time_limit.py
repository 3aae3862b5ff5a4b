"""Time limit for a block of code that may not return by itself."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class OutOfTimeError(BaseException):
    """A block exceeded its ``time_limit``. This is not an ``Exception``, because libraries catch those and
    continue."""


_depth = 0


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise ``OutOfTimeError`` inside the ``with`` block if it takes longer than ``seconds``.

    An alarm signal interrupts the block between two bytecode instructions. Only the main thread receives
    signals, so in other threads there is no limit.
    """
    # Python delivers signals to the main thread only, and refuses to set a handler in another one.
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
    """Pause the surrounding ``time_limit``, if any, while the ``with`` block runs."""
    # setitimer returns the time that was left on the clock.
    left, _ = signal.setitimer(signal.ITIMER_REAL, 0) if is_limited() else (0.0, 0.0)
    try:
        yield
    finally:
        if left:
            signal.setitimer(signal.ITIMER_REAL, left)


def is_limited() -> bool:
    """Return whether the caller runs inside a ``time_limit``."""
    return _depth > 0
