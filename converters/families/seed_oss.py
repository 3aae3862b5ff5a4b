"""Seed-OSS: Llama with biases on query, key and value, which the attention output has of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from converters.families import llama
from converters.families.base import Features


def _read_features(config: Mapping[str, object]) -> Features:
    of_query, of_output, of_mlp = (bool(config.get(key)) for key in ("attention_bias", "attention_out_bias", "mlp_bias"))
    return Features(qkv_bias=of_query, attention_output_bias=of_output, mlp_bias=of_mlp, qk_norm=False)


FAMILY = replace(
    llama.FAMILY,
    model_type="seed_oss",
    architecture_class="SeedOssForCausalLM",
    config_keys=llama.FAMILY.config_keys | {"attention_out_bias"},
    read_features=_read_features,
    defaults={"attention_bias": True},
)
