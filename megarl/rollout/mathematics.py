"""Comparison of mathematical answers by value, with the library math-verify: 1/2 equals 0.5."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any

from megarl.data.records import Doubt
from megarl.errors import DeadlineError
from megarl.rollout.answers import gsm8k_answer
from megarl.rollout.mathematics_answers import boxed_answer, outside_thoughts, stated_answer
from megarl.rollout.mathematics_statements import agree, values_in
from megarl.rollout.mathematics_text import unify
from megarl.rollout.mathematics_values import library_agrees, or_none, silence_library
from megarl.rollout.mathematics_words import is_unit
from megarl.time_limit import OutOfTimeError, is_limited, time_limit

CHECK_SECONDS = 5.0
"""Time limit in seconds for checking one answer, unless the caller has set its own."""

# Parsed references up to this length in characters are cached.
_LONGEST_KEPT = 1000

_DELIMITED = re.compile(r"\\boxed\s*\{|\\\(|\\\[|(?<!\\)\$.+(?<!\\)\$", re.DOTALL)
_MARKED = re.compile(r"(?<!\\)\$\$.*?\$\$|(?<!\\)\$.*?(?<!\\)\$|\\\(.*?\\\)|\\\[.*?\\\]", re.DOTALL)
# A final line ``#### result`` after worked steps, as in GSM8K.
_MARKED_RESULT = re.compile(r"(?:^|\n)\s*####[ \t]*(\S[^\n]*)\s*\Z")
_HEDGE = re.compile(r"[0-9})$]\s+or\s+(?:\$|\\\()*[-+]?[0-9][^\n]*\s*\Z")
# A stated answer that is a number with words. math-verify would not read it better than we do.
_PLAIN = re.compile(
    r"(?:(?:either|about|approximately|exactly|at least|at most|more than|less than)\s+)?[-+]?[0-9.][^$\\]*\Z"
)
# Without a box, only this many characters at the end of a response are searched for an expression.
_LONGEST_ENDING = 20_000

# NuminaMath and similar data sets store these words in place of an answer.
_NO_ANSWERS = frozenset({"proof", "notfound"})

_SPACING = re.compile(r"\\(?:left|right|[!,;: ])|\\text\s*(?=\{)|[\s$]")


class JudgementTimeoutError(DeadlineError):
    """Checking an answer exceeded ``CHECK_SECONDS``."""


def math_verify(response: str, answer: str) -> float:
    r"""Return 1.0 if the response's final answer equals the reference answer, else 0.0.

    The final answer is the content of the last ``\boxed{}``, else the text after ``the answer is``, else the
    last expression that math-verify finds. A reference without ``\boxed{}``, ``$...$``, ``\(`` or ``\[`` is
    parsed as if it were boxed.

    Args:
        response: the model's response.
        answer: the reference answer; ``fault_of_reference`` reports the unusable ones.

    Raises:
        JudgementTimeoutError: parsing and comparing exceeded ``CHECK_SECONDS`` or the caller's
            ``time_limit``. Signals enforce the limit, so it works only in the main thread.
    """
    with _time_limit(CHECK_SECONDS):
        wanted = _reference(answer)
        boxed = boxed_answer(response, values_in(wanted))
        if boxed is not None:
            return _score(wanted, boxed)
        stated = stated_answer(response)
        # A plain statement is final. One with mathematics gets a second chance below, where math-verify may
        # parse it better.
        if stated is not None and (_score(wanted, stated) or _PLAIN.match(stated)):
            return _score(wanted, stated)
        ending = _ending(outside_thoughts(response))
        return float(not _HEDGE.search(ending) and library_agrees(list(_parsed(answer)), _parse(ending)))


def _score(reference: str, answer: str) -> float:
    # sympy may raise on text that only resembles mathematics; such a response is incorrect.
    return float(or_none(lambda: agree(reference, answer)) or False)


def math_answer(response: str) -> str | None:
    """Return the final answer of a response as text for majority votes: its last box, else its last number,
    else None.

    Votes compare texts, so 1/2 and 0.5 are different answers: comparing by value would need one library call
    per pair of answers.
    """
    boxed = boxed_answer(response)
    return _as_text(boxed) if boxed else gsm8k_answer(response, "flexible")


def fault_of_reference(answer: str) -> str | Doubt | None:
    """Return why a reference answer cannot be used, a ``Doubt`` about a usable one, or None."""
    try:
        with _time_limit(CHECK_SECONDS):
            found = bool(_parsed(answer))
    except JudgementTimeoutError:
        return f"it could not be read within {CHECK_SECONDS:g} s"
    return doubt_of_reference(answer) if found else "no mathematical expression can be read from it"


def doubt_of_reference(answer: str) -> Doubt | None:
    """Return a doubt if a reference is only a note that the problem has no final answer (``proof``, ``not
    found``), else None."""
    if "".join(answer.split()).lower() not in _NO_ANSWERS:
        return None
    return Doubt(
        f"{answer!r} is not an answer, but a response that repeats it is correct: leave such problems out"
    )


def _reference(answer: str) -> str:
    """Return the part of a reference to compare: the result after ``####``, else its boxes, else the whole
    text. If the text mixes prose and mathematics, only the mathematics at its end."""
    result = _MARKED_RESULT.search(answer)
    if result is not None:
        return result[1]
    boxed = boxed_answer(answer, 2)
    if boxed is not None:
        return boxed
    marked = list(_MARKED.finditer(answer))
    outside = re.findall(r"[^\W\d_]{2,}", _MARKED.sub(" ", answer))
    if not marked or all(word in ("and", "or") or is_unit(word) for word in outside):
        return answer
    last = [marked[-1][0]]
    for earlier, later in zip(marked[-2::-1], marked[:0:-1], strict=True):
        if not re.fullmatch(r"\s*(?:,|;|and|or|,\s*and|,\s*or)\s*", answer[earlier.end() : later.start()]):
            break
        last.insert(0, earlier[0])
    return ", ".join(last)


def _parsed(answer: str) -> tuple[Any, ...]:
    """Return math-verify's parse of a reference: its values, then the text that they came from. Empty if it
    finds nothing."""
    return _parsed_before(answer) if len(answer) <= _LONGEST_KEPT else _parsed_now(answer)


def _parsed_now(answer: str) -> tuple[Any, ...]:
    return tuple(_parse(answer if _DELIMITED.search(answer) else f"\\boxed{{{answer}}}"))


# Cached, because each reference comes again with every response to its prompt.
_parsed_before = lru_cache(maxsize=1024)(_parsed_now)


def _parse(text: str) -> list[Any]:
    import math_verify as library

    silence_library()
    # Disable math-verify's own timeout, whose signal would replace the caller's.
    return or_none(lambda: library.parse(unify(text), parsing_timeout=None)) or []


def _ending(text: str) -> str:
    """Return the last lines of a long text, because math-verify's patterns are slow on long texts."""
    return text if len(text) <= _LONGEST_ENDING else text[-_LONGEST_ENDING:].partition("\n")[2]


def _as_text(expression: str) -> str:
    """Remove commas, spaces and braces from LaTeX that only change its appearance."""
    return re.sub(r"\{([^{}\\])\}", r"\1", _SPACING.sub("", expression))


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raise ``JudgementTimeoutError`` if the context takes longer than ``seconds``. Inside another
    ``time_limit`` it has no limit of its own. Works in the main thread only."""
    from math_verify.errors import TimeoutException  # does not derive from Exception

    try:
        with nullcontext() if is_limited() else time_limit(seconds):
            yield
    except (OutOfTimeError, TimeoutException):
        raise JudgementTimeoutError(
            f"a response could not be scored within {seconds:g} s; it counts as incorrect. Fix: "
            "nothing, unless there are many"
        ) from None
