"""Comparison of two final answers: lists, intervals, congruences, sequences, numbers in other bases, words,
units."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain, combinations, product, starmap
from math import lcm
from typing import Any

from megarl.rollout.mathematics_text import AND, CLOSE, OPEN, OR, closes_at_end, spell
from megarl.rollout.mathematics_values import (
    fractions_agree,
    joined_sets,
    matches_all,
    number,
    value_of,
    values_agree,
)
from megarl.rollout.mathematics_words import (
    Words,
    plain_words,
    read_words,
    without_about,
    without_factors,
    words_agree,
)

_LARGEST_MODULUS = 10_000

LONGEST = 4000
"""Maximum characters of an answer that is parsed as mathematics. A longer answer must be identical to the
reference."""

_WORDS = re.compile(f"{OPEN}([^{CLOSE}]*){CLOSE}")
_BASES = {
    "two": 2,
    "three": 3,
    "four": 4,
    "five": 5,
    "six": 6,
    "seven": 7,
    "eight": 8,
    "nine": 9,
    "ten": 10,
    "twelve": 12,
    "sixteen": 16,
}
# A number in a base: 112_3, 112_{three}, (112)_{base 3}.
_BASE = re.compile(
    rf"\(?\s*([0-9a-zA-Z]+)\s*\)?\s*_\s*\{{?\s*\(?\s*(?:base\s*)?([0-9]+|{'|'.join(_BASES)})\s*\)?\s*\}}?"
)
# A number in a base, in words: 112 base 3, 112 (in base 3).
_IN_BASE = re.compile(rf"([0-9a-zA-Z]+)\s*\(?{OPEN}(?:in )?base{CLOSE}\s*([0-9]+)\)?")
# A residue: 3 \pmod 7, 3 (mod 7), 3 modulo 7.
_RESIDUE = re.compile(
    rf"(.+?)\s*[,(]?\s*(?:{OPEN}(?:mod|modulo){CLOSE}|\\pmod"
    rf"|\bmod\b)\s*\{{?\s*\(?\s*([^)}}]+?)\s*\)?\s*\}}?\s*\)?"
)
# A variable: a letter or a command, with indices or primes, and with an argument as in f(x).
_NAME = r"(?:[A-Za-z]|\\[a-zA-Z]+)(?:_\{?[0-9A-Za-z]+\}?|')*(?:\s*\(\s*\w+\s*\))?"
_CONGRUENT = re.compile(rf"^\s*{_NAME}\s*\\equiv\s*")
# An assignment: x = 5, AB = 5, \angle ABC = 60. The group is the value.
_ASSIGNED = re.compile(
    rf"\s*(?:\\(?:angle|triangle|overline)\s*)?(?:{_NAME}|[A-Z]+|\{{[A-Z]+\}})?\s*=(?!=)\s*([^=]*)"
)
_INDEX = re.compile(r"_(?:\{\s*[0-9]\s*\}|[0-9])\s*=")
_MEMBER = re.compile(rf"^\s*{_NAME}\s*\\in(?![a-z])\s*")
# A set with a condition: \{x \mid x > 2\}. The groups are the variable and the condition.
_BUILDER = re.compile(rf"\\\{{\s*({_NAME})\s*(?:\\in\s*\\mathbb\{{R\}}\s*)?[|:]\s*(.*)\\\}}\s*$")
_BETWEEN_NAMES = re.compile(r"\s*,\s*(?:and\s)?|\s+and\s+")
# Several numbers, such as 10 00, but not digits that follow a power, an index or a decimal point.
_SEVERAL_NUMBERS = re.compile(r"(?<![_^.\w])[0-9.]+\s+[0-9]")
_WRAPPED = r"(?:\\(?:text|textbf|textrm|mathbf|mathrm)\s*\{\s*)?"
_GAP = r"(?:\s|\\[ ,;:!]|\\q?quad(?![a-z])|~|\}|\$)+"
# A choice's letter and text: (B) 12, B) 12 or B. 12, also within \text{}. Before an operator, the letter is a
# variable.
_CHOICE = re.compile(
    rf"\s*\$?{_WRAPPED}(?:\(([A-J])\)|([A-J])[.:)]){_GAP}((?![-+*/^=_<>|]\s|[+*/^=_<>|]|\\(?:times|cdot|cup"
    rf"|cap|pm)).+)",
    re.DOTALL,
)
_BARE_CHOICE = re.compile(rf"\s*\$?{_WRAPPED}\(?([A-J])\)?[.\s}}$]*")
_OTHER_CHOICE = re.compile(r"\b(?:or|and|not)\b|(?<![A-Za-z0-9])\(?[A-J]\)?(?![A-Za-z0-9])")
_SEPARATORS = f",;{OR}{AND}"
_COMPARED = re.compile(r"[<>=]|\\(?:le|ge|ne|in)(?![a-z])")
_DECIMAL = re.compile(r"[-+]?\s*[0-9]*\.([0-9]+)")


def agree(reference: str, response: str) -> bool:
    """Return whether a final answer is equivalent to the reference. Both are raw texts, as in a box or in the
    data."""
    if max(len(reference), len(response)) > LONGEST:
        return reference.strip() == response.strip()
    by_choice = _choices_agree(reference, response)
    if by_choice is not None:
        return by_choice
    return any(starmap(_spelled_agree, product(_readings(reference), _readings(response))))


def values_in(reference: str) -> int:
    """Return the number of values in a reference: the length of a list or set, else 1."""
    text = spell(reference) if len(reference) <= LONGEST else ""
    return max(1, len(_split(_without_braces(text))))


def _choices_agree(reference: str, response: str) -> bool | None:
    """Compare two answers if one is a multiple-choice letter with its text, such as ``(B) 12``. Return None
    if neither is.

    The other answer may be the letter alone or the text alone. If both have letter and text, both must agree.
    """
    wanted, given = _choice(reference), _choice(response)
    # Check only the response for a hedge, such as "B or C": a reference has none.
    if given and _OTHER_CHOICE.search(given[1]):
        given = None
    if not wanted and not given:
        return None
    wanted_letter, wanted_text = wanted or (_bare_choice(reference), reference)
    given_letter, given_text = given or (_bare_choice(response), response)
    if wanted_letter and given_letter:
        if wanted_letter != given_letter:
            return False
        if not wanted or not given:
            return True
    return agree(wanted_text, given_text)


def _choice(text: str) -> tuple[str, str] | None:
    """Split ``(B) 12`` into the letter and the text. Return None for any other text."""
    found = _CHOICE.fullmatch(text)
    if found is None:
        return None
    # If ``\text{`` encloses letter and text, the text ends with its closing brace.
    rest = (
        found[3][:-1]
        if found[3].count("}") == found[3].count("{") + 1 and found[3].endswith("}")
        else found[3]
    )
    return found[1] or found[2], rest


def _bare_choice(text: str) -> str | None:
    found = _BARE_CHOICE.fullmatch(text)
    return found[1] if found else None


def _readings(text: str) -> list[str]:
    """Return the text and, if it contains a number like 2e-1, also a variant in which e is Euler's number."""
    by_euler = re.sub(r"([0-9])e(?=[-+][0-9])", r"\1 e ", text)
    return list(map(spell, dict.fromkeys((text, by_euler))))


