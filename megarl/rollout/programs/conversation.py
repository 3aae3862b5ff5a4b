"""A program that has been run and now answers requests, seen from outside its process.

Its answers are only data, because the program can write anything to the pipe. Nothing in them is executed,
and each value is rebuilt from Python's own plain types.
"""

from __future__ import annotations

import contextlib
import json
import marshal
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.rollout.programs.inside import decode, encode
from megarl.rollout.programs.process import LONGEST_OUTPUT, Limits, file_of, python_command, running

_SOURCE = (Path(__file__).parent / "inside.py").read_text(encoding="utf-8")
INSIDE = f"import marshal\nexec(marshal.loads({marshal.dumps(compile(_SOURCE, 'inside.py', 'exec'))!r}))"
"""Source of the program that runs the model's program; it is compiled once, instead of in each process."""

_PIECE = 1 << 16
# Maximum number of bytes of all answers together, because a statement may keep the values of many calls.
_LONGEST_CONVERSATION = 4 * LONGEST_OUTPUT

# Maximum count of numbers in all ranges of a conversation: a range takes a few bytes of an answer, but a
# statement may turn every one into a list.
_LONGEST_RANGES = 1_000_000


class EndedError(Exception):
    """The program has ended, or has closed its end of a pipe."""


class RaisedError(Exception):
    """The program, or a statement about it, has raised an exception.

    Args:
        kinds: names of the exception's class and of its base classes.
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        super().__init__(*kinds[:1])
        self.kinds = tuple(kinds)


@dataclass(frozen=True, slots=True, eq=False)
class Remote:
    """A handle of an object in the program's process that cannot be passed by value. It is equal only to
    itself.

    Attributes:
        number: number under which the program's process stores the object; None if ``builtin`` names it.
        builtin: name of one of Python's own functions, or ``operator.NAME``.
    """

    number: int | None = None
    builtin: str = ""


class Conversation:
    """Requests to a program, one after the other.

    Each request raises ``EndedError``, ``RaisedError``, or, for an invalid answer, ``ValueError`` or
    ``RecursionError``.

    Args:
        process: process of the program's supervisor.
        asked: file descriptor of the pipe to the program.
        told: file descriptor of the pipe from the program.
    """

    def __init__(self, process: subprocess.Popen[bytes], asked: int, told: int) -> None:
        self.process = process
        self._asked, self._told = asked, told
        self._read = b""
        self._bytes_left, self._numbers_left = _LONGEST_CONVERSATION, _LONGEST_RANGES

    def name(self, name: str) -> Any:
        """Return the value of a name in the program."""
        return self._value(self._answer({"do": "name", "name": name}))

    def call(
        self, function: Remote, arguments: Sequence[Any], keywords: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of the program and return its result."""
        return self.call_and_see(function, arguments, keywords, back=False)[0]

    def call_and_see(
        self,
        function: Remote,
        arguments: Sequence[Any],
        keywords: Mapping[str, Any] | None,
        *,
        back: bool = True,
    ) -> tuple[Any, list[Any]]:
        """Call a function of the program. Return its result and, with ``back``, the arguments as the function
        has left them."""
        named = {key: _encoded(value) for key, value in (keywords or {}).items()}
        request = {
            "do": "call",
            "function": _encoded(function),
            "arguments": _encoded(list(arguments)),
            "keywords": named,
        }
        answer = self._answer({**request, "back": back})
        left = self._decoded(answer.get("back", [])) if back else []
        return self._value(answer), left if isinstance(left, list) else []

    def solve(self, name: str, arguments: Sequence[Any]) -> Any:
        """Call a function by its name, at the top level or as a method of ``Solution``, and return its
        result."""
        return self._value(
            self._answer({"do": "solve", "name": name, "arguments": _encoded(list(arguments))})
        )

    def run(self, statement: str) -> bool:
        """Run a statement in the program's own process. Return whether it ran to its end, according to that
        process.

        A token that is sent afterwards has to be returned, so that nothing written earlier can be mistaken
        for the answer.
        """
        self._answer({"do": "run", "statement": statement})
        token = os.urandom(16).hex()
        return bool(self._value(self._answer({"do": "echo", "token": token})) == token)

    def _answer(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        data = json.dumps(request).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._asked, data) :]
        except BrokenPipeError:
            raise EndedError from None
        answer = json.loads(self._line())
        if not isinstance(answer, Mapping):
            raise ValueError("the reply of a program is not an object")
        kinds = answer.get("raised")
        if isinstance(kinds, list):
            raise RaisedError([kind for kind in kinds if isinstance(kind, str)])
        return answer

    def _line(self) -> bytes:
        parts, length = [self._read], len(self._read)
        while b"\n" not in parts[-1]:
            piece = os.read(self._told, _PIECE)
            if not piece:
                raise EndedError
            parts.append(piece)
            length += len(piece)
            # Count over the whole conversation, because many short answers fill memory as one long answer
            # does.
            self._bytes_left -= len(piece)
            if length > LONGEST_OUTPUT or self._bytes_left < 0:
                raise ValueError("the reply of a program is too long")
        line, _, self._read = b"".join(parts).partition(b"\n")
        return line

    def _value(self, answer: Mapping[str, Any]) -> Any:
        if "value" not in answer:
            raise ValueError("the reply of a program has no value")
        return self._decoded(answer["value"])

    def _decoded(self, coded: Any) -> Any:
        return decode(coded, self._rare)

    def _rare(self, kind: str, content: Any) -> Any:
        if kind != "range":
            return _remote(kind, content)
        made = range(*content)
        self._numbers_left -= len(made)
        if self._numbers_left < 0:
            raise ValueError("the ranges are too long")
        return made


def _remote(kind: str, content: Any) -> Remote:
    if kind != "object" or type(content) is not int:
        raise ValueError(f"no value is of the kind {kind}")
    return Remote(content)


def _encoded(value: Any) -> Any:
    return encode(value, _encoded_remote)


def _encoded_remote(value: Any) -> Any:
    if not isinstance(value, Remote):
        raise TypeError(f"a {type(value).__name__} cannot be sent to a program")
    return {"builtin": value.builtin} if value.number is None else {"object": value.number}


@contextlib.contextmanager
def conversation(task: Mapping[str, Any], limits: Limits) -> Iterator[Conversation]:
    """Run a program, and yield the conversation with it.

    Args:
        task: task for ``inside``.
        limits: limits of the program.

    Raises:
        RewardError: the program cannot be started.
    """
    with contextlib.ExitStack() as stack:
        source, given, written = map(stack.enter_context, map(file_of, (json.dumps(task), "", "")))
        read_asked, asked = os.pipe()
        told, write_told = os.pipe()
        for end in (asked, told):
            stack.callback(os.close, end)
        inner = (read_asked, write_told)
        try:
            command = python_command(INSIDE, *map(str, (source.fileno(), *inner)))
            process = stack.enter_context(running(command, limits, given, written, (source.fileno(), *inner)))
        # Close these ends, which the program now holds: while they stay open here, the program's death would
        # not close the pipes.
        finally:
            for end in inner:
                os.close(end)
        yield Conversation(process, asked, told)
