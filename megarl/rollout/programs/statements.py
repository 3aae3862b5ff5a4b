"""Statements about a program (``assert f(2) == 4``), evaluated outside of its process.

A statement is parsed and interpreted here, never executed as Python: calls of the program's functions leave as requests,
with plain values as arguments, and plain values come back. What is compared with them stays outside. The interpreter
knows a part of Python that is bounded: operators, pure functions of Python's own, loops over what is there. Names that a
statement does not make itself are the program's.

``reason_against`` says why a statement cannot be evaluated so.
"""

from __future__ import annotations

import ast
import builtins
import collections
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from megarl.rollout.programs.conversation import Conversation, RaisedError, Remote

_STEPS = 200_000
"""Nodes that one statement may evaluate."""

_LARGEST = 1_000_000
"""Length of what an operation may make, and bits of numbers."""

_ASKED_OF_OBJECTS = frozenset("abs bool bytes complex dict float int iter len next repr reversed round str".split())
"""Functions of one argument that an object of the program answers in its own process; the others take what it iterates over."""

_BUILTINS: Mapping[str, Callable[..., Any]] = {
    name: getattr(builtins, name)
    for name in (
        "abs all any ascii bin bool bytes chr complex dict divmod enumerate filter float frozenset hex int isinstance iter len "
        "list map max min next oct ord pow range repr reversed round set sorted str sum tuple type zip"
    ).split()
}
_EXCEPTIONS = {
    name: kind for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, BaseException)
}
_MATHEMATICS = (
    "acos asin atan atan2 ceil copysign cos cosh degrees dist e exp fabs floor fmod fsum gcd hypot inf isclose isfinite "
    "isinf isnan isqrt lcm log log10 log1p log2 nan pi pow prod radians sin sinh sqrt tan tanh tau trunc"
).split()
_MODULES: Mapping[str, Mapping[str, Any]] = {
    "math": {name: getattr(math, name) for name in _MATHEMATICS},
    "collections": {"Counter": collections.Counter},
    "typing": {},
    "__future__": {"annotations": None},
}
_ALWAYS_OURS = {"isclose": math.isclose, "Counter": collections.Counter}

_JUDGES = frozenset("np numpy pd pandas pytest unittest torch scipy sympy random re string copy itertools functools os sys".split())
"""Modules that a statement may take its measure from, so that the program may not answer for them."""

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
_VIEWS = (type({}.keys()), type({}.items()), type({}.values()))
_PLAIN = (str, bytes, list, tuple, dict, set, frozenset, bool, int, float, complex, range, collections.Counter, *_VIEWS)
_TEXT_METHODS_THAT_GROW = {"ljust", "rjust", "center", "zfill", "expandtabs", "to_bytes", "replace", "join", "translate"}
_NEVER = {"format", "format_map"}

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
        tree = ast.parse(statement)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "it is no Python"
    if not any(isinstance(node, ast.Assert | ast.Raise) for node in ast.walk(tree)):
        return "it asserts nothing"
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    nodes = list(_evaluated(tree))
    keys = {id(each) for node in nodes if isinstance(node, ast.Call) for each in _lambdas_for_us(node)}
    for node in nodes:
        reason = _reason_against_node(node) or _reason_against_call(node, functions)
        if isinstance(node, ast.Lambda) and id(node) not in keys:
            reason = "a function is kept or given to the program"
        if reason is not None:
            return reason
    return None


def _lambdas_for_us(call: ast.Call) -> list[ast.expr]:
    """The functions without a name that are given to a function of Python's own."""
    ours = isinstance(call.func, ast.Name) and call.func.id in _BUILTINS
    ours = ours or (isinstance(call.func, ast.Attribute) and call.func.attr == "sort")
    passed = [*call.args, *(keyword.value for keyword in call.keywords)]
    return [each for each in passed if ours and isinstance(each, ast.Lambda)]


def _reason_against_call(node: ast.AST, functions: set[str]) -> str | None:
    if not isinstance(node, ast.Call) or (isinstance(node.func, ast.Name) and node.func.id in {*functions, *_BUILTINS}):
        return None
    passed = [*node.args, *(keyword.value for keyword in node.keywords)]
    given = any(isinstance(each, ast.Name) and each.id in functions for each in passed)
    return "a function is given to the program" if given else None


def _evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but messages of asserts and annotations, which are not evaluated."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("msg", "annotation", "returns") or (isinstance(node, ast.Raise) and name == "cause"):
            continue
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ast.AST):
                yield from _evaluated(each)