def _spelled_agree(reference: str, response: str) -> bool:
    if not reference or not response:
        return False
    if _squeezed(reference) == _squeezed(response) and number(reference) is None:
        return True
    for kind in (_approximations_agree, _sequences_agree, _residues_agree, _bases_agree, _ratios_agree):
        verdict = kind(reference, response)
        if verdict is not None:
            return verdict
    return _lists_agree(reference, response)


def _squeezed(text: str) -> str:
    """Remove spaces and braces that only change the appearance of a text."""
    return re.sub(r"\{([^{}\\])\}", r"\1", re.sub(r"(?<![0-9])\s|\s(?![0-9])", "", text))


# ---- Kinds of answers. Each function returns a verdict, or None if neither side is of its kind.


def _approximations_agree(reference: str, response: str) -> bool | None:
    """Compare two answers if one is marked as an approximation. Return None if neither is.

    An approximate reference allows an error of half a unit in its last digit. An approximate response is
    correct only if the reference is a decimal with the same digits, or if the response also gives the exact
    value and its decimal rounds that value correctly.
    """
    wanted, given = _approximation(reference), _approximation(response)
    if wanted is None and given is None:
        return None
    if wanted is not None:
        exact, about = wanted
        for candidate in filter(None, given or (response,)):
            if _spelled_agree(exact, candidate) or _is_near(about, candidate):
                return True
        return False
    assert given is not None
    exact, about = given
    if exact and not _is_near(about, exact):
        return False
    if _spelled_agree(reference, exact):
        return True
    return _DECIMAL.match(_WORDS.sub("", reference).strip()) is not None and _spelled_agree(reference, about)


