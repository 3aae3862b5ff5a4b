"""Sizes in a config: how they are read, and what is said of one that cannot be."""

from __future__ import annotations

from collections.abc import Mapping

SIZE_NEEDED = "a positive whole number is needed"
"""End of what is said of a size that is missing or of the wrong kind."""


def read_size(config: Mapping[str, object], key: str, problems: list[str]) -> int:
    """The size under a key; where it is no positive whole number, 1, and a problem that ends with ``SIZE_NEEDED``."""
    value = config.get(key)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    problems.append(f"{key} = {value!r}: {SIZE_NEEDED}")
    return 1
