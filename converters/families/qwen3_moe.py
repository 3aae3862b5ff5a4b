"""Qwen3-MoE: Qwen3's attention; experts in the layers that the config selects."""

from __future__ import annotations

from converters.families import qwen3
from converters.families.base import Family
from converters.families.sparse import layer_rules, read_qwen_mixture

FAMILY = Family(
    model_type="qwen3_moe",
    architecture_class="Qwen3MoeForCausalLM",
    # transformers sets sliding_window to null unless use_sliding_window is true, and never reads
    # max_window_layers for this family. output_router_logits and router_aux_loss_coef concern the loss that
    # it computes from labels.
    config_keys=frozenset(
        {
            "attention_bias",
            "decoder_sparse_step",
            "max_window_layers",
            "mlp_only_layers",
            "moe_intermediate_size",
            "norm_topk_prob",
            "num_experts",
            "num_experts_per_tok",
            "num_local_experts",
            "output_router_logits",
            "router_aux_loss_coef",
            "sliding_window",
            "use_sliding_window",
        }
    ),
    read_features=qwen3.FAMILY.read_features,
    layer_rules=layer_rules,
    read_mixture=read_qwen_mixture,
    has_uniform_window=True,
    defaults={"decoder_sparse_step": 1, "use_sliding_window": False},
)