def _approximation(text: str) -> tuple[str, str] | None:
    r"""Split a text with ``\approx`` or ``about`` into its exact value (empty if missing) and its approximate
    value. Return None for any other text."""
    before, sign, after = text.rpartition("\\approx")
    if sign:
        # Ignore the name of the approximated quantity.
        return ("" if re.fullmatch(rf"\s*(?:{_NAME})?\s*", before) else before.strip(), after.strip())
    for run in _WORDS.finditer(text):
        if without_about(run[1])[1]:
            return "", _WORDS.sub(_words_without_about, text).strip()
    return None


def _words_without_about(run: re.Match[str]) -> str:
    kept = without_about(run[1])[0].strip()
    return f"{OPEN}{kept}{CLOSE}" if kept else ""


def _is_near(about: str, other: str) -> bool:
    """Return whether ``other``, rounded to the last digit of the decimal ``about``, equals it, and their
    words agree."""
    wanted, given = _Piece.of(about), _Piece.of(other)
    middle = number(wanted.value)
    if middle is None or not words_agree(read_words(wanted.words), read_words(given.words)):
        return False
    decimals = _DECIMAL.fullmatch(wanted.value.strip())
    allowed = Fraction(1, 2 * 10 ** len(decimals[1])) if decimals else Fraction(1, 2)
    exact = number(given.value)
    if exact is not None:
        return abs(exact - middle) <= allowed
    value = value_of(given.value)
    return value is not None and _is_within(value, middle, allowed)


def _is_within(value: Any, middle: Fraction, allowed: Fraction) -> bool:
    import sympy

    if not isinstance(value, sympy.Expr) or value.free_symbols:
        return False
    distance = sympy.N(abs(value - sympy.Rational(middle)), 30)
    return bool(distance <= sympy.Rational(allowed))


def _sequences_agree(reference: str, response: str) -> bool | None:
    r"""Compare two answers if one abbreviates a sequence, ``1,3,\ldots,2n-1``. Return None if neither does.
    The elements that are written must agree."""
    if "\\ldots" not in reference and "\\ldots" not in response:
        return None
    first, second = (
        _split(_without_braces(text).replace("\\ldots", ",\\ldots,")) for text in (reference, response)
    )
    if not len(first) == len(second) > 1:
        return False
    for one, other in zip(first, second, strict=True):
        agrees = one == other if "\\ldots" in (one, other) else _spelled_agree(one, other)
        if not agrees:
            return False
    return True


def _residues_agree(reference: str, response: str) -> bool | None:
    r"""Compare two answers if one is a residue. Return None if neither is. ``3 \pmod 7`` equals 10 modulo 7,
    but neither 3 modulo 5 nor the plain number 3."""
    wanted, given = _residues(reference), _residues(response)
    if not wanted and not given:
        return None
    if not given:
        return False
    if not wanted:
        # The reference gives only the remainder; the response may add the modulus.
        return len(given) == 1 and _spelled_agree(reference, given[0][0])
    first, second = _classes(wanted), _classes(given)
    if AND in reference + response or not first or not second:
        return matches_all(wanted, given, lambda one, other: all(map(_spelled_agree, one, other)))
    common = lcm(*(modulus for _, modulus in first | second))
    if common > _LARGEST_MODULUS:
        return first == second
    return _members(first, common) == _members(second, common)


