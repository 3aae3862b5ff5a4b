"""Whatever the config class of a family declares is read or refused; mixtures and latent attention have such a test beside their own."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
from transformers import PreTrainedConfig

from converters.errors import ConversionError
from converters.families.read import read_architecture
from tests.tiers import newest_megatron
from tests.unit.converters_tiny import tiny_config

pytestmark = newest_megatron
CHANGED: dict[type, Any] = {bool: lambda value: not value, int: lambda value: value + 2, float: lambda value: 2 * value + 0.5}
WINDOWS = {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1}
# of all families, and of one
CHANGED_BY_NAME: dict[str, dict[str, Any]] = {
    "first_k_dense_replace": {"first_k_dense_replace": 2},
    "head_dim": {"head_dim": 8},
    "hidden_act": {"hidden_act": "gelu"},
    "layer_types": {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    "max_window_layers": WINDOWS,
    "hidden_size": {"hidden_size": 48},
    "n_group": {"n_group": 6},
    "n_routed_experts": {"n_routed_experts": 16},
    "num_attention_heads": {"num_attention_heads": 42},
    "num_key_value_heads": {"num_key_value_heads": 3},
    "rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
    "sliding_window": WINDOWS,
    "topk_group": {"topk_group": 3},
    "use_sliding_window": WINDOWS,
}
OWN: dict[str, dict[str, dict[str, Any]]] = {"gpt_oss": {"sliding_window": {"sliding_window": 7}}}
# generation, what transformers gives back, what only reorders a sum, what training sets to 0 and says so, and another name of
# num_nextn_predict_layers
INERT = {
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "output_router_logits",
    "pretraining_tp",
    "attention_dropout",
    "num_mtp_layers",
}
REFUSED = {"hidden_act"}
REFUSED_OF: dict[str, set[str]] = {
    "qwen2": {*WINDOWS, "layer_types"},
    "qwen3": {*WINDOWS, "layer_types"},
    "gpt_oss": {"attention_bias", "swiglu_alpha"},
}


@pytest.mark.parametrize("name", ["glm4_moe", "gpt_oss", "llama", "qwen2", "qwen3"])
def test_no_key_of_a_family_goes_unread(name: str) -> None:
    """Whatever the config class declares changes the architecture when it changes, or is refused, or is listed above."""
    base = tiny_config(name)
    own = {field.name for field in dataclasses.fields(base)} - {field.name for field in dataclasses.fields(PreTrainedConfig)}
    assert len(own) > 15
    for key in sorted(own - INERT):
        changes = OWN.get(name, {}).get(key) or CHANGED_BY_NAME.get(key) or {key: CHANGED[type(getattr(base, key))](getattr(base, key))}
        try:
            # transformers writes into the dictionaries that it is given
            assert read_architecture(tiny_config(name, **copy.deepcopy(changes))) != read_architecture(base), key
        except ConversionError as refusal:
            assert key in REFUSED | REFUSED_OF.get(name, set()), refusal
