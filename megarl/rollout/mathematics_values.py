"""Parsing of LaTeX to mathematical values with the library math-verify, and their exact comparison.

math-verify rounds decimals to six places and ignores differences below 1e-15, so that 1/2^98 would equal
1/2^99. This module uses its parser and its rules for equations, sets and matrices, but replaces every
comparison of two numbers or expressions by an exact one.
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import lru_cache, partial
from itertools import count
from typing import Any

from megarl.patched import patched

# Maximum characters of a text to parse; its parsed value is cached.
_LONGEST_KEPT = 1000

# Decimal digits at which irrational numbers are compared. The second precision is used if they agree at the
# first.
_DIGITS = 60, 400

# Number of last digits that may differ because of rounding and cancellation.
_ROOM = 20

_LARGEST_EXPONENT = 10_000

_INTEGER, _DECIMAL = r"[0-9]+", r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_NUMBER = re.compile(
    rf"(?P<sign>[-+]?)\s*(?:(?P<whole>{_INTEGER})?\s*\\frac\s*"
    rf"\{{\s*(?P<inner>-?)\s*(?P<over>{_DECIMAL})\s*\}}\s*\{{\s*(?P<under>{_DECIMAL})\s*\}}"
    rf"|(?P<top>{_DECIMAL})\s*/\s*(?P<bottom>{_DECIMAL})"
    rf"|(?P<decimal>{_DECIMAL})(?:\s*(?:\\times|\\cdot"
    rf"|\*)\s*10\s*\^\s*\{{?\s*(?P<exponent>[-+]?[0-9]+)\s*\}}?)?)"
)


def number(text: str) -> Fraction | None:
    r"""Return the exact value of an integer, a decimal, a fraction, a mixed number or ``3\times 10^{8}``.
    Return None for any other text."""
    found = _NUMBER.fullmatch(text.strip())
    if found is None:
        return None
    part = found.groupdict()
    try:
        if part["over"]:
            value = Fraction(part["over"]) / Fraction(part["under"])
            if part["whole"] and part["inner"]:
                return None
            value = Fraction(part["whole"] or 0) + (-value if part["inner"] else value)
        elif part["top"]:
            value = Fraction(part["top"]) / Fraction(part["bottom"])
        else:
            exponent = int(part["exponent"] or 0)
            if abs(exponent) > _LARGEST_EXPONENT:
                return None
            value = Fraction(part["decimal"]) * Fraction(10) ** exponent
    except (ZeroDivisionError, ValueError):
        return None
    return -value if part["sign"] == "-" else value


def value_of(text: str) -> Any:
    """Parse LaTeX without words to a sympy value with exact decimals and with i as the imaginary unit. Return
    None if the text has no value or is too long."""
    return _value_kept(text) if len(text) <= _LONGEST_KEPT else None


def _value_now(text: str) -> Any:
    from math_verify.parser import LatexExtractionConfig, NormalizationConfig, parse

    # Units are already removed. With units=True math-verify would read 3m as 3.
    config = LatexExtractionConfig(
        normalization_config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all"
        )
    )
    silence_library()
    read = or_none(
        lambda: parse(
            f"\\boxed{{{text}}}",
            extraction_config=[config],
            fallback_mode="no_fallback",
            parsing_timeout=None,
        )
    )
    return or_none(lambda: _exact(read[0])) if read else None


_value_kept = lru_cache(maxsize=1024)(_value_now)


def silence_library() -> None:
    """Suppress a warning that math-verify logs at each call without a timeout of its own; this package sets a
    time limit itself."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)


def or_none(compute: Callable[[], Any]) -> Any:
    """Return the result of ``compute``, or None if it raises. sympy raises errors of any class on text that
    only resembles mathematics."""
    try:
        return compute()
    except Exception as error:
        logging.getLogger(__name__).debug("not mathematics: %s", error)
        return None


def _exact(value: Any) -> Any:
    """Replace floats by fractions, and the symbol i, which math-verify parses as a variable, by the imaginary
    unit."""
    import sympy

    if isinstance(value, sympy.MatrixBase):
        return value.applyfunc(_exact)
    if not isinstance(value, sympy.Basic):
        return value
    replaced: dict[Any, Any] = {}
    for each in value.atoms(sympy.Float, sympy.Symbol):
        if isinstance(each, sympy.Float):
            # Convert from the text of the float, because the float 0.1 itself is not one tenth.
            replaced[each] = sympy.Rational(str(each))
        elif each.name == "i":
            replaced[each] = sympy.I
    return value.xreplace(replaced) if replaced else value


