"""Tests that are stored as a Python file: pytest functions (KodCode), or plain asserts.

pytest would run all functions of a file in one process. Here each test function becomes a separate statement,
with the parts of the file that it needs. Whatever would change its meaning, or needs pytest itself, is
rejected with a reason: a test that silently does not run would pass every program.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import filterfalse
from typing import TypeGuard

from megarl.rollout.programs.own_functions import ALWAYS_OURS, EXCEPTIONS, FUNCTIONS, MODULES
from megarl.rollout.programs.statements import has_node, names_in, reason_against

# Name by which the tests of data sets import the program's file.
_PROGRAM = "solution"
# Test for a line of Python first: other formats are JSON without such lines, and parsing megabytes of it as
# Python is slow.
_BEGINS = re.compile(r"^(?:from|import|def|async|class|assert)\s|^@", re.MULTILINE)
_FIXTURE = re.compile(r"(?:setup|teardown)(?:_\w+)?|setUp|tearDown")
_OURS = {*FUNCTIONS, *ALWAYS_OURS, *EXCEPTIONS, *MODULES}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def statements_of_file(text: str) -> tuple[str, ...] | None:
    """Split a file of tests into one statement per test function, which defines and calls the function. A
    file without test functions becomes one statement. Return None if the text is not a file of tests.

    The file's other top-level code precedes each test. Unused imports are removed, since a module that is not
    installed here would prevent the evaluation of the test. Imports of the program itself are removed too,
    because its names are available anyway. Tests that share an object become one statement.

    Raises:
        ValueError: the text is a file of tests, but part of it is unsupported.
    """
    if not _BEGINS.search(text):
        return None
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not has_node(tree.body, ast.Assert | ast.ClassDef | Function):
        return None
    try:
        return tuple(map(_checked, _statements(tree)))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _statements(tree: ast.Module) -> Iterator[str]:
    tests = {node.name: node for node in tree.body if _is_test(node)}
    fault = _fault_of_tests(tree, tests)
    if fault is not None:
        raise ValueError(fault)
    body = _Plain(tree).visit(tree).body
    rest = list(filterfalse(_is_test, body))
    if not tests:
        yield _text([*_used(rest, rest)])
        return
    shared = set[str]()
    for node in rest:
        if isinstance(node, ast.Assign) and has_node(ast.walk(node), ast.Call):
            shared.update(_made(node))
    together = sum(bool(_names([test]) & shared) for test in tests.values()) > 1
    for called in [list(tests)] if together else [[name] for name in tests]:
        functions = _reached(called, tests)
        calls = ast.parse("\n".join(f"{name}()" for name in called)).body
        yield _text([*_used(rest, [*rest, *functions]), *functions, *calls])


def _is_test(node: ast.AST) -> TypeGuard[Function]:
    return isinstance(node, Function) and node.name.startswith("test")


def _fault_of_tests(tree: ast.Module, tests: dict[str, Function]) -> str | None:
    """Return which part of a file is unsupported, or None."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        imported = {alias.name for alias in node.names}
        if isinstance(node, ast.Import) and _PROGRAM in imported:
            return (
                f"it imports the program as a module: store 'from {_PROGRAM} import NAME', and use the name"
            )
        if _is_of_program(node) and (own := imported & {*_OURS, "*"}):
            return f"it tests {min(own)} of the program, which is also a name of Python"
    for each in tree.body:
        if isinstance(each, ast.ClassDef) and any(map(_is_test, each.body)):
            return f"its tests are methods of {each.name}: store functions test_...(), or assert statements"
        if isinstance(each, Function) and (_FIXTURE.fullmatch(each.name) or "fixture" in _decorators(each)):
            return f"{each.name}() is run only by pytest: call it in the tests"
    for name, test in tests.items():
        if test.args.args or test.decorator_list or isinstance(test, ast.AsyncFunctionDef):
            return (
                f"{name}() needs pytest (a fixture, a decorator or a loop): store functions without arguments"
            )
        if has_node(ast.walk(test), ast.Yield | ast.YieldFrom):
            return f"{name}() is a generator, so calling it runs nothing"
    if tests or has_node(_executed(tree), ast.Assert):
        return None
    called = _names(each for each in _executed(tree) if isinstance(each, ast.Expr))
    functions = [each.name for each in tree.body if isinstance(each, Function)]
    if not functions:
        return "it asserts nothing"
    if called.intersection(functions):
        return None
    name = functions[0]
    return (
        f"it defines {name}() but never calls it: add the line {name}(NAME), with the name of the "
        "function that it tests (in a column such as entry_point)"
    )


