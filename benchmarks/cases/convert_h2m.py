"""Import of a Hugging Face model into a Megatron-Core checkpoint: see ``benchmarks.conversion``."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import conversion
from benchmarks.point import Point


def measure(quick: bool) -> Iterator[Point]:
    """See ``measure``."""
    return conversion.measure("import", quick)
