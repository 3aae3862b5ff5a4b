"""Calls of an environment in threads, a few at a time, of which one that hangs is given up."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megarl.errors import RewardError


@dataclass(frozen=True, slots=True)
class Call:
    """A call that waits or runs.

    Attributes:
        number: of the caller's.
        call: what is called.
        owner: whose call it is; each owner has ``most`` of them running.
        most: of this owner.
        timeout_s: seconds that it may take.
    """

    number: int
    call: Callable[[], Any]
    owner: object
    most: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Ended:
    """How a call ended: with a result or an error, or with neither, because it took too long."""

    number: int
    result: Any = None
    error: BaseException | None = None

    @property
    def is_late(self) -> bool:
        """Whether it was given up."""
        return self.result is None and self.error is None


class TurnThreads:
    """Runs calls in threads of their own, which end with the process where a call never comes back."""

    def __init__(self) -> None:
        self._waiting: deque[Call] = deque()
        self._running: dict[int, tuple[Call, float]] = {}
        self._ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()
        self._hanging: Counter[int] = Counter()

    @property
    def busy(self) -> int:
        """Calls that have not ended."""
        return len(self._waiting) + len(self._running)

    def start(self, call: Call) -> None:
        """Run a call as soon as its owner has a thread for it."""
        self._waiting.append(call)
        self._fill()

    def take(self, *, wait: bool, all_of_them: bool = False) -> list[Ended]:
        """Calls that have ended.

        Args:
            wait: for one at least, where there are any.
            all_of_them: wait for all.

        Raises:
            RewardError: more calls of an owner hang than it has threads.
        """
        found: list[Ended] = []
        while self.busy:
            ended = self._next(0.0 if not wait or (found and not all_of_them) else None)
            if ended is None:
                break
            found.append(ended)
        return found

    def _next(self, timeout_s: float | None) -> Ended | None:
        """The next call that ends; one that takes too long ends here."""
        while True:
            number, (call, until) = min(self._running.items(), key=lambda item: item[1][1])
            left = max(until - time.monotonic(), 0.0)
            try:
                ended = self._ended.get(timeout=left if timeout_s is None else min(left, timeout_s))
            except queue.Empty:
                if time.monotonic() < until:
                    if timeout_s is not None:
                        return None
                    continue
                self._give_up(call)
                ended = Ended(number)
            if self._running.pop(ended.number, None) is not None:
                self._fill()
                return ended

    def _give_up(self, call: Call) -> None:
        self._hanging[id(call.owner)] += 1
        if self._hanging[id(call.owner)] > call.most:
            raise RewardError(
                f"{self._hanging[id(call.owner)]} calls of the environment {type(call.owner).__name__} did not come back within "
                f"{call.timeout_s:g} s. Nothing was trained on this batch. Fix: mend the environment, or raise env.step_timeout_s"
            )

    def _fill(self) -> None:
        running = Counter(id(call.owner) for call, _ in self._running.values())
        left: deque[Call] = deque()
        for call in self._waiting:
            if running[id(call.owner)] >= call.most:
                left.append(call)
                continue
            running[id(call.owner)] += 1
            self._running[call.number] = call, time.monotonic() + call.timeout_s
            threading.Thread(target=self._run, args=(call,), name="environment", daemon=True).start()
        self._waiting = left

    def _run(self, call: Call) -> None:
        try:
            self._ended.put(Ended(call.number, call.call()))
        except BaseException as error:
            self._ended.put(Ended(call.number, error=error))
