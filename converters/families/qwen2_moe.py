"""Qwen1.5-MoE and Qwen2-MoE: Qwen2's attention; routed experts and a gated shared expert in layers that the
config selects."""

from __future__ import annotations

from functools import partial

from converters.families.base import Family, features_of
from converters.families.sparse import layer_rules, read_qwen_mixture

FAMILY = Family(
    model_type="qwen2_moe",
    architecture_class="Qwen2MoeForCausalLM",
    # transformers derives layer_types from the three window keys, and only layer_types determines the
    # windows. output_router_logits and router_aux_loss_coef concern the loss that it computes from labels.
    config_keys=frozenset(
        {
            "decoder_sparse_step",
            "layer_types",
            "max_window_layers",
            "mlp_only_layers",
            "moe_intermediate_size",
            "norm_topk_prob",
            "num_experts",
            "num_experts_per_tok",
            "output_router_logits",
            "qkv_bias",
            "router_aux_loss_coef",
            "shared_expert_intermediate_size",
            "sliding_window",
            "use_sliding_window",
        }
    ),
    read_features=partial(features_of, qkv_bias="qkv_bias"),
    layer_rules=layer_rules,
    read_mixture=partial(read_qwen_mixture, shared_width_key="shared_expert_intermediate_size"),
    defaults={
        "decoder_sparse_step": 1,
        "max_window_layers": 28,
        "qkv_bias": True,
        "sliding_window": 4096,
        "use_sliding_window": False,
    },
)
