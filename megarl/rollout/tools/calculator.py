"""The tool ``calculator``: evaluates arithmetic on numbers, and rejects every other Python expression."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

_BINARY: Mapping[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: Mapping[type, Callable[[float], float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}

_LONGEST_EXPRESSION = 1000
# Maximum bits of an integer result: evaluating 9**9**9 would exhaust memory and time.
_MOST_BITS = 4096


def calculate(expression: str) -> str:
    """Evaluate an arithmetic expression and return its value as Python prints it.

    Raises:
        ValueError: the text is not an arithmetic expression, or its value is too large.
        ArithmeticError: the value is undefined, such as 1/0.
    """
    if len(expression) > _LONGEST_EXPRESSION:
        raise ValueError(f"the expression has more than {_LONGEST_EXPRESSION} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{expression[:60]!r} is no arithmetic expression") from None
    value = _value(tree.body)
    return (
        # Print whole floats as integers only below 2**53, where every integer is representable.
        str(int(value))
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53
        else str(value)
    )


def _value(node: ast.AST) -> float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            _refuse_large_power(left, right)
        result = _BINARY[type(node.op)](left, right)
        if isinstance(result, complex):
            raise ValueError("the value is no real number")
        if isinstance(result, int) and result.bit_length() > _MOST_BITS:
            raise ValueError("the value is too large")
        return result
    raise ValueError(f"{ast.unparse(node)[:40]!r} is no number; numbers, parentheses and + - * / // % ** are")


def _refuse_large_power(base: float, exponent: float) -> None:
    if (
        isinstance(base, int)
        and isinstance(exponent, int)
        and exponent > 0
        and base.bit_length() * exponent > _MOST_BITS
    ):
        raise ValueError("the value is too large")
