"""Formats in which data sets store tests of a program, and in which a response contains the program."""

from __future__ import annotations

import ast
import base64
import json
import pickletools
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megarl.rollout.programs.files_of_tests import statements_of_file

if TYPE_CHECKING:
    from megarl.data.rows import Fields

_FENCE = re.compile(r"^[ \t]*+```[ \t]*+([^\s`]*+)[^`\n]*+$", re.MULTILINE)
_PYTHON = re.compile(r"\{?\.?(?:python|py)[\d.]*(?:[}:,{].*)?", re.IGNORECASE)
_LISTS_OF_TESTS = ("public_test_cases", "private_test_cases", "test_cases", "tests")
_STATEMENTS = ("test_list", "challenge_test_list")
# Start of base64-encoded zlib data, whose first byte is 0x78.
_PACKED = re.compile(r"\s*e[AFJN]")
_BEGINS_BY_NAME = re.compile(r"\s*[A-Za-z_]\w* ?= ?\S")
_LITERALS = (ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.UnaryOp, ast.unaryop, ast.expr_context)
_PICKLE = b"\x80"
_TEXTS_OF_PICKLES = frozenset({"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"})
_FRAMES_OF_PICKLES = frozenset({"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"})
LARGEST_UNPACKED = 2**26
"""Maximum size of decompressed tests, in bytes."""


@dataclass(frozen=True, slots=True)
class Test:
    """One test of a program: an input with its output, a function call, or a statement.

    Attributes:
        given: standard input of the program.
        expected: expected standard output, or expected return value of the function; None for a statement.
        function: name of the function to call, at the top level or as a method of ``Solution``; empty for
            none.
        arguments: arguments of the call.
        statement: statement that must run without an exception after the program; empty for none.
    """

    given: str = ""
    expected: Any = None
    function: str = ""
    arguments: Sequence[Any] = ()
    statement: str = ""


def program_in(response: str) -> str | None:
    """Return the last complete code block (between lines of three backticks) that is marked as Python. If
    none is marked as Python, return the last unmarked one. Return None if there is neither."""
    marked, unmarked, kind, begin = None, None, None, 0
    for fence in _FENCE.finditer(response):
        name = fence[1]
        # A named fence starts a new block even inside another one, because the other was never closed.
        if kind is None or name:
            kind, begin = name, fence.end()
            continue
        if _PYTHON.fullmatch(kind):
            marked = response[begin : fence.start()]
        elif not kind:
            unmarked = response[begin : fence.start()]
        kind = None
    return unmarked if marked is None else marked


def tests_of(answer: str) -> tuple[Test, ...]:
    """Parse the tests in a reference answer. These formats are supported:

    * ``{"inputs": [...], "outputs": [...]}`` for programs that read standard input and write standard output;
      with ``"fn_name"`` for a function that is called with each list of arguments (APPS, TACO).
    * ``[{"input", "output"}, ...]``. Tests with ``"testtype": "functional"`` or ``"type": "function_call"``
      call the function ``"fn_name"`` or ``metadata.func_name`` with JSON arguments, one per line
      (LiveCodeBench). Such lists may also be in the keys ``public_test_cases``, ``private_test_cases``,
      ``test_cases`` and ``tests`` of an object, next to a common ``metadata``.
    * Statements, ``["assert f(2) == 4", ...]``, also in the keys ``test_list`` and ``challenge_test_list`` of
      an object, next to ``test_setup_code`` and ``test_imports`` (MBPP).
    * A Python file with functions ``test_...()``, each of them a test, or with asserts (KodCode).

    Each part may itself be JSON text, or base64-encoded zlib data of that text or of a pickle of it
    (LiveCodeBench).

    Raises:
        ValueError: the answer has no tests, or they cannot be read.
    """
    statements = statements_of_file(answer)
    if statements is not None:
        return tuple(Test(statement=each) for each in statements)
    # Twice, because the JSON may be a string that contains the tests as JSON.
    given = _parsed(_parsed(answer, "its tests"), "its tests")
    tests = tuple(_tests_in(given, {}))
    if not tests:
        raise ValueError("it holds no test")
    if all(_are_named_arguments(test.given) for test in tests):
        raise ValueError(
            f"its inputs are arguments by name ({tests[0].given.strip()[:40]!r}), which a program would get "
            "as text: store {'fn_name': ..., 'inputs': [[...]], 'outputs': [...]}, or assert statements"
        )
    return tests