def _classes(residues: Sequence[tuple[str, str]]) -> set[tuple[int, int]]:
    """Return (residue, modulus) as integers, the residue reduced by its modulus. The result is empty if any
    of them is not an integer."""
    classes = set[tuple[int, int]]()
    for texts in residues:
        residue, modulus = map(number, texts)
        if residue is None or not modulus or not residue.denominator == modulus.denominator == 1:
            return set()
        classes.add((int(residue % modulus), int(modulus)))
    return classes


def _members(classes: set[tuple[int, int]], common: int) -> set[int]:
    """Return the members of residue classes below a multiple of all their moduli."""
    members = set[int]()
    for residue, modulus in classes:
        members.update(range(residue % abs(modulus), common, abs(modulus)))
    return members


def _residues(text: str) -> list[tuple[str, str]]:
    r"""Parse a list of residues into pairs (residue, modulus); ``1, 3 \pmod 8`` gives two. Empty if the text
    is no such list."""
    found: list[tuple[str, str]] = []
    modulus = ""
    # Iterate backwards, because a modulus applies to the residues before it.
    for part in reversed(_split(text)):
        residue = _RESIDUE.fullmatch(part)
        modulus = residue[2] if residue else modulus
        if not modulus:
            return []
        found.insert(0, (_CONGRUENT.sub("", residue[1] if residue else part).rstrip("( "), modulus))
    return found


def _bases_agree(reference: str, response: str) -> bool | None:
    """Compare two answers if one is a number with a base. Return None if neither is. The digits must be
    equal; only the response may add the base."""
    wanted, given = _in_base(reference), _in_base(response)
    if wanted is None and given is None:
        return None
    if wanted is None:
        assert given is not None
        return number(reference) is not None and _spelled_agree(reference, given[0])
    return wanted == given


def _in_base(text: str) -> tuple[str, int] | None:
    unmarked = _WORDS.sub(r"\1", text).replace("\\", "") if "_" in text else text
    found = _BASE.fullmatch(unmarked.strip()) or _IN_BASE.fullmatch(text)
    # Capital letters are digits above 9; a lower-case letter is a variable.
    if found is None or (not found[1][0].isdigit() and not found[1].isupper()):
        return None
    if found[1].isalpha() and len(found[1]) == 1:
        return None  # a variable with an index
    return found[1].upper().lstrip("0") or "0", _BASES.get(found[2]) or int(found[2])


def _ratios_agree(reference: str, response: str) -> bool | None:
    """Compare two answers if one is a ratio such as 1:2:3, up to a common factor. Return None if neither is.
    2:05 is a time of day, not a ratio."""
    wanted, given = (list(map(number, text.split(":"))) for text in (reference, response))
    if (len(wanted) < 2 and len(given) < 2) or None in wanted or None in given:
        return None
    if re.search(r":0[0-9]", reference + response):
        return reference.lstrip("0 ") == response.lstrip("0 ")
    if len(wanted) != len(given):
        # 1:2 against a single number may be one half; leave that to the other kinds.
        return None if min(len(wanted), len(given)) == 1 and max(len(wanted), len(given)) == 2 else False
    # Compare cross products instead of quotients, because a term may be 0.
    for (first, given_first), (second, given_second) in combinations(zip(wanted, given, strict=True), 2):
        if (first or 0) * (given_second or 0) != (second or 0) * (given_first or 0):
            return False
    return True


# ---- Lists and their elements.


@dataclass(frozen=True, slots=True)
class _Piece:
    """One value and the words next to it.

    Attributes:
        value: the mathematics; empty if ``parts`` is used.
        words: all words before and after the value.
        parts: only if there are words between several values: alternately values, and words, which start with
            ``OPEN``.
    """

    value: str
    words: str
    parts: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str) -> _Piece:
        words, values, parts = list[str](), list[str](), list[str]()
        for place, part in enumerate(_WORDS.split(text)):
            # The pattern has a group, so that words and the text between them alternate.
            if place % 2:
                words.append(part)
                parts.append(f"{OPEN}{part}")
            elif value := part.strip(" ,;:"):
                values.append(value)
                parts.append(value)
        if len(values) > 1:
            return cls("", " ".join(words), tuple(parts))
        return cls(values[0] if values else "", " ".join(words))


