"""Alternating measurement of several things in one process, in wall and CPU seconds."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.device import Clock


class HostClock:
    """The clock of this process, for devices whose work is done when a call returns."""

    def __init__(self) -> None:
        self._begun = 0.0

    def start(self) -> None:
        """Start the clock."""
        self._begun = time.perf_counter()

    def seconds(self) -> float:
        """Return the seconds since ``start``."""
        return time.perf_counter() - self._begun


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Disable garbage collection inside the block, so that no repeat pays for the garbage of another."""
    enabled = gc.isenabled()
    # Collect garbage from before, which belongs to no repeat.
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def seconds_of(action: Callable[[], Any], calls: int = 1) -> float:
    """Return the seconds per call, over ``calls`` calls."""
    start = time.perf_counter()
    for _ in range(calls):
        action()
    return (time.perf_counter() - start) / calls


@dataclass(slots=True)
class Spent:
    """Wall and CPU seconds of the repeats of one thing.

    Attributes:
        wall: wall seconds of each repeat.
        cpu: CPU seconds of the process in each repeat, over all of its threads. They are more reliable on a
            busy machine.
    """

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @contextlib.contextmanager
    def repeat(self, counts: bool = True, clock: Clock | None = None) -> Iterator[None]:
        """Add the seconds of the block, if it counts.

        Args:
            counts: False for warm-up.
            clock: clock of the device that does the work; by default that of this process.
        """
        clock = clock or HostClock()
        clock.start()
        cpu = time.process_time()
        yield
        # Read the clock first: a GPU's clock waits here until the work is done, and the CPU seconds of that
        # wait count.
        wall = clock.seconds()
        if counts:
            self.wall.append(wall)
            self.cpu.append(time.process_time() - cpu)


def over_ranks(ranks: Sequence[Spent]) -> Spent:
    """Return the wall seconds of the slowest rank, and the core-seconds of all ranks together."""
    wall = [max(repeat) for repeat in zip(*(spent.wall for spent in ranks), strict=True)]
    return Spent(wall, [sum(repeat) for repeat in zip(*(spent.cpu for spent in ranks), strict=True)])


def spent_in_turn(
    actions: Mapping[str, Callable[[], Any]], *, repeats: int, warm_up: int = 1, clock: Clock | None = None
) -> dict[str, Spent]:
    """Measure each action. Every repeat runs all actions one after another, so that temporary load on the
    machine affects all of them."""
    spent = {name: Spent() for name in actions}
    with collector_off():
        for turn in range(warm_up + repeats):
            for name, action in actions.items():
                with spent[name].repeat(turn >= warm_up, clock):
                    action()
            # Collect garbage between repeats, while no clock runs.
            gc.collect()
    return spent


def in_turn(
    actions: Mapping[str, Callable[[], Any]],
    *,
    repeats: int,
    warm_up: int = 1,
    calls: int = 1,
    collect: bool = False,
) -> dict[str, list[float]]:
    """Return the seconds per call of each action, one number per repeat.

    Every repeat runs all actions one after another, so that temporary load on the machine affects all of
    them.

    Args:
        actions: the actions to time, by name.
        repeats: rounds that are counted.
        warm_up: earlier rounds that are not counted.
        calls: consecutive calls per number; more than 1 for actions that are too short for the clock.
        collect: collect garbage between repeats, for actions that leave much garbage.
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