def _are_named_arguments(given: str) -> bool:
    """Return whether an input is written like LeetCode's examples: ``nums = [3, 3], target = 6``. As standard
    input, such a text would fail every program."""
    if not _BEGINS_BY_NAME.match(given):
        return False
    try:
        call = ast.parse(f"f({given.strip()})", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    if not isinstance(call, ast.Call) or call.args:
        return False
    for keyword in call.keywords:
        if not keyword.arg:
            return False
        for part in ast.walk(keyword.value):
            # Accept the literals of Python and those of JSON.
            if not isinstance(part, _LITERALS) and getattr(part, "id", "") not in ("null", "true", "false"):
                return False
    return True


def _parsed(value: Any, what: str) -> Any:
    """Parse a text as JSON; return any other value unchanged."""
    if not isinstance(value, str):
        return value
    unpacked = _unpacked(value, what)
    text = None if unpacked is None else _pickled_text(unpacked)
    try:
        return json.loads(value if unpacked is None else text or unpacked)
    except (ValueError, RecursionError):
        if unpacked is None:
            raise ValueError(f"the text of {what} is no JSON: {value[:40]!r}") from None
    if unpacked.startswith(_PICKLE) or unpacked.endswith(b"."):
        raise ValueError(
            f"{what} is packed as a pickle of more than one text, which can run code and is never read: "
            "unpack it once, where the data "
            "are trusted, by json.loads(pickle.loads(zlib.decompress(base64.b64decode(text)))), and store "
            "what that gives as JSON"
        )
    raise ValueError(f"{what} is packed, but its content is not JSON: {unpacked[:40]!r}")


def _pickled_text(content: bytes) -> str | None:
    """Return the text in a pickle of a single string (LiveCodeBench), or None for anything else.

    Nothing is unpickled, because that could run code. Only opcodes that frame, hold and memoise a string are
    accepted.
    """
    found = list[Any]()
    try:
        for opcode, argument, _ in pickletools.genops(content):
            if opcode.name in _TEXTS_OF_PICKLES:
                found.append(argument)
            elif opcode.name not in _FRAMES_OF_PICKLES:
                return None
    except ValueError:
        return None
    return found[0] if len(found) == 1 else None


def _unpacked(text: str, what: str) -> bytes | None:
    """Decode base64-encoded zlib data (LiveCodeBench's private tests). Return None for any other text.

    Raises:
        ValueError: the data are damaged, truncated or too large.
    """
    if not _PACKED.match(text):
        return None
    try:
        packed = base64.b64decode("".join(text.split()), validate=True)
    except ValueError:
        return None
    stream = zlib.decompressobj()
    try:
        content = stream.decompress(packed, LARGEST_UNPACKED + 1)
    except zlib.error as error:
        raise ValueError(f"{what} is packed, but cannot be unpacked: {error}") from None
    # A few compressed kilobytes may expand to gigabytes.
    if len(content) > LARGEST_UNPACKED:
        raise ValueError(
            f"{what} is packed, but has more than {LARGEST_UNPACKED:,} bytes unpacked: store fewer "
            "or smaller tests"
        )
    if not stream.eof:
        raise ValueError(f"{what} is packed, but truncated: store the full text")
    return content


def _tests_in(given: Any, metadata: Fields) -> Iterator[Test]:
    if isinstance(given, Mapping):
        yield from _tests_of_object(given, metadata)
        return
    if not isinstance(given, list):
        raise ValueError("its tests are neither a list nor an object")
    for each in given:
        if isinstance(each, str):
            yield Test(statement=each)
        elif isinstance(each, Mapping) and "input" in each and "output" in each:
            yield _test_of_pair(each, {**metadata, **_metadata_of(each)})
        else:
            raise ValueError("a test is neither a statement nor an object with input and output")


def _tests_of_object(given: Fields, metadata: Fields) -> Iterator[Test]:
    inner = {**metadata, **_metadata_of(given)}
    if given.get("fn_name"):
        inner["func_name"] = given["fn_name"]
    if lists := list(filter(given.get, _LISTS_OF_TESTS)):
        for name in lists:
            yield from _tests_in(_parsed(given[name], name), inner)
    elif statements := list(filter(given.get, _STATEMENTS)):
        yield from _statements(given, statements)
    elif "input_output" in given:
        yield from _tests_in(_parsed(given["input_output"], "input_output"), inner)
    else:
        inputs = _parsed(given.get("inputs"), "inputs")
        outputs = _parsed(given.get("outputs"), "outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise ValueError("inputs and outputs are wanted, two lists of the same length")
        for each, expected in zip(inputs, outputs, strict=True):
            yield _test(each, expected, inner.get("func_name"))


def _statements(given: Fields, names: Sequence[str]) -> Iterator[Test]:
    imports = given.get("test_imports") or []
    lines = [imports] if isinstance(imports, str) else list(imports)
    setup = "\n".join([*lines, given.get("test_setup_code") or ""]).strip()
    for name in names:
        for statement in _parsed(given[name], name):
            if not isinstance(statement, str):
                raise ValueError(f"a test of {name} is no statement")
            yield Test(statement=f"{setup}\n{statement}" if setup else statement)


def _metadata_of(given: Fields) -> Fields:
    found = _parsed(given.get("metadata") or {}, "metadata")
    if not isinstance(found, Mapping):
        raise ValueError("metadata is no object")
    return found


def _test_of_pair(given: Fields, metadata: Fields) -> Test:
    name = given.get("fn_name") or metadata.get("func_name") or metadata.get("fn_name")
    kind = given.get("testtype") or given.get("type") or ("functional" if name else "stdin")
    is_call = kind in ("functional", "function_call")
    if is_call and not name:
        raise ValueError("a functional test names no function under fn_name or metadata.func_name")
    return _test(given["input"], given["output"], name if is_call else None)


def _test(given: Any, expected: Any, function: Any) -> Test:
    if not function:
        return Test(given=_lines(given), expected=_lines(expected))
    try:
        arguments = (
            list(map(json.loads, filter(str.strip, given.splitlines())))
            if isinstance(given, str)
            else list(given)
        )
        expected = json.loads(expected) if isinstance(expected, str) and isinstance(given, str) else expected
    except (ValueError, TypeError):
        raise ValueError(
            f"the arguments of a call of {function} are neither a list nor JSON, one a line"
        ) from None
    return Test(function=str(function), arguments=arguments, expected=expected)


def _lines(text: Any) -> str:
    """Return a test's text; the elements of a list are joined as lines."""
    return "\n".join(map(str, text)) if isinstance(text, list) else str(text)
