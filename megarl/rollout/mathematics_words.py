"""Words next to a value: units, nouns, and words that change the value's meaning (``or more``, ``PM``)."""

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
# Words that change what a value means. If one side has such a word, the other must have it too.
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
"""Names of mathematical functions, which are not words of a language."""

_SHORT_WORDS = _set_of(
    "yes no and or not am pm the of is in on at to if for all odd any red ten one two six day per mod are has"
)


@dataclass(frozen=True, slots=True)
class Words:
    """The words that accompany a number in a mathematical answer.

    Attributes:
        units: sorted (unit, exponent).
        nouns: other words, in the singular.
        changes: words that change the value, such as "dozen".
    """

    units: tuple[tuple[str, int], ...] = ()
    nouns: frozenset[str] = frozenset()
    changes: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.units or self.nouns or self.changes)


def read_words(text: str) -> Words:
    """Sort the words of a value into units, nouns and words that change its meaning."""
    units: Counter[str] = Counter()
    nouns: set[str] = set()
    changes: set[str] = set()
    sign, power, last = 1, 1, ""
    for token in _tokens(text):
        unit = _unit(token, last)
        if token in ("per", "/"):
            sign = -1
            continue
        # "square" precedes its unit, whereas "squared" follows it.
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
        # Reset sign and power, because they apply to one unit.
        sign = power = 1
    return Words(
        tuple(sorted((unit, count) for unit, count in units.items() if unit and count)),
        frozenset(nouns),
        frozenset(changes),
    )


def words_agree(reference: Words, response: Words) -> bool:
    """Return whether the words of a response agree with those of its reference.

    A unit or a noun may be missing on one side. A different one is incorrect, and so is any difference in
    words that change the meaning.
    """
    if reference.changes != response.changes:
        # A response may state a time of day more exactly than the reference does.
        return not reference and response.changes <= {"am", "pm"}
    if not reference or not response:
        return True
    if reference.units != response.units:
        return False
    return reference.nouns <= response.nouns or response.nouns <= reference.nouns


def plain_words(text: str, signs: bool = False) -> tuple[str, ...]:
    """Return the words of an answer that is not a value (``due East``), in the singular and in lower case,
    without articles.

    Args:
        text: words, possibly with numbers.
        signs: keep every other sign of the text as well.
    """
    if signs:
        return tuple(map(singular, re.findall(r"[^\W\d_]+|[0-9.]+|[^\s\w]", text.lower())))
    return tuple(singular(token) for token in _tokens(text) if token not in ("the", "a", "an"))


def without_about(text: str) -> tuple[str, bool]:
    """Return words without ``about``, ``approximately`` and similar words, and whether there were any."""
    kept, count = _ABOUT.subn(" ", text)
    return kept, count > 0


def without_factors(text: str) -> tuple[str, int]:
    """Return words without ``million`` and similar words, and the product of these factors."""
    factor = 1
    kept = []
    for word in text.split():
        each = _FACTORS.get(singular(word.lower()), 1)
        factor *= each
        kept += [word] if each == 1 else []
    return " ".join(kept), factor


def is_word(run: str) -> bool:
    """Return whether separate letters are a word, and not a product of variables such as ``abc``."""
    # A longer run of capitals names points, such as ABCD.
    return run.lower() in _SHORT_WORDS or (len(run) > 3 and not run.isupper())


def is_unit(run: str) -> bool:
    """Return whether letters after a number are a unit."""
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
    # "a" is more often an article than the unit ampere.
    if token == "a":
        return None
    return _UNITS.get(token) or _UNITS.get(singular(token))
