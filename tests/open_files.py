"""Files that this process has open, by what they are: a mere number hides a leak when something else is
closed meanwhile."""

from __future__ import annotations

import contextlib
import gc
import os
from collections import Counter


def open_files() -> Counter[str]:
    """How many descriptors there are of each file, pipe, socket and shared memory of this process, as the
    kernel names them.

    ``open_files() - before`` is what was opened since and not closed. What earlier tests of the process left
    behind may be closed at any time, by a thread or the collector of garbage, and does not count.
    """
    gc.collect()
    held: Counter[str] = Counter()
    for descriptor in os.listdir("/proc/self/fd"):
        # the listing's own descriptor is gone by now, as may be those of other threads
        with contextlib.suppress(FileNotFoundError):
            held[os.readlink(f"/proc/self/fd/{descriptor}")] += 1
    return held
