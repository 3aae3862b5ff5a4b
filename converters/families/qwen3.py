"""Qwen3, dense: RMS norms over the head dimension of queries and keys."""

from __future__ import annotations

from functools import partial

from converters.families.base import Family, features_of

FAMILY = Family(
    model_type="qwen3",
    architecture_class="Qwen3ForCausalLM",
    config_keys=frozenset(
        {"attention_bias", "use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}
    ),
    read_features=partial(
        features_of, qkv_bias="attention_bias", attention_output_bias="attention_bias", qk_norm=True
    ),
    has_layer_windows=True,
    defaults={"max_window_layers": 28, "sliding_window": 4096, "use_sliding_window": False},
)
