"""The device that is measured, a CPU or one CUDA device: its clock, its peak memory, and its rate of matrix
products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from benchmarks import memory
from benchmarks.timing import HostClock

# The product is large enough to hide the cost of a launch, and small enough for one core in a tenth of a
# second.
PRODUCT = {"cpu": 768, "cuda": 8192}


class Clock(Protocol):
    """A clock that measures the wall seconds of a device's work between two calls."""

    def start(self) -> None:
        """Wait until the device is idle, and start the clock."""

    def seconds(self) -> float:
        """Wait until the device's work is done, and return the seconds since ``start``."""


class CudaClock:
    """The clock of a CUDA device, based on events that the device records, because calls return before their
    work is done.

    Args:
        cuda: ``torch.cuda``.
    """

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._begun: Any = None

    def start(self) -> None:
        """Start the clock; see ``Clock``."""
        # Wait for earlier work of the device, which must not count.
        self._cuda.synchronize()
        self._begun = self._cuda.Event(enable_timing=True)
        self._begun.record()

    def seconds(self) -> float:
        """Return the seconds since ``start``; see ``Clock``."""
        ended = self._cuda.Event(enable_timing=True)
        ended.record()
        # elapsed_time requires that both events are over.
        self._cuda.synchronize()
        return float(self._begun.elapsed_time(ended)) / 1000


def clock_of(device: str) -> Clock:
    """Return the clock of ``cpu`` or ``cuda``."""
    return CudaClock() if device == "cuda" else HostClock()


def peak_of(action: Callable[[], Any], device: str = "cpu", cuda: Any = torch.cuda) -> float:
    """Return the peak memory of ``action`` beyond that at its beginning, in MiB. On a CPU the kernel counts
    it, on CUDA torch does."""
    if device == "cpu":
        return memory.peak_of(action)
    cuda.synchronize()
    cuda.empty_cache()
    cuda.reset_peak_memory_stats()
    before = cuda.memory_allocated()
    action()
    cuda.synchronize()
    return float(cuda.max_memory_allocated() - before) / memory.MEBIBYTE


def gemm_rate(device: str = "cpu", repeats: int = 5) -> float:
    """Return the rate of one square matrix product, the best of some repeats, in floating-point operations
    per second. No step can be faster on this machine.

    The product is in bfloat16 on CUDA, and in float32 on a CPU, with as many threads as torch has.
    """
    size = PRODUCT[device]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    one, other = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    clock = clock_of(device)
    taken = []
    for _ in range(repeats + 1):
        clock.start()
        torch.mm(one, other)
        taken.append(clock.seconds())
    # Leave out the first product, in which the library chooses and loads its kernel.
    return 2.0 * size**3 / min(taken[1:])
