"""The rule on bounds: every number lies within what its field says (``megarl.key``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from megarl.config.algorithms import run_type
from megarl.config.rules.view import Rule, View
from megarl.config.schema import keys_of, section_types
from megarl.errors import Violation
from megarl.key import Key, fields_of


@cache
def bounded_keys(section: Any, path: str = "") -> Mapping[str, Key]:
    """The keys with bounds of a section and of those below it, by dotted path."""
    found: dict[str, Key] = {}
    for name, annotation in keys_of(section).items():
        full = f"{path}.{name}" if path else name
        key = fields_of(section).get(name)
        if key is not None and key.bounds is not None:
            found[full] = key
        for inner in section_types(annotation):
            found |= bounded_keys(inner, full)
    return found


def values_in_range(view: View) -> Iterator[Violation]:
    """Every number lies within its bounds."""
    for path, key in bounded_keys(run_type(view.get("algorithm"))).items():
        value, bounds = view.get(path), key.bounds
        if value is not None and bounds is not None and not bounds.holds(value):
            yield Violation(path, value, f"it must be {bounds}", key.advice or f"write a value that is {bounds}")


RANGE_RULES: tuple[Rule, ...] = (values_in_range,)
