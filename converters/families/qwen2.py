"""Qwen2 and Qwen2.5, dense: biases on query, key and value, never on the attention output."""

from __future__ import annotations

from collections.abc import Mapping

from converters.families.base import Family, Features
from converters.families.dense import layer_rules, model_rules


def _read_features(config: Mapping[str, object]) -> Features:
    del config
    return Features(qkv_bias=True, attention_output_bias=False, mlp_bias=False, qk_norm=False)


FAMILY = Family(
    model_type="qwen2",
    architecture_class="Qwen2ForCausalLM",
    config_keys=frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"}),
    read_features=_read_features,
    model_rules=model_rules,
    layer_rules=layer_rules,
    has_layer_windows=True,
    defaults={"max_window_layers": 28, "sliding_window": 4096, "use_sliding_window": False},
)