def fractions_agree(reference: Fraction, response: Fraction) -> bool:
    """Return whether two exact numbers are equal."""
    import sympy

    return library_agrees([sympy.Rational(reference)], [sympy.Rational(response)])


def values_agree(reference: Any, response: Any) -> bool:
    """Return whether two sympy values are equal: numbers exactly, expressions for all values of their
    variables, sets by their elements."""
    import sympy

    if isinstance(reference, sympy.Expr) and isinstance(response, sympy.Expr):
        verdict = _expressions_equal(reference, response)
        if verdict is not None:
            return verdict
    sets = [_as_set(reference), _as_set(response)]
    is_set = isinstance(reference, sympy.Set) or isinstance(response, sympy.Set)
    if None not in sets and (is_set or reference.free_symbols == response.free_symbols):
        return _sets_equal(*sets)
    return library_agrees([reference], [response])


def library_agrees(reference: list[Any], response: list[Any]) -> bool:
    """Return whether math-verify, patched with exact comparisons, considers any parse of the response equal
    to the reference."""
    silence_library()
    return bool(or_none(lambda: _library_verdict(reference, response)))


def _library_verdict(reference: list[Any], response: list[Any]) -> bool:
    import math_verify as library
    from math_verify import grader

    simplified = grader.sympy_symbolic_eq

    def symbolic(one: Any, other: Any) -> bool:
        return _expressions_equal(one, other) is not False and bool(simplified(one, other))

    exact = {
        "sympy_numeric_eq": _numbers_equal,
        "sympy_symbolic_eq": symbolic,
        "sympy_deep_compare_set_and_tuple": _collections_equal,
    }
    for name in exact:
        # Raise if a new version of math-verify lacks one of these functions: it would silently round again.
        getattr(grader, name)
    # Patch the module, because math-verify accepts no comparison functions: its grader calls these by name.
    with patched(*((grader, name, function) for name, function in exact.items())):
        return library.verify(list(map(_exact, reference)), list(map(_exact, response)), timeout_seconds=None)


def _numbers_equal(one: Any, other: Any, *_: Any) -> bool:
    import sympy

    if isinstance(one, sympy.MatrixBase) and isinstance(other, sympy.MatrixBase):
        return one.shape == other.shape and all(map(_equal, one.flat(), other.flat()))
    return _expressions_equal(one, other) is True


def _equal(one: Any, other: Any) -> bool:
    from math_verify import grader

    return bool(grader.sympy_expr_eq(one, _exact(other), 0, _DIGITS[0]))


def _collections_equal(one: Any, other: Any, *_: Any) -> bool:
    """Return whether two tuples are equal element by element, or two finite sets in any order."""
    import sympy

    # math-verify's parser stores the original order of elements, which sympy's sets lose.
    first, second = list(one.args), list(getattr(other, "_unsorted_args", other.args))
    if len(first) != len(second):
        return False
    if isinstance(one, sympy.FiniteSet) and isinstance(other, sympy.FiniteSet):
        return matches_all(first, second, _equal)
    return all(map(_equal, first, second))


def matches_all(first: Iterable[Any], second: Iterable[Any], equal: Callable[[Any, Any], bool]) -> bool:
    """Return whether two collections can be matched one to one, in any order, such that matched elements are
    equal."""
    left = list(second)
    for each in first:
        for place, other in enumerate(left):
            if equal(each, other):
                left.pop(place)
                break
        else:
            return False
    return not left


def _expressions_equal(one: Any, other: Any) -> bool | None:
    """Return whether two expressions are equal wherever both are defined. Return None if numerical evaluation
    cannot decide it.

    Constants are compared as fractions, or to hundreds of digits. Expressions with variables are compared in
    this way at a few fixed points, and must agree at each of them.
    """
    import sympy

    if not (isinstance(one, sympy.Expr) and isinstance(other, sympy.Expr)):
        return None
    both = sympy.Tuple(one, other)
    if both.has(sympy.core.function.AppliedUndef):
        return None
    points = _points(sorted(both.free_symbols, key=str), whole=both.has(sympy.Sum, sympy.Product))
    verdicts = [or_none(partial(_equal_at, one, other, point)) for point in points]
    if False in verdicts:
        return False
    # Require agreement at two or more points where both are defined; constants have only one point.
    return True if verdicts.count(True) >= min(2, len(verdicts)) else None


