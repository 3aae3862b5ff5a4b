"""Tiny models of every family for the converter tests, with all sizes different and every element distinct."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

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

CONFIGS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama_tied": (LlamaConfig, {"tie_word_embeddings": True, "num_key_value_heads": 3}),
    "llama_all_biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama_one_group": (LlamaConfig, {"num_key_value_heads": 1}),
    "qwen2": (Qwen2Config, {}),
    "qwen2_tied": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {"num_key_value_heads": 6}),
    "qwen3_tied": (Qwen3Config, {"tie_word_embeddings": True}),
}


def tiny_config(name: str, **changes: Any) -> PreTrainedConfig:
    """The config called ``name``, with changes."""
    config_class, options = CONFIGS[name]
    return config_class(**{**SIZES, **options, **changes})


def tiny_model(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """A model with random weights, norms and biases included."""
    torch.manual_seed(sum(map(ord, name)))
    model = AutoModelForCausalLM.from_config(tiny_config(name, **changes), dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape) * 0.2
            parameter.copy_((1.0 + noise if parameter.dim() == 1 else noise).to(dtype))
    return model


def save_tiny(
    directory: Path, name: str, dtype: torch.dtype = torch.float32, max_shard_size: str = "5GB", **changes: Any
) -> PreTrainedModel:
    """Save such a model with transformers."""
    model = tiny_model(name, dtype, **changes)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return model
