"""Tiny models of every family for the converter tests, with all sizes different and every element
distinct."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Dots1Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    LlamaConfig,
    MinistralConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
)

SIZES: dict[str, Any] = {
    "hidden_size": 42,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}

MIXTRAL: dict[str, Any] = {"num_local_experts": 5, "num_experts_per_tok": 4, "sliding_window": None}
QWEN3_MOE: dict[str, Any] = {
    "num_experts": 7,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 22,
    "norm_topk_prob": True,
}
QWEN2_MOE: dict[str, Any] = {
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 22,
    "shared_expert_intermediate_size": 32,
}

GATED_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 7,
    "linear_value_head_dim": 9,
    "partial_rotary_factor": 0.4,
    # transformers saves no prediction layers
    "mtp_num_hidden_layers": 0,
}
QWEN3_NEXT: dict[str, Any] = {**QWEN2_MOE, **GATED_DELTA, "norm_topk_prob": True}

GLM4_MOE: dict[str, Any] = {
    "n_routed_experts": 12,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 22,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
    "partial_rotary_factor": 0.4,
    "attention_bias": True,
    "num_nextn_predict_layers": 0,
}

LATENT: dict[str, Any] = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 14,
    "q_lora_rank": 18,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "head_dim": 6,
    "v_head_dim": 10,
}
DEEPSEEK: dict[str, Any] = {
    **LATENT,
    "n_routed_experts": 12,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 22,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
# transformers saves no prediction layers (tests/unit/test_prediction_layers.py)
DEEPSEEK_V3: dict[str, Any] = {**DEEPSEEK, "num_nextn_predict_layers": 0}
DEEPSEEK_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "mscale": 0.9,
    "mscale_all_dim": 0.7,
}

GPT_OSS: dict[str, Any] = {
    "num_local_experts": 5,
    "num_experts_per_tok": 3,
    "sliding_window": 9,
    "swiglu_limit": 1.5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 16,
    },
}

WINDOWS = ["full_attention", "sliding_attention", "full_attention"]
SEED_OSS: dict[str, Any] = {"attention_dropout": 0.0, "residual_dropout": 0.0}
DOTS1: dict[str, Any] = {
    **{
        key: GLM4_MOE[key]
        for key in (
            "n_routed_experts",
            "num_experts_per_tok",
            "n_group",
            "topk_group",
            "moe_intermediate_size",
        )
    },
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
    "sliding_window": None,
}
GLM4_MOE_LITE: dict[str, Any] = {
    **{key: value for key, value in DEEPSEEK.items() if key != "first_k_dense_replace"},
    "num_nextn_predict_layers": 0,
}

CONFIGS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "deepseek_v2": (DeepseekV2Config, {**DEEPSEEK, "q_lora_rank": None}),
    "deepseek_v2_groups_tied": (
        DeepseekV2Config,
        {
            **DEEPSEEK,
            "topk_method": "group_limited_greedy",
            "first_k_dense_replace": 0,
            "tie_word_embeddings": True,
        },
    ),
    "deepseek_v3": (DeepseekV3Config, DEEPSEEK_V3),
    "deepseek_v3_dense": (DeepseekV3Config, {**DEEPSEEK_V3, "first_k_dense_replace": 3, "q_lora_rank": None}),
    "dots1": (Dots1Config, DOTS1),
    "dots1_window_tied": (
        Dots1Config,
        {**DOTS1, "sliding_window": 9, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "glm4_moe_lite": (Glm4MoeLiteConfig, GLM4_MOE_LITE),
    "glm4_moe_lite_all_experts": (
        Glm4MoeLiteConfig,
        {**GLM4_MOE_LITE, "mlp_layer_types": ["sparse"] * 3, "q_lora_rank": None},
    ),
    "glm4_moe": (Glm4MoeConfig, GLM4_MOE),
    "glm4_moe_all_experts_tied": (
        Glm4MoeConfig,
        {
            **GLM4_MOE,
            "first_k_dense_replace": 0,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
            "use_qk_norm": True,
            "attention_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    "gpt_oss": (GptOssConfig, GPT_OSS),
    "gpt_oss_full_tied": (
        GptOssConfig,
        {
            **GPT_OSS,
            "layer_types": ["full_attention"] * 3,
            "num_experts_per_tok": 1,
            "tie_word_embeddings": True,
        },
    ),
    "llama": (LlamaConfig, {}),
    "llama_tied": (LlamaConfig, {"tie_word_embeddings": True, "num_key_value_heads": 3}),
    "llama_all_biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama_one_group": (LlamaConfig, {"num_key_value_heads": 1}),
    "ministral": (MinistralConfig, {"sliding_window": 9, "layer_types": WINDOWS}),
    "ministral_all_windows_tied": (MinistralConfig, {"sliding_window": 9, "tie_word_embeddings": True}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "mistral_window": (MistralConfig, {"sliding_window": 9, "num_key_value_heads": 3}),
    "mixtral": (MixtralConfig, MIXTRAL),
    "mixtral_window_tied": (MixtralConfig, {**MIXTRAL, "sliding_window": 9, "tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, {}),
    "qwen2_tied": (
        Qwen2Config,
        {
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
        },
    ),
    "qwen2_moe": (Qwen2MoeConfig, QWEN2_MOE),
    "qwen2_moe_mixed_tied": (
        Qwen2MoeConfig,
        {
            **QWEN2_MOE,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": (Qwen3Config, {"num_key_value_heads": 6}),
    "qwen3_tied": (
        Qwen3Config,
        {
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 2,
        },
    ),
    "qwen3_moe": (Qwen3MoeConfig, QWEN3_MOE),
    "qwen3_moe_mixed": (Qwen3MoeConfig, {**QWEN3_MOE, "norm_topk_prob": False, "mlp_only_layers": [1]}),
    "qwen3_5_text": (Qwen3_5TextConfig, GATED_DELTA),
    "qwen3_5_text_tied": (
        Qwen3_5TextConfig,
        {**GATED_DELTA, "num_key_value_heads": 3, "tie_word_embeddings": True},
    ),
    "qwen3_5_moe_text": (Qwen3_5MoeTextConfig, {**QWEN2_MOE, **GATED_DELTA}),
    "qwen3_next": (Qwen3NextConfig, QWEN3_NEXT),
    "qwen3_next_mixed_tied": (
        Qwen3NextConfig,
        {
            **QWEN3_NEXT,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "mlp_only_layers": [1],
        }
        | {
            "norm_topk_prob": False,
            "num_key_value_heads": 3,
            "linear_num_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
    "seed_oss": (SeedOssConfig, {**SEED_OSS, "attention_bias": True}),
    "seed_oss_all_biases_tied": (
        SeedOssConfig,
        {
            **SEED_OSS,
            "attention_bias": True,
            "attention_out_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
}


# every tensor is stored by itself; of GPT-OSS the experts are stacked always
# (tests/unit/test_converters_gpt_oss.py)
ALONE = [name for name in CONFIGS if not name.startswith("gpt_oss")]


def tiny_config(name: str, **changes: Any) -> PreTrainedConfig:
    """The config called ``name``, with changes."""
    config_class, options = CONFIGS[name]
    return config_class(**{**SIZES, **options, **changes})


def tiny_model(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A model with random weights, norms and biases included."""
    torch.manual_seed(sum(map(ord, name)))
    # The grouped matrix product that transformers prefers wants rows of a multiple of 16 bytes; tiny ones are
    # not.
    model = AutoModelForCausalLM.from_config(
        tiny_config(name, **changes), dtype=dtype, experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape) * 0.2
            parameter.copy_((1.0 + noise if parameter.dim() == 1 else noise).to(dtype))
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith(
                "e_score_correction_bias"
            ):  # as large as the scores that it corrects, and not of half precision
                buffer.copy_(torch.rand(buffer.shape) - 0.5)
    return model


def save_tiny(
    directory: Path,
    name: str,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    stacked_experts: bool = False,
    **changes: Any,
) -> PreTrainedModel:
    """Save such a model with transformers, each expert alone as it does by default, or stacked as its models
    hold them."""
    model = tiny_model(name, dtype, **changes)
    model.save_pretrained(directory, max_shard_size=max_shard_size, save_original_format=not stacked_experts)
    return model


def stored_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor that transformers saved. Its models hold experts in another form than it saves them in."""
    return {
        name: tensor
        for file in sorted(directory.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
