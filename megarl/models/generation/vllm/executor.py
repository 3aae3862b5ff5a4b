"""Executor of an engine's ranks: it runs them in vLLM's processes, which leave nothing in /dev/shm however
they end."""

from __future__ import annotations

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from megarl.models.generation.vllm.shared_memory_names import remove_names


class Executor(MultiprocExecutor):
    """vLLM's executor of several processes (``distributed_executor_backend``); once all of them run, it
    removes the files of their shared memory."""

    def _init_executor(self) -> None:
        super()._init_executor()
        # Call this after super(), when every rank has opened the memory and no longer needs its name.
        self.collective_rpc("megarl_remove_names")
        remove_names()
