"""Mathematical answers compared by value (library `math_verify`): 1/2 equals 0.5."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any

from megarl.errors import DeadlineError
from megarl.rollout.answers import gsm8k_answer
from megarl.time_limit import OutOfTimeError, is_limited, time_limit

CHECK_SECONDS = 5.0
"""How long one answer may take to be judged where the caller has set no time limit."""

_LONGEST_KEPT = 1000
"""Characters of a reference that is kept with what was read from it."""

_DELIMITED = re.compile(r"\\boxed\s*\{|\\\(|\\\[|(?<!\\)\$.+(?<!\\)\$", re.DOTALL)
_BASE = re.compile(r"\d_\{?\d")
_UNIT = re.compile(r"\\(?:text|mathrm|mbox|textrm)\s*\{[^{}]*\}\s*(?:\^\s*(?:\d|\{\d+\}))?\s*$")
"""A unit at the end, with its exponent: the library leaves it out, and no part of the value is lost by that."""

_SPACING = re.compile(r"\\(?:left|right|[!,;: ])|\\text\s*(?=\{)|[\s$]")


class JudgementTimeoutError(DeadlineError):
    """An answer could not be judged within ``CHECK_SECONDS``."""


def math_verify(response: str, answer: str) -> float:
    """1.0 when the last mathematical expression of the response equals the reference answer, else 0.0.

    A reference without ``\\boxed{}``, ``$...$``, ``\\(`` or ``\\[`` is taken as if the whole of it stood in a box: the library looks for
    LaTeX in marked places alone, and of a bare ``3\\sqrt{13}`` would take the 3. What it cannot hold as one value (a number in another
    base, a sum of unit vectors) is compared as text with the last box of the response. Boxes that stand close to each other, with only a
    word or a comma between them, are one answer of several values to the library.

    Args:
        response: the model's.
        answer: the reference, see ``fault_of_reference``.

    Raises:
        JudgementTimeoutError: parsing and comparing took more than ``CHECK_SECONDS``, or than the caller's ``time_limit``. Signals do
            that, so only in the main thread.
    """
    import math_verify as library

    with _time_limit(CHECK_SECONDS):
        reference = _parsed(answer)
        if _loses_a_part(answer, reference):
            return float(_as_text(_last_box(response)) == _as_text(_last_box(answer) or answer))
        return float(_or_none(lambda: library.verify(list(reference), _parse(response), timeout_seconds=None)) or False)


def math_answer(response: str) -> str | None:
    """The final answer of a response as text, by which a majority votes: its last box, else its last number; None where it has neither.

    1/2 and 0.5 are two answers here: to compare every two by value would take the library as many calls as there are pairs.
    """
    box = _last_box(response)
    return _as_text(box) if box else gsm8k_answer(response, "flexible")


def fault_of_reference(answer: str) -> str | None:
    """Why nothing can be compared with this reference answer; None where it can."""
    try:
        with _time_limit(CHECK_SECONDS):
            return None if _parsed(answer) else "no mathematical expression can be read from it"
    except JudgementTimeoutError:
        return f"it could not be read within {CHECK_SECONDS:g} s"


def _parsed(answer: str) -> tuple[Any, ...]:
    """Return what the library reads from a reference: values, and last the text that they came from; empty for nothing."""
    return _parsed_before(answer) if len(answer) <= _LONGEST_KEPT else _parsed_now(answer)


def _parsed_now(answer: str) -> tuple[Any, ...]:
    return tuple(_parse(answer if _DELIMITED.search(answer) else f"\\boxed{{{answer}}}"))


_parsed_before = lru_cache(maxsize=1024)(_parsed_now)
"""References come again with every answer to their prompt."""


def _parse(text: str) -> list[Any]:
    import math_verify as library

    # Without a time limit of its own, and there is one here, the library warns at every call.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return _or_none(lambda: library.parse(text, parsing_timeout=None)) or []


def _or_none(compute: Callable[[], Any]) -> Any:
    """Its value; None where it raises. Sympy raises errors of any class on text that only looks like mathematics."""
    try:
        return compute()
    except Exception as error:
        logging.getLogger(__name__).debug("not mathematics: %s", error)
        return None


def _loses_a_part(answer: str, parsed: tuple[Any, ...]) -> bool:
    """Whether the library kept less of a reference than it says: fewer digits, or a number without its base."""
    content = _UNIT.sub("", _last_box(answer) or answer)
    kept = parsed[-1] if parsed and isinstance(parsed[-1], str) else content
    if _BASE.search(content):
        return True
    # a decimal may be kept as a fraction, which has other digits
    return "." not in content and len(re.findall(r"\d", kept)) < len(re.findall(r"\d", content))


def _last_box(text: str) -> str:
    """What stands in the last ``\\boxed{}``; empty where there is none or it does not end."""
    start = text.rfind("\\boxed{")
    depth = 0
    for place in range(start + len("\\boxed"), len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : place]
    return ""


def _as_text(expression: str) -> str:
    """Without what changes how LaTeX looks and not what it says."""
    return re.sub(r"\{([^{}\\])\}", r"\1", _SPACING.sub("", expression))


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises JudgementTimeoutError where the block takes longer, in the main thread; a caller's ``time_limit`` holds in its place."""
    from math_verify.errors import TimeoutException  # no Exception either

    try:
        with nullcontext() if is_limited() else time_limit(seconds):
            yield
    except (OutOfTimeError, TimeoutException):
        raise JudgementTimeoutError(
            f"an answer could not be judged within {seconds:g} s; it counts as wrong. Fix: nothing, unless there are many"
        ) from None