def _lists_agree(reference: str, response: str) -> bool:
    """Compare two lists in any order. A list of one value equals that value. If the reference names its
    values (A = 3, B = 4), a response without names must give them in that order (3, 4)."""
    first = _elements(reference, names_roots=_INDEX.search(response) is None)
    second = _elements(response, names_roots=_INDEX.search(reference) is None)
    given = _listed(response)
    if _names_each(first) and "=" not in response and len(first) in (len(second), len(given)):
        return len(first) == len(given) and all(map(_elements_agree, first, given))
    if len(first) == len(second) and matches_all(first, second, _elements_agree):
        return True
    if _stream(reference) == _stream(response) and (_WORDS.search(reference) or len(first) == len(second)):
        return True
    if _conditions_agree(first, second, reference + response):
        return True
    return _is_bare_tuple(first, second, response) or _is_bare_tuple(second, first, reference)


def _names_each(elements: Sequence[str]) -> bool:
    """Return whether there are several elements, each assigned to a different name."""
    names = {each.partition("=")[0].strip() for each in elements if _ASSIGNED.fullmatch(each)}
    return len(names) == len(elements) > 1


def _is_bare_tuple(one: Sequence[str], other: Sequence[str], text: str) -> bool:
    """Return whether ``one`` is a tuple and ``other`` lists its coordinates in order, without brackets."""
    if len(one) != 1 or "\\{" in text or OR in text:
        return False
    coordinates = _coordinates(one[0])
    return len(coordinates) == len(other) and all(map(_elements_agree, coordinates, other))


def _conditions_agree(first: Sequence[str], second: Sequence[str], text: str) -> bool:
    """Compare a set with a list of conditions or sets joined by ``or``, ``and`` or commas. A comma may mean
    either."""
    if len(first) == len(second):
        return False
    for side in (first, second):
        # (1,2), (3,4) are two points, unless the text has a union: then they are intervals.
        if len(side) > 1 and "\\cup" not in text and not all(map(_COMPARED.search, side)):
            return False
    joined = "or" if OR in text else "and" if AND in text else "by commas"
    sets = [joined_sets(map(value_of, map(_condition, side)), joined) for side in (first, second)]
    return None not in sets and values_agree(*sets)


def _elements(text: str, names_roots: bool) -> list[str]:
    """Return the distinct values of a list or set. With ``names_roots``, x_1 = 1, x_2 = 2 are the two values
    1 and 2 of x, in any order."""
    expanded = _listed(text)
    roots = [_INDEX.sub("=", each) for each in expanded]
    if names_roots and len({each.partition("=")[0] for each in roots}) == 1:
        expanded = roots
    distinct: dict[Any, str] = {}
    for each in expanded:
        value = number(each)
        # Compare by value, because 0.5 and \frac{1}{2} are the same element.
        distinct.setdefault(_squeezed(each) if value is None else value, each)
    return list(distinct.values())


def _listed(text: str) -> list[str]:
    r"""Return the values of a list or set. ``\pm`` gives two values."""
    listed = _MEMBER.sub("", text)
    text = listed if listed.startswith("\\{") else text
    built = _BUILDER.match(text)
    inner = built[2] if built else _without_braces(_without_name_of_list(text))
    return list(chain.from_iterable(map(_both_signs, _split(inner))))


def _without_name_of_list(text: str) -> str:
    """Remove a name before the first value of a list: ``x = 1, 2``."""
    parts = _split(text)
    named = _ASSIGNED.match(parts[0]) if len(parts) > 1 else None
    if named is None or any(map(_COMPARED.search, parts[1:])):
        return text
    return text[named.start(1) :]


