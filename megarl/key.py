"""Description of configuration keys: each field of a section's TypedDict carries a ``Key`` with its meaning,
bounds and default::

    prompts: Annotated[int, Key("number of prompts per step.", AT_LEAST_1)]
    scale: NotRequired[Annotated[float, Key("factor of the rewards.", ABOVE_0, default=1.0)]]

``megarl.config`` reads these annotations to check types and bounds, to fill in defaults, and to write
``configs/KEYS.md``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from typing_extensions import is_typeddict


@dataclass(frozen=True, slots=True)
class Range:
    """Interval of numbers, open or closed at either end.

    Attributes:
        low: smallest value, None for no bound.
        high: largest value, None for no bound.
        low_open: ``low`` itself is outside.
        high_open: ``high`` itself is outside.
    """

    low: float | None = None
    high: float | None = None
    low_open: bool = False
    high_open: bool = False

    def holds(self, value: float) -> bool:
        """Return whether ``value`` is inside the interval."""
        if self.low is not None and (value <= self.low if self.low_open else value < self.low):
            return False
        return self.high is None or not (value >= self.high if self.high_open else value > self.high)

    def __str__(self) -> str:
        low = "" if self.low is None else f"{'more than' if self.low_open else 'at least'} {_text(self.low)}"
        high = (
            "" if self.high is None else f"{'less than' if self.high_open else 'at most'} {_text(self.high)}"
        )
        return " and ".join(filter(None, (low, high)))


def _text(bound: float) -> str:
    # Write large integers in full: ``g`` rounds them to six digits.
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


AT_LEAST_1 = Range(low=1)
AT_LEAST_0 = Range(low=0)
ABOVE_0 = Range(low=0, low_open=True)
SHARE = Range(low=0, high=1)
POSITIVE_SHARE = Range(low=0, high=1, low_open=True)
DECAY = Range(low=0, high=1, high_open=True)


class _NoDefault:
    """Type of ``NO_DEFAULT``, which marks a key that is required or whose value is derived from other
    keys."""

    def __repr__(self) -> str:
        return "NO_DEFAULT"


# None is a valid default, so the absence of one needs a marker of its own.
NO_DEFAULT = _NoDefault()


@dataclass(frozen=True, slots=True)
class Key:
    """Meaning, bounds and default of a configuration key.

    Attributes:
        meaning: text for the table of keys; it ends with a full stop.
        bounds: bounds of a number. The type decides whether null is allowed.
        default: value of an absent key; ``NO_DEFAULT`` if the key is required or derived from other keys.
        advice: what to write instead of a number out of bounds, if that is not obvious.
        follows: key of the same section whose value is used if this key is absent.
    """

    meaning: str
    bounds: Range | None = None
    default: Any = NO_DEFAULT
    advice: str | None = None
    follows: str | None = None


# Cached, because get_type_hints evaluates the text of every annotation again.
@cache
def fields_of(section: Any) -> Mapping[str, Key]:
    """Return the ``Key`` of each field of a section's TypedDict, by field name; fields without a ``Key`` are
    left out."""
    fields = {}
    for name, annotation in get_type_hints(section, include_extras=True).items():
        key = _key_in(annotation)
        if key is not None:
            fields[name] = key
    return fields


def defaults_of(section: Any) -> dict[str, Any]:
    """Return the defaults of a section's keys, by key. Values are copies, so the caller may change them."""
    # Copy the defaults, because a default may be a list or a section, which callers fill in.
    return {
        name: copy.deepcopy(key.default)
        for name, key in fields_of(section).items()
        if key.default is not NO_DEFAULT
    }


def _key_in(annotation: Any) -> Key | None:
    """Return the ``Key`` of a field's annotation, also inside ``NotRequired``; None if it has none."""
    if get_origin(annotation) is Annotated:
        return next((part for part in get_args(annotation)[1:] if isinstance(part, Key)), None)
    return next(filter(None, map(_key_in, get_args(annotation))), None)


def section_types(annotation: Any) -> Iterator[Any]:
    """Yield the TypedDicts inside an annotation, also inside ``NotRequired``, unions and lists, but not the
    values of a ``dict``, whose names users choose."""
    if is_typeddict(annotation):
        yield annotation
    # Values of a dict have user-chosen names, for which there are no dotted keys.
    for part in get_args(annotation) if get_origin(annotation) is not dict else ():
        yield from section_types(part)


def named_section_types(annotation: Any) -> Iterator[Any]:
    """Yield the TypedDicts that are the values of a ``dict`` inside an annotation: sections whose names
    users choose."""
    for part in get_args(annotation):
        yield from section_types(part) if get_origin(annotation) is dict else named_section_types(part)


@cache
def keys_of(section: Any) -> dict[str, Any]:
    """Return the keys of a TypedDict with their complete annotations (``NotRequired`` and ``Annotated``
    included)."""
    return get_type_hints(section, include_extras=True)
