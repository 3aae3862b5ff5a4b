"""The host of a program, which runs in the program's own process: it executes the program and then answers
requests. Also the encoding of plain values, which both sides use.

The source of this file is passed to a separate Python process, so it may import only the standard library. It
gives no protection: the program can impersonate it, so its replies are untrusted data. Protection comes from
keeping expected values out of this process.
"""

from __future__ import annotations

import builtins
import json
import operator
import os
import site
import sys
import types

# Importing typing would take longer than running a test. Type checkers recognise this constant by its name.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from decimal import Decimal
    from typing import Any, TypedDict

    class Task(TypedDict):
        """A program, and what is imported in advance for it."""

        code: str
        packages: list[str]
        function: str
        given_names: Sequence[str]
        given_modules: Sequence[str]

    class Request(TypedDict, total=False):
        """A request to a program: the kind, which is a method of ``_Program``, and its arguments."""

        do: str
        name: str
        function: Any
        arguments: Any
        keywords: Mapping[str, Any]
        back: bool
        statement: str
        token: str

    class Reply(TypedDict, total=False):
        """Reply of a program: encoded values, or the classes of an exception."""

        value: Any
        back: Any
        raised: list[str]


_SMALL = 1 << 62
_LONGEST_NUMBER = 1 << 18

GIVEN_NAMES = ("typing", "operator", "math", "itertools", "functools", "collections", "heapq", "bisect")
GIVEN_MODULES = (*GIVEN_NAMES, "copy", "datetime", "random", "re", "string", "sys")
"""Modules that are imported in advance for a ``Solution`` method or a called function, as on the site from
which such tasks come. All public names of the modules in ``GIVEN_NAMES`` are available, except names of
built-in functions; a later module wins over an earlier one. A module in ``GIVEN_MODULES`` is available under
its own name only if the program contains ``name.``, because ``bisect`` is also a function."""


def encode(value: Any, other: Callable[[Any], Any]) -> Any:
    """Encode a value as JSON types. Strings, numbers, booleans, None and lists stay as they are; any other
    type becomes ``{kind: content}``.

    A value of a subclass, such as a named tuple, is encoded as its plain base type.

    Args:
        value: any value.
        other: encodes a value that has no plain type.
    """
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        # str's own method, because a subclass may override __str__.
        return str.__str__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, int):
        number = int.__int__(value)
        # Base 16, because Python limits the length of decimal numbers.
        return number if -_SMALL < number < _SMALL else {"int": hex(number)}
    if isinstance(value, list):
        return [encode(each, other) for each in value]
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(each, other) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(key, other), encode(each, other)] for key, each in value.items()]}
    return _encode_rare(value, other)


def _encode_rare(value: Any, other: Callable[[Any], Any]) -> Any:
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, range):
        return {"range": [encode(each, other) for each in (value.start, value.stop, value.step)]}
    # Do not import these modules, which takes longer than most tests: a value of such a type implies that its
    # module is already imported.
    if "decimal" in sys.modules and isinstance(value, sys.modules["decimal"].Decimal):
        return {"decimal": str(value)}
    if "collections" in sys.modules and isinstance(value, sys.modules["collections"].deque):
        return {"deque": [encode(each, other) for each in value]}
    if "fractions" in sys.modules and isinstance(value, sys.modules["fractions"].Fraction):
        return {"fraction": [hex(value.numerator), hex(value.denominator)]}
    # A scalar of numpy or torch.
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        return encode(value.item(), other)
    return other(value)


def decode(coded: Any, other: Callable[[str, Any], Any]) -> Any:
    """Decode the result of ``encode``. The value has exactly Python's own types, never a subclass.

    Args:
        coded: JSON value.
        other: decodes a value whose kind is not plain, given the kind and its content.

    Raises:
        ValueError: the encoding is invalid.
    """
    if coded is None or isinstance(coded, bool | int | float | str):
        return coded
    if isinstance(coded, list):
        return [decode(each, other) for each in coded]
    if not isinstance(coded, dict) or len(coded) != 1:
        raise ValueError("an object with one key is wanted")
    [(kind, content)] = coded.items()
    try:
        if kind == "deque":
            from collections import deque

            return deque(decode(each, other) for each in content)
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](decode(each, other) for each in content)
        if kind == "dict":
            return {decode(key, other): decode(each, other) for key, each in content}
        return _DECODERS[kind](content) if kind in _DECODERS else other(kind, content)
    except (TypeError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"no {kind}: {error}") from None


def _whole(text: str) -> int:
    # Reject numbers far larger than any task needs, because arithmetic with them takes minutes.
    if len(text) > _LONGEST_NUMBER:
        raise ValueError("the number is too large")
    return int(text, 16)