def _both_signs(text: str) -> list[str]:
    # \pmod also starts with \pm.
    if "\\pm" not in re.sub(r"\\pmod", "", text):
        return [text]
    upper = re.sub(r"\\pm(?![a-z])", "+", re.sub(r"\\mp(?![a-z])", "-", text))
    lower = re.sub(r"\\pm(?![a-z])", "-", re.sub(r"\\mp(?![a-z])", "+", text))
    return [upper.strip().removeprefix("+"), lower]


def _without_braces(text: str) -> str:
    """Return the content of a set's braces if it lists its elements, else the text unchanged."""
    inner = text.strip()
    if (
        inner.startswith("\\{")
        and inner.endswith("\\}")
        and _BUILDER.match(inner) is None
        and inner.count("\\{") == 1
    ):
        return inner[2:-2]
    return text


def _split(text: str, separators: str = _SEPARATORS) -> list[str]:
    """Split a list at the commas and connectives (or at ``separators``) that are outside all brackets."""
    depth, start, parts = 0, 0, list[str]()
    for place, character in enumerate(text):
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character in separators and depth <= 0 and not _is_in_words(text, place):
            parts.append(text[start:place])
            start = place + 1
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip(" .")]


def _is_in_words(text: str, place: int) -> bool:
    return text.rfind(OPEN, 0, place) > text.rfind(CLOSE, 0, place)


def _coordinates(text: str) -> list[str]:
    """Return the coordinates of a tuple, ``(a, b)`` or ``(x, y) = (a, b)``. Empty for any other text."""
    inner = text.rpartition("=")[2].strip()
    if not (inner.startswith("(") and inner.endswith(")") and closes_at_end(inner, "(", ")")):
        return []
    parts = _split(inner[1:-1])
    return parts if len(parts) > 1 else []


def _elements_agree(reference: str, response: str) -> bool:
    """Compare two values and their words."""
    first, second = _Piece.of(reference), _Piece.of(response)
    if first.parts or second.parts:
        return len(first.parts) == len(second.parts) and all(map(_parts_agree, first.parts, second.parts))
    if not first.value or not second.value:
        return _texts_agree(first, second)
    first, factor = _without_factor(first)
    second, other_factor = _without_factor(second)
    wanted, given = read_words(first.words), read_words(second.words)
    if given.changes != wanted.changes and not words_agree(wanted, given):
        return False
    percents = ("percent", 1) in wanted.units, ("percent", 1) in given.units
    if any(percents):
        return _percentages_agree(first, second, percents)
    if words_agree(wanted, given) and _values_agree(first.value, second.value, factor, other_factor):
        return True
    return _agree_by_letter(first.value, wanted, second.value, given) or _agree_by_letter(
        second.value, given, first.value, wanted
    )


def _agree_by_letter(value: str, words: Words, bare: str, others: Words) -> bool:
    r"""Compare a value and its unit with a text that ends in a unit letter outside ``\text{}``, such as 5
    m."""
    found = re.fullmatch(r"(.*[0-9)}])\s*([a-zA-Z](?:\s*/\s*[a-zA-Z])?)(?:\s*\^\s*\{?([0-9])\}?)?", bare)
    if found is None or not words.units or others:
        return False
    unit = read_words(found[2] + (f"^{found[3]}" if found[3] else ""))
    return unit.units == words.units and _values_agree(value, found[1])


def _parts_agree(reference: str, response: str) -> bool:
    """Compare one part each (words, or a value) of two answers that have words between values."""
    if reference.startswith(OPEN) != response.startswith(OPEN):
        return False
    if reference.startswith(OPEN):
        return read_words(reference) == read_words(response)
    return _values_agree(reference, response)


def _texts_agree(first: _Piece, second: _Piece) -> bool:
    """Compare two answers that consist of words only."""
    if first.value or second.value or not first.words or not second.words:
        return False
    if plain_words(first.words) == plain_words(second.words):
        return True
    names, others = _BETWEEN_NAMES.split(first.words), _BETWEEN_NAMES.split(second.words)
    return len(names) > 1 and sorted(map(plain_words, names)) == sorted(map(plain_words, others))


