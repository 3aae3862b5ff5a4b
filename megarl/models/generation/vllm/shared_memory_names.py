"""Removal of the files through which vLLM's processes share memory, as soon as all of them have opened it.

The memory itself remains until the last process releases it, even if that process is killed. If a process
were killed while its file still has a name, the memory would stay allocated until the next reboot.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

# vLLM's CPU kernels create shared memory with this prefix in C++.
_OF_KERNELS = "/dev/shm/vllm_dist_"


def remove_names() -> None:
    """Unlink the files of all shared memory that vLLM uses in this process. Existing mappings stay valid, but
    no process can open the memory by name any more."""
    for block in _blocks():
        with contextlib.suppress(FileNotFoundError):
            block.unlink()
        # The process that created the memory would unlink it again at exit, and report a missing file.
        block.unlink = _nothing  # type: ignore[method-assign]
    # Look these up in the process's memory map, because vLLM exposes neither names nor file descriptors.
    for path in _mapped(_OF_KERNELS):
        path.unlink(missing_ok=True)


def _blocks() -> list[SharedMemory]:
    """Return all ``SharedMemory`` objects of this process. They belong to vLLM's message queues."""
    # Compare the exact type, because isinstance runs code of proxy objects.
    return [found for found in gc.get_objects() if type(found) is SharedMemory]


def _mapped(beginning: str) -> Iterator[Path]:
    """Yield the existing files that are mapped into this process and whose path starts with ``beginning``."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        # Columns: address, permissions, offset, device, inode, path.
        *_, path = line.split(maxsplit=5)
        # An unlinked file may still be mapped, with the path "... (deleted)".
        if path.startswith(beginning) and os.path.exists(path):
            yield Path(path)


def _nothing() -> None:
    """Do nothing. Replaces ``unlink`` after the file has been removed."""
