"""The pool of gloo workers that all distributed tests share; it is the fuzzer's, whose known faults can be put into every job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from megarl import env
from megarl.config.backend import enabled_backend
from megarl.parity import pool
from megarl.parity.faults.mutations import applied, mutation
from tests.models import VOCABULARY

FAULT_VARIABLE = "MEGARL_TEST_FAULT"


class WorkerPool(pool.WorkerPool):
    """The fuzzer's; with ``MEGARL_TEST_FAULT`` its jobs run with the fault of that name, to see which tests notice."""

    def run(self, world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        fault = env.text(FAULT_VARIABLE)
        policy = next((value for value in arguments if isinstance(value, Mapping) and "train_global_batch_size" in value), None)
        if fault is None or policy is None:
            return super().run(world, function, *arguments)
        return super().run(world, _with_fault, fault, dict(policy), world, function, *arguments)


def _with_fault(fault: str, policy: Mapping[str, Any], world: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)``, on a backend that can have the fault with it."""
    backend = enabled_backend(policy)
    if backend not in mutation(fault).backends:
        return function(*arguments)
    section = policy.get(f"{backend}_cfg", {})
    tp = section.get("tensor_model_parallel_size", section.get("tensor_parallel_size", 1))
    cp = section.get("context_parallel_size", 1)
    dp = world // (tp * cp * section.get("pipeline_model_parallel_size", 1))
    micro = max(1, policy["train_global_batch_size"] // dp // policy["train_micro_batch_size"])
    case: Any = SimpleNamespace(backend=backend, vocab=VOCABULARY, tp=tp, cp=cp, dp=dp, micro=micro)
    with applied(fault, case):
        return function(*arguments)
