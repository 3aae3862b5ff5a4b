"""Requests from the driver to a running program in the sandbox.

Replies are untrusted data, because the program can write anything to the pipe. Nothing in them is executed,
and each value is rebuilt from Python's plain types.
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
from typing import TYPE_CHECKING, Any

from megarl.rollout.programs.inside import decode, encode
from megarl.rollout.programs.process import LONGEST_OUTPUT, Limits, file_of, python_command, running

if TYPE_CHECKING:
    from megarl.rollout.programs.inside import Reply, Request, Task

_SOURCE = (Path(__file__).parent / "inside.py").read_text(encoding="utf-8")
INSIDE = f"import marshal\nexec(marshal.loads({marshal.dumps(compile(_SOURCE, 'inside.py', 'exec'))!r}))"
"""Source of the host program, which runs the model's program. It embeds compiled code, so that not every
process has to compile it."""

_PIECE = 1 << 16
# Maximum bytes of all replies together, because a statement may keep the values of many calls.
_LONGEST_CONVERSATION = 4 * LONGEST_OUTPUT

# Maximum total length of all ranges that a program returns: a range takes few bytes in a reply, but a
# statement may turn each into a list.
_LONGEST_RANGES = 1_000_000


class EndedError(Exception):
    """The program has exited, or has closed its end of a pipe."""


class RaisedError(Exception):
    """The program, or a statement about it, raised an exception.

    Args:
        kinds: names of the exception's class and of its base classes.
    """

    def __init__(self, kinds: Sequence[str]) -> None:
        super().__init__(*kinds[:1])
        self.kinds = tuple(kinds)


@dataclass(frozen=True, slots=True, eq=False)
class Remote:
    """Handle of an object in the program's process that cannot be passed by value. A handle equals only
    itself.

    Attributes:
        number: index under which the program's process stores the object; None if ``builtin`` is given.
        builtin: name of a built-in function, or ``operator.NAME``.
    """

    number: int | None = None
    builtin: str = ""


class Conversation:
    """A sequence of requests to a program, each answered before the next.

    Each request raises ``EndedError``, ``RaisedError`` or, for an invalid reply, ``ValueError`` or
    ``RecursionError``.

    Args:
        process: supervisor process of the program.
        asked: write end of the pipe to the program.
        told: read end of the pipe from the program.
    """

    def __init__(self, process: subprocess.Popen[bytes], asked: int, told: int) -> None:
        self.process = process
        self._asked, self._told = asked, told
        self._read = b""
        self._bytes_left, self._numbers_left = _LONGEST_CONVERSATION, _LONGEST_RANGES

    def name(self, name: str) -> Any:
        """Return the value of a global name in the program."""
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
        """Call a function of the program. Return its result and, with ``back``, the arguments after the call,
        since the function may have modified them."""
        named = {key: _encoded(value) for key, value in (keywords or {}).items()}
        answer = self._answer(
            {
                "do": "call",
                "function": _encoded(function),
                "arguments": _encoded(list(arguments)),
                "keywords": named,
                "back": back,
            }
        )
        left = self._decoded(answer.get("back", [])) if back else []
        return self._value(answer), left if isinstance(left, list) else []

    def solve(self, name: str, arguments: Sequence[Any]) -> Any:
        """Call a function by name, at the top level or as a method of ``Solution``, and return its result."""
        return self._value(
            self._answer({"do": "solve", "name": name, "arguments": _encoded(list(arguments))})
        )

    def run(self, statement: str) -> bool:
        """Execute a statement in the program's own process. Return True if it finished, as far as that
        process can be trusted.

        The process must then echo a random token, so that output written in advance cannot pass for the
        reply.
        """
        self._answer({"do": "run", "statement": statement})
        token = os.urandom(16).hex()
        return bool(self._value(self._answer({"do": "echo", "token": token})) == token)

    def _answer(self, request: Request) -> Reply:
        data = json.dumps(request).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._asked, data) :]
        except BrokenPipeError:
            raise EndedError from None
        answer: Reply = json.loads(self._line())
        if not isinstance(answer, dict):
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
            # Count over all replies, because many short ones fill memory as one long reply does.
            self._bytes_left -= len(piece)
            if length > LONGEST_OUTPUT or self._bytes_left < 0:
                raise ValueError("the reply of a program is too long")
        line, _, self._read = b"".join(parts).partition(b"\n")
        return line

    def _value(self, answer: Reply) -> Any:
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
def conversation(task: Task, limits: Limits) -> Iterator[Conversation]:
    """Run a program, and yield a ``Conversation`` with it.

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
        # Close the ends that the program has inherited: while they are open here, its death would not close
        # the pipes.
        finally:
            for end in inner:
                os.close(end)
        yield Conversation(process, asked, told)
