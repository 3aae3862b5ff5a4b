"""Mutants of a module: each differs from it in one expression or statement within a function, as a mistake of
a programmer would.

An operation finds places in the syntax tree and gives the text that stands there instead, so that a mutant is
a text and the one in its place, as any fault (``megarl.parity.faults.Fault``): it is planted in memory, or
put into a copied tree.

Left out by construction: error messages, conditions of a raise and calls that refuse or log, which tests of
numbers do not see; annotations and docstrings; arguments swapped where their order does not matter; and
dimensions, because another one is an error of torch at once.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FLIPPED = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "//",
    ast.BitAnd: "|",
    ast.BitOr: "&",
}
WIDENED = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
}
REDUCED = {
    "sum": "mean",
    "mean": "sum",
    "amax": "amin",
    "amin": "amax",
    "max": "min",
    "min": "max",
    "maximum": "minimum",
    "any": "all",
}
REDUCED |= {"minimum": "maximum", "all": "any"}
DROPPED = frozenset(
    {
        "clamp",
        "detach",
        "abs",
        "exp",
        "log",
        "sqrt",
        "square",
        "flip",
        "roll",
        "cumsum",
        "nan_to_num",
        "masked_fill",
    }
)
"""Methods whose result may be taken for what they are called on."""
LEFT_OUT = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)
REFUSING = ("check", "require", "logger.", "warnings.", "super().")
"""How the names begin of functions that refuse what they are given, or say something; and of those without
which a class is none."""
SYMMETRIC = frozenset({"maximum", "minimum", "logaddexp", "equal", "max", "min", "lcm"})
KEPT = frozenset({"dim", "dims", "axis", "dtype", "strict"})
"""Keyword arguments that are left as they are."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A change of one place.

    Attributes:
        place: qualified name of the function.
        old, new: the changed lines, before and after.
        text: of ``old`` in the module, with as many lines around it as make it unique; and what stands in its
            place.
    """

    place: str
    old: str
    new: str
    text: tuple[str, str]

    def __str__(self) -> str:
        return f"{self.place}: {self.change}"

    @property
    def change(self) -> str:
        """The changed lines in words."""
        return f"{self.old} -> {self.new}"


def mutants_of(module: str) -> list[Mutant]:
    """Return all mutants of a module of this repository, in the order of its lines."""
    return list(mutants_in(ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8")))


def sampled_mutants(module: str, most: int, seed: int) -> dict[int, Mutant]:
    """Return at most so many mutants of a module, chosen by a seed, each with its number among all."""
    found = mutants_of(module)
    chosen = random.Random(f"{seed} {module}").sample(range(len(found)), min(most, len(found)))
    return {number: found[number] for number in sorted(chosen)}


def mutants_in(source: str) -> Iterator[Mutant]:
    """Mutants of a source text."""
    lines = Lines(source)
    known: set[str] = set()
    for place, function in _functions(ast.parse(source), ""):
        for statement in function.body:
            for begin, end, new in _changes(statement, lines):
                mutant = lines.mutant(place, begin, end, new)
                if str(mutant) not in known and mutant.old != mutant.new:
                    known.add(str(mutant))
                    yield mutant


class Lines:
    """A source text by the positions of its syntax tree, whose columns count bytes."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._lines = [f"{line}\n" for line in source.split("\n")]
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Begin and end of a node in the text."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._position(node.lineno, node.col_offset), self._position(
            node.end_lineno, node.end_col_offset
        )

    def of(self, node: ast.expr | ast.stmt) -> str:
        """The text of a node."""
        begin, end = self.span(node)
        return self.source[begin:end]

    def _position(self, line: int, column: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def mutant(self, place: str, begin: int, end: int, new: str) -> Mutant:
        """The mutant that has ``new`` between two positions."""
        first = max(number for number, start in enumerate(self._starts) if start <= begin)
        last = max(number for number, start in enumerate(self._starts) if start < max(end, begin + 1))
        old_lines = self.source[self._starts[first] : self._starts[last + 1]]
        new_lines = self.source[self._starts[first] : begin] + new + self.source[end : self._starts[last + 1]]
        above = first
        while self.source.count(self.source[self._starts[above] : self._starts[last + 1]]) > 1:
            above -= 1
        context = self.source[self._starts[above] : self._starts[first]]
        old, shown = (" ".join(text.split()) for text in (old_lines, new_lines))
        return Mutant(place, old, shown, (context + old_lines, context + new_lines))


def _functions(node: ast.AST, path: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions of a module and its classes, but for those within functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef) and child.name != "__repr__":
            yield f"{path}{child.name}", child
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{path}{child.name}.")


def _changes(node: ast.AST, lines: Lines) -> Iterator[tuple[int, int, str]]:
    """Begin, end and new text of each change within a statement or an expression."""
    if isinstance(node, LEFT_OUT) or (
        isinstance(node, ast.If) and any(isinstance(each, ast.Raise) for each in node.body)
    ):
        return
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if is_text or (isinstance(node, ast.Call) and _refuses(node)):
        return
    yield from _of_node(node, lines)
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "returns", "args", "decorator_list"} and isinstance(
            node, ast.FunctionDef | ast.AnnAssign | ast.Lambda
        ):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not (isinstance(child, ast.keyword) and child.arg in KEPT):
                yield from _changes(child, lines)


