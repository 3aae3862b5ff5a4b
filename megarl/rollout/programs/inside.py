"""The host of a program, in the program's process: it runs the program, then answers requests. Also the
encoding of plain values.

The source of this file is passed to a separate Python, so it imports only the standard library. Nothing in it
gives protection, because the program can impersonate it; its answers must be treated as data. The protection
is that expected values never reach this process.
"""

from __future__ import annotations

import builtins
import json
import operator
import os
import site
import sys
import types

# Do not import typing, which takes longer than running a test; a type checker recognises the constant by its
# name.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from decimal import Decimal
    from typing import Any

_SMALL = 1 << 62
_LONGEST_NUMBER = 1 << 18

GIVEN_NAMES = ("typing", "operator", "math", "itertools", "functools", "collections", "heapq", "bisect")
GIVEN_MODULES = (*GIVEN_NAMES, "copy", "datetime", "random", "re", "string", "sys")
"""Modules that are already imported for a program that is a method of ``Solution`` or a called function, as
on the site that such tasks come from. All names of the modules in ``GIVEN_NAMES`` are available, except those
of Python's own functions; if two modules share a name, the later module's is used. Each module in
``GIVEN_MODULES`` is available under its own name if the program contains ``name.``, since ``bisect`` is a
function too."""


def encode(value: Any, other: Callable[[Any], Any]) -> Any:
    """Encode a value in types of JSON: text, numbers, booleans and None are kept, lists stay lists, and
    everything else becomes ``{kind: content}``.

    A value of a subclass of a plain type, such as a named tuple, becomes one of the plain type.

    Args:
        value: any value.
        other: encodes a value that is not plain.
    """
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        # Call the method of str, because a subclass may override __str__.
        return str.__str__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, int):
        number = int.__int__(value)
        # Write large numbers in base 16, because Python limits the length of decimal numbers.
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
    # Do not import these modules, which takes longer than most tests. If a value is of such a type, its
    # module is already imported.
    if "decimal" in sys.modules and isinstance(value, sys.modules["decimal"].Decimal):
        return {"decimal": str(value)}
    if "collections" in sys.modules and isinstance(value, sys.modules["collections"].deque):
        return {"deque": [encode(each, other) for each in value]}
    if "fractions" in sys.modules and isinstance(value, sys.modules["fractions"].Fraction):
        return {"fraction": [hex(value.numerator), hex(value.denominator)]}
    # The value is a scalar of numpy or torch.
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        return encode(value.item(), other)
    return other(value)


def decode(coded: Any, other: Callable[[str, Any], Any]) -> Any:
    """Decode a plain value from ``encode``; the result has exactly Python's own types.

    Args:
        coded: types of JSON.
        other: decodes a value of a kind that is not plain.

    Raises:
        ValueError: the value is not valid.
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
    # Refuse numbers far larger than any that a task needs, because arithmetic with them takes minutes.
    if len(text) > _LONGEST_NUMBER:
        raise ValueError("the number is too large")
    return int(text, 16)


def _fraction(parts: list[Any]) -> Any:
    from fractions import Fraction

    return Fraction(_whole(parts[0]), _whole(parts[1]))


def _decimal(text: str) -> Decimal:
    from decimal import Decimal

    value = Decimal(text)
    # Limit the exponent: comparing such a number with an integer takes time proportional to the power of ten
    # that it stands for.
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
    """A program that has been run, with its names and the objects that requests refer to."""

    def __init__(self, names: dict[str, Any], given: Mapping[str, Any]) -> None:
        self._names, self._given = names, given
        self._objects: list[Any] = []

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
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

    def _name(self, request: Mapping[str, Any]) -> dict[str, Any]:
        name = request["name"]
        if name not in self._names and not hasattr(builtins, name):
            raise NameError(name)
        value = self._names[name] if name in self._names else getattr(builtins, name)
        return {"value": encode(value, self._keep)}

    def _call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        arguments = self._decoded(request["arguments"])
        keywords = {key: self._decoded(value) for key, value in request["keywords"].items()}
        answer = {"value": encode(self._decoded(request["function"])(*arguments, **keywords), self._keep)}
        if request["back"]:
            answer["back"] = encode(arguments, self._keep)
        return answer

    def _solve(self, request: Mapping[str, Any]) -> dict[str, Any]:
        name = request["name"]
        # Do not take a name that the task itself supplied for the program's function, even if both have the
        # same name.
        own = self._names.get(name) if self._names.get(name) is not self._given.get(name) else None
        function = own or getattr(self._names["Solution"](), name)
        return {"value": encode(function(*self._decoded(request["arguments"])), self._keep)}

    def _run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        exec(compile(request["statement"], "test.py", "exec", dont_inherit=True), self._names)
        return {"value": None}

    def _echo(self, request: Mapping[str, Any]) -> dict[str, Any]:
        return {"value": request["token"]}


def _imported(task: Mapping[str, Any]) -> dict[str, Any]:
    given: dict[str, Any] = {}
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
    # Hide the descriptors from a program that reads its arguments.
    sys.argv = ["program.py"]
    with os.fdopen(source, encoding="utf-8") as file:
        task = json.load(file)
    # Do the part of site's work that a program may need: Python starts without site, because the hooks that
    # packages install take half of the time.
    sys.path += task["packages"]
    site.setquit()
    site.sethelper()
    # Use a separate module, so that the program sees neither this file's names as its own, nor itself under a
    # different module name.
    module = types.ModuleType("program" if asked >= 0 else "__main__")
    sys.modules[module.__name__] = module
    names = vars(module)
    given = _imported(task)
    names.update(given)
    # Do not inherit this file's __future__ import, with which annotations would not be evaluated.
    exec(compile(task["code"], "program.py", "exec", dont_inherit=True), names)
    if asked < 0:
        return
    program = _Program(names, given)
    with os.fdopen(asked, encoding="utf-8") as requests:
        for line in requests:
            answer = json.dumps(program.answer(json.loads(line))) + "\n"
            data = answer.encode()
            while data:
                # Loop because os.write may write only a part. Do not print, because standard output belongs
                # to the program.
                data = data[os.write(told, data) :]


if __name__ == "__main__":
    _main()
