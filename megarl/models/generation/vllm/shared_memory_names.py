"""Removal of the files through which vLLM's processes share memory, as soon as all of them have opened it.

The memory itself remains until the last process releases it, however that process ends. If a process is
killed while its file still has a name, the memory stays allocated until the machine is restarted.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

# vLLM's kernels on a CPU create this shared memory outside Python.
_OF_KERNELS = "/dev/shm/vllm_dist_"


def remove_names() -> None:
    """Remove the files of all of vLLM's shared memory in this process; afterwards no process can open it by
    name."""
    for block in _blocks():
        with contextlib.suppress(FileNotFoundError):
            block.unlink()
        # The process that created the memory would remove it again at its end, and report that nothing is
        # there.
        block.unlink = _nothing  # type: ignore[method-assign]
    # Find these in the maps of the process: vLLM exposes neither their names nor their descriptors.
    for path in _mapped(_OF_KERNELS):
        path.unlink(missing_ok=True)


def _blocks() -> list[SharedMemory]:
    """Return this process's ``SharedMemory`` objects of Python: those of vLLM's message queues."""
    # Compare the exact type, because isinstance has side effects on some objects.
    return [found for found in gc.get_objects() if type(found) is SharedMemory]


def _mapped(beginning: str) -> Iterator[Path]:
    """Yield the existing files mapped into this process whose path begins with ``beginning``."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        # The columns are address, permissions, offset, device, inode and path.
        *_, path = line.split(maxsplit=5)
        # A removed file is still mapped, with the path "... (deleted)".
        if path.startswith(beginning) and os.path.exists(path):
            yield Path(path)


def _nothing() -> None:
    """Do nothing; replaces ``unlink`` once the file is removed."""
