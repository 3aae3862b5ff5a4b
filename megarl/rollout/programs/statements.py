"""Classification of test statements (``assert f(2) == 4``): which of them can be evaluated outside of the
program's process.

Such a statement is interpreted (see ``evaluation``) and never executed as Python. ``reason_against`` returns
why a statement cannot be evaluated: it uses unsupported syntax, passes a function of its own to the program,
or needs a module that is not available.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Any

from megarl.rollout.programs.conversation import Conversation
from megarl.rollout.programs.evaluation import runs_to_its_end
from megarl.rollout.programs.own_functions import ALWAYS_OURS, EXCEPTIONS, FUNCTIONS, MODULES

# Names with which a statement may compare results. They must not be looked up in the program, which could
# define them to its advantage.
_JUDGES = frozenset(
    (
        *("np", "numpy", "pd", "pandas", "pytest", "unittest", "torch", "scipy", "sympy", "random", "re"),
        *(
            "string",
            "copy",
            "itertools",
            "functools",
            "os",
            "sys",
            "datetime",
            "date",
            "timedelta",
            "OrderedDict",
        ),
        *("defaultdict", "cmath", "statistics", "json", "heapq", "bisect", "operator"),
    )
)

_OURS = {*FUNCTIONS, *EXCEPTIONS, *MODULES, *ALWAYS_OURS}
# Methods that produce a large result from a short text or a small number.
_NEVER = {"format", "format_map", "elements"}

# An allow-list, so that new Python syntax is rejected until the interpreter supports it.
_NODES = (
    ast.Module,
    ast.Expr,
    ast.Assert,
    ast.Assign,
    ast.AnnAssign,
    ast.AugAssign,
    ast.For,
    ast.If,
    ast.Pass,
    ast.Break,
    ast.Continue,
    ast.Return,
    ast.Try,
    ast.ExceptHandler,
    ast.FunctionDef,
    ast.arguments,
    ast.arg,
    ast.Import,
    ast.ImportFrom,
    ast.alias,
    ast.BoolOp,
    ast.BinOp,
    ast.UnaryOp,
    ast.Compare,
    ast.Call,
    ast.keyword,
    ast.Lambda,
    ast.IfExp,
    ast.Constant,
    ast.Name,
    ast.Attribute,
    ast.Subscript,
    ast.Slice,
    ast.Starred,
    ast.List,
    ast.Tuple,
    ast.Set,
    ast.Dict,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
    ast.comprehension,
    ast.expr_context,
    ast.boolop,
    ast.operator,
    ast.unaryop,
    ast.cmpop,
)


def reason_against(statement: str) -> str | None:
    """Return why a statement cannot be evaluated outside of the program, or None."""
    try:
        return _reason_against_tree(ast.parse(statement))
    except (SyntaxError, ValueError):
        return "it is no Python"
    except (RecursionError, MemoryError):
        return "it is nested too deeply"


def _reason_against_tree(tree: ast.Module) -> str | None:
    if not has_node(ast.walk(tree), ast.Assert | ast.Raise):
        return "it asserts nothing"
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    nodes = list(_evaluated(tree))
    keys = set[int]()
    for node in nodes:
        if isinstance(node, ast.Call):
            keys.update(map(id, _lambdas_for_us(node)))
    for node in nodes:
        reason = _reason_against_node(node) or _reason_against_call(node, functions)
        if isinstance(node, ast.Lambda) and id(node) not in keys:
            reason = "a function is stored or passed to the program"
        if reason is not None:
            return reason
    return None


def has_node(nodes: Iterable[ast.AST], kinds: Any) -> bool:
    """Return whether any node is of one of the kinds."""
    return any(isinstance(node, kinds) for node in nodes)


def _passed(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _lambdas_for_us(call: ast.Call) -> list[ast.expr]:
    """Return the lambdas that a call passes to a built-in function."""
    ours = isinstance(call.func, ast.Name) and call.func.id in FUNCTIONS
    ours = ours or (isinstance(call.func, ast.Attribute) and call.func.attr == "sort")
    return [each for each in _passed(call) if ours and isinstance(each, ast.Lambda)]


def _reason_against_call(node: ast.AST, functions: set[str]) -> str | None:
    if not isinstance(node, ast.Call) or (
        isinstance(node.func, ast.Name) and node.func.id in {*functions, *FUNCTIONS}
    ):
        return None
    for each in _passed(node):
        if isinstance(each, ast.Name) and each.id in functions:
            return "a function is passed to the program"
    return None


def _evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes except those that are never evaluated: messages of asserts, annotations and causes of
    exceptions."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("msg", "annotation", "returns") or (isinstance(node, ast.Raise) and name == "cause"):
            continue
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.AST):
                yield from _evaluated(each)


def _reason_against_node(node: ast.AST) -> str | None:
    if not isinstance(node, (*_NODES, ast.Raise)):
        return f"{type(node).__name__} is not evaluated outside the sandbox"
    match node:
        case ast.Assert(test=ast.Tuple(elts=[_, *_])):
            return "a tuple is always true"
        case ast.Name(id=name) if name in _JUDGES or name.startswith("__"):
            return f"{name} is not evaluated outside the sandbox"
        case ast.Attribute(attr=name) if name.startswith("_") or name in _NEVER:
            return f"the attribute {name} is not read outside the sandbox"
        # Any attribute is allowed if the name is not one of our modules: it may be a value of the program.
        case ast.Attribute(value=ast.Name(id=module), attr=name) if name not in MODULES.get(
            module, {name: None}
        ):
            return f"{module}.{name} is not available outside the sandbox"
        case ast.Import(names=names):
            wanted = [alias.name for alias in names if alias.name not in MODULES]
            return f"the module {wanted[0]} is not available outside the sandbox" if wanted else None
        case ast.ImportFrom(module=module, names=names, level=level):
            known = module in MODULES and not level
            fits = known and (
                module == "typing" or all(alias.name in MODULES[module or ""] for alias in names)
            )
            return None if fits else f"the module {module} is not available outside the sandbox"
        case ast.FunctionDef(decorator_list=decorators, args=ast.arguments() as arguments):
            simple = not (
                decorators
                or arguments.vararg
                or arguments.kwarg
                or arguments.kwonlyargs
                or arguments.defaults
            )
            return None if simple else f"the function {node.name} is not evaluated outside the sandbox"
        case ast.ExceptHandler(name=str()):
            return "it reads an exception"
    return None


def reason_to_doubt(statement: str) -> str | None:
    """Return why a program may pass a statement without solving its task, although the statement is evaluated
    outside; or None."""
    tree = ast.parse(statement)
    not_programs = _OURS | _names_made(tree)
    # In order, so that a name assigned from the program's names counts as the program's too.
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and names_in(node.value) - not_programs:
            not_programs -= {each.id for each in node.targets if isinstance(each, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and all(
            names_in(each) - not_programs for each in (node.left, *node.comparators)
        ):
            return "it compares two values that the program makes"
    return None


def names_in(part: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(part) if isinstance(node, ast.Name)}


def _names_made(tree: ast.Module) -> set[str]:
    """Return the names that a statement defines."""
    made = set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                made.add(name)
            case ast.FunctionDef(name=name) | ast.arg(arg=name):
                made.add(name)
            case ast.alias():
                made.add(node.asname or node.name)
    return made


def holds(statement: str, program: Conversation) -> bool:
    """Return whether a statement runs without an exception.

    Args:
        statement: a statement for which ``reason_against`` returns None.
        program: the program under test.

    Raises:
        EndedError: the program has exited.
    """
    tree = ast.parse(statement)
    return runs_to_its_end(tree.body, program, _functions_of_program(tree))


def _functions_of_program(tree: ast.Module) -> frozenset[str]:
    """Return the names of built-in functions that refer to the program's functions instead: if a statement
    uses no other names, it must be testing these."""
    names = names_in(tree)
    made = _names_made(tree)
    return frozenset() if names - _OURS - made else frozenset(names & {*FUNCTIONS, *ALWAYS_OURS} - made)