def _fraction(parts: list[Any]) -> Any:
    from fractions import Fraction

    return Fraction(_whole(parts[0]), _whole(parts[1]))


def _decimal(text: str) -> Decimal:
    from decimal import Decimal

    value = Decimal(text)
    # Limit the exponent: comparing 1e1000000 with an integer computes the full power of ten.
    if value.is_finite() and abs(value.adjusted()) > 10_000:
        raise ValueError("the exponent is too large")
    return value


_SEQUENCES: Mapping[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_DECODERS: Mapping[str, Callable[[Any], Any]] = {
    "int": _whole,
    "complex": lambda parts: complex(*parts),
    "bytes": bytes.fromhex,
    "decimal": _decimal,
    "fraction": _fraction,
}


class _Program:
    """An executed program: its global names, and the objects that requests refer to by index."""

    def __init__(self, names: dict[str, Any], given: Mapping[str, object]) -> None:
        self._names, self._given = names, given
        self._objects: list[Any] = []

    def answer(self, request: Request) -> Reply:
        try:
            return getattr(self, f"_{request['do']}")(request)
        except BaseException as error:
            return {"raised": [kind.__name__ for kind in type(error).__mro__]}

    def _keep(self, value: Any) -> Any:
        self._objects.append(value)
        return {"object": len(self._objects) - 1}

    def _find(self, kind: str, content: Any) -> Any:
        if kind == "range":
            return range(*content)
        if kind == "builtin":
            return getattr(
                operator if content.startswith("operator.") else builtins, content.rpartition(".")[2]
            )
        return self._objects[content]

    def _decoded(self, coded: Any) -> Any:
        return decode(coded, self._find)

    def _name(self, request: Request) -> Reply:
        name = request["name"]
        if name not in self._names and not hasattr(builtins, name):
            raise NameError(name)
        value = self._names[name] if name in self._names else getattr(builtins, name)
        return {"value": encode(value, self._keep)}

    def _call(self, request: Request) -> Reply:
        arguments = self._decoded(request["arguments"])
        keywords = {key: self._decoded(value) for key, value in request["keywords"].items()}
        answer: Reply = {
            "value": encode(self._decoded(request["function"])(*arguments, **keywords), self._keep)
        }
        if request["back"]:
            answer["back"] = encode(arguments, self._keep)
        return answer

    def _solve(self, request: Request) -> Reply:
        name = request["name"]
        # A name that the task supplied is not the program's function, even if it has the wanted name.
        own = self._names.get(name) if self._names.get(name) is not self._given.get(name) else None
        function = own or getattr(self._names["Solution"](), name)
        return {"value": encode(function(*self._decoded(request["arguments"])), self._keep)}

    def _run(self, request: Request) -> Reply:
        exec(compile(request["statement"], "test.py", "exec", dont_inherit=True), self._names)
        return {"value": None}

    def _echo(self, request: Request) -> Reply:
        return {"value": request["token"]}


def _imported(task: Task) -> dict[str, object]:
    given: dict[str, object] = {}
    for module in task["given_names"]:
        loaded = __import__(module)
        public = getattr(loaded, "__all__", None) or [
            name for name in vars(loaded) if not name.startswith("_")
        ]
        for name in public:
            if not hasattr(builtins, name):
                given[name] = getattr(loaded, name)
    for name in task["given_modules"]:
        given[name] = __import__(name)
    if "Solution" not in task["code"]:
        given.pop(task["function"], None)
    return given


def _main() -> None:
    source, asked, told = map(int, sys.argv[1:4])
    # Hide the descriptors from programs that read sys.argv.
    sys.argv = ["program.py"]
    with os.fdopen(source, encoding="utf-8") as file:
        task = json.load(file)
    # Do the useful part of site's work. Python starts without site, because the start-up hooks of installed
    # packages take half of the time.
    sys.path += task["packages"]
    site.setquit()
    site.sethelper()
    # Run the program in a module of its own, so that it sees neither this file's names nor a different module
    # name of its own.
    module = types.ModuleType("program" if asked >= 0 else "__main__")
    sys.modules[module.__name__] = module
    names = vars(module)
    given = _imported(task)
    names.update(given)
    # dont_inherit: this file's __future__ import would leave the program's annotations unevaluated.
    exec(compile(task["code"], "program.py", "exec", dont_inherit=True), names)
    if asked < 0:
        return
    program = _Program(names, given)
    with os.fdopen(asked, encoding="utf-8") as requests:
        for line in requests:
            answer = json.dumps(program.answer(json.loads(line))) + "\n"
            data = answer.encode()
            while data:
                # os.write may be partial. Do not print: standard output belongs to the program.
                data = data[os.write(told, data) :]


if __name__ == "__main__":
    _main()
