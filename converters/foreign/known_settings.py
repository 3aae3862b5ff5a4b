"""Settings of Megatron-Core, classified by their effect on the function that a model computes.

Settings of initialisation, dropout, optimisation, parallelism, kernels and precision have no effect on it:
the same weights define the same function. The lists cover all fields of ``TransformerConfig`` in
Megatron-Core 0.16.1 and 0.19.2, and Megatron-LM's arguments.
"""

from __future__ import annotations

import re
from typing import Any

NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "activation_func_clamp_value",
            "experimental_attention_variant",
            "linear_attention_freq",
            "mrope_section",
            "query_pre_attn_scalar",
            "softmax_scale",
            "transformer_layer_spec",
            "window_attn_skip_freq",
        ),
        (None,),
    ),
    **dict.fromkeys(
        (
            "apply_residual_connection_post_layernorm",
            "attention_output_gate",
            "clone_attention_heads",
            "heterogeneous_block_specs",
            "is_hybrid_model",
            "layernorm_zero_centered_gamma",
            "multi_latent_attention",
            "qk_l2_norm",
            "rotary_interleaved",
            "use_legacy_models",
            "use_mup",
        ),
        (False, None),
    ),
    **dict.fromkeys(
        (
            "embedding_multiplier",
            "seq_len_interpolation_factor",
        ),
        (None, 1, 1.0),
    ),
    **dict.fromkeys(
        (
            "final_logit_softcapping",
            "attn_logit_softcapping",
            "hybrid_attention_ratio",
            "hybrid_mlp_ratio",
        ),
        (None, 0, 0.0),
    ),
    **dict.fromkeys(
        (
            "heterogeneous_layers_config_encoded_json",
            "heterogeneous_layers_config_path",
            "hybrid_layer_pattern",
            "hybrid_override_pattern",
        ),
        (None, ""),
    ),
    **dict.fromkeys(
        (
            "mtp_num_layers",
            "no_rope_freq",
        ),
        (None, 0),
    ),
    "glu_linear_offset": (0.0, None),
    "softmax_type": ("vanilla", None),
    "spec": (None, []),
    # Transformer Engine uses these two values for "no window".
    "window_size": (None, (-1, -1), (-1, 0)),
}
"""Setting -> neutral values. Another value is rejected unless the architecture requires it."""
NEUTRAL_OF_MIXTURES: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "moe_apply_probs_on_input",
            "moe_router_force_load_balancing",
            "moe_shared_expert_gate",
            "moe_token_dropping",
        ),
        (False, None),
    ),
    **dict.fromkeys(
        (
            "moe_expert_capacity_factor",
            "moe_expert_rank_capacity_factor",
            "moe_latent_size",
            "moe_mlp_glu_interleave_size",
            "moe_router_group_topk",
            "moe_router_num_groups",
            "moe_router_topk_limited_devices",
            "moe_shared_expert_glu_interleave_size",
        ),
        (None,),
    ),
    **dict.fromkeys(
        (
            "moe_input_jitter_eps",
            "moe_router_force_biased",
        ),
        (None, 0, 0.0),
    ),
    "moe_shared_expert_intermediate_size": (None, 0),
}
"""Further settings like ``NEUTRAL``, for models with experts."""
READ = frozenset(
    {
        "activation",
        "add_bias_linear",
        "add_qkv_bias",
        "ffn_hidden_size",
        "gated_linear_unit",
        "hidden_size",
        "init_method_std",
        "kv_channels",
        "kv_lora_rank",
        "layernorm_epsilon",
        "max_sequence_length",
        "moe_aux_loss_coeff",
        "moe_ffn_hidden_size",
        "moe_layer_freq",
        "moe_router_enable_expert_bias",
        "moe_router_pre_softmax",
        "moe_router_score_function",
        "moe_router_topk",
        "moe_router_topk_scaling_factor",
        "normalization",
        "num_attention_heads",
        "num_layers",
        "num_moe_experts",
        "num_query_groups",
        "padded_vocab_size",
        "position_embedding_type",
        "q_lora_rank",
        "qk_head_dim",
        "qk_layernorm",
        "qk_pos_emb_head_dim",
        "rope_scaling",
        "rope_scaling_factor",
        "rotary_base",
        "rotary_percent",
        "share_embeddings_and_output_weights",
        "v_head_dim",
        "vocab_size",
    }
)
"""Settings from which a config is derived, or with which it is compared."""
DEFAULTS: dict[str, Any] = {
    "moe_layer_freq": 1,
    "moe_router_enable_expert_bias": False,
    "moe_router_pre_softmax": False,
    "moe_router_score_function": "softmax",
    "moe_router_topk_scaling_factor": None,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
    "original_max_position_embeddings": 4096,
    "qk_layernorm": False,
    "rope_scaling": False,
    "rope_type": "yarn",
    "rotary_percent": 1.0,
    "rotary_scaling_factor": 40,
}
"""Megatron-Core's defaults, for checkpoints of releases without the setting."""
# An unknown setting with one of these words is rejected, because it may affect the function.
_LOOKS_LIKE_THE_MODEL = re.compile(
    r"(^|_)(attention|attn|rope|rotary|norm|layernorm|rmsnorm|qk|kv|softmax|softcap\w*|logits?|activation"
    r"|gelu|swiglu|glu|expert|experts|router"
    r"|multiplier|residual|sink|sinks|window|sliding|mamba|linear|latent|mla|mtp|mup|embedding|gate|gated"
    r"|bias|heads?|hyper|engram)(_|$)|^moe_"
)
# Settings with these prefixes never affect the function, although they may contain such a word.
_NEVER_THE_MODEL = re.compile(
    r"(accumulate|adam|apply_wd|async|bert|check|checkpoint|ckpt|cp|cpu|cross_entropy|cuda|data|ddp|decode"
    r"|decoupled|defer|delay|dino|disable"
    r"|dist|distribute|distributed|dsa|dump|enable|eod|eval|exit|expert_model_parallel"
    r"|expert_tensor_parallel|external|fim|fine_grained"
    r"|finetune|flash|fp16|fp32_residual_connection|fp4|fp8|freeze|fsdp|ft|fused_residual_rmsnorm|global"
    r"|grad|gradient|grpo|head_lr|ict"
    r"|inference|init_method|init_model|inprocess|keep|kitchen|langrl|linear_(conv|key|num|value)|lion"
    r"|load|logits_(load|save)|log|lr|mamba"
    r"|masked_softmax_fusion|megatron_fsdp|memory|micro|min_lr|mlp_chunks|mtp_(detach|grad|loss|standalone"
    r"|use_repeated|hybrid)|muon|mup|nccl"
    r"|no_(load|persist|save|weight_decay)|non_persistent|offload|one_logger|optimizer|output_bert|overlap"
    r"|persist|pin|pipeline|profile"
    r"|qk_clip|recompute|refit|relative_attention|rerun|reset|rl|rollout|sample|save|sequence|sglang|sharp"
    r"|straggler|swin|te|tensor"
    r"|tensorboard|test|tp|train|transformer_impl|update_weight|vision|wandb|weight_decay|wgrad"
    r"|use_(cpu|dist|flash|fused|gloo|grouped_gemm|kitchen|mamba|megatron_fsdp|ring|te|torch|tp"
    r"|transformer_engine))(_|$)"
)
INERT = frozenset(
    {
        "activation_func_fp8_input_store",
        "activation_offload_fraction",
        "ep_overlap_early_attn_memory_release",
        "experimental_attention_variant_loss_scale_func",
        "expert_gtp_weight_remat_size",
        "fused_single_qkv_rope",
        "loss_scale_window",
        "num_microbatches_with_partial_activation_checkpoints",
        "add_position_embedding",
        "apply_query_key_layer_scaling",
        "apply_rope_fusion",
        "attention_backend",
        "attention_dropout",
        "attention_softmax_in_fp32",
        "bias_activation_fusion",
        "bias_dropout_fusion",
        "bias_gelu_fusion",
        "bias_swiglu_fusion",
        "cache_mla_latents",
        "create_attention_mask_in_dataloader",
        "embedding_init_method",
        "embedding_init_method_std",
        "embedding_path",
        "hidden_dropout",
        "memory_efficient_layer_norm",
        "mla_down_proj_fusion",
        "moe_deepep_num_sms",
        "moe_enable_deepep",
        "moe_enable_routing_replay",
        "moe_extended_tp",
        "moe_flex_dispatcher_backend",
        "moe_flex_dispatcher_num_sms",
        "moe_grad_scale_func",
        "moe_grouped_gemm",
        "moe_layer_recompute",
        "moe_pad_expert_input_to_capacity",
        "moe_pad_experts_for_cuda_graph_inference",
        "moe_per_layer_logging",
        "moe_router_bias_update_rate",
        "moe_router_dtype",
        "moe_router_fusion",
        "moe_router_load_balancing_type",
        "moe_router_padding_for_fp8",
        "moe_router_padding_for_quantization",
        "moe_router_quantile_balancing_ema",
        "moe_shared_expert_overlap",
        "moe_single_grouped_bias",
        "moe_single_grouped_weight",
        "moe_token_dispatcher_type",
        "moe_token_drop_policy",
        "moe_upcycling_granularity",
        "moe_use_legacy_grouped_gemm",
        "moe_use_upcycling",
        "moe_z_loss_coeff",
        "account_for_embedding_in_pipeline_split",
        "clone_scatter_output_in_embedding",
        "scatter_embedding_sequence_parallel",
        "symmetric_ar_type",
        "use_arbitrary_attention_mask",
    }
)
"""Settings whose names suggest an effect on the function, but that have none."""
_INERT_PREFIXES = ("moe_hybridep_", "moe_ncclep_", "moe_paged_stash", "moe_permute_", "moe_routing_trace_")


def is_suspicious(name: str) -> bool:
    """Return whether an unknown setting may affect the function, judging by its name."""
    return not is_known(name) and not is_inert(name) and bool(_LOOKS_LIKE_THE_MODEL.search(name))


def is_known(name: str) -> bool:
    """Return whether a setting is compared with the config."""
    return name in READ or name in DEFAULTS or name in NEUTRAL or name in NEUTRAL_OF_MIXTURES


def is_inert(name: str) -> bool:
    """Return whether a setting is known to have no effect on the function."""
    return not is_known(name) and (
        name in INERT or name.startswith(_INERT_PREFIXES) or bool(_NEVER_THE_MODEL.match(name))
    )
