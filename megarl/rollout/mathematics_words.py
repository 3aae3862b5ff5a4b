"""Words that accompany a value: units, nouns, and words that change its meaning (``or more``, ``PM``)."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass


def _set_of(words: str) -> frozenset[str]:
    return frozenset(words.split())


_SPELLINGS = {
    "mm": "millimeter millimetre",
    "cm": "centimeter centimetre cms",
    "dm": "decimeter decimetre",
    "m": "meter metre mtr",
    "km": "kilometer kilometre kms",
    "in": "inch inches",
    "ft": "foot feet",
    "yd": "yard",
    "mi": "mile",
    "mg": "milligram",
    "g": "gram gm gms",
    "kg": "kilogram kgs kilo",
    "lb": "lbs pound",
    "oz": "ounce",
    "ton": "tonne",
    "ms": "millisecond",
    "s": "second sec secs",
    "min": "minute mins",
    "h": "hour hr hrs",
    "day": "days",
    "week": "weeks wk",
    "month": "months",
    "year": "yr yrs",
    "ml": "milliliter millilitre",
    "l": "liter litre",
    "gallon": "gal",
    "quart": "qt",
    "acre": "acres",
    "hectare": "ha",
    "degree": "deg degs °",
    "radian": "rad rads",
    "celsius": "centigrade",
    "fahrenheit": "",
    "k": "kelvin",
    "j": "joule",
    "kj": "kilojoule",
    "n": "newton",
    "w": "watt",
    "kw": "kilowatt",
    "mw": "megawatt",
    "kwh": "",
    "v": "volt",
    "a": "ampere amp",
    "ohm": "",
    "hz": "hertz",
    "khz": "kilohertz",
    "mhz": "megahertz",
    "pa": "pascal",
    "kpa": "kilopascal",
    "atm": "",
    "mol": "mole",
    "ev": "",
    "dollar": "$ usd buck",
    "cent": "¢",
    "euro": "€ eur",
    "gbp": "£ sterling",
    "yen": "¥ jpy",
    "rupee": "₹ rs inr",
    "yuan": "rmb cny",
    "percent": "% pct percentage",
    "bit": "bits",
    "byte": "bytes",
    "mb": "megabyte",
    "gb": "gigabyte",
}
_UNITS = {spelling: unit for unit, spellings in _SPELLINGS.items() for spelling in (unit, *spellings.split())}
_QUOTIENTS = {
    "mph": ("mi", "h"),
    "kmh": ("km", "h"),
    "kph": ("km", "h"),
    "kmph": ("km", "h"),
    "fps": ("ft", "s"),
    "mps": ("m", "s"),
}
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}
_FILLERS = _set_of("the a an of unit each total exactly only just our its")

_BOUNDS = (
    (
        r"(?:or|and) (?:more|greater|above|higher|over|up)|at least|no less than|not less than|no fewer "
        r"than|minimum of",
        "≥",
    ),
    (r"(?:or|and) (?:less|fewer|below|lower|under)|at most|no more than|not more than|maximum of|up to", "≤"),
    (r"more than|greater than|over|above|exceeding", ">"),
    (r"less than|fewer than|under|below", "<"),
)
# Words that change the meaning of a value: both sides must have the same ones.
_CHANGES = _set_of(
    "≥ ≤ > < am pm noon midnight or and not no non to between than more less fewer greater least most mod "
    "modulo if where except without minus plus negative odd even bc ad maybe perhaps possibly probably "
    "north south east west january february march april may june july august september october november "
    "december monday tuesday wednesday thursday friday saturday sunday"
)

_ABOUT = re.compile(
    r"\b(?:about|approximately|approx|around|roughly|nearly|almost|circa|close to)\b\.?", re.IGNORECASE
)
_FACTORS = {
    "dozen": 12,
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
_TOKEN = re.compile(r"[^\W\d_]+|[$€£¥₹¢%°≥≤><]|\^-?[0-9]|/|[0-9]+")

FUNCTIONS = _set_of(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp lim max min gcd lcm det dim "
    "ker deg arg sqrt pi infty inf sup alpha beta gamma theta phi omega"
)
"""Names of mathematical functions and constants, which are not words of a natural language."""

_SHORT_WORDS = _set_of(
    "yes no and or not am pm the of is in on at to if for all odd any red ten one two six day per mod are has"
)


@dataclass(frozen=True, slots=True)
class Words:
    """The words next to a number in an answer.

    Attributes:
        units: sorted pairs (unit, exponent).
        nouns: other words, in the singular.
        changes: words that change the meaning of the value, such as ``least`` or ``pm``.
    """

    units: tuple[tuple[str, int], ...] = ()
    nouns: frozenset[str] = frozenset()
    changes: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.units or self.nouns or self.changes)


def read_words(text: str) -> Words:
    """Classify the words of a value into units, nouns and words that change its meaning."""
    units: Counter[str] = Counter()
    nouns: set[str] = set()
    changes: set[str] = set()
    sign, power, last = 1, 1, ""
    for token in _tokens(text):
        unit = _unit(token, last)
        if token in ("per", "/"):
            sign = -1
            continue
        # "square" precedes its unit, but "squared" follows it.
        if token in _POWERS and not token.endswith("ed"):
            power = _POWERS[token]
            continue
        if token.startswith("^") or token in _POWERS:
            units[last] *= _POWERS.get(token) or int(token[1:])
            continue
        if token in _CHANGES:
            changes.add(token)
        elif token in _QUOTIENTS:
            over, under = _QUOTIENTS[token]
            units[over] += 1
            units[under] -= 1
        elif unit:
            units[unit] += sign * power
            last = unit
        elif singular(token) not in _FILLERS:
            nouns.add(singular(token))
        # "per" and "square" apply to one unit only.
        sign = power = 1
    return Words(
        tuple(sorted((unit, count) for unit, count in units.items() if unit and count)),
        frozenset(nouns),
        frozenset(changes),
    )


def words_agree(reference: Words, response: Words) -> bool:
    """Return whether the words of a response are compatible with those of the reference.

    A unit or a noun may be missing on one side, but a different one is incorrect. Words that change the
    meaning must be the same on both sides, except that a response may add ``am`` or ``pm``.
    """
    if reference.changes != response.changes:
        # A response may give a time of day more precisely than the reference.
        return not reference and response.changes <= {"am", "pm"}
    if not reference or not response:
        return True
    if reference.units != response.units:
        return False
    return reference.nouns <= response.nouns or response.nouns <= reference.nouns


def plain_words(text: str, signs: bool = False) -> tuple[str, ...]:
    """Return the words of a non-numeric answer (``due East``) in lower case and in the singular, without
    articles.

    Args:
        text: words, possibly with numbers.
        signs: also return every other symbol of the text.
    """
    if signs:
        return tuple(map(singular, re.findall(r"[^\W\d_]+|[0-9.]+|[^\s\w]", text.lower())))
    return tuple(singular(token) for token in _tokens(text) if token not in ("the", "a", "an"))


def without_about(text: str) -> tuple[str, bool]:
    """Remove ``about``, ``approximately`` and similar words. Also return whether there were any."""
    kept, count = _ABOUT.subn(" ", text)
    return kept, count > 0


def without_factors(text: str) -> tuple[str, int]:
    """Remove ``million`` and similar words. Also return the product of these factors."""
    factor = 1
    kept = []
    for word in text.split():
        each = _FACTORS.get(singular(word.lower()), 1)
        factor *= each
        kept += [word] if each == 1 else []
    return " ".join(kept), factor


def is_word(run: str) -> bool:
    """Return whether consecutive letters are a word, as opposed to a product of variables such as ``abc``."""
    # Several capital letters are names of points, such as ABCD.
    return run.lower() in _SHORT_WORDS or (len(run) > 3 and not run.isupper())


def is_unit(run: str) -> bool:
    """Return whether letters directly after a number are a unit."""
    return (
        run.lower() in _UNITS
        or run.lower() in _QUOTIENTS
        or run.lower() in ("am", "pm", "th", "st", "nd", "rd")
    )


def singular(word: str) -> str:
    """Return a noun without its plural ending."""
    if len(word) > 4 and word.endswith("ies"):
        return word[:-3] + "y"
    if len(word) > 4 and word.endswith(("xes", "ches", "shes", "sses")):
        return word[:-2]
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word


def _tokens(text: str) -> list[str]:
    lowered = re.sub(r"\b([ap])\.?\s?m\b\.?", r"\1m", text.lower().replace("{", "").replace("}", ""))
    lowered = re.sub(r"\s+", " ", re.sub(r"\^\s+", "^", lowered))
    for phrase, bound in _BOUNDS:
        lowered = re.sub(rf"\b(?:{phrase})\b", bound, lowered)
    return _TOKEN.findall(lowered)


def _unit(token: str, last: str) -> str | None:
    if last == "degree" and token in ("c", "f"):
        return {"c": "celsius", "f": "fahrenheit"}[token]
    # "a" is usually the article, not ampere.
    if token == "a":
        return None
    return _UNITS.get(token) or _UNITS.get(singular(token))
