"""Qwen3, dense: RMS norms over the head dimension of queries and keys."""

from __future__ import annotations

from collections.abc import Mapping

from converters.families.base import Family, Features
from converters.families.dense import layer_rules, model_rules


def read_features(config: Mapping[str, object]) -> Features:
    """Biases of all attention projections or of none, and norms on query and key heads."""
    attention_bias = bool(config.get("attention_bias"))
    return Features(qkv_bias=attention_bias, attention_output_bias=attention_bias, mlp_bias=False, qk_norm=True)


FAMILY = Family(
    model_type="qwen3",
    architecture_class="Qwen3ForCausalLM",
    config_keys=frozenset({"attention_bias", "use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}),
    read_features=read_features,
    model_rules=model_rules,
    layer_rules=layer_rules,
    has_layer_windows=True,
    defaults={"max_window_layers": 28, "sliding_window": 4096, "use_sliding_window": False},
)
