"""The verdict on a program: which of its tests pass.

Each test runs in a separate process. Expected values stay outside of it: outputs and return values are
compared here, and a statement (``assert f(2) == 4``) is evaluated here, call by call. A statement that cannot
be evaluated outside (see ``statements``) runs in the program's process, after the program. A program that
manipulates its process can pass such a statement, so they are counted while the data are read.

A decimal number with a point or an exponent matches any number within 1e-6, absolute or relative to the
expected number. Integers and all other values must be equal, and booleans are not numbers. A tuple equals a
list, as in JSON. Statements use Python's own comparison.
"""

from __future__ import annotations

import json
import math
import re
import site
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from megarl.data.records import Doubt
from megarl.rollout.programs.conversation import INSIDE, EndedError, RaisedError, conversation
from megarl.rollout.programs.forms import Test, program_in, tests_of
from megarl.rollout.programs.inside import GIVEN_MODULES, GIVEN_NAMES
from megarl.rollout.programs.process import STOPPED, Limits, file_of, python_command, running, text_in
from megarl.rollout.programs.statements import holds, reason_against, reason_to_doubt

if TYPE_CHECKING:
    from megarl.rollout.programs.inside import Task

# Starting a program takes at least this long, so a test with less time left is skipped.
_LEAST_SECONDS = 0.05

TOLERANCE = 1e-6
"""Tolerance of decimal numbers, absolute and relative to the expected number."""

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,6})?", re.ASCII)
_WHOLE = re.compile(r"[+-]?\d+", re.ASCII)


def judge(
    response: str, answer: str, limits: Limits, partial: bool = False, seconds: float = math.inf
) -> float:
    """Return 1.0 if the program in a response passes all tests, else 0.0; with ``partial``, the share of
    tests that pass.

    Args:
        response: response with the program, see ``program_in``.
        answer: the tests, see ``tests_of``.
        limits: limits of the program in each test.
        partial: return the share of tests that pass.
        seconds: time limit for all tests together, only with ``partial``. Each test gets an equal share of
            the remaining time, so that a test that hangs leaves time for others. Tests that ran out of time
            are repeated with the time that is left in the end. A test for which no time is left does not
            pass.

    Raises:
        RewardError: the program cannot be started, for a reason that is not its own.
    """
    tests = tests_of(answer)
    code = program_in(response)
    if code is None:
        return 0.0
    if partial:
        return _number_passed(code, tests, limits, time.monotonic() + seconds) / len(tests)
    return float(all(_passes(code, test, limits) is True for test in tests))


def _number_passed(code: str, tests: Sequence[Test], limits: Limits, deadline: float) -> int:
    passed, waiting = 0, [(test, 0.0) for test in tests]
    while waiting:
        cut_short = list[tuple[Test, float]]()
        for place, (test, before) in enumerate(waiting):
            # Divide again before each test, so that fast tests leave their time to later ones.
            granted = min(limits.seconds, (deadline - time.monotonic()) / (len(waiting) - place))
            # Repeating a test with no more time than before would give the same result.
            if granted <= max(before, _LEAST_SECONDS):
                continue
            result = _passes(code, test, replace(limits, seconds=granted))
            passed += result is True
            if result is None and granted < limits.seconds:
                cut_short.append((test, granted))
        waiting = cut_short
    return passed


def _passes(code: str, test: Test, limits: Limits) -> bool | None:
    """Return whether a test passes. None if the program was killed for exceeding a limit."""
    task = _task(code, test)
    if test.function or test.statement:
        return _answers(task, test, limits)
    with file_of(json.dumps(task)) as source, file_of(test.given) as given, file_of() as written:
        # Without descriptors no requests follow, and the program runs as __main__ (``inside``).
        command = python_command(INSIDE, str(source.fileno()), "-1", "-1")
        with running(command, limits, given, written, (source.fileno(),)) as process:
            code_of_end = process.wait()
        if code_of_end == STOPPED:
            return None
        return code_of_end == 0 and same_output(text_in(written), test.expected)


def _task(code: str, test: Test) -> Task:
    """Build the task for ``inside``. It contains no expected value."""
    is_part = bool(test.function) or "Solution(" in test.statement
    return {
        "code": code,
        "packages": site.getsitepackages(),
        "function": test.function,
        "given_names": GIVEN_NAMES if is_part else (),
        "given_modules": [
            name for name in GIVEN_MODULES if is_part and re.search(rf"(?<![\w.]){name}\.", code)
        ],
    }


