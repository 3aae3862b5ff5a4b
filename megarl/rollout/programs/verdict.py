"""The verdict about a program: which of its tests pass.

Each test is a process of its own. Expected values stay outside of it: outputs and returned values are compared here, and
a statement (``assert f(2) == 4``) is evaluated here, call by call. What cannot be evaluated so (see ``statements``) runs
in the program's process, after the program: a program that takes that process over passes it, so such statements are
counted when the data are read.
"""

from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megarl.rollout.programs.comparison import same_output, same_returned
from megarl.rollout.programs.conversation import INSIDE, EndedError, RaisedError, conversation
from megarl.rollout.programs.forms import Test, program_in, tests_of
from megarl.rollout.programs.inside import GIVEN_MODULES, GIVEN_NAMES
from megarl.rollout.programs.process import STOPPED, Limits, file_of, python_command, running, text_in
from megarl.rollout.programs.statements import holds, reason_against

logger = logging.getLogger(__name__)

_LEAST_SECONDS = 0.05
"""In which no program starts, so that a test with no more is not begun."""


def judge(response: str, answer: str, limits: Limits, partial: bool = False, seconds: float = math.inf) -> float:
    """Return 1.0 when the program of a response passes all tests, else 0.0.

    Args:
        response: with the program, see ``program_in``.
        answer: the tests, see ``tests_of``.
        limits: of the program, for each test.
        partial: return the share of the tests that pass.
        seconds: for all tests together, with ``partial``: each has its part of what is left, so that one that does not end leaves time for
            the others, and those that were cut short have what is left in the end. A test whose time does not come has not passed.

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
            granted = min(limits.seconds, (deadline - time.monotonic()) / (len(waiting) - place))
            # no more than it had says nothing new
            if granted <= max(before, _LEAST_SECONDS):
                continue
            result = _passes(code, test, replace(limits, seconds=granted))
            passed += result is True
            if result is None and granted < limits.seconds:
                cut_short.append((test, granted))
        waiting = cut_short
    return passed


def _passes(code: str, test: Test, limits: Limits) -> bool | None:
    """Whether a test passes; None where the program was ended for what it took."""
    task = _task(code, test)
    if test.function or test.statement:
        return _answers(task, test, limits)
    with file_of(json.dumps(task)) as source, file_of(test.given) as given, file_of() as written:
        command = python_command(INSIDE, str(source.fileno()), "-1", "-1")
        with running(command, limits, given, written, (source.fileno(),)) as process:
            code_of_end = process.wait()
        if code_of_end == STOPPED:
            return None
        return code_of_end == 0 and same_output(text_in(written), test.expected)


def _task(code: str, test: Test) -> dict[str, Any]:
    """Return what ``inside`` is given; nothing of what is expected."""
    is_part = bool(test.function) or "Solution(" in test.statement
    return {
        "code": code,
        "function": test.function,
        "given_names": GIVEN_NAMES if is_part else (),
        "given_modules": [name for name in GIVEN_MODULES if is_part and re.search(rf"(?<![\w.]){name}\.", code)],
    }


def _answers(task: dict[str, Any], test: Test, limits: Limits) -> bool | None:
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


def fault_of_tests(answer: str) -> str | None:
    """Return why a program cannot be tested with a reference, or None."""
    try:
        tests_of(answer)
    except ValueError as error:
        return str(error)
    return None


class CheckedReferences:
    """Looks for faults of references, and counts the statements that only the program's own process can tell about.

    The first is logged, and each time that there are ten times as many.
    """

    def __init__(self) -> None:
        self._statements = self._inside = 0
        self._next_report = 1

    def __call__(self, answer: str) -> str | None:
        """Return why a program cannot be tested with a reference, or None."""
        try:
            statements = [test.statement for test in tests_of(answer) if test.statement]
        except ValueError as error:
            return str(error)
        for statement in statements:
            self._statements += 1
            reason = reason_against(statement)
            if reason is not None:
                self._inside += 1
                self._report(statement, reason)
        return None

    def _report(self, statement: str, reason: str) -> None:
        if self._inside < self._next_report:
            return
        self._next_report *= 10
        logger.warning(
            "code: %d of the first %d statements run in the program's own process, where a program that sets out to can pass them "
            "without solving its task. The last of them is %r: %s",
            self._inside,
            self._statements,
            statement[:200],
            reason,
        )