def _reason_against_node(node: ast.AST) -> str | None:
    if not isinstance(node, (*_NODES, ast.Raise)):
        return f"{type(node).__name__} is not evaluated outside"
    match node:
        case ast.Assert(test=ast.Tuple(elts=[_, *_])):
            return "a tuple is always true"
        case ast.Name(id=name) if name in _JUDGES or name.startswith("__"):
            return f"{name} is not evaluated outside"
        case ast.Attribute(attr=name) if name.startswith("_") or name in _NEVER:
            return f"the attribute {name} is not read outside"
        case ast.Import(names=names):
            wanted = [alias.name for alias in names if alias.name not in _MODULES]
            return f"the module {wanted[0]} is not there outside" if wanted else None
        case ast.ImportFrom(module=module, names=names, level=level):
            known = module in _MODULES and not level
            fits = known and (module == "typing" or all(alias.name in _MODULES[module or ""] for alias in names))
            return None if fits else f"the module {module} is not there outside"
        case ast.FunctionDef(decorator_list=decorators, args=ast.arguments() as arguments):
            simple = not (decorators or arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.defaults)
            return None if simple else f"the function {node.name} is not evaluated outside"
        case ast.ExceptHandler(name=str()):
            return "it looks at an exception"
    return None


def holds(statement: str, program: Conversation) -> bool:
    """Whether a statement runs to its end without an exception.

    Args:
        statement: one that ``reason_against`` has nothing to say of.
        program: that it is about.

    Raises:
        EndedError: the program has ended.
    """
    tree = ast.parse(statement)
    interpreter = _Interpreter(program, _functions_of_program(tree))
    try:
        interpreter.execute(tree.body)
    except RaisedError:
        return False
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, NameError, MemoryError, RecursionError):
        return False
    except (StopIteration, RuntimeError, BufferError, _Jump):
        return False
    return True


def _functions_of_program(tree: ast.Module) -> frozenset[str]:
    """Names of Python's own functions that mean the program's: where a statement calls nothing else, these are tested."""
    nodes = list(ast.walk(tree))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    made = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    made |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    made |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    made |= {(node.asname or node.name) for node in nodes if isinstance(node, ast.alias)}
    ours = {*_BUILTINS, *_EXCEPTIONS, *_MODULES, *_ALWAYS_OURS}
    return frozenset() if names - ours - made else frozenset(names & {*_BUILTINS, *_ALWAYS_OURS} - made)


class _Jump(Exception):
    """Control leaves a block."""


class _Break(_Jump):
    """A loop ends."""


class _Continue(_Jump):
    """A loop goes on with its next value."""


class _Return(_Jump):
    """A function returns a value."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class _Interpreter:
    """Evaluates statements with the names that they make.

    Args:
        program: whose names all others are.
        tested: names of Python's own that mean the program's.
        names: that functions and comprehensions start with.
    """

    def __init__(self, program: Conversation, tested: frozenset[str], names: Mapping[str, Any] | None = None) -> None:
        self._program, self._tested = program, tested
        self._names = dict(names or {})
        self._steps = [0]

    def _inner(self, names: Mapping[str, Any]) -> _Interpreter:
        inner = _Interpreter(self._program, self._tested, {**self._names, **names})
        inner._steps = self._steps
        return inner

    def execute(self, body: Sequence[ast.stmt]) -> None:
        """Run statements one after the other."""
        for statement in body:
            self._count()
            getattr(self, f"_run_{type(statement).__name__}")(statement)

    def _count(self) -> None:
        self._steps[0] += 1
        if self._steps[0] > _STEPS:
            raise MemoryError(f"a statement takes more than {_STEPS} steps")

    # statements

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
        except (RaisedError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError, NameError) as error:
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
            self._names[alias.asname or alias.name] = _MODULES[alias.name]

    def _run_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self._names[alias.asname or alias.name] = _MODULES[node.module or ""].get(alias.name)

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

    # expressions

    def _value(self, node: ast.expr) -> Any:
        self._count()
        return getattr(self, f"_of_{type(node).__name__}")(node)

    def _of_Constant(self, node: ast.Constant) -> Any:
        return node.value

    def _of_Name(self, node: ast.Name) -> Any:
        name = node.id
        if name in self._names:
            return self._names[name]
        if name in self._tested:
            return self._program.name(name)
        for table in (_BUILTINS, _ALWAYS_OURS, _EXCEPTIONS, _MODULES):
            if name in table:
                return table[name]  # type: ignore[index]
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
            return self._program.call(Remote(builtin=f"operator.{function.__name__.rstrip('_')}"), [left, right])
        # a plain value beside an object of the program stays outside: it may be what is expected
        _refuse_growth(kind, left, right)
        return function(left, right)

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
        return slice(*(None if part is None else self._value(part) for part in (node.lower, node.upper, node.step)))

    def _of_Attribute(self, node: ast.Attribute) -> Any:
        of, name = self._value(node.value), node.attr
        if isinstance(of, Remote):
            return self._program.call(Remote(builtin="getattr"), [of, name])
        if isinstance(of, Mapping) and any(of is module for module in _MODULES.values()):
            return of[name]
        if type(of) not in _PLAIN:
            raise AttributeError(name)
        method = getattr(of, name)
        return _bounded(method) if name in _TEXT_METHODS_THAT_GROW else method

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
        # a list that has a name may be looked at again after a function has changed it
        back = any(isinstance(node, ast.Name) for node in nodes)
        sent = [self._sendable(argument) for argument in arguments]
        value, left = self._program.call_and_see(function, sent, keywords, back=back)
        for argument, changed in zip(arguments, left, strict=False):
            _update(argument, changed)
        return value

    def _sendable(self, argument: Any) -> Any:
        if isinstance(argument, _VIEWS):
            return list(argument)
        if isinstance(argument, Iterator):
            return self._program.call(Remote(builtin="iter"), [list(argument)])
        name = getattr(argument, "__name__", "")
        return Remote(builtin=name) if name in _BUILTINS and _BUILTINS[name] is argument else argument

    def _call_own(self, function: Any, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        if not callable(function):
            raise TypeError("what is called is no function")
        name = getattr(function, "__name__", "")
        if _BUILTINS.get(name) is not function:
            return function(*arguments, **keywords)
        if name in ("isinstance", "type"):
            return self._type_test(name, arguments)
        if isinstance(keywords.get("key"), Remote):
            keywords["key"] = self._local(keywords["key"])
        if name in ("map", "filter") and isinstance(arguments[0], Remote):
            arguments[0] = self._local(arguments[0])
        if any(isinstance(argument, Remote) for argument in arguments):
            if name in _ASKED_OF_OBJECTS:
                # no second argument: it may be what is expected
                [value] = arguments
                return self._program.call(Remote(builtin=name), [value])
            arguments = [self._iterated(each) for each in arguments]
        _refuse_large(name, arguments)
        return function(*arguments, **keywords)

    def _local(self, function: Remote) -> Callable[..., Any]:
        return lambda *arguments: self._program.call(function, arguments)

    def _type_test(self, name: str, arguments: Sequence[Any]) -> Any:
        """Return what ``isinstance`` or ``type`` says of a value; an object of the program is of no type of Python's own."""
        if name == "type":
            [value] = arguments
            return self._program.call(Remote(builtin="type"), [value]) if isinstance(value, Remote) else type(value)
        value, kinds = arguments
        wanted = kinds if isinstance(kinds, tuple) else (kinds,)
        if any(isinstance(kind, Remote) for kind in wanted):
            return self._program.call(Remote(builtin="isinstance"), [value, kinds]) is True
        return not isinstance(value, Remote) and isinstance(value, wanted)

    def _iterated(self, value: Any) -> Iterable[Any]:
        if isinstance(value, Remote):
            found = self._program.call(Remote(builtin="list"), [value])
            if type(found) is not list:
                raise TypeError("no list of it comes back")
            return found
        return value  # type: ignore[no-any-return]

    def _truth(self, value: Any) -> bool:
        if isinstance(value, Remote):
            return self._program.call(Remote(builtin="bool"), [value]) is True
        return bool(value)