def _stream(text: str) -> tuple[str, ...]:
    """Return all words and symbols of a text in order, without separators and word marks."""
    if not _WORDS.search(text):
        return (_squeezed(text),)
    return plain_words(re.sub(f"[{_SEPARATORS}{OPEN}{CLOSE}]", " ", text), signs=True)


def _without_factor(piece: _Piece) -> tuple[_Piece, Fraction]:
    words, factor = without_factors(piece.words)
    return replace(piece, words=words), Fraction(factor)


def _percentages_agree(first: _Piece, second: _Piece, percents: Sequence[bool]) -> bool:
    """Compare two values of which at least one has a percent sign. They agree by value, or as plain numbers
    if one side lacks the sign.

    A reference without the sign counts as a percentage only if it is an integer or above 10, so that 0.5% is
    not 0.5.
    """
    rest = [read_words(re.sub(r"percent(?:age)?|%", "", piece.words)) for piece in (first, second)]
    if not words_agree(*rest) or (not all(percents) and any(rest)):
        return False
    factors = [Fraction(1, 100 if percent else 1) for percent in percents]
    if _values_agree(first.value, second.value, *factors):
        return True
    wanted = number(first.value)
    may_lack = percents[0] or (wanted is not None and (wanted.denominator == 1 or wanted > 10))
    return not all(percents) and may_lack and _values_agree(first.value, second.value)


def _values_agree(
    reference: str, response: str, factor: Fraction = Fraction(1), other_factor: Fraction = Fraction(1)
) -> bool:
    """Compare two texts without words, each multiplied by its factor."""
    reference, response = _same_side(reference, response)
    exact = list(map(number, (reference, response)))
    if any(map(_SEVERAL_NUMBERS.search, (reference, response))):
        # Compare as text, because math-verify would read 10 00 as 1000.
        return _squeezed(reference) == _squeezed(response)
    if exact[0] is not None and exact[1] is not None:
        return fractions_agree(exact[0] * factor, exact[1] * other_factor)
    if factor == other_factor == 1:
        if _squeezed(reference) == _squeezed(response):
            return True
        tuples = _coordinates(reference), _coordinates(response)
        # A pair on one side only may be an open interval, which is parsed below.
        if all(tuples) or len(tuples[0]) > 2 or len(tuples[1]) > 2:
            return len(tuples[0]) == len(tuples[1]) and all(map(_elements_agree, *tuples))
    wanted, given = value_of(_condition(reference)), value_of(_condition(response))
    for value, text in ((wanted, reference), (given, response)):
        # An impossible interval such as [2,1) is read as the empty set. It must not equal another impossible
        # interval.
        if value is None or (str(value) == "EmptySet" and "\\emptyset" not in text):
            return False
    if factor != 1 or other_factor != 1:
        wanted, given = _scaled(wanted, factor), _scaled(given, other_factor)
    return wanted is not None and given is not None and values_agree(wanted, given)


def _scaled(value: Any, factor: Fraction) -> Any:
    import sympy

    return value * sympy.Rational(factor) if isinstance(value, sympy.Expr) else None


def _same_side(reference: str, response: str) -> tuple[str, str]:
    r"""Remove a name that only one of the texts has: ``x = 5`` or ``AB = 5`` against 5, ``x \in [1,2)``
    against [1,2)."""
    reference, response = _MEMBER.sub("", reference, count=1), _MEMBER.sub("", response, count=1)
    sides = _split(response, "=")
    if not _COMPARED.search(reference) and (len(sides) > 1 or response.startswith("=")):
        return reference, sides[-1] if sides else ""
    if not _COMPARED.search(response) and (len(_split(reference, "=")) > 1 or reference.startswith("=")):
        named = _ASSIGNED.fullmatch(reference)
        return (named[1].strip() if named else reference), response
    return reference, response


def _condition(text: str) -> str:
    r"""Return the condition of a set in builder notation: ``x > 2`` from ``\{x \mid x > 2\}``. In any other
    text only remove a leading ``x \in``."""
    built = _BUILDER.match(_MEMBER.sub("", text, count=1))
    return built[2].strip() if built else _MEMBER.sub("", text, count=1)
