"""Read numbers from a config, and report invalid ones as problems."""

from __future__ import annotations

import sys
from collections.abc import Mapping

Config = Mapping[str, object]
"""A flat ``config.json`` with the defaults of its class, or one of its sections."""
SIZE_NEEDED = "a positive whole number is needed"
"""End of the message for a missing or invalid size."""


def read_size(config: Config, key: str, problems: list[str], *, least: int = 1) -> int:
    """Return the integer at a key. If it is missing, invalid, or below ``least`` (0 or 1), append a problem
    and return ``least``."""
    value = config.get(key)
    # bool is an int in Python, but true is not a size.
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return value
    problems.append(
        f"{key} = {value!r}: {SIZE_NEEDED if least else 'a whole number of at least 0 is needed'}"
    )
    return least


def read_number(
    value: object,
    name: str,
    problems: list[str],
    *,
    default: object = None,
    instead: float = 1.0,
    may_be_zero: bool = False,
) -> float:
    """Return a finite number above 0 (at least 0 with ``may_be_zero``). For other values, append a problem
    that begins with ``name``, and return ``instead``."""
    value = default if value is None else value
    # NaN fails the comparison with 0, and integers too large for a float fail the other.
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and 0 <= value <= sys.float_info.max
        and (value or may_be_zero)
    ):
        return float(value)
    problems.append(
        f"{name} = {value!r}: a {'number of at least 0' if may_be_zero else 'positive number'} is needed"
    )
    return instead


def is_off(value: object) -> bool:
    """Return whether a value disables a feature: None, False and empty values. 0 is not included, because its
    meaning depends on the key."""
    return value is None or value is False or (isinstance(value, str | list | tuple | dict) and not value)
