"""Entry point ``vllm.general_plugins``: vLLM calls ``register`` in each of its processes."""

from __future__ import annotations

MODULE = "megarl.models.generation.vllm.weight_engines"
EXTENSION = "megarl.models.generation.vllm.worker_extension.WorkerCalls"
EXECUTOR = "megarl.models.generation.vllm.executor.Executor"
COLOCATED, APART = "megarl_shared_memory", "megarl_broadcast"


def register() -> None:
    """Make the two engines of weight transfer known; vLLM imports them when one is used."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for name, kind in ((COLOCATED, "SharedMemoryEngine"), (APART, "BroadcastEngine")):
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, MODULE, kind)