def _points(symbols: list[Any], whole: bool) -> list[dict[Any, Any]]:
    """Return the points at which expressions are compared: all positive, all negative, small, and mixed
    coordinates. Constants get one empty point.

    Args:
        symbols: the variables.
        whole: use positive integers only, for sums whose bound is a variable.
    """
    import sympy

    if not symbols:
        return [{}]
    if whole:
        return [dict(zip(symbols, map(sympy.Integer, count(first, 2)), strict=False)) for first in (2, 5, 8)]
    # Use a separate generator, so that earlier comparisons do not change the points.
    chooser = random.Random(len(symbols))
    points: list[dict[Any, Any]] = []
    for low, high, signs in ((20, 90, (1,)), (20, 90, (-1,)), (1, 6, (1,)), (1, 90, (1, -1))):
        points.append({})
        for symbol in symbols:
            over = chooser.choice(signs) * chooser.randrange(low, high)
            points[-1][symbol] = sympy.Rational(over, chooser.choice((7, 11, 13, 17, 19)))
    return points


def _equal_at(one: Any, other: Any, point: dict[Any, Any]) -> bool | None:
    """Return whether two expressions have the same value at a point. Return None if it cannot be decided
    there, for example because one of them is undefined."""
    import sympy

    first, second = one.xreplace(point).doit(), other.xreplace(point).doit()
    if first.is_Rational and second.is_Rational:
        return bool(first == second)
    if first in (sympy.oo, -sympy.oo) or second in (sympy.oo, -sympy.oo):
        return bool(first == second)
    if point and first.is_real is not second.is_real:
        # One side is undefined here, as ln a + ln b is for negative a and b, where ln(ab) is defined.
        return None
    for digits in _DIGITS:
        verdict = _equal_to(digits, first, second)
        if verdict is not True:
            return verdict
    return True


def _equal_to(digits: int, first: Any, second: Any) -> bool | None:
    """Return whether two constants agree to ``digits`` digits, except for the last ``_ROOM``. Return None if
    either is not a finite number."""
    import sympy

    one, other = sympy.N(first, digits), sympy.N(second, digits)
    for each in (one, other):
        if not each.is_number or not each.is_finite:
            return None
    size = max(abs(one), abs(other))
    tolerance = sympy.Float(10, digits) ** (_ROOM - digits)
    if size > tolerance:
        return bool(abs(one - other) <= size * tolerance)
    # Both numbers are zero, or too small to distinguish from zero at this precision.
    return or_none(lambda: (first - second).equals(0))


def _as_set(value: Any, with_equations: bool = False) -> Any:
    """Return a set unchanged, and convert an inequality (or an equation) in one variable to its set of
    solutions. Return None for any other value."""
    import sympy
    from math_verify.grader import And

    if isinstance(value, sympy.Set):
        return value
    parts = list(getattr(value, "_unsorted_args", [value])) if isinstance(value, And) else [value]
    variables = set[Any]()
    for part in parts:
        if not isinstance(part, sympy.core.relational.Relational):
            return None
        if isinstance(part, sympy.Eq) and not with_equations:
            return None
        variables |= part.free_symbols
    if len(variables) != 1:
        return None
    return or_none(lambda: sympy.Intersection(*map(_solutions, parts)))


def _solutions(inequality: Any) -> Any:
    """Return the set of solutions of an inequality. This is all reals if it always holds, as x < oo does."""
    import sympy

    evaluated = inequality.doit()
    return sympy.S.Reals if evaluated == sympy.true else evaluated.as_set()


def _sets_equal(one: Any, other: Any) -> bool:
    """Return whether two sets of real numbers are equal. Ends of intervals are compared exactly."""
    import sympy

    if one == other:
        return True
    if isinstance(one, sympy.Interval) and isinstance(other, sympy.Interval):
        closed = (one.left_open, one.right_open) == (other.left_open, other.right_open)
        return closed and _equal(one.start, other.start) and _equal(one.end, other.end)
    if isinstance(one, sympy.FiniteSet) and isinstance(other, sympy.FiniteSet):
        return _collections_equal(one, other)
    if isinstance(one, sympy.Union) and isinstance(other, sympy.Union):
        return matches_all(one.args, other.args, _sets_equal)
    return bool(or_none(lambda: one.symmetric_difference(other).is_empty))


def joined_sets(values: Iterable[Any], joined: str) -> Any:
    """Combine sets, or conditions on one variable, into one set. Return None if a value is neither.

    Args:
        values: values parsed from LaTeX.
        joined: ``or`` for the union; ``and`` for the intersection; ``by commas`` for the intersection unless
            it is empty, else the union.
    """
    import sympy

    sets = [_as_set(value, with_equations=True) for value in values]
    if None in sets:
        return None
    common = or_none(lambda: sympy.Intersection(*sets))
    if (
        len(sets) == 1
        or joined == "and"
        or (joined == "by commas" and common is not None and not common.is_empty)
    ):
        return common
    return or_none(lambda: sympy.Union(*sets))
