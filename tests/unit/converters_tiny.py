"""Tiny models of every family for the converter tests, with all sizes different and every element distinct."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
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
QWEN3_MOE: dict[str, Any] = {"num_experts": 7, "num_experts_per_tok": 4, "moe_intermediate_size": 22, "norm_topk_prob": True}
QWEN2_MOE: dict[str, Any] = {
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 22,
    "shared_expert_intermediate_size": 32,
}

CONFIGS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama_tied": (LlamaConfig, {"tie_word_embeddings": True, "num_key_value_heads": 3}),
    "llama_all_biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama_one_group": (LlamaConfig, {"num_key_value_heads": 1}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "mistral_window": (MistralConfig, {"sliding_window": 9, "num_key_value_heads": 3}),
    "mixtral": (MixtralConfig, MIXTRAL),
    "mixtral_window_tied": (MixtralConfig, {**MIXTRAL, "sliding_window": 9, "tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, {}),
    "qwen2_tied": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2_moe": (Qwen2MoeConfig, QWEN2_MOE),
    "qwen2_moe_mixed_tied": (
        Qwen2MoeConfig,
        {**QWEN2_MOE, "norm_topk_prob": True, "mlp_only_layers": [1], "num_key_value_heads": 3, "tie_word_embeddings": True},
    ),
    "qwen3": (Qwen3Config, {"num_key_value_heads": 6}),
    "qwen3_tied": (Qwen3Config, {"tie_word_embeddings": True}),
    "qwen3_moe": (Qwen3MoeConfig, QWEN3_MOE),
    "qwen3_moe_mixed": (Qwen3MoeConfig, {**QWEN3_MOE, "norm_topk_prob": False, "mlp_only_layers": [1]}),
}


def tiny_config(name: str, **changes: Any) -> PreTrainedConfig:
    """The config called ``name``, with changes."""
    config_class, options = CONFIGS[name]
    return config_class(**{**SIZES, **options, **changes})


def tiny_model(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A model with random weights, norms and biases included."""
    torch.manual_seed(sum(map(ord, name)))
    # The grouped matrix product that transformers prefers wants rows of a multiple of 16 bytes; tiny ones are not.
    model = AutoModelForCausalLM.from_config(tiny_config(name, **changes), dtype=dtype, experts_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape) * 0.2
            parameter.copy_((1.0 + noise if parameter.dim() == 1 else noise).to(dtype))
    return model


def save_tiny(
    directory: Path,
    name: str,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    stacked_experts: bool = False,
    **changes: Any,
) -> PreTrainedModel:
    """Save such a model with transformers, each expert alone as it does by default, or stacked as its models hold them."""
    model = tiny_model(name, dtype, **changes)
    model.save_pretrained(directory, max_shard_size=max_shard_size, save_original_format=not stacked_experts)
    return model


def stored_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor that transformers saved. Its models hold experts in another form than it saves them in."""
    return {name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()}
