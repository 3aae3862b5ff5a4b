"""Scores of responses that are complete, while others are still sampled."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

_Task = TypeVar("_Task")
_Score = TypeVar("_Score")


class ScoresAhead(Generic[_Task, _Score]):
    """Scores tasks in a thread, which lives as long as it has some. ``begin`` and ``take`` are called by one thread.

    Args:
        score: the score of each task, in their order. It is called by one thread at a time, for all that have come meanwhile.
    """

    def __init__(self, score: Callable[[Sequence[_Task]], Sequence[_Score]]) -> None:
        self._score = score
        self._lock = threading.Lock()
        self._waiting: list[tuple[Hashable, _Task]] = []
        self._found: defaultdict[Hashable, deque[_Score]] = defaultdict(deque)
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def begin(self, tasks: Sequence[tuple[Hashable, _Task]]) -> None:
        """Begin with further tasks, each with the key that its score is found by."""
        with self._lock:
            self._waiting += tasks
            if self._thread is None and self._waiting:
                self._thread = threading.Thread(target=self._work, name="rewards", daemon=True)
                self._thread.start()

    def take(self) -> dict[Hashable, deque[_Score]]:
        """Wait for all that has begun, and forget it: by its key, a score for each task that had that key.

        Raises:
            BaseException: what ``score`` raised.
        """
        if (thread := self._thread) is not None:
            thread.join()
        found, self._found = self._found, defaultdict(deque)
        error, self._error = self._error, None
        if error is not None:
            raise error
        return dict(found)

    def _work(self) -> None:
        while True:
            with self._lock:
                tasks, self._waiting = self._waiting, []
                # under the lock: what comes from now on finds no thread, and starts another
                if not tasks or self._error is not None:
                    self._thread = None
                    return
            try:
                scores = self._score([task for _, task in tasks])
            except BaseException as error:
                self._error = error
                continue
            for (key, _), score in zip(tasks, scores, strict=True):
                self._found[key].append(score)
