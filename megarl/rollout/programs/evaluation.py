"""An interpreter for a subset of Python, which evaluates test statements outside of the tested program's
process.

Calls of the program's functions are sent to it as requests; arguments and results are plain values. Expected
values never leave this process, so the program cannot read them. The interpreter supports operators, pure
built-in functions, and loops over existing values. Names that a statement does not define are looked up in
the program.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from megarl.rollout.programs.conversation import Conversation, RaisedError, Remote
from megarl.rollout.programs.own_functions import (
    ALWAYS_OURS,
    ASKED_OF_OBJECTS,
    EXCEPTIONS,
    FUNCTIONS,
    METHODS_THAT_GROW,
    MODULES,
    PLAIN,
    VIEWS,
    bounded,
    refuse_growth,
    refuse_large,
    refuse_long,
)

# Maximum number of nodes that one statement may evaluate.
_STEPS = 200_000

_BINARY: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}
_COMPARISONS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_UNARY: Mapping[type, Callable[[Any], Any]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Invert: operator.invert,
}
# Exceptions that operations raise here just as they would in the program.
_OF_PYTHON = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, NameError)


class _Jump(Exception):
    """Base of the exceptions by which control leaves a block."""


class _Break(_Jump):
    """Raised to leave a loop."""


class _Continue(_Jump):
    """Raised to continue with a loop's next value."""


