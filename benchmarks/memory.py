"""Peak memory of a piece of code, as the kernel counts this process's resident pages."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from converters.files.process import status_bytes

MEBIBYTE = 1024 * 1024
# writing 5 there starts the kernel's high-water mark again (Linux, Documentation/filesystems/proc.rst)
_RESET = Path("/proc/self/clear_refs")


def peak_of(action: Callable[[], Any]) -> float:
    """Return MiB that ``action`` needed at its worst moment, its result included, beyond what was resident
    when it began."""
    gc.collect()
    # memory that was freed but stayed in the allocator's lists would be used again without the kernel seeing
    # it
    ctypes.CDLL(None).malloc_trim(0)
    _RESET.write_text("5", encoding="ascii")
    before = status_bytes("VmHWM")
    action()
    return (status_bytes("VmHWM") - before) / MEBIBYTE


def use_pages(mebibytes: int = 1024) -> None:
    """Leave so much free memory in the allocator of this process, which has been written to.

    Whether a large block takes pages again, which costs more than a copy of it, otherwise depends on where
    small blocks happen to lie: with this it takes none, as in a process that has worked for a while. The
    runner's cases keep what they free.
    """
    torch.empty(mebibytes * MEBIBYTE, dtype=torch.uint8).fill_(1)
