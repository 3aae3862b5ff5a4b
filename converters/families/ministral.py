"""Ministral: Mistral with a window in the layers that ``layer_types`` lists, or in all layers without it."""

from __future__ import annotations

from dataclasses import replace

from converters.families import mistral

FAMILY = replace(
    mistral.FAMILY,
    model_type="ministral",
    architecture_class="MinistralForCausalLM",
    config_keys=mistral.FAMILY.config_keys | {"layer_types"},
    has_layer_windows=True,
)
