"""Mistral 7B and similar models: no biases; one sliding window for all layers, or none."""

from __future__ import annotations

from converters.families.base import Family

FAMILY = Family(
    model_type="mistral",
    architecture_class="MistralForCausalLM",
    config_keys=frozenset({"sliding_window"}),
    has_uniform_window=True,
    defaults={"sliding_window": 4096},
)
