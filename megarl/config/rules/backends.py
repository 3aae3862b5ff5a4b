"""Rules on the backend of the policy and its features."""

from __future__ import annotations

from collections.abc import Iterator

from converters.families import FAMILIES
from megarl.config.rules.view import Rule, View
from megarl.errors import Violation

DTENSOR = "policy.dtensor_cfg"
MEGATRON = "policy.megatron_cfg"
HAND_WRITTEN_PLANS = frozenset({"llama", "mistral", "qwen2", "qwen3"})


def backend_of(view: View) -> str:
    """Return the policy's backend: ``megatron`` or ``dtensor`` if enabled, else ``fsdp1``."""
    # Raise NotApplicableError without a policy, so that no rule on its backend applies.
    view["policy"]
    if view.get(f"{MEGATRON}.enabled", False):
        return "megatron"
    return "dtensor" if view.get(f"{DTENSOR}.enabled", False) else "fsdp1"


def torch_optimizer_given(view: View) -> Iterator[Violation]:
    """Require ``policy.optimizer`` for training on DTensor or FSDP1."""
    view.require(backend_of(view) != "megatron" and view.has("algorithm"))
    if view["policy.optimizer"] is None:
        fix = "write {name: torch.optim.AdamW, kwargs: {lr: ...}}"
        yield Violation("policy.optimizer", None, f"a policy on {backend_of(view)} needs an optimizer", fix)


def converter_is_the_model_s(view: View) -> Iterator[Violation]:
    """Require that ``converter_type``, if given, names the family of the model's ``config.json``."""
    view.require(backend_of(view) == "megatron")
    key, family = f"{MEGATRON}.converter_type", view.facts.family
    named = view[key].lower().removesuffix("forcausallm").replace("_", "")
    known = FAMILIES.get(family)
    # Accept the architecture class as well: Kimi-K2 has its own model type, but DeepSeek-V3's class.
    of_class = known is not None and view[key] == known.architecture_class
    if named != family.replace("_", "") and not of_class:
        yield Violation(
            key,
            view[key],
            f"the family follows from the model's config.json, which says {family}",
            "remove the line",
        )


def recomputed_parts(view: View) -> Iterator[Violation]:
    """Require that selective recomputation lists at least one part of a layer, and only parts that the model
    has."""
    view.require(backend_of(view) == "megatron")
    key = f"{MEGATRON}.recompute_modules"
    view.require(view[f"{MEGATRON}.recompute_granularity"] == "selective")
    parts = view[key]
    if not parts:
        yield Violation(
            key, parts, "selective recomputation needs at least one part", "write for example [core_attn]"
        )
    layers = list(map(view.facts.is_sparse, range(view.facts.num_layers)))
    for part, without in (("mlp", all(layers)), ("moe", not any(layers))):
        if part in parts and without:
            kind = "dense layers" if part == "mlp" else "layers with experts"
            yield Violation(
                key, parts, f"the model has no {kind}, so it has no {part} to recompute", f"remove {part}"
            )


def dtensor_context_parallel(view: View) -> Iterator[Violation]:
    """Refuse context parallelism on DTensor for Gemma 3, whose mixture of attention kinds it does not
    support."""
    view.require(backend_of(view) == "dtensor")
    key = f"{DTENSOR}.context_parallel_size"
    view.require(view[key] > 1)
    if view.facts.family.startswith("gemma3"):
        yield Violation(
            key,
            view[key],
            "Gemma 3 mixes attention kinds that context parallelism does not support",
            "set it to 1",
        )


def dtensor_plan(view: View) -> Iterator[Violation]:
    """Require a tensor-parallel plan that supports sequence parallelism, if DTensor's ``sequence_parallel``
    is true."""
    view.require(
        backend_of(view) == "dtensor"
        and view[f"{DTENSOR}.sequence_parallel"]
        and view[f"{DTENSOR}.tensor_parallel_size"] != 1
    )
    if view[f"{DTENSOR}.custom_parallel_plan"] is None and view.facts.family not in HAND_WRITTEN_PLANS:
        bound = f"there is no sequence-parallel plan for {view.facts.family!r}"
        yield Violation(
            f"{DTENSOR}.sequence_parallel", True, bound, "set it to false, or give custom_parallel_plan"
        )


BACKEND_RULES: tuple[Rule, ...] = (
    torch_optimizer_given,
    converter_is_the_model_s,
    recomputed_parts,
    dtensor_context_parallel,
    dtensor_plan,
)
