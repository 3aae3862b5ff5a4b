"""Tensor-parallel plans of a user's own for DTensor."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from megarl.models.dtensor.styles import VocabularyEmbedding


def by_names() -> dict[str, str]:
    """A custom plan in which styles go by their names."""
    names = {
        "self_attn.q_proj": "colwise",
        "self_attn.k_proj": "colwise",
        "self_attn.v_proj": "colwise",
        "self_attn.o_proj": "rowwise",
    }
    names |= {"mlp.gate_proj": "colwise", "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise"}
    return {f"model.layers.*.{name}": style for name, style in names.items()}


HEAD_NORMS = ("model.layers.*.self_attn.q_norm", "model.layers.*.self_attn.k_norm")


def with_head_norms() -> dict[str, Any]:
    return {**by_names(), **dict.fromkeys(HEAD_NORMS, "replicated_with_grad_allreduce")}


def over_the_sequence() -> dict[str, Any]:
    """Activations between layers divided over the sequence, with every norm."""
    layer, stream = "model.layers.*", Shard(1)
    return {
        **{
            name: ColwiseParallel() if style == "colwise" else RowwiseParallel(output_layouts=stream)
            for name, style in by_names().items()
        },
        **dict.fromkeys(HEAD_NORMS, "replicated_with_grad_allreduce"),
        "model.embed_tokens": VocabularyEmbedding(output_layouts=stream),
        f"{layer}.self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": stream},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        f"{layer}.mlp": PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),)),
        f"{layer}.input_layernorm": SequenceParallel(),
        f"{layer}.post_attention_layernorm": SequenceParallel(),
        "model.norm": SequenceParallel(use_local_output=True),
        "lm_head": ColwiseParallel(input_layouts=stream),
    }
