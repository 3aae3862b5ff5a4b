"""Llama 2 and 3.x: no biases unless the config asks for them."""

from __future__ import annotations

from collections.abc import Mapping

from converters.families.base import Family, Features
from converters.families.dense import layer_rules, model_rules


def _read_features(config: Mapping[str, object]) -> Features:
    attention_bias = bool(config.get("attention_bias"))
    return Features(qkv_bias=attention_bias, attention_output_bias=attention_bias, mlp_bias=bool(config.get("mlp_bias")), qk_norm=False)


FAMILY = Family(
    model_type="llama",
    architecture_class="LlamaForCausalLM",
    # pretraining_tp only reorders a sum; transformers no longer reads it.
    config_keys=frozenset({"attention_bias", "mlp_bias", "pretraining_tp"}),
    read_features=_read_features,
    model_rules=model_rules,
    layer_rules=layer_rules,
)
