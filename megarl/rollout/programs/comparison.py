"""What programs write and return, compared with what is expected.

A decimal number with a point or an exponent is met by one that differs by no more than 1e-6, or by that share of it.
Whole numbers and all else have to be equal; truth values are no numbers. A tuple is equal to a list, as in JSON.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

TOLERANCE = 1e-6
"""Absolute, and relative to the expected number."""

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,6})?", re.ASCII)
_WHOLE = re.compile(r"[+-]?\d+", re.ASCII)


def same_output(written: str, expected: str) -> bool:
    """Whether two outputs are equal but for white space around words, empty lines at the end, and decimal numbers."""
    ours, theirs = written.rstrip().split("\n"), expected.rstrip().split("\n")
    return len(ours) == len(theirs) and all(_same_line(*pair) for pair in zip(ours, theirs, strict=True))


def _same_line(written: str, expected: str) -> bool:
    ours, theirs = written.split(), expected.split()
    return len(ours) == len(theirs) and all(a == b or _same_number(a, b) for a, b in zip(ours, theirs, strict=True))


def _same_number(written: str, expected: str) -> bool:
    if not (_NUMBER.fullmatch(written) and _NUMBER.fullmatch(expected)):
        return False
    if Decimal(written) == Decimal(expected):
        return True
    # beyond the largest float all would be equal
    ours, theirs = float(written), float(expected)
    return _WHOLE.fullmatch(expected) is None and math.isfinite(ours) and math.isfinite(theirs) and _is_close(ours, theirs)


def _is_close(value: float, expected: float) -> bool:
    if not math.isfinite(expected):
        return value == expected or (math.isnan(expected) and math.isnan(value))
    return abs(value - expected) <= TOLERANCE * max(1.0, abs(expected))


def same_returned(value: Any, expected: Any) -> bool:
    """Whether what a function returned is what is expected, or the one member of a list that is.

    Args:
        value: plain, as ``inside.decode`` makes it.
        expected: of the types of JSON.
    """
    if _same_value(value, expected):
        return True
    # some data sets put the one value that a function returns into a list
    return isinstance(expected, list) and len(expected) == 1 and _same_value(value, expected[0])


def _same_value(value: Any, expected: Any) -> bool:
    if isinstance(expected, bool) or isinstance(value, bool):
        return value is expected
    if isinstance(expected, float):
        return type(value) in (int, float) and _is_close(_as_float(value), expected)
    if isinstance(expected, int):
        return type(value) in (int, float) and bool(value == expected)
    if isinstance(expected, list):
        if type(value) not in (list, tuple) or len(value) != len(expected):
            return False
        return all(_same_value(ours, theirs) for ours, theirs in zip(value, expected, strict=True))
    if isinstance(expected, Mapping):
        return type(value) is dict and _same_mapping(value, expected)
    return type(value) is type(expected) and bool(value == expected)


def _same_mapping(value: dict[Any, Any], expected: Mapping[str, Any]) -> bool:
    ours = {_key(key): each for key, each in value.items()}
    return len(ours) == len(value) and ours.keys() == expected.keys() and all(_same_value(ours[key], expected[key]) for key in expected)


def _key(key: Any) -> Any:
    """Return a key as JSON writes it."""
    if key is None or isinstance(key, bool):
        return {None: "null", True: "true", False: "false"}[key]
    return repr(key) if isinstance(key, int | float) else key


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.nan
