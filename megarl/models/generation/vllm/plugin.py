"""Entry point ``vllm.general_plugins``, whose ``register`` vLLM calls in each of its processes."""

from __future__ import annotations

import importlib.metadata

from megarl.errors import ConfigError

GROUP = "vllm.general_plugins"
MODULE = "megarl.models.generation.vllm.weight_engines"
EXTENSION = "megarl.models.generation.vllm.worker_extension.WorkerCalls"
EXECUTOR = "megarl.models.generation.vllm.executor.Executor"
COLOCATED, APART = "megarl_shared_memory", "megarl_broadcast"


def register() -> None:
    """Register the two weight-transfer engines with vLLM, which imports an engine when it is used."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for name, kind in ((COLOCATED, "SharedMemoryEngine"), (APART, "BroadcastEngine")):
        # vLLM and the worker itself both call this, and vLLM refuses a second registration.
        if name not in WeightTransferEngineFactory._registry:
            WeightTransferEngineFactory.register_engine(name, MODULE, kind)


def require_entry_point() -> None:
    """Raise an error if megarl is importable but not installed: vLLM's other processes would not find its
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
