"""Qwen3-Next: gated delta nets in three of four layers, attention with an output gate in the others,
zero-centred norms, routed experts and a gated shared expert."""

from __future__ import annotations

from functools import partial

from converters.families.base import Family, features_of
from converters.families.sparse import layer_rules, read_qwen_mixture
from converters.model_config import gated_delta
from converters.model_config.prediction_layers import MTP_KEYS

FAMILY = Family(
    model_type="qwen3_next",
    architecture_class="Qwen3NextForCausalLM",
    # output_router_logits and router_aux_loss_coef concern the loss that transformers computes from labels.
    # The class does not read any window.
    config_keys=gated_delta.CONFIG_KEYS
    | MTP_KEYS
    | frozenset(
        {
            "attention_bias",
            "decoder_sparse_step",
            "mlp_only_layers",
            "moe_intermediate_size",
            "norm_topk_prob",
            "num_experts",
            "num_experts_per_tok",
            "output_router_logits",
            "router_aux_loss_coef",
            "shared_expert_intermediate_size",
            "use_sliding_window",
        }
    ),
    read_features=partial(
        features_of,
        qkv_bias="attention_bias",
        attention_output_bias="attention_bias",
        qk_norm=True,
        output_gate=True,
    ),
    layer_rules=layer_rules,
    read_mixture=partial(read_qwen_mixture, shared_width_key="shared_expert_intermediate_size"),
    read_gated_delta=partial(gated_delta.read_gated_delta, stored_by_head=True),
    zero_centered_norms=True,
    predicts_in_mtp=True,
    rotates_partly=True,
    defaults={"decoder_sparse_step": 1, "norm_topk_prob": True},
)
