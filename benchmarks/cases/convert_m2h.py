"""Export of a Megatron-Core checkpoint to a Hugging Face model: see ``benchmarks.conversion``."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import conversion
from benchmarks.point import Point


def measure(quick: bool) -> Iterator[Point]:
    """See ``measure``."""
    return conversion.measure("export", quick)
