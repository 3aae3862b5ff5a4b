"""Seed-OSS: Llama with biases on query, key and value, and a separate setting for the attention output's
bias."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from converters.families import llama
from converters.families.base import features_of

FAMILY = replace(
    llama.FAMILY,
    model_type="seed_oss",
    architecture_class="SeedOssForCausalLM",
    config_keys=llama.FAMILY.config_keys | {"attention_out_bias"},
    read_features=partial(
        features_of,
        qkv_bias="attention_bias",
        attention_output_bias="attention_out_bias",
        mlp_bias="mlp_bias",
    ),
    defaults={"attention_bias": True},
)
