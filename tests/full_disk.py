"""A disk on which the log of a run has no more room."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megarl.observe.metrics_file import FILE_NAME


@contextmanager
def full_disk(run_dir: Path, room: int = 5) -> Iterator[None]:
    """No file can become longer than the metrics are by now, and ``room`` bytes; of this process and what it
    starts."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    path = run_dir / FILE_NAME
    resource.setrlimit(
        resource.RLIMIT_FSIZE, ((path.stat().st_size if path.exists() else 0) + room, before[1])
    )
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
