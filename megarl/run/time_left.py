"""The time limit of a launch: decide whether another step and its checkpoint fit before it."""

from __future__ import annotations

import datetime
import logging
import re
import time
from collections import deque
from collections.abc import Callable

from megarl import env

logger = logging.getLogger(__name__)

_WINDOW = 10
# Safety factor on the slowest of the last ten steps and saves, because the next ones may be slower.
_SAFETY = 1.2

ENDING_SECONDS = 10.0
"""Seconds that a launch needs to end after its last checkpoint."""

_DURATION = re.compile(r"\+(\d+):([0-5]\d)(?::([0-5]\d))?")


class TimeLeft:
    """The remaining time of a launch.

    Args:
        end: end of the launch, in unix seconds.
        name: source of the limit, for messages (such as ``--stop-at``).
        clock: returns unix seconds.
    """

    def __init__(self, end: float, name: str, clock: Callable[[], float] = time.time) -> None:
        self._end, self._name, self._clock = end, name, clock
        self._steps: deque[float] = deque(maxlen=_WINDOW)
        self._saves: deque[float] = deque(maxlen=_WINDOW)

    def took(self, step_s: float | None = None, save_s: float | None = None) -> None:
        """Record the duration of a step (with its validation) or of a save, in seconds."""
        for measured, seconds in ((self._steps, step_s), (self._saves, save_s)):
            if seconds is not None:
                measured.append(seconds)

    @property
    def needed_s(self) -> float:
        """Estimated seconds for another step, its checkpoint and the end of the launch. Until a save was
        measured, it is assumed to take as long as a step."""
        step = max(self._steps, default=0.0)
        return _SAFETY * (step + max(self._saves, default=step)) + ENDING_SECONDS

    @property
    def reason(self) -> str | None:
        """Reason why no further step may begin; None while another step fits."""
        # Job limits are times of day, so use the wall clock.
        left = self._end - self._clock()
        if left >= self.needed_s:
            return None
        when = datetime.datetime.fromtimestamp(self._end).astimezone().isoformat(sep=" ", timespec="seconds")
        return (
            f"{self._name} {when} is {max(left, 0.0):.0f} s away, another step and its checkpoint may "
            f"take {self.needed_s:.0f} s"
        )


def read_time(text: str, now: float | None = None) -> float:
    """Parse a user's time to unix seconds.

    Args:
        text: ``2026-11-26T18:30`` (local time, unless it has a zone), or ``+HH:MM[:SS]`` from now.
        now: current unix seconds; None reads the clock.

    Raises:
        ValueError: the text has neither form, or is in the past.
    """
    now = time.time() if now is None else now
    duration = _DURATION.fullmatch(text.strip())
    if duration is not None:
        hours, minutes, seconds = (int(part or 0) for part in duration.groups())
        return now + 3600 * hours + 60 * minutes + seconds
    try:
        end = datetime.datetime.fromisoformat(text.strip()).timestamp()
    # ``timestamp`` calls mktime, which raises the latter two for dates far away.
    except (ValueError, OverflowError, OSError):
        raise ValueError(
            f"{text!r} is not a time. Fix: write 2026-11-26T18:30, or +3:45 for three hours and "
            "three quarters from now"
        ) from None
    if end <= now:
        raise ValueError(f"{text!r} is in the past. Fix: give a future time")
    return end


def time_left(stop_at: float | None) -> TimeLeft | None:
    """Return the earlier of ``stop_at`` (unix seconds) and the end of the Slurm job; None without either.

    Raises:
        ValueError: ``SLURM_JOB_END_TIME`` is not an integer.
    """
    limits = [] if stop_at is None else [(stop_at, "--stop-at")]
    # Slurm 22.05 and older versions do not set it.
    job_end = env.integer("SLURM_JOB_END_TIME", 0)
    if 0 < job_end <= time.time():
        logger.warning(
            "SLURM_JOB_END_TIME = %d is in the past, although this program runs: it is ignored", job_end
        )
    elif job_end:
        limits.append((float(job_end), "SLURM_JOB_END_TIME"))
    return TimeLeft(*min(limits)) if limits else None
