"""Built-in functions and methods that a test statement may use outside of the program's process. All are
pure, and the size of their results is limited."""

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
"""Built-in functions of one argument that are evaluated in the program's process if the argument is an object
of the program. All others get the list of the object's elements instead."""

EXCEPTIONS: Mapping[str, type[BaseException]] = {
    name: kind
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, BaseException)
}

# Excluded, because their results grow too fast.
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
    # Any name may be imported from typing: annotations are never evaluated.
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
"""Functions and classes with which statements build expected values. A class of the program with the same
name never replaces them."""

VIEWS: tuple[type, ...] = (type({}.keys()), type({}.items()), type({}.values()))
_RARE = (collections.Counter, collections.deque, Decimal, Fraction)
PLAIN = (str, bytes, list, tuple, dict, set, frozenset, bool, int, float, complex, range, *VIEWS, *_RARE)
METHODS_THAT_GROW = frozenset(
    ("ljust", "rjust", "center", "zfill", "expandtabs", "to_bytes", "replace", "join", "translate")
)

# Maximum number of elements of a result, and of bits of an integer.
_LARGEST = 1_000_000


def refuse_growth(kind: type, left: Any, right: Any) -> None:
    """Check that the result of an arithmetic operation cannot be far larger than its operands.

    Raises:
        MemoryError: it may be too large.
    """
    # A short format such as "%999999999d" has a long result.
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
    """Check the length of an operation's result.

    Raises:
        MemoryError: the value has more than a million elements.
    """
    if _length(value) > _LARGEST:
        raise MemoryError(f"a {type(value).__name__} of {_length(value)} items is too large")


def refuse_large(name: str, arguments: Sequence[Any]) -> None:
    """Check that a function's result cannot be far larger than its arguments.

    Raises:
        MemoryError: it may be too large.
    """
    if name == "pow" and len(arguments) == 2:
        refuse_growth(ast.Pow, *arguments)
    if name == "range" and len(range(*arguments)) > _LARGEST:
        raise MemoryError("the range is too long")
    if name == "bytes" and isinstance(arguments[0] if arguments else None, int) and arguments[0] > _LARGEST:
        raise MemoryError("so many bytes are too many")


def bounded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method such that it raises ``MemoryError`` for arguments with which its result may be large."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        values = [getattr(method, "__self__", None), *arguments, *keywords.values()]
        if math.prod(max(1, _size(value)) for value in values) > _LARGEST:
            raise MemoryError("its result may be too large")
        return method(*arguments, **keywords)

    return call
