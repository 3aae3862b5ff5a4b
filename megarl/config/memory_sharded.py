"""How much memory a rank of the torch backends will need: parameters, gradients and optimizer state are sharded over all ranks that hold
the same tensor-parallel part. All sizes are bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.config.arithmetic import BatchPlan
from megarl.config.backend import enabled_backend
from megarl.config.layout import Layout
from megarl.config.memory import (
    BYTES,
    RankMemory,
    generation_cache_bytes,
    layer_activation_bytes,
    layer_parameters,
    logit_bytes,
    stage_parameters,
)
from megarl.config.model_facts import ModelFacts

MOMENTS = 2
"""float32 numbers a parameter of optimizer state: Adam's, which most optimizers do not exceed."""
GATHERED_LAYERS = 2
"""Layers whose whole parameters are there at once: the one that computes and the next one, which is being gathered."""


def estimate_sharded(policy: Mapping[str, Any], facts: ModelFacts, layout: Layout, plan: BatchPlan, reference: bool) -> RankMemory:
    """Memory of a rank.

    Weights, gradients and optimizer state are float32 shards; beside them stand the whole parameters of the layers that compute, in the
    type they compute in, and their reduced gradients before they are sharded.

    Args:
        policy: a checked ``policy`` section with its defaults, on DTensor or FSDP1.
        facts: sizes of the model.
        layout: the ranks.
        plan: the batches.
        reference: whether there is a reference policy.
    """
    element, shards = BYTES[policy["precision"]], layout.data * layout.context
    whole = stage_parameters(facts, layout.tensor, 0, [facts.num_layers])
    parameters = -(-whole // shards)
    in_host = _offloads(policy)
    gathered = GATHERED_LAYERS * layer_parameters(facts, layout.tensor) * element
    device_share = 0 if in_host else 4 * parameters
    return RankMemory(
        stage=0,
        layers=facts.num_layers,
        parameters=parameters,
        weights=device_share + gathered,
        gradients=device_share,
        optimizer=MOMENTS * device_share,
        activations=_activations(policy, facts, layout, plan, element),
        logits=logit_bytes(policy, facts, layout, plan, element),
        generation_cache=generation_cache_bytes(facts.num_layers, policy, facts, layout, element),
        reference_weights=4 * parameters if reference else 0,
    )


def _offloads(policy: Mapping[str, Any]) -> bool:
    """Whether the shards live in host memory."""
    if enabled_backend(policy) == "dtensor":
        return bool(policy["dtensor_cfg"]["cpu_offload"])
    return bool(policy["fsdp_offload_enabled"])


def _activations(policy: Mapping[str, Any], facts: ModelFacts, layout: Layout, plan: BatchPlan, element: int) -> int:
    dtensor = enabled_backend(policy) == "dtensor"
    divided = dtensor and policy["dtensor_cfg"]["sequence_parallel"]
    recompute = policy["dtensor_cfg"]["activation_checkpointing"] if dtensor else policy["activation_checkpointing_enabled"]
    tokens = -(-plan.tokens_per_micro_batch // layout.context)
    layer = layer_activation_bytes(facts, tokens, layout.tensor, divided, element)
    if recompute:
        return facts.num_layers * (tokens * facts.hidden_size * element // (layout.tensor if divided else 1)) + layer
    return facts.num_layers * layer