def _names_of(kind: type) -> list[str]:
    return [each.__name__ for each in kind.__mro__]


def _is_same(left: Any, right: Any) -> bool:
    """Whether ``is`` holds. Values that came from a program are new objects: for them, whether type and value are the same."""
    if isinstance(left, bool | type | Remote) or left is None or left is ... or isinstance(right, bool | type | Remote):
        return left is right
    return type(left) is type(right) and bool(left == right)


def _update(argument: Any, changed: Any) -> None:
    """Make a list, dictionary or set what the program has made of it."""
    if type(argument) is not type(changed):
        return
    if isinstance(argument, list):
        argument[:] = changed
    elif isinstance(argument, dict | set):
        argument.clear()
        argument.update(changed)


def _refuse_growth(kind: type, left: Any, right: Any) -> None:
    """Refuse an operation whose result may be far larger than what it is made of.

    Raises:
        MemoryError: it may.
    """
    if kind is ast.Mod and isinstance(left, str | bytes):
        raise MemoryError("the width of a format is not known")
    if kind not in (ast.Pow, ast.LShift, ast.Mult):
        return
    if isinstance(left, int) and isinstance(right, int):
        bits = max(1, left.bit_length())
        size = {ast.Pow: bits * abs(right), ast.LShift: bits + abs(right), ast.Mult: bits + right.bit_length()}[kind]
    else:
        size = math.prod(abs(each) if isinstance(each, int) else _length(each) for each in (left, right))
    if size > _LARGEST:
        raise MemoryError(f"what {kind.__name__} makes is too large")


def _length(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 1


def _refuse_large(name: str, arguments: Sequence[Any]) -> None:
    if name == "pow" and len(arguments) == 2:
        _refuse_growth(ast.Pow, *arguments)
    if name == "range" and len(range(*arguments)) > _LARGEST:
        raise MemoryError("the range is too long")
    if name == "bytes" and isinstance(arguments[0] if arguments else None, int) and arguments[0] > _LARGEST:
        raise MemoryError("so many bytes are too many")


def _bounded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that refuses arguments with which its result may be large."""

    def call(*arguments: Any, **keywords: Any) -> Any:
        values = [getattr(method, "__self__", None), *arguments, *keywords.values()]
        sizes = [abs(value) if isinstance(value, int) else _length(value) for value in values]
        if math.prod(max(1, size) for size in sizes) > _LARGEST:
            raise MemoryError("its result may be too large")
        return method(*arguments, **keywords)

    return call
