"""Entry point ``vllm.general_plugins``. vLLM calls its ``register`` in each of its processes."""

from __future__ import annotations

import importlib.metadata

from megarl.errors import ConfigError

GROUP = "vllm.general_plugins"
MODULE = "megarl.models.generation.vllm.weight_engines"
EXTENSION = "megarl.models.generation.vllm.worker_extension.WorkerCalls"
EXECUTOR = "megarl.models.generation.vllm.executor.Executor"
COLOCATED, APART = "megarl_shared_memory", "megarl_broadcast"


def register() -> None:
    """Register the two weight-transfer engines with vLLM. Their module is imported only when one is used."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for name, kind in ((COLOCATED, "SharedMemoryEngine"), (APART, "BroadcastEngine")):
        # Both vLLM and megarl's worker call this function, but vLLM rejects a second registration.
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, MODULE, kind)


def require_entry_point() -> None:
    """Check that megarl is installed and not only importable. Otherwise vLLM's processes would not find its
    weight-transfer engines.

    Raises:
        ConfigError: no installed distribution has the entry point.
    """
    if not any(
        entry.value.startswith(f"{__name__}:") for entry in importlib.metadata.entry_points(group=GROUP)
    ):
        raise ConfigError(
            "policy.generation.backend = 'vllm': no installed distribution has megarl's entry "
            f"point in {GROUP}, through which vLLM's processes find the classes that receive "
            "weights. Fix: install megarl where the workers run (pip install -e .); PYTHONPATH "
            "alone is not enough"
        )
