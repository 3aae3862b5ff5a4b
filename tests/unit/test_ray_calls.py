"""Calls of Ray have a bound where somebody has asked for it; a real call that waits for a stopped process:
``system/test_faults.py``."""

from __future__ import annotations

import queue
import threading

import pytest
import ray

from megarl.distributed import ray_calls
from megarl.distributed.ray_calls import bounded, calling

WAIT = 30.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_calls, "_LOOK_SECONDS", 0.01)


def test_a_call_that_does_not_come_back_is_told_of_once_with_what_it_is_and_its_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: queue.Queue[str] = queue.Queue()
    release = threading.Event()
    monkeypatch.setattr(ray, "put", lambda value: release.wait(WAIT))
    with bounded(0.2, told.put):
        caller = threading.Thread(target=ray_calls.put, args=(5,))
        caller.start()
        message = told.get(timeout=WAIT)
        assert "ray.put: Ray did not return within 0.2 s" in message and "Fix: " in message
        release.set()
        caller.join()
    assert told.empty()


def test_calls_that_come_back_are_not_late_and_the_rest_is_not_looked_at() -> None:
    told: list[str] = []
    with bounded(0.2, told.append):
        for _ in range(3):
            with calling("quick"):
                pass
        with calling("an own bound", WAIT):
            threading.Event().wait(0.5)
        with calling("no bound at all", None):
            threading.Event().wait(0.5)
        assert ray_calls._watch is not None and not ray_calls._watch.calls
    with calling("outside", 0.0):
        threading.Event().wait(0.3)
    assert told == []


def test_what_is_called_within_a_call_has_its_bound() -> None:
    """Storing the batch of a step belongs to the step; each thread has calls of its own."""
    told: list[str] = []
    with bounded(0.2, told.append), calling("train, step 3", WAIT):
        with calling("ray.put"):
            threading.Event().wait(0.5)
        assert told == []
        other = threading.Thread(target=lambda: _wait_within("of another thread", 1.0))
        other.start()
        other.join()
    assert len(told) == 1 and "of another thread" in told[0]


def _wait_within(what: str, seconds: float) -> None:
    with calling(what):
        threading.Event().wait(seconds)


def test_an_error_of_a_call_ends_it() -> None:
    told: list[str] = []
    with bounded(0.2, told.append):
        with pytest.raises(ValueError, match="no"), calling("fails"):
            raise ValueError("no")
        threading.Event().wait(0.5)
    assert told == []
