"""The tool ``python``: runs code in the sandbox of ``megarl.rollout.programs``, in one interpreter per
conversation, so that variables persist between calls.

The sandbox forks, and a fork of a process with other threads may deadlock on a lock that such a thread holds.
The driver has threads; so it starts this module as a separate, single-threaded host program, and sends it
requests on standard input, one line of JSON each.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import site
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypedDict

from megarl.config.environments import ToolConfig
from megarl.errors import ConfigError, RewardError, Violation
from megarl.rollout.message_env import EnvironmentLostError
from megarl.rollout.programs import Limits, isolation
from megarl.rollout.programs.conversation import Conversation, EndedError, RaisedError, conversation
from megarl.rollout.programs.inside import GIVEN_MODULES

if TYPE_CHECKING:
    from megarl.rollout.programs.inside import Task

_START_SECONDS = 60.0
# Maximum lifetime of an interpreter in seconds, in case the run fails to end it.
_LONGEST_LIFE = 3600.0

# Program that runs inside the sandbox. Its output is untrusted and treated as plain text. It takes built-ins
# from their module, because the policy's code may redefine names such as ``eval`` or ``print``.
_HOST = """
def megarl_cell(text):
    import ast, builtins, contextlib, io, traceback
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            tree = ast.parse(text, "code.py")
            ends_in_value = tree.body and builtins.isinstance(tree.body[-1], ast.Expr)
            last = ast.Expression(tree.body.pop().value) if ends_in_value else None
            names = builtins.globals()
            builtins.exec(builtins.compile(tree, "code.py", "exec"), names)
            value = None if last is None else builtins.eval(builtins.compile(last, "code.py", "eval"), names)
            if value is not None:
                builtins.print(builtins.repr(value))
        except builtins.BaseException as error:
            builtins.print("".join(traceback.format_exception_only(error)).strip())
    return out.getvalue()
"""


class _Reply(TypedDict, total=False):
    """A line from the host of an interpreter, with one of these keys."""

    ready: bool
    output: str
    ended: str
    lost: str


@dataclass(slots=True)
class Python:
    """The Python interpreter of one conversation, started at the first call.

    Attributes:
        limits: limits on the interpreter's memory, processes and lifetime.
        timeout_s: time limit of one call in seconds. When it is exceeded, the interpreter is killed and its
            variables are lost.
    """

    limits: Limits
    timeout_s: float
    _process: subprocess.Popen[bytes] | None = None

    @classmethod
    def maker(cls, section: ToolConfig, key: str) -> Callable[[], Python]:
        """Return a factory of interpreters from the tool's configuration section.

        Args:
            section: configuration section of the tool.
            key: its dotted key, for error messages.

        Raises:
            ConfigError: the section requires isolation, and this machine cannot isolate programs.
        """
        fault, bubblewrap = isolation()
        if fault is not None and section.get("isolation", "required") == "required":
            fix = (
                f"grant namespaces or install bubblewrap, or write {key}.isolation: preferred, "
                "which runs the model's code unprotected"
            )
            raise ConfigError(
                [Violation(f"{key}.isolation", "required", f"code cannot be isolated here: {fault}", fix)]
            )
        memory = section.get("memory_mb", 512)
        limits = Limits(_LONGEST_LIFE, memory, isolated=fault is None, bubblewrap=bubblewrap)
        return lambda: cls(limits, section.get("timeout_s", 10.0))

    def __call__(self, code: str) -> str:
        """Run code and return what it prints, followed by the value of a final expression.

        Raises:
            ValueError: the code exceeds the time limit, or ends the interpreter.
            EnvironmentLostError: no interpreter can be started, or its host process was killed; no code
                inside the sandbox can cause this.
        """
        process = self._process = self._process or self._started()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({"code": code}).encode() + b"\n")
            process.stdin.flush()
        except OSError as error:
            self.close()
            raise EnvironmentLostError("the host of the interpreter was killed") from error
        answer = self._line(process, self.timeout_s)
        if answer is None:
            self.close()
            raise ValueError(
                f"the code took more than {self.timeout_s:g} s; the interpreter was ended, and its "
                "variables are gone"
            )
        if "lost" in answer:
            self.close()
            raise EnvironmentLostError(answer["lost"])
        if "ended" in answer:
            self.close()
            raise ValueError(answer["ended"])
        return str(answer["output"])

    def _started(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "megarl.rollout.tools.python", json.dumps(asdict(self.limits))]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        ready = self._line(process, _START_SECONDS)
        if ready is None or "ready" not in ready:
            process.kill()
            process.wait()
            raise EnvironmentLostError(
                f"no interpreter can be started: {ready['lost'] if ready else 'it did not answer'}"
            )
        return process

    def _line(self, process: subprocess.Popen[bytes], timeout_s: float) -> _Reply | None:
        """Read the host's next reply. Return None on timeout."""
        assert process.stdout is not None
        until, read = time.monotonic() + timeout_s, b""
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not read.endswith(b"\n"):
                if not selector.select(max(until - time.monotonic(), 0.0)):
                    return None
                piece = process.stdout.read1(1 << 16)  # type: ignore[attr-defined]
                if not piece:
                    return {"lost": "the host of the interpreter was killed"}
                read += piece
        found: _Reply = json.loads(read)
        return found

    def close(self) -> None:
        """Kill the interpreter, if it is running."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            self._process = None


def _serve(limits: Limits) -> None:
    """Answer requests from standard input until it is closed."""
    try:
        with _interpreter(limits) as program:
            cell = program.name("megarl_cell")
            _end_with_the_driver()
            _say({"ready": True})
            for line in sys.stdin:
                _say(_output(program, cell, json.loads(line)["code"]))
    except RewardError as error:
        _say({"lost": str(error)})


def _end_with_the_driver() -> None:
    """Check every second, even while code runs, that the driver is alive, and exit if it is not.

    PR_SET_PDEATHSIG is no substitute: it fires when the parent thread ends, which may be long before the
    driver does.
    """
    parent = os.getppid()

    def look(*_: object) -> None:
        if os.getppid() != parent:
            os._exit(1)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)


def _output(program: Conversation, cell: Any, code: str) -> _Reply:
    try:
        return {"output": str(program.call(cell, [code]))}
    except (EndedError, RaisedError, ValueError, RecursionError):
        return {
            "ended": (
                "the code ended the interpreter, took too much memory or printed too much; its "
                "variables are gone"
            )
        }


@contextlib.contextmanager
def _interpreter(limits: Limits) -> Iterator[Conversation]:
    task: Task = {
        "code": _HOST,
        "packages": site.getsitepackages(),
        "given_names": [],
        "given_modules": list(GIVEN_MODULES),
        "function": "",
    }
    with conversation(task, limits) as program:
        yield program


def _say(answer: _Reply) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _serve(Limits(**json.loads(sys.argv[1])))
