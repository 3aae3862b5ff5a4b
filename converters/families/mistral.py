"""Mistral 7B and its like: no biases; one sliding window in all layers, or none."""

from __future__ import annotations

from collections.abc import Mapping

from converters.families.base import PLAIN, Family, Features
from converters.families.dense import layer_rules, model_rules


def _read_features(config: Mapping[str, object]) -> Features:
    del config
    return PLAIN


FAMILY = Family(
    model_type="mistral",
    architecture_class="MistralForCausalLM",
    config_keys=frozenset({"sliding_window"}),
    read_features=_read_features,
    model_rules=model_rules,
    layer_rules=layer_rules,
    has_uniform_window=True,
    defaults={"sliding_window": 4096},
)
