"""Parser for case lines: the one-line text form of a case, such as ``tp=2 loss=dpo``."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable
from typing import Any

from megarl.errors import ConfigError
from megarl.parity.case import CHOICES, DEFAULTS, Case, Fields, idle_fields
from megarl.parity.options import ADVANTAGES, LOSSES, fault_of

_POSITIVE = ("temperature", "nucleus", "lr")
_LEAST = {
    "seed": 0,
    "window": 0,
    "experts": 0,
    "topk": 0,
    "expert": 0,
    "first": 0,
    "last": 0,
    "room": 0,
    "rows": 0,
    "keep": 0,
    "bucket": 0,
    "chunk": 0,
    "length": 2,
}
_WITH_OPTIONS = {"loss": LOSSES, "advantages": ADVANTAGES}


class CaseError(ConfigError):
    """Error in a case line. The message names the invalid word."""


def parse(line: str) -> Case:
    """Return the case that a line describes. Fields that the line does not name keep their defaults.

    Raises:
        CaseError: a word is not ``key=value``, its key is unknown or repeated, its value is invalid, or it
            has no effect in this case.
    """
    values: Fields = {}
    for word in line.split():
        key, equals, value = word.partition("=")
        if not equals:
            raise CaseError(f"case word {word!r}: expected key=value, for example tp=2")
        if key not in DEFAULTS:
            near = difflib.get_close_matches(key, DEFAULTS, n=1)
            hint = f"nearest is {near[0]!r}" if near else f"the keys are {', '.join(DEFAULTS)}"
            raise CaseError(f"case word {word!r}: there is no key {key!r}; {hint}")
        if key in values:
            raise CaseError(f"case word {word!r}: {key!r} is given twice; keep one of the two")
        values[key] = _value(word, key, value, type(DEFAULTS[key]))
    case = Case(**values)
    for word in line.split():
        owner = idle_fields(case).get(word.partition("=")[0])
        if owner is not None:
            raise CaseError(f"case word {word!r}: it means nothing with {owner}; leave it out")
    return case


def words_of(line: str) -> Fields:
    """Return only the fields that a line names, with their parsed values.

    Raises:
        CaseError: the line is invalid, as in ``parse``.
    """
    case = parse(line)
    fields: Fields = {}
    for word in line.split():
        key = word.partition("=")[0]
        fields[key] = getattr(case, key)
    return fields


def _value(word: str, key: str, text: str, kind: type) -> Any:
    if kind is bool:
        if text not in ("0", "1"):
            raise CaseError(f"case word {word!r}: expected 0 or 1")
        return text == "1"
    if kind is str:
        _check_name(word, key, text)
        return text
    read: Callable[[str], int | float] = int if kind is int else float
    try:
        number = read(text)
    except ValueError:
        raise CaseError(f"case word {word!r}: expected a {'whole ' if kind is int else ''}number") from None
    least = _LEAST.get(key, 1 if kind is int else 0)
    # ``not >=`` also rejects NaN, which ``<`` would accept.
    if not number >= least or not math.isfinite(number) or (key in _POSITIVE and number == 0):
        raise CaseError(
            f"case word {word!r}: expected {'more than 0' if key in _POSITIVE else f'at least {least}'}"
        )
    return number


def _check_name(word: str, key: str, text: str) -> None:
    if key in _WITH_OPTIONS:
        fault = fault_of(text, _WITH_OPTIONS[key])
        if fault:
            raise CaseError(f"case word {word!r}: {fault}")
    elif key in CHOICES and text not in CHOICES[key]:
        near = difflib.get_close_matches(text, CHOICES[key], n=1)
        raise CaseError(
            f"case word {word!r}: expected one of {', '.join(CHOICES[key])}"
            + (f"; nearest is {near[0]}" if near else "")
        )
