"""Peak memory of a piece of code, by the kernel's count of this process's resident pages."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from converters.files.process import status_bytes

MEBIBYTE = 1024 * 1024
# Writing 5 to this file resets the kernel's high-water mark (Linux, Documentation/filesystems/proc.rst).
_RESET = Path("/proc/self/clear_refs")


def peak_of(action: Callable[[], Any]) -> float:
    """Return the peak memory of ``action``, including its result, beyond the resident memory at its
    beginning, in MiB."""
    gc.collect()
    # Return freed memory to the kernel, which would otherwise not see it when the allocator uses it again.
    ctypes.CDLL(None).malloc_trim(0)
    _RESET.write_text("5", encoding="ascii")
    before = status_bytes("VmHWM")
    action()
    return (status_bytes("VmHWM") - before) / MEBIBYTE


def use_pages(mebibytes: int = 1024) -> None:
    """Leave ``mebibytes`` of free memory, which has been written to, in this process's allocator.

    Taking new pages for a large block costs more than copying the block, and otherwise depends on where small
    blocks happen to be. With this call a block takes no new pages, as in a process that has worked for a
    while. The runner's cases keep the memory that they free.
    """
    torch.empty(mebibytes * MEBIBYTE, dtype=torch.uint8).fill_(1)
