"""Weights handed to an engine on the same device: see ``benchmarks.refit``."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks import refit
from benchmarks.point import Point


def measure(quick: bool) -> Iterator[Point]:
    """See ``measure``."""
    # thousands of handles are more than a process may have open files
    torch.multiprocessing.set_sharing_strategy("file_system")
    return refit.measure(quick)
