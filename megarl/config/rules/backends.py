"""Rules on which backend runs the policy, and on what each backend can do."""

from __future__ import annotations

from collections.abc import Iterator

from converters.families import FAMILIES
from megarl.config.rules.view import Rule, View
from megarl.errors import Violation

DTENSOR = "policy.dtensor_cfg"
MEGATRON = "policy.megatron_cfg"
HAND_WRITTEN_PLANS = frozenset({"llama", "mistral", "qwen2", "qwen3"})


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


def torch_optimizer_given(view: View) -> Iterator[Violation]:
    """The torch backends train with the optimizer that the configuration names."""
    view.require(backend_of(view) != "megatron" and view.has("algorithm"))
    if view["policy.optimizer"] is None:
        fix = "write {name: torch.optim.AdamW, kwargs: {lr: ...}}"
        yield Violation("policy.optimizer", None, f"a policy on {backend_of(view)} trains with it", fix)


def switches_of_fsdp1(view: View) -> Iterator[Violation]:
    """Two switches belong to FSDP1 and would do nothing elsewhere."""
    backend = backend_of(view)
    view.require(backend != "fsdp1")
    instead = {
        "policy.activation_checkpointing_enabled": f"policy.{backend}_cfg.activation_checkpointing",
        "policy.fsdp_offload_enabled": f"{DTENSOR}.cpu_offload" if backend == "dtensor" else "the optimizer's own keys",
    }
    for key, other in instead.items():
        if view[key]:
            yield Violation(key, True, f"only FSDP1 reads it, and this policy runs on {backend}", f"set it to false and use {other}")


def converter_is_the_model_s(view: View) -> Iterator[Violation]:
    """The weights are converted by the rules of the model's own family; a name may be written down, but only the right one."""
    view.require(backend_of(view) == "megatron")
    key, family = f"{MEGATRON}.converter_type", view.facts.family
    named = view[key].lower().removesuffix("forcausallm").replace("_", "")
    known = FAMILIES.get(family)
    # Kimi-K2's model type is its own, and its class DeepSeek-V3's.
    of_class = known is not None and view[key] == known.architecture_class
    if named != family.replace("_", "") and not of_class:
        yield Violation(key, view[key], f"the model's own config.json decides, and says {family}", "remove the line")


def recomputed_parts(view: View) -> Iterator[Violation]:
    """Parts of layers are recomputed where recomputation is on and selective, and the model has them."""
    view.require(backend_of(view) == "megatron")
    key = f"{MEGATRON}.recompute_modules"
    parts, granularity, switch = view[key], f"{MEGATRON}.recompute_granularity", f"{MEGATRON}.activation_checkpointing"
    if view[granularity] != "selective":
        if parts != ["core_attn"]:
            fix = f"set {granularity} to selective, or remove the line"
            yield Violation(key, parts, f"{granularity} is {view[granularity]}, so it would do nothing", fix)
        return
    if not view[switch]:
        yield Violation(granularity, "selective", f"{switch} is false, so that nothing is recomputed", f"set {switch} to true")
    if not parts:
        yield Violation(key, parts, "selective recomputation needs at least one part", "write for example [core_attn]")
    layers = [view.facts.is_sparse(layer) for layer in range(view.facts.num_layers)]
    for part, without in (("mlp", all(layers)), ("moe", not any(layers))):
        if part in parts and without:
            kind = "dense layers" if part == "mlp" else "layers with experts"
            yield Violation(key, parts, f"the model has no {kind}, so that {part} is nothing of it", f"remove {part}")


def transformer_engine_needs_a_gpu(view: View) -> Iterator[Violation]:
    """Where the ranks run on CPUs there can be no layers of Transformer Engine; whether they work on a GPU, only a worker finds out."""
    view.require(backend_of(view) == "megatron" and view["cluster.device"] == "cpu")
    key = f"{MEGATRON}.transformer_engine"
    if view[key] is True:
        yield Violation(key, True, "Transformer Engine needs a GPU, and cluster.device is cpu", "write auto or false")


def dtensor_context_parallel(view: View) -> Iterator[Violation]:
    """What context parallelism excludes in the DTensor backend."""
    view.require(backend_of(view) == "dtensor")
    key = f"{DTENSOR}.context_parallel_size"
    view.require(view[key] > 1)
    if view.facts.family.startswith("gemma3"):
        yield Violation(key, view[key], "Gemma 3 mixes attention kinds that context parallelism does not offer", "set it to 1")


def dtensor_plan(view: View) -> Iterator[Violation]:
    """Sequence parallelism needs a plan that was written for it."""
    view.require(backend_of(view) == "dtensor" and view[f"{DTENSOR}.sequence_parallel"])
    if view[f"{DTENSOR}.tensor_parallel_size"] == 1:
        yield Violation(
            f"{DTENSOR}.sequence_parallel", True, "it shards between tensor-parallel ranks and there is only one", "set it to false"
        )
    elif view[f"{DTENSOR}.custom_parallel_plan"] is None and view.facts.family not in HAND_WRITTEN_PLANS:
        bound = f"there is no plan with it for {view.facts.family!r}"
        yield Violation(f"{DTENSOR}.sequence_parallel", True, bound, "set it to false, or give custom_parallel_plan")


def fsdp1_limits(view: View) -> Iterator[Violation]:
    """What FSDP1 cannot do."""
    view.require(backend_of(view) == "fsdp1")
    if view["policy.precision"] == "float16":
        yield Violation("policy.precision", "float16", "FSDP1 has no loss scaling", "write bfloat16 or float32")


BACKEND_RULES: tuple[Rule, ...] = (
    one_backend,
    torch_optimizer_unused,
    torch_optimizer_given,
    switches_of_fsdp1,
    converter_is_the_model_s,
    recomputed_parts,
    transformer_engine_needs_a_gpu,
    dtensor_context_parallel,
    dtensor_plan,
    fsdp1_limits,
)
