"""Llama 2 and 3.x: no biases unless the config enables them."""

from __future__ import annotations

from functools import partial

from converters.families.base import Family, features_of

FAMILY = Family(
    model_type="llama",
    architecture_class="LlamaForCausalLM",
    # pretraining_tp only reorders a sum, and transformers no longer reads it.
    config_keys=frozenset({"attention_bias", "mlp_bias", "pretraining_tp"}),
    read_features=partial(
        features_of, qkv_bias="attention_bias", attention_output_bias="attention_bias", mlp_bias="mlp_bias"
    ),
)
