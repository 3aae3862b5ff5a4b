"""Threads for environment calls. A call that hangs is abandoned, and its thread replaced."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from megarl.errors import RewardError

# Poll interval in seconds for queued and overdue calls.
_LOOK_SECONDS = 0.01

# Initial number of threads per owner. For two turns of 256 fast conversations on two cores this took 0.18 s;
# one thread per conversation took 0.41 s.
_FEW = 8


class Call(NamedTuple):
    """A call that is queued or running.

    Attributes:
        number: id that the caller has chosen.
        call: the function to call.
        owner: environment that is called; it runs at most ``most`` calls concurrently.
        most: maximum number of threads of this owner.
        timeout_s: time limit in seconds.
    """

    number: int
    call: Callable[[], Any]
    owner: object
    most: int
    timeout_s: float


class Ended(NamedTuple):
    """Outcome of a call: a result, an error, or neither if it timed out."""

    number: int
    result: Any = None
    error: BaseException | None = None
    call: Call | None = None

    @property
    def is_late(self) -> bool:
        """True if the call timed out."""
        return self.result is None and self.error is None


class _Owner:
    """The worker threads of one environment, and its queue of calls to run. Threads are started on demand.

    Args:
        name: name of the environment, for messages.
        most: maximum number of threads.
    """

    def __init__(self, name: str, most: int) -> None:
        self.name, self.most = name, most
        self.waiting: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self.threads = self.open = self.hanging = 0


class TurnThreads:
    """Daemon threads that run environment calls until ``close``. A thread whose call never returns ends with
    the process."""

    def __init__(self) -> None:
        self._owners: dict[int, _Owner] = {}
        self._calls: dict[int, Call] = {}
        self._begun: dict[int, float] = {}
        self._given_up: list[Call] = []
        self._grown = 0.0
        self._ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()

    @property
    def busy(self) -> int:
        """Number of calls that have not ended."""
        return len(self._calls)

    def start(self, call: Call) -> None:
        """Queue a call, which runs as soon as its owner has a free thread."""
        owner = self._owners.get(id(call.owner))
        if owner is None:
            owner = self._owners[id(call.owner)] = _Owner(type(call.owner).__name__, call.most)
        self._calls[call.number] = call
        owner.open += 1
        owner.waiting.put(call)
        if owner.threads < min(owner.most, owner.open, _FEW):
            self._add_threads(owner, 1)

    def take(self, *, wait: bool, all_of_them: bool = False) -> list[Ended]:
        """Return the calls that have ended.

        Args:
            wait: block until at least one has ended, if any are pending.
            all_of_them: with ``wait``, block until all have ended.

        Raises:
            RewardError: more calls of an owner hang than it may have threads.
        """
        found: list[Ended] = []
        while self.busy:
            ended = self._next(block=wait and (all_of_them or not found))
            if ended is None:
                break
            found.append(ended)
        return found

    def forget(self) -> None:
        """Abandon all pending calls and discard their results."""
        self._given_up += self._calls.values()
        self._calls.clear()
        self._begun.clear()
        # The sentinels make idle threads exit now, and busy ones after their call.
        self.close()
        self._owners.clear()

    def close(self) -> None:
        """Make the threads exit after their current calls."""
        for owner in self._owners.values():
            for _ in range(owner.threads):
                owner.waiting.put(None)

    def _next(self, *, block: bool) -> Ended | None:
        """Return the next call that ends or exceeds its time limit. Without ``block``, return None if there
        is none."""
        while True:
            try:
                ended = self._ended.get(timeout=_LOOK_SECONDS) if block else self._ended.get_nowait()
            except queue.Empty:
                late = next((call for call in self._calls.values() if self._is_late(call)), None)
                if late is not None:
                    self._give_up(late)
                    return self._closed(Ended(late.number))
                self._grow()
                if not block:
                    return None
                continue
            # Compare call objects, not numbers: an abandoned call may return when a later call has its
            # number.
            if ended.call is self._calls.get(ended.number):
                return self._closed(ended)

    def _is_late(self, call: Call) -> bool:
        begun = self._begun.get(call.number)
        return begun is not None and time.monotonic() - begun > call.timeout_s

    def _closed(self, ended: Ended) -> Ended:
        call = self._calls.pop(ended.number)
        self._begun.pop(ended.number, None)
        self._owners[id(call.owner)].open -= 1
        return ended

    def _give_up(self, call: Call) -> None:
        """Abandon a call that hangs, and start a replacement for its thread.

        Raises:
            RewardError: more calls of the owner hang than it may have threads.
        """
        owner = self._owners[id(call.owner)]
        self._given_up.append(call)
        owner.hanging += 1
        owner.threads -= 1
        if owner.hanging > owner.most:
            raise RewardError(
                f"{owner.hanging} calls of the environment {owner.name} did not return within "
                f"{call.timeout_s:g} s. Nothing was trained on this batch. Fix: correct the "
                "environment, or raise env.step_timeout_s"
            )
        self._add_threads(owner, min(1, owner.most - owner.threads))

    def _grow(self) -> None:
        """Double the threads of owners with queued calls. Owners whose calls return quickly thus keep few
        threads."""
        now = time.monotonic()
        if now - self._grown < _LOOK_SECONDS:
            return
        self._grown = now
        for owner in self._owners.values():
            self._add_threads(
                owner, min(owner.waiting.qsize(), max(owner.threads, _FEW), owner.most - owner.threads)
            )

    def _add_threads(self, owner: _Owner, count: int) -> None:
        for _ in range(count):
            owner.threads += 1
            threading.Thread(target=self._work, args=(owner,), name="environment", daemon=True).start()

    def _work(self, owner: _Owner) -> None:
        while (call := owner.waiting.get()) is not None:
            self._begun[call.number] = time.monotonic()
            try:
                ended = Ended(call.number, call.call(), call=call)
            except BaseException as error:
                ended = Ended(call.number, error=error, call=call)
            if any(call is each for each in self._given_up):
                return  # A replacement is already running.
            self._ended.put(ended)
