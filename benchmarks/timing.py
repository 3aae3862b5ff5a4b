"""Timing of several things in turn, in one process."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """No garbage collection inside, so that no repeat pays for the garbage of another."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def seconds_of(action: Callable[[], Any], calls: int = 1) -> float:
    """Seconds a call, over ``calls`` calls."""
    start = time.perf_counter()
    for _ in range(calls):
        action()
    return (time.perf_counter() - start) / calls


def in_turn(
    actions: Mapping[str, Callable[[], Any]], *, repeats: int, warm_up: int = 1, calls: int = 1, collect: bool = False
) -> dict[str, list[float]]:
    """Seconds a call of each action, one number a repeat.

    Every repeat runs all actions one after another, so a passing load on the machine meets all of them.

    Args:
        actions: what to time, by name.
        repeats: rounds that are counted.
        warm_up: rounds before them that are not.
        calls: calls in a row that make one number; for actions too short for the clock.
        collect: collect garbage between repeats, for actions that leave much behind.
    """
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    with collector_off():
        for turn in range(warm_up + repeats):
            for name, action in actions.items():
                took = seconds_of(action, calls)
                if turn >= warm_up:
                    seconds[name].append(took)
            if collect:
                gc.collect()
    return seconds