class _Return(_Jump):
    """Raised to return a value from a function."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def runs_to_its_end(body: Sequence[ast.stmt], program: Conversation, tested: frozenset[str]) -> bool:
    """Return whether statements run without an exception.

    Args:
        body: statements for which ``statements.reason_against`` returns None.
        program: the program under test.
        tested: names of built-in functions that refer to the program's functions of the same name.

    Raises:
        EndedError: the program has exited.
    """
    try:
        _Interpreter(program, tested).execute(body)
    except (RaisedError, _Jump, StopIteration, RuntimeError, BufferError, MemoryError):
        return False
    except _OF_PYTHON:
        return False
    return True


class _Interpreter:
    """Evaluates statements, and holds the names that they define.

    Args:
        program: the program under test, in which all other names are looked up.
        tested: names of built-in functions that refer to the program's functions of the same name.
        names: initial names, for scopes of functions and comprehensions.
    """

    def __init__(
        self, program: Conversation, tested: frozenset[str], names: Mapping[str, Any] | None = None
    ) -> None:
        self._program, self._tested = program, tested
        self._names = dict(names or {})
        self._steps = [0]

    def _inner(self, names: Mapping[str, Any]) -> _Interpreter:
        inner = _Interpreter(self._program, self._tested, {**self._names, **names})
        # Share the counter, because the limit on steps is for all scopes together.
        inner._steps = self._steps
        return inner

    def execute(self, body: Sequence[ast.stmt]) -> None:
        """Run statements in order."""
        for statement in body:
            self._count()
            getattr(self, f"_run_{type(statement).__name__}")(statement)

    def _count(self) -> None:
        self._steps[0] += 1
        if self._steps[0] > _STEPS:
            raise MemoryError(f"a statement takes more than {_STEPS} steps")

    # Statements.

    def _run_Pass(self, node: ast.Pass) -> None:
        """Do nothing."""

    def _run_Expr(self, node: ast.Expr) -> None:
        self._value(node.value)

    def _run_Assert(self, node: ast.Assert) -> None:
        if not self._truth(self._value(node.test)):
            raise RaisedError(_names_of(AssertionError))

    def _run_Raise(self, node: ast.Raise) -> None:
        kind = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        value = self._value(kind) if kind is not None else AssertionError
        raise RaisedError(_names_of(value) if isinstance(value, type) else ["Exception"])

    def _run_Assign(self, node: ast.Assign) -> None:
        value = self._value(node.value)
        for target in node.targets:
            self._assign(target, value)

    def _run_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._assign(node.target, self._value(node.value))

    def _run_AugAssign(self, node: ast.AugAssign) -> None:
        # Parse the target again: its own nodes have a store context and no value.
        load = ast.copy_location(ast.parse(ast.unparse(node.target), mode="eval").body, node.target)
        self._assign(node.target, self._binary(type(node.op), self._value(load), self._value(node.value)))

    def _run_For(self, node: ast.For) -> None:
        for each in self._iterated(self._value(node.iter)):
            self._count()
            self._assign(node.target, each)
            try:
                self.execute(node.body)
            except _Break:
                return
            except _Continue:
                continue
        self.execute(node.orelse)

    def _run_Break(self, node: ast.Break) -> None:
        raise _Break

    def _run_Continue(self, node: ast.Continue) -> None:
        raise _Continue

    def _run_Return(self, node: ast.Return) -> None:
        raise _Return(None if node.value is None else self._value(node.value))

    def _run_If(self, node: ast.If) -> None:
        self.execute(node.body if self._truth(self._value(node.test)) else node.orelse)

    def _run_Try(self, node: ast.Try) -> None:
        try:
            self._try(node)
        finally:
            self.execute(node.finalbody)

    def _try(self, node: ast.Try) -> None:
        try:
            self.execute(node.body)
        # A _Jump is not caught: break, continue and return are no errors.
        except (RaisedError, *_OF_PYTHON) as error:
            kinds = error.kinds if isinstance(error, RaisedError) else _names_of(type(error))
            for handler in node.handlers:
                if self._is_handled(handler, kinds):
                    self.execute(handler.body)
                    return
            raise
        self.execute(node.orelse)

    def _is_handled(self, handler: ast.ExceptHandler, kinds: Sequence[str]) -> bool:
        if handler.type is None:
            return True
        wanted = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        return any(each.id in kinds for each in wanted if isinstance(each, ast.Name))

    def _run_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._names[alias.asname or alias.name] = MODULES[alias.name]

    def _run_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self._names[alias.asname or alias.name] = MODULES[node.module or ""].get(alias.name)

    def _run_FunctionDef(self, node: ast.FunctionDef) -> None:
        parameters = [each.arg for each in (*node.args.posonlyargs, *node.args.args)]

        def function(*arguments: Any) -> Any:
            self._count()
            try:
                self._inner(dict(zip(parameters, arguments, strict=True))).execute(node.body)
            except _Return as returned:
                return returned.value
            return None

        self._names[node.name] = function

    def _assign(self, target: ast.expr, value: Any) -> None:
        match target:
            case ast.Name(id=name):
                self._names[name] = value
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                for part, each in zip(parts, self._iterated(value), strict=True):
                    self._assign(part, each)
            case ast.Attribute(value=of, attr=name) if isinstance(owner := self._value(of), Remote):
                self._program.call(Remote(builtin="setattr"), [owner, name, value])
            case ast.Subscript(value=of, slice=key):
                owner = self._value(of)
                if isinstance(owner, Remote):
                    self._program.call(Remote(builtin="operator.setitem"), [owner, self._value(key), value])
                else:
                    owner[self._value(key)] = value
            case _:
                raise TypeError("this cannot be assigned to")

    # Expressions.

    def _value(self, node: ast.expr) -> Any:
        self._count()
        return getattr(self, f"_of_{type(node).__name__}")(node)

    def _of_Constant(self, node: ast.Constant) -> Any:
        return node.value

    def _of_Name(self, node: ast.Name) -> Any:
        name = node.id
        if name in self._names:
            return self._names[name]
        # Before the built-ins: if a statement tests a function called sorted, it means the program's.
        if name in self._tested:
            return self._program.name(name)
        for table in (FUNCTIONS, ALWAYS_OURS, EXCEPTIONS, MODULES):
            if name in table:
                return table[name]
        return self._program.name(name)

    def _of_List(self, node: ast.List) -> list[Any]:
        return self._elements(node.elts)

    def _of_Tuple(self, node: ast.Tuple) -> tuple[Any, ...]:
        return tuple(self._elements(node.elts))

    def _of_Set(self, node: ast.Set) -> set[Any]:
        return set(self._elements(node.elts))

    def _of_Dict(self, node: ast.Dict) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            if key is None:
                made.update(self._value(value))
            else:
                made[self._value(key)] = self._value(value)
        return made

    def _elements(self, nodes: Sequence[ast.expr]) -> list[Any]:
        found = list[Any]()
        for node in nodes:
            if isinstance(node, ast.Starred):
                found += self._iterated(self._value(node.value))
                refuse_long(found)
            else:
                found.append(self._value(node))
        return found

    def _of_ListComp(self, node: ast.ListComp) -> list[Any]:
        return [inner._value(node.elt) for inner in self._loops(node.generators)]

    def _of_SetComp(self, node: ast.SetComp) -> set[Any]:
        return {inner._value(node.elt) for inner in self._loops(node.generators)}

    def _of_GeneratorExp(self, node: ast.GeneratorExp) -> Iterator[Any]:
        return (inner._value(node.elt) for inner in self._loops(node.generators))

    def _of_DictComp(self, node: ast.DictComp) -> dict[Any, Any]:
        return {inner._value(node.key): inner._value(node.value) for inner in self._loops(node.generators)}

    def _loops(self, generators: Sequence[ast.comprehension]) -> Iterator[_Interpreter]:
        if not generators:
            yield self
            return
        first, *rest = generators
        for each in self._iterated(self._value(first.iter)):
            self._count()
            inner = self._inner({})
            inner._assign(first.target, each)
            if all(inner._truth(inner._value(test)) for test in first.ifs):
                yield from inner._loops(rest)

    def _of_Lambda(self, node: ast.Lambda) -> Callable[..., Any]:
        parameters = [each.arg for each in node.args.args]

        def function(*arguments: Any) -> Any:
            return self._inner(dict(zip(parameters, arguments, strict=True)))._value(node.body)

        return function

    def _of_IfExp(self, node: ast.IfExp) -> Any:
        return self._value(node.body if self._truth(self._value(node.test)) else node.orelse)

    def _of_BoolOp(self, node: ast.BoolOp) -> Any:
        stops_at = isinstance(node.op, ast.Or)
        value = None
        for each in node.values:
            value = self._value(each)
            if self._truth(value) is stops_at:
                break
        return value

    def _of_UnaryOp(self, node: ast.UnaryOp) -> Any:
        value = self._value(node.operand)
        if isinstance(node.op, ast.Not):
            return not self._truth(value)
        return _UNARY[type(node.op)](value)

    def _of_BinOp(self, node: ast.BinOp) -> Any:
        return self._binary(type(node.op), self._value(node.left), self._value(node.right))

    def _binary(self, kind: type, left: Any, right: Any) -> Any:
        function = _BINARY[kind]
        if isinstance(left, Remote) and isinstance(right, Remote):
            return self._program.call(
                Remote(builtin=f"operator.{function.__name__.rstrip('_')}"), [left, right]
            )
        # If only one side is an object of the program, evaluate here: the plain value may be the expected
        # one, which the program must not see.
        refuse_growth(kind, left, right)
        value = function(left, right)
        # Check the result too: x + x in a loop grows by small steps.
        refuse_long(value)
        return value

    def _of_Compare(self, node: ast.Compare) -> Any:
        left, result = self._value(node.left), True
        for kind, part in zip(node.ops, node.comparators, strict=True):
            right = self._value(part)
            result = self._compared(kind, left, right)
            if not self._truth(result):
                break
            left = right
        return result

    def _compared(self, kind: ast.cmpop, left: Any, right: Any) -> Any:
        match kind:
            case ast.Is() | ast.IsNot():
                return _is_same(left, right) is isinstance(kind, ast.Is)
            case ast.In() | ast.NotIn():
                inside = self._contains(right, left)
                return inside is isinstance(kind, ast.In)
        function = _COMPARISONS[type(kind)]
        if isinstance(left, Remote) and isinstance(right, Remote):
            return self._program.call(Remote(builtin=f"operator.{function.__name__}"), [left, right])
        return function(left, right)

    def _contains(self, container: Any, value: Any) -> bool:
        return value in (self._iterated(container) if isinstance(container, Remote) else container)

    def _of_Subscript(self, node: ast.Subscript) -> Any:
        of, key = self._value(node.value), self._value(node.slice)
        if isinstance(of, Remote):
            return self._program.call(Remote(builtin="operator.getitem"), [of, key])
        return of[key]

    def _of_Slice(self, node: ast.Slice) -> slice:
        return slice(
            *(None if part is None else self._value(part) for part in (node.lower, node.upper, node.step))
        )

    def _of_Attribute(self, node: ast.Attribute) -> Any:
        of, name = self._value(node.value), node.attr
        if isinstance(of, Remote):
            return self._program.call(Remote(builtin="getattr"), [of, name])
        if isinstance(of, Mapping) and any(of is module for module in MODULES.values()):
            return of[name]
        if type(of) not in PLAIN:
            raise AttributeError(name)
        method = getattr(of, name)
        return bounded(method) if name in METHODS_THAT_GROW else method

    def _of_Call(self, node: ast.Call) -> Any:
        function = self._value(node.func)
        arguments = self._elements(node.args)
        keywords: dict[str, Any] = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                keywords.update(self._value(keyword.value))
            else:
                keywords[keyword.arg] = self._value(keyword.value)
        if isinstance(function, Remote):
            return self._call_program(function, node.args, arguments, keywords)
        return self._call_own(function, arguments, keywords)

    def _call_program(
        self, function: Remote, nodes: Sequence[ast.expr], arguments: list[Any], keywords: Mapping[str, Any]
    ) -> Any:
        # Request the arguments back if one has a name: the statement may read a list after the call has
        # changed it.
        back = any(isinstance(node, ast.Name) for node in nodes)
        sent = list(map(self._sendable, arguments))
        value, left = self._program.call_and_see(function, sent, keywords, back=back)
        # Not strict, because the untrusted program decides how many arguments it returns.
        for argument, changed in zip(arguments, left, strict=False):
            _update(argument, changed)
        return value

    def _sendable(self, argument: Any) -> Any:
        if type(argument) in VIEWS:
            return list(argument)
        # An iterator cannot be sent, so have the program create one over the same values.
        if isinstance(argument, Iterator):
            return self._program.call(Remote(builtin="iter"), [list(argument)])
        name = getattr(argument, "__name__", "")
        return Remote(builtin=name) if name in FUNCTIONS and FUNCTIONS[name] is argument else argument

    def _call_own(self, function: Any, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        if not callable(function):
            raise TypeError("the called object is not a function")
        name = getattr(function, "__name__", "")
        if FUNCTIONS.get(name) is not function:
            return function(*arguments, **keywords)
        if name in ("isinstance", "type"):
            return self._type_test(name, arguments)
        if isinstance(keywords.get("key"), Remote):
            keywords["key"] = self._local(keywords["key"])
        if name in ("map", "filter") and isinstance(arguments[0], Remote):
            arguments[0] = self._local(arguments[0])
        if any(isinstance(argument, Remote) for argument in arguments):
            if name in ASKED_OF_OBJECTS:
                # Send one argument only: a second one could be the expected value.
                [value] = arguments
                return self._program.call(Remote(builtin=name), [value])
            arguments = list(map(self._iterated, arguments))
        refuse_large(name, arguments)
        return FUNCTIONS[name](*arguments, **keywords)

    def _local(self, function: Remote) -> Callable[..., Any]:
        return lambda *arguments: self._program.call(function, arguments)

    def _type_test(self, name: str, arguments: Sequence[Any]) -> Any:
        """Evaluate ``isinstance`` or ``type``. An object of the program is an instance of no built-in
        type."""
        if name == "type":
            [value] = arguments
            return (
                self._program.call(Remote(builtin="type"), [value])
                if isinstance(value, Remote)
                else type(value)
            )
        value, kinds = arguments
        wanted = kinds if isinstance(kinds, tuple) else (kinds,)
        if any(isinstance(kind, Remote) for kind in wanted):
            return self._program.call(Remote(builtin="isinstance"), [value, kinds]) is True
        return not isinstance(value, Remote) and isinstance(value, wanted)

    def _iterated(self, value: Any) -> Iterable[Any]:
        if isinstance(value, Remote):
            found = self._program.call(Remote(builtin="list"), [value])
            if type(found) is not list:
                raise TypeError("the program returned no list of it")
            return found
        return value

    def _truth(self, value: Any) -> bool:
        if isinstance(value, Remote):
            # Nothing but True counts as true, since the reply is untrusted.
            return self._program.call(Remote(builtin="bool"), [value]) is True
        return bool(value)


def _names_of(kind: type) -> list[str]:
    return [each.__name__ for each in kind.__mro__]


def _is_same(left: Any, right: Any) -> bool:
    """Evaluate ``left is right``. Values from the program are always new objects, so type and value are
    compared for all but singletons, types and handles."""
    if (
        isinstance(left, bool | type | Remote)
        or left is None
        or left is ...
        or isinstance(right, bool | type | Remote)
    ):
        return left is right
    return type(left) is type(right) and bool(left == right)


def _update(argument: Any, changed: Any) -> None:
    """Update a list, dictionary or set in place to its contents after a call, as if the program had modified
    it."""
    if type(argument) is not type(changed):
        return
    if isinstance(argument, list):
        argument[:] = changed
    elif isinstance(argument, dict | set):
        argument.clear()
        argument.update(changed)
