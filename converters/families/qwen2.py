"""Qwen2 and Qwen2.5, dense: biases on query, key and value, but not on the attention output."""

from __future__ import annotations

from functools import partial

from converters.families.base import Family, features_of

FAMILY = Family(
    model_type="qwen2",
    architecture_class="Qwen2ForCausalLM",
    config_keys=frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}),
    read_features=partial(features_of, qkv_bias=True),
    has_layer_windows=True,
    defaults={"max_window_layers": 28, "sliding_window": 4096, "use_sliding_window": False},
)