def _answers(task: Task, test: Test, limits: Limits) -> bool | None:
    with conversation(task, limits) as program:
        try:
            if test.function:
                return same_returned(program.solve(test.function, test.arguments), test.expected)
            if reason_against(test.statement) is None:
                return holds(test.statement, program)
            return program.run(test.statement)
        except (RaisedError, ValueError, RecursionError):
            return False
        except EndedError:
            return None if program.process.wait() == STOPPED else False


def same_output(written: str, expected: str) -> bool:
    """Return whether two outputs are equal, except for white space around words, empty lines at the end, and
    the tolerance of decimal numbers."""
    ours, theirs = written.rstrip().split("\n"), expected.rstrip().split("\n")
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def _same_line(written: str, expected: str) -> bool:
    ours, theirs = written.split(), expected.split()
    return len(ours) == len(theirs) and all(
        a == b or _same_number(a, b) for a, b in zip(ours, theirs, strict=True)
    )


def _same_number(written: str, expected: str) -> bool:
    if not (_NUMBER.fullmatch(written) and _NUMBER.fullmatch(expected)):
        return False
    if Decimal(written) == Decimal(expected):
        return True
    # Beyond the largest float, all numbers would become equal infinities.
    ours, theirs = float(written), float(expected)
    return (
        _WHOLE.fullmatch(expected) is None
        and math.isfinite(ours)
        and math.isfinite(theirs)
        and _is_close(ours, theirs)
    )


def _is_close(value: float, expected: float) -> bool:
    if not math.isfinite(expected):
        return value == expected or (math.isnan(expected) and math.isnan(value))
    return abs(value - expected) <= TOLERANCE * max(1.0, abs(expected))


def same_returned(value: Any, expected: Any) -> bool:
    """Return whether a function's return value equals the expected value, or the only element of an expected
    list.

    Args:
        value: plain value from ``inside.decode``.
        expected: value from JSON.
    """
    if _same_value(value, expected):
        return True
    # Some data sets wrap a function's only return value in a list.
    return isinstance(expected, list) and len(expected) == 1 and _same_value(value, expected[0])


def _same_value(value: Any, expected: Any) -> bool:
    if isinstance(expected, bool) or isinstance(value, bool):
        # True equals 1 in Python, but a test that expects a boolean must not accept a number.
        return value is expected
    if isinstance(expected, float):
        return type(value) in (int, float) and _is_close(_as_float(value), expected)
    if isinstance(expected, int):
        return type(value) in (int, float) and bool(value == expected)
    if isinstance(expected, list):
        if type(value) not in (list, tuple) or len(value) != len(expected):
            return False
        return all(map(_same_value, value, expected))
    if isinstance(expected, Mapping):
        return type(value) is dict and _same_mapping(value, expected)
    return type(value) is type(expected) and bool(value == expected)


def _same_mapping(value: dict[Any, Any], expected: Mapping[str, Any]) -> bool:
    ours = {_key(key): each for key, each in value.items()}
    # Lengths too: two Python keys, 1 and "1", become the same JSON key.
    return (
        len(ours) == len(value)
        and ours.keys() == expected.keys()
        and all(_same_value(ours[key], expected[key]) for key in expected)
    )


def _key(key: Any) -> Any:
    """Return a dictionary key in the form that JSON gives it."""
    if key is None or isinstance(key, bool):
        return {None: "null", True: "true", False: "false"}[key]
    return repr(key) if isinstance(key, int | float) else key


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.nan


def fault_of_tests(answer: str) -> str | Doubt | None:
    """Return why a program cannot be tested with a reference, a ``Doubt`` about a usable reference, or None.

    The doubt concerns statements that a program can pass on purpose without solving its task: those that run
    in its own process, and those that only compare the program's own results.
    """
    try:
        tests = tests_of(answer)
    except ValueError as error:
        return str(error)
    for test in tests:
        reason = (
            (reason_against(test.statement) or reason_to_doubt(test.statement)) if test.statement else None
        )
        if reason is not None:
            return Doubt(f"a program can pass {test.statement[:120]!r} without solving its task ({reason})")
    return None
