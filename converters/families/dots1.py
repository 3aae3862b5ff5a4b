"""dots.llm1: Qwen3's attention with windows in some layers, and DeepSeek-V3's mixture of experts after the
first layers."""

from __future__ import annotations

from dataclasses import replace

from converters.families import glm4_moe, qwen3
from converters.model_config import prediction_layers

FAMILY = replace(
    glm4_moe.FAMILY,
    model_type="dots1",
    architecture_class="Dots1ForCausalLM",
    config_keys=(glm4_moe.FAMILY.config_keys - prediction_layers.CONFIG_KEYS - {"use_qk_norm"})
    | {"layer_types", "max_window_layers", "pretraining_tp", "sliding_window"},
    read_features=qwen3.FAMILY.read_features,
    rotates_partly=False,
    may_predict_further=False,
    has_layer_windows=True,
    defaults={
        "first_k_dense_replace": 0,
        "max_window_layers": 62,
        "n_group": 1,
        "sliding_window": 4096,
        "topk_group": 1,
    },
)
