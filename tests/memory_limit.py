"""Processes that run out of memory, as the kernel has it and not as a mock does."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator, Sequence

from converters.files.process import status_bytes

# what a limit bounds, as the kernel names it in a process's status
_USED = {resource.RLIMIT_DATA: "VmData", resource.RLIMIT_AS: "VmSize"}


@contextlib.contextmanager
def no_more_memory_than(
    room: int, processes: Sequence[int], limit: int = resource.RLIMIT_DATA
) -> Iterator[None]:
    """The kernel gives each process no more bytes beyond those that it has.

    Args:
        room: bytes.
        processes: their ids.
        limit: ``RLIMIT_DATA`` bounds private memory, ``RLIMIT_AS`` also what is shared with others.
    """
    before = {process: resource.prlimit(process, limit) for process in processes}
    try:
        for process, (_, hard) in before.items():
            resource.prlimit(process, limit, (status_bytes(_USED[limit], process) + room, hard))
        yield
    finally:
        for process, both in before.items():
            # one that has died is what the caller finds out
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(process, limit, both)
