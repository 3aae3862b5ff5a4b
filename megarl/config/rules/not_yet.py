"""Rules that refuse values which the schema allows but this version does not support. A rule is removed when
its feature is implemented."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from megarl.config.rules.backends import MEGATRON, backend_of
from megarl.config.rules.view import Rule, View
from megarl.errors import Violation

NOT_YET = "not in this version"
_DATA_PARALLEL = f"{MEGATRON}.distributed_data_parallel_config"
NEVER_LEGAL: Mapping[str, frozenset[Any]] = {
    f"{_DATA_PARALLEL}.use_custom_fsdp": frozenset({True}),
    f"{_DATA_PARALLEL}.data_parallel_sharding_strategy": frozenset(
        {"optim", "optim_grads", "optim_grads_params"}
    ),
    f"{_DATA_PARALLEL}.average_in_collective": frozenset({True}),
    f"{MEGATRON}.optimizer.params_dtype": frozenset({"bfloat16", "float16"}),
    f"{MEGATRON}.optimizer.optimizer_cpu_offload": frozenset({True}),
    f"{MEGATRON}.optimizer.use_precision_aware_optimizer": frozenset({True}),
}
"""Dotted key -> values that the schema allows because NeMo-RL's configurations have them, but that a rule
always refuses."""
UNBUILT_FLAGS = {
    f"{MEGATRON}.distributed_data_parallel_config.use_custom_fsdp": "Megatron's own FSDP is",
}


def unbuilt_flags(view: View) -> Iterator[Violation]:
    """Refuse switches of features that are not implemented."""
    for key, what in UNBUILT_FLAGS.items():
        if view.get(key, False):
            yield Violation(key, True, f"{what} {NOT_YET}", "set it to false")


def unbuilt_models(view: View) -> Iterator[Violation]:
    """Refuse mixture-of-experts models on backends other than Megatron."""
    backend = backend_of(view)
    if view.facts.num_experts > 0 and backend != "megatron":
        bound = (
            f"the model is a mixture of {view.facts.num_experts} experts, which on the {backend} "
            f"backend is {NOT_YET}"
        )
        yield Violation(
            "policy.model_name",
            view["policy.model_name"],
            bound,
            f"use a dense model, or set {MEGATRON}.enabled to true",
        )


def unbuilt_hybrids(view: View) -> Iterator[Violation]:
    """Refuse gated delta nets on backends other than Megatron, because transformers' implementation leaks
    state between packed sequences. Also refuse them with adapters and with Transformer Engine, which were not
    verified for them."""
    view.require(view.facts.gated_delta is not None or view.facts.output_gate)
    backend = backend_of(view)
    if backend != "megatron" and view.facts.num_experts == 0:
        bound = f"the model has gated delta nets, which on the {backend} backend are {NOT_YET}"
        yield Violation(
            "policy.model_name",
            view["policy.model_name"],
            bound,
            f"use another model, or set {MEGATRON}.enabled to true",
        )
    if view.get("policy.peft.enabled", False):
        yield Violation(
            "policy.peft.enabled",
            True,
            f"adapters of a model with gated delta nets are {NOT_YET}",
            "set it to false",
        )
    if view.get(f"{MEGATRON}.transformer_engine") is True:
        bound = f"Transformer Engine layers together with gated delta nets are {NOT_YET}"
        yield Violation(
            f"{MEGATRON}.transformer_engine", True, bound, "write auto or false, for the portable layers"
        )
    distributed = f"{MEGATRON}.optimizer.use_distributed_optimizer"
    if backend == "megatron" and view["policy.precision"] != "float32" and not view.get(distributed, True):
        # Gated delta nets keep decay parameters in float32. Without the distributed optimizer,
        # Megatron-Core's checkpoints contain the state of one dtype only.
        bound = (
            "checkpoints without the distributed optimizer, for gated delta nets in "
            f"{view['policy.precision']} are {NOT_YET}"
        )
        yield Violation(distributed, False, bound, "set it to true, or policy.precision to float32")


def float32_logits_in_chunks(view: View) -> Iterator[Violation]:
    """Refuse ``float32_logits`` with ``logprob_chunk_size``, because chunks are computed in the dtype of the
    weights."""
    key = "policy.logprob_chunk_size"
    if view[key] and view.get(f"{MEGATRON}.float32_logits", False):
        yield Violation(
            key,
            view[key],
            f"with {MEGATRON}.float32_logits it is {NOT_YET}",
            "write null, or set float32_logits to false",
        )


NOT_YET_RULES: tuple[Rule, ...] = (
    unbuilt_flags,
    unbuilt_models,
    unbuilt_hybrids,
    float32_logits_in_chunks,
)
