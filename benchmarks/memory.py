"""Peak memory of a piece of code: as the kernel counts this process's resident pages, and as autograd holds tensors for the way back."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

MEBIBYTE = 1024 * 1024
_STATUS = Path("/proc/self/status")
# writing 5 there starts the kernel's high-water mark anew (Linux, Documentation/filesystems/proc.rst)
_RESET = Path("/proc/self/clear_refs")


def peak_of(action: Callable[[], Any]) -> float:
    """MiB that ``action`` needed at its worst moment, its result included, beyond what was resident when it began."""
    gc.collect()
    # memory that was freed but stayed in the allocator's lists would be used again without the kernel seeing it
    ctypes.CDLL(None).malloc_trim(0)
    _RESET.write_text("5", encoding="ascii")
    before = _kibibytes("VmHWM")
    action()
    return (_kibibytes("VmHWM") - before) / 1024


def in_use(device: str = "cpu") -> float:
    """MiB that this process has now, without garbage and free blocks: resident ones, or those allocated on the CUDA device."""
    gc.collect()
    if device == "cuda":
        return torch.cuda.memory_allocated() / MEBIBYTE
    ctypes.CDLL(None).malloc_trim(0)
    return _kibibytes("VmRSS") / 1024


def _kibibytes(key: str) -> int:
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1])
    raise KeyError(f"{_STATUS} has no {key}; this needs Linux")


class Saved:
    """What autograd keeps for the backward pass; each storage counts once, and parameters, which are there anyway, do not.

    Attributes:
        peak: MiB at the worst moment.
    """

    def __init__(self) -> None:
        self.peak = 0.0
        self._held: dict[int, int] = {}
        self._bytes = 0

    def hold(self, tensor: torch.Tensor) -> _Held:
        """Count ``tensor`` until what this returns is gone."""
        held = _Held(self, tensor)
        if held.place is not None:
            if not self._held.get(held.place):
                self._bytes += held.size
                self.peak = max(self.peak, self._bytes / MEBIBYTE)
            self._held[held.place] = self._held.get(held.place, 0) + 1
        return held

    def release(self, held: _Held) -> None:
        """One holder less."""
        if held.place is not None:
            self._held[held.place] -= 1
            if not self._held[held.place]:
                self._bytes -= held.size


class _Held:
    """Stands for a tensor in the graph. ``place`` is the address of its memory, None for a parameter."""

    def __init__(self, owner: Saved, tensor: torch.Tensor) -> None:
        self.owner = owner
        self.tensor = tensor
        whole = tensor if tensor._base is None else tensor._base
        storage = tensor.untyped_storage()
        self.place = None if isinstance(whole, torch.nn.Parameter) else storage.data_ptr()
        self.size = storage.nbytes()

    def __del__(self) -> None:
        self.owner.release(self)


@contextlib.contextmanager
def saved_for_backward() -> Iterator[Saved]:
    """Inside, every tensor that autograd saves is counted for as long as it is saved."""
    saved = Saved()
    with torch.autograd.graph.saved_tensors_hooks(saved.hold, lambda held: held.tensor):
        yield saved
