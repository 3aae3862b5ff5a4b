"""vLLM's executor for an engine whose ranks are separate processes, changed so that it leaves nothing in
/dev/shm, even if the processes are killed."""

from __future__ import annotations

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from megarl.models.generation.vllm.shared_memory_names import remove_names


class Executor(MultiprocExecutor):
    """vLLM's multiprocessing executor (``distributed_executor_backend``). It unlinks the files of the shared
    memory as soon as all processes run."""

    def _init_executor(self) -> None:
        super()._init_executor()
        # Only now has every rank opened the memory, so that its name is no longer needed.
        self.collective_rpc("megarl_remove_names")
        remove_names()
