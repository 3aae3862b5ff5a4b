"""vLLM itself, none of whose calls waits for a process of it that has died, and which leaves no file behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
import threading
from concurrent.futures import Future, wait
from multiprocessing import connection
from typing import Any

from megarl import env

SOCKETS = "VLLM_RPC_BASE_PATH"
# between two looks at vLLM's processes while one of its calls lasts
LOOK_SECONDS = 1.0
# that a call has to fail of itself after a process died, and say why
LAST_WORDS_SECONDS = 5.0


class Engine:
    """``vllm.LLM``, in this process or with processes of its own.

    Args:
        options: its arguments.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        # where vLLM's processes meet; it would leave the sockets where they are
        self._sockets = tempfile.TemporaryDirectory(prefix="vllm-", dir=env.text(SOCKETS))
        with env.variables({SOCKETS: self._sockets.name}):
            self._llm = LLM(**options)
        self._processes = multiprocessing.active_children()

    @property
    def has_sleep_mode(self) -> bool:
        """It can give its memory back and take it again."""
        return bool(self._llm.llm_engine.vllm_config.model_config.enable_sleep_mode)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of ``LLM``.

        Raises:
            RuntimeError: a process of vLLM died, so that there will be no answer. vLLM itself would wait for it for ever.
        """
        if not self._processes:
            return getattr(self._llm, method)(*args, **kwargs)
        answer: Future[Any] = Future()
        threading.Thread(target=self._answer, args=(answer, method, args, kwargs), name=f"vllm-{method}", daemon=True).start()
        while not wait([answer], LOOK_SECONDS).done:
            dead = [process for process in self._processes if not process.is_alive()]
            if dead and not wait([answer], LAST_WORDS_SECONDS).done:
                said = ", ".join(f"{process.name} (process {process.pid}, exit code {process.exitcode})" for process in dead)
                raise RuntimeError(f"vLLM died in {method}(): {said}")
        return answer.result()

    def _answer(self, answer: Future[Any], method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            answer.set_result(getattr(self._llm, method)(*args, **kwargs))
        except BaseException as error:
            answer.set_exception(error)

    def shutdown(self) -> None:
        """End vLLM's processes, those that are left of an engine that died too."""
        with contextlib.ExitStack() as ending:
            ending.callback(self._sockets.cleanup)
            ending.callback(self._llm.llm_engine.engine_core.shutdown)
            if not self._processes:
                self.call("shutdown_weight_transfer_engine")
            elif all(process.is_alive() for process in self._processes):
                try:
                    self.call("shutdown_weight_transfer_engine")
                except Exception:
                    # of an engine that is just dying: who asked it for something heard of that
                    if not connection.wait([process.sentinel for process in self._processes], LAST_WORDS_SECONDS):
                        raise