def _refuses(call: ast.Call) -> bool:
    return ast.unparse(call.func).removeprefix("self.").lstrip("_").startswith(REFUSING)


def _of_node(node: ast.AST, lines: Lines) -> Iterator[tuple[int, int, str]]:
    """The changes of one node itself."""
    match node:
        case ast.BinOp() if not any(
            isinstance(side, ast.Constant) and isinstance(side.value, str) for side in (node.left, node.right)
        ):
            yield from _of_operator(node, lines)
        case ast.Compare(ops=[operator]) if type(operator) in WIDENED:
            yield _between(node.left, node.comparators[0], WIDENED[type(operator)], lines)
        case ast.BoolOp():
            word = "or" if isinstance(node.op, ast.And) else "and"
            yield _between(node.values[0], node.values[1], word, lines)
            yield (*lines.span(node), lines.of(node.values[0]))
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert()) if not isinstance(
            node.operand, ast.Constant
        ):
            yield (*lines.span(node), f"({lines.of(node.operand)})")
        case ast.Constant(value=bool()):
            yield (*lines.span(node), str(not node.value))
        case ast.Constant(value=int() | float() as number):
            yield (*lines.span(node), repr(number + 1))
        case ast.Slice():
            yield from _of_slice(node, lines)
        case ast.Call():
            yield from _of_call(node, lines)
        case ast.If() | ast.IfExp() | ast.While():
            yield (*lines.span(node.test), f"not ({lines.of(node.test)})")
        case ast.AugAssign() | ast.Continue():
            yield (*lines.span(node), "pass")
        case ast.Expr(value=ast.Call() as call) if not _refuses(call):
            yield (*lines.span(node), "pass")


def _between(left: ast.expr, right: ast.expr, word: str, lines: Lines) -> tuple[int, int, str]:
    """A change of the operator between two expressions, with the brackets that are around these."""
    begin, end = lines.span(left)[1], lines.span(right)[0]
    gap = lines.source[begin:end]
    return begin, end, f"{gap[: gap.rfind(')') + 1]} {word} {gap[gap.find('(') :] if '(' in gap else ''}"


def _of_operator(node: ast.BinOp, lines: Lines) -> Iterator[tuple[int, int, str]]:
    """Another operator, or the right operand left out."""
    if type(node.op) in FLIPPED:
        yield _between(node.left, node.right, FLIPPED[type(node.op)], lines)
        begin, end = lines.span(node.left)[1], lines.span(node)[1]
        yield begin, end, _closed(lines.source[begin:end])


def _closed(text: str) -> str:
    """The brackets that close before an operator: those of the left operand."""
    depth, kept = 0, ""
    for sign in text:
        depth += (sign == "(") - (sign == ")")
        if depth < 0:
            kept, depth = kept + ")", 0
    return kept


def _of_slice(node: ast.Slice, lines: Lines) -> Iterator[tuple[int, int, str]]:
    """The begin of a slice one further on; one from the beginning that ends before the end, or has a step,
    begins one later."""
    if node.lower is None and (node.upper is not None or node.step is not None):
        begin, _ = lines.span(node)
        yield begin, begin, "1"
    if node.lower is not None and not isinstance(node.lower, ast.Constant):
        yield (*lines.span(node.lower), f"{lines.of(node.lower)} + 1")


def _of_call(node: ast.Call, lines: Lines) -> Iterator[tuple[int, int, str]]:
    """Arguments swapped, another reduction, or the method left out."""
    values = [each for each in node.args if not isinstance(each, ast.Starred)]
    first = 1 if ast.unparse(node.func) == "torch.where" else 0
    pair = values[first : first + 2] if len(values) == len(node.args) else []
    if (
        len(pair) == 2
        and not isinstance(pair[1], ast.Constant)
        and ast.unparse(node.func).rpartition(".")[2] not in SYMMETRIC
    ):
        one, other = pair
        between = lines.source[lines.span(one)[1] : lines.span(other)[0]]
        yield lines.span(one)[0], lines.span(other)[1], lines.of(other) + between + lines.of(one)
    if isinstance(node.func, ast.Attribute):
        begin, end = lines.span(node.func.value)[1], lines.span(node.func)[1]
        if node.func.attr in REDUCED:
            yield begin, end, lines.source[begin:end].replace(node.func.attr, REDUCED[node.func.attr])
        if node.func.attr in DROPPED and ast.unparse(node.func.value) != "torch":
            yield begin, lines.span(node)[1], _closed(lines.source[begin : lines.span(node.func)[1]])