def _is_of_program(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == _PROGRAM


def _decorators(node: Function) -> str:
    return " ".join(map(ast.unparse, node.decorator_list))


def _executed(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the top-level statements, with the contents of an ``if __name__ == "__main__"`` block in place of
    the block."""
    for node in tree.body:
        yield from [node] if (guarded := _guarded(node)) is None else guarded


def _guarded(node: ast.stmt) -> list[ast.stmt] | None:
    """Return the contents of an ``if __name__ == "__main__"`` block, or None for any other statement."""
    return node.body if isinstance(node, ast.If) and "__name__" in _names([node.test]) else None


class _Plain(ast.NodeTransformer):
    """AST transformer that makes a test file independent of pytest and of the program's module.

    It removes imports of the program, replaces ``pytest.raises(KIND)`` by try and except, and ``==
    pytest.approx(NUMBER)`` by a comparison.

    Args:
        tree: the file. A name that it assigns is not taken for an exception class.
    """

    def __init__(self, tree: ast.Module) -> None:
        self._made = set(_made(tree))
        self._has_tests = any(map(_is_test, tree.body))

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        guarded = _guarded(node)
        # With test functions, the guarded block only calls them or pytest. Without any, the block itself is
        # the test.
        return node if guarded is None else [] if self._has_tests else guarded

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.stmt | list[ast.stmt]:
        if not _is_of_program(node):
            return node
        aliases = [f"{each.asname} = {each.name}" for each in node.names if each.asname is not None]
        return ast.parse("\n".join(aliases) or "pass").body

    def visit_With(self, node: ast.With) -> ast.With | list[ast.stmt]:
        self.generic_visit(node)
        [*others, item] = node.items
        kind = _only_argument(item.context_expr, "pytest.raises")
        if others or item.optional_vars is not None or kind is None or not self._is_kind(kind):
            return node
        before, raised, after = ast.parse("was_raised = False\nwas_raised = True\nassert was_raised").body
        return [before, ast.Try(node.body, [ast.ExceptHandler(kind, None, [raised])], [], []), after]

    def _is_kind(self, kind: ast.expr) -> bool:
        names = kind.elts if isinstance(kind, ast.Tuple) else [kind]
        return all(isinstance(each, ast.Name) and each.id not in self._made for each in names)

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        [right, *others] = node.comparators
        number = _only_argument(right, "pytest.approx")
        if others or not isinstance(node.ops[0], ast.Eq) or number is None or _names([number]):
            return node
        # The default tolerances of pytest.approx.
        bound = f"max(1e-6 * abs({ast.unparse(number)}), 1e-12)"
        apart = f"abs(({ast.unparse(node.left)}) - ({ast.unparse(number)}))"
        return ast.parse(f"{apart} <= {bound}", mode="eval").body


def _only_argument(node: ast.expr, function: str) -> ast.expr | None:
    """Return the argument of a call of ``function`` with exactly one argument; None for anything else."""
    if not isinstance(node, ast.Call) or ast.unparse(node.func) != function or node.keywords:
        return None
    return node.args[0] if len(node.args) == 1 else None


def _made(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node assigns, including aliases of imports of the program."""
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            yield each.id
        elif isinstance(each, ast.ImportFrom) and _is_of_program(each):
            for alias in each.names:
                if alias.asname is not None:
                    yield alias.asname


def _reached(names: Sequence[str], tests: dict[str, Function]) -> list[Function]:
    """Return the given tests and the tests that they call, in file order."""
    found, waiting = set[str](), list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += _names([tests[name]]) & tests.keys()
    return [test for name, test in tests.items() if name in found]


def _used(rest: Sequence[ast.stmt], users: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements ``rest``, without imports of names that none of ``users`` reads."""
    names = _names(users)
    for each in rest:
        if not isinstance(each, ast.Import | ast.ImportFrom) or any(
            (alias.asname or alias.name.partition(".")[0]) in {*names, "*"} for alias in each.names
        ):
            yield each


def _names(nodes: Iterable[ast.AST]) -> set[str]:
    return set[str]().union(*map(names_in, nodes))


def _text(nodes: Sequence[ast.stmt]) -> str:
    return "\n".join(map(ast.unparse, map(ast.fix_missing_locations, nodes)))


def _checked(statement: str) -> str:
    """Check a statement and return it. If it has to run in the program's own process, wrap it in a function,
    so that its names do not overwrite the program's.

    Raises:
        ValueError: the statement needs pytest, or a module that is not installed.
    """
    for node in ast.walk(ast.parse(statement)):
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        names += ["." * node.level + (node.module or "")] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            if name.partition(".")[0] == "pytest":
                raise ValueError(
                    "it needs pytest, of which only 'with pytest.raises(KIND)' by the names of "
                    "errors and '== pytest.approx(NUMBER)' are supported"
                )
            # Look up only the first part, because find_spec imports the parent packages of a dotted name.
            if name.startswith(".") or importlib.util.find_spec(name.partition(".")[0]) is None:
                raise ValueError(f"it imports {name}, which is not available")
    if reason_against(statement) is None:
        return statement
    lines = "\n".join(f"    {line}" for line in statement.splitlines())
    return f"def run_tests():\n{lines}\nrun_tests()"
