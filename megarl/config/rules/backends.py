"""Rules on which backend runs the policy, and on what each backend can do."""

from __future__ import annotations

from collections.abc import Iterator

from megarl.config.rules.view import Rule, View
from megarl.errors import Violation

DTENSOR = "policy.dtensor_cfg"
MEGATRON = "policy.megatron_cfg"
HAND_WRITTEN_PLANS = frozenset({"llama", "qwen2", "qwen3", "gemma3_text", "gemma3"})


def backend_of(view: View) -> str:
    """The backend a policy runs on: ``megatron``, ``dtensor`` or, with neither enabled, ``fsdp1``."""
    view["policy"]
    if view.get(f"{MEGATRON}.enabled", False):
        return "megatron"
    return "dtensor" if view.get(f"{DTENSOR}.enabled", False) else "fsdp1"


def one_backend(view: View) -> Iterator[Violation]:
    """At most one backend is enabled."""
    if view[f"{MEGATRON}.enabled"] and view[f"{DTENSOR}.enabled"]:
        yield Violation(f"{DTENSOR}.enabled", True, "megatron_cfg is enabled too, a policy has one backend", "set one of the two to false")


def torch_optimizer_unused(view: View) -> Iterator[Violation]:
    """Megatron has its own optimizer and scheduler."""
    view.require(backend_of(view) == "megatron")
    for key in ("optimizer", "scheduler"):
        value = view[f"policy.{key}"]
        if value is not None:
            fix = f"set it to null and use {MEGATRON}.{key}"
            yield Violation(f"policy.{key}", value, "the Megatron backend does not use it", fix)


def dtensor_context_parallel(view: View) -> Iterator[Violation]:
    """What context parallelism excludes in the DTensor backend."""
    view.require(backend_of(view) == "dtensor")
    key = f"{DTENSOR}.context_parallel_size"
    size = view[key]
    view.require(size > 1)
    if view.get("policy.sequence_packing.enabled"):
        yield Violation(key, size, "sequence packing needs another attention kernel than context parallelism", "disable one of the two")
    if view[f"{DTENSOR}.tensor_parallel_size"] > 1 and view[f"{DTENSOR}.sequence_parallel"]:
        yield Violation(key, size, "it excludes tensor parallelism with sequence_parallel", f"set {DTENSOR}.sequence_parallel to false")
    if view.facts.model_type.startswith("gemma3"):
        yield Violation(key, size, "Gemma 3 mixes attention kinds that context parallelism does not offer", "set it to 1")


def dtensor_plan(view: View) -> Iterator[Violation]:
    """Sequence parallelism needs a plan that was written for it."""
    view.require(backend_of(view) == "dtensor" and view[f"{DTENSOR}.sequence_parallel"])
    if view[f"{DTENSOR}.tensor_parallel_size"] == 1:
        yield Violation(
            f"{DTENSOR}.sequence_parallel", True, "it shards between tensor-parallel ranks and there is only one", "set it to false"
        )
    elif view[f"{DTENSOR}.custom_parallel_plan"] is None and view.facts.model_type not in HAND_WRITTEN_PLANS:
        bound = f"there is no plan with it for {view.facts.model_type!r}"
        yield Violation(f"{DTENSOR}.sequence_parallel", True, bound, "set it to false, or give custom_parallel_plan")


def dtensor_tied_weights(view: View) -> Iterator[Violation]:
    """Tied embeddings cannot be divided over tensor-parallel ranks."""
    key = f"{DTENSOR}.tensor_parallel_size"
    view.require(backend_of(view) == "dtensor" and view[key] > 1 and view.facts.tied)
    if not view.facts.model_type.startswith(("gemma2", "gemma3")):
        yield Violation(key, view[key], "the model's output layer is its embedding, which this backend cannot divide", "set it to 1")


def fsdp1_limits(view: View) -> Iterator[Violation]:
    """What FSDP1 cannot do."""
    view.require(backend_of(view) == "fsdp1")
    if view["policy.precision"] == "float16":
        yield Violation("policy.precision", "float16", "FSDP1 has no loss scaling", "write bfloat16 or float32")
    if view.facts.tied:
        yield Violation("policy.model_name", view["policy.model_name"], "FSDP1 cannot train tied embeddings", f"enable {MEGATRON}")


BACKEND_RULES: tuple[Rule, ...] = (
    one_backend,
    torch_optimizer_unused,
    dtensor_context_parallel,
    dtensor_plan,
    dtensor_tied_weights,
    fsdp1_limits,
)
