"""Tests of a program that are written as a file of Python: functions for pytest (KodCode), or asserts."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

# What data sets call the file that a program stands in.
_PROGRAM = "solution"
# JSON, which other forms are, has no line that begins so; parsing megabytes of it as Python would take long.
_BEGINS = re.compile(r"^(?:from|import|def|class|assert)\s|^@", re.MULTILINE)


def statements_of_file(text: str) -> tuple[str, ...] | None:
    """Return a statement for each test function of a file, which defines it and calls it, or the whole file
    where it has none; None for a text that is no file of tests.

    What else is at the top level stands before each; of the imports, those that the function uses, since one
    module that is not there outside of the program would keep all tests from being evaluated there. The
    program's own names need no import.

    Raises:
        ValueError: it is one, and needs what only pytest has, or lacks the call of its function.
    """
    if not _BEGINS.search(text):
        return None
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not any(isinstance(node, ast.Assert | ast.FunctionDef | ast.ClassDef) for node in tree.body):
        return None
    nodes: list[ast.stmt] = [_ExpectedErrors().visit(each) for node in tree.body for each in _own(node)]
    tests = [each for each in nodes if isinstance(each, ast.FunctionDef) and each.name.startswith("test")]
    rest = [each for each in nodes if each not in tests]
    fault = _fault_of_tests(tests, rest)
    if fault is not None:
        raise ValueError(fault)
    if not tests:
        return (_text(_used(rest, rest)),)
    return tuple(
        _text([*_used(rest, [*rest, test]), test, *ast.parse(f"{test.name}()").body]) for test in tests
    )


def _own(node: ast.stmt) -> Iterator[ast.stmt]:
    """Yield what is left of a statement without an import of the program, whose names are there."""
    if isinstance(node, ast.Import) and any(each.name == _PROGRAM for each in node.names):
        raise ValueError(
            f"it imports the program as a module: store 'from {_PROGRAM} import NAME', and use the name"
        )
    if not (isinstance(node, ast.ImportFrom) and node.module == _PROGRAM):
        yield node
        return
    for each in node.names:
        if each.asname is not None:
            yield from ast.parse(f"{each.asname} = {each.name}").body


class _ExpectedErrors(ast.NodeTransformer):
    """Says ``with pytest.raises(KIND)`` by try and except, which can be evaluated outside of the program."""

    def visit_With(self, node: ast.With) -> ast.With | list[ast.stmt]:
        self.generic_visit(node)
        [*others, item] = node.items
        call = item.context_expr
        if (
            others
            or item.optional_vars is not None
            or not isinstance(call, ast.Call)
            or ast.unparse(call.func) != "pytest.raises"
            or len(call.args) != 1
            or call.keywords
        ):
            return node
        before, raised, after = ast.parse("was_raised = False\nwas_raised = True\nassert was_raised").body
        handler = ast.ExceptHandler(call.args[0], None, [raised])
        return [before, ast.Try(node.body, [handler], [], []), after]


def _fault_of_tests(tests: Sequence[ast.FunctionDef], rest: Sequence[ast.stmt]) -> str | None:
    """Say what tests need that is not there, or None."""
    classes = [each.name for each in rest if isinstance(each, ast.ClassDef) and each.name.startswith("Test")]
    if classes:
        return f"its tests are methods of {classes[0]}: store functions test_...(), or assert statements"
    wanting = [each.name for each in tests if each.args.args or each.decorator_list]
    if wanting:
        return f"{wanting[0]}() needs pytest (a fixture or a decorator): store functions without arguments"
    used = _names(rest)
    uncalled = [each.name for each in rest if isinstance(each, ast.FunctionDef) and each.name not in used]
    if uncalled and not tests:
        return (
            f"it defines {uncalled[0]}() and calls it nowhere: add the line {uncalled[0]}(NAME), with the "
            "name of the function that it tests (in a column such as entry_point)"
        )
    return None


def _used(rest: Sequence[ast.stmt], users: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Return statements without imports of names that none of ``users`` reads."""
    names = _names(users)
    return [
        each
        for each in rest
        if not isinstance(each, ast.Import | ast.ImportFrom)
        or any((alias.asname or alias.name.partition(".")[0]) in {*names, "*"} for alias in each.names)
    ]


def _names(nodes: Sequence[ast.stmt]) -> set[str]:
    return {node.id for each in nodes for node in ast.walk(each) if isinstance(node, ast.Name)}


def _text(nodes: Sequence[ast.stmt]) -> str:
    return "\n".join(ast.unparse(ast.fix_missing_locations(each)) for each in nodes)
