"""Python's own functions and methods that a statement about a program may use: pure ones, with results of
limited size."""

from __future__ import annotations

import ast
import builtins
import collections
import math
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

_FUNCTIONS = (
    *(
        abs,
        all,
        any,
        ascii,
        bin,
        bool,
        bytes,
        chr,
        complex,
        dict,
        divmod,
        enumerate,
        filter,
        float,
        frozenset,
        hex,
        int,
    ),
    *(
        isinstance,
        iter,
        len,
        list,
        map,
        max,
        min,
        next,
        oct,
        ord,
        pow,
        range,
        repr,
        reversed,
        round,
        set,
        sorted,
        str,
    ),
    *(sum, tuple, type, zip),
)
FUNCTIONS: Mapping[str, Callable[..., Any]] = {function.__name__: function for function in _FUNCTIONS}

ASKED_OF_OBJECTS = frozenset(
    function.__name__
    for function in (abs, bool, bytes, complex, dict, float, int, iter, len, next, repr, reversed, round, str)
)
"""Functions of one argument that are evaluated in the program's process if the argument is an object of the
program.

The other functions get the list of the object's elements instead.
"""

EXCEPTIONS: Mapping[str, type[BaseException]] = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, BaseException)
}

# The results of these functions grow too fast.
_NOT_OF_MATHEMATICS = {"comb", "factorial", "perm"}

MODULES: Mapping[str, Mapping[str, Any]] = {
    "math": {
        name: value
        for name, value in vars(math).items()
        if not name.startswith("_") and name not in _NOT_OF_MATHEMATICS
    },
    "collections": {"Counter": collections.Counter, "deque": collections.deque},
    "decimal": {"Decimal": Decimal},
    "fractions": {"Fraction": Fraction},
    # Any name of typing may be imported: they occur only in annotations, which are not evaluated.
    "typing": {},
    "__future__": {"annotations": None},
}
ALWAYS_OURS: Mapping[str, Any] = {
    "isclose": math.isclose,
    "Counter": collections.Counter,
    "deque": collections.deque,
    "Decimal": Decimal,
    "Fraction": Fraction,
}
"""Functions and classes for expected values. A class of the program with the same name never replaces
them."""

VIEWS: tuple[type, ...] = (type({}.keys()), type({}.items()), type({}.values()))
_RARE = (collections.Counter, collections.deque, Decimal, Fraction)
PLAIN = (str, bytes, list, tuple, dict, set, frozenset, bool, int, float, complex, range, *VIEWS, *_RARE)
METHODS_THAT_GROW = frozenset(
    ("ljust", "rjust", "center", "zfill", "expandtabs", "to_bytes", "replace", "join", "translate")
)

# Maximum length of an operation's result, and maximum number of bits of a number.
_LARGEST = 1_000_000


def refuse_growth(kind: type, left: Any, right: Any) -> None:
    """Refuse an operation whose result may be far larger than its operands.

    Raises:
        MemoryError: the result may be too large.
    """
    # A short text such as "%999999999d" % 1 has a long result.
    if kind is ast.Mod and isinstance(left, str | bytes):
        raise MemoryError("the width of a format is not known")
    if kind not in (ast.Pow, ast.LShift, ast.Mult):
        return
    if isinstance(left, int) and isinstance(right, int):
        bits = max(1, left.bit_length())
        sizes = {
            ast.Pow: bits * abs(right),
            ast.LShift: bits + abs(right),
            ast.Mult: bits + right.bit_length(),
        }
        size = sizes[kind]
    else:
        size = _size(left) * _size(right)
    if size > _LARGEST:
        raise MemoryError(f"what {kind.__name__} makes is too large")


def _size(operand: Any) -> int:
    return abs(operand) if isinstance(operand, int) else _length(operand)


def _length(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 1


def refuse_long(value: Any) -> None:
    """Refuse a long result of an operation on shorter values.

    Raises:
        MemoryError: the value has more than a million items.
    """
    if _length(value) > _LARGEST:
        raise MemoryError(f"a {type(value).__name__} of {_length(value)} items is too large")


def refuse_large(name: str, arguments: Sequence[Any]) -> None:
    """Refuse to call a function whose result may be far larger than its arguments.

    Raises:
        MemoryError: the result may be too large.
    """
    if name == "pow" and len(arguments) == 2:
        refuse_growth(ast.Pow, *arguments)
    if name == "range" and len(range(*arguments)) > _LARGEST:
        raise MemoryError("the range is too long")
    if name == "bytes" and isinstance(arguments[0] if arguments else None, int) and arguments[0] > _LARGEST:
        raise MemoryError("so many bytes are too many")


def bounded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method so that it refuses arguments with which its result may be large."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        values = [getattr(method, "__self__", None), *arguments, *keywords.values()]
        if math.prod(max(1, _size(value)) for value in values) > _LARGEST:
            raise MemoryError("its result may be too large")
        return method(*arguments, **keywords)

    return call
