"""Messages about shapes say from which keys of the config they follow, for every tensor of every family."""

from __future__ import annotations

import re
from typing import Any

import pytest

from converters.families.read import read_architecture
from converters.mapping.formulas import formula_of, formula_of_parameter
from converters.mapping.rules import all_rules, rule_for
from tests.tiers import newest_megatron
from tests.unit.converters_tiny import CONFIGS, tiny_config

pytestmark = newest_megatron


@pytest.mark.parametrize("name", CONFIGS)
def test_formulas_are_those_of_the_config(name: str) -> None:
    """Computed with the config's own numbers, each gives the shape."""
    config = tiny_config(name)
    numbers: dict[str, Any] = {
        key: value for key, value in config.to_dict().items() if isinstance(value, int)
    }
    numbers |= {
        key: getattr(config, key)
        for key in ("head_dim", "num_experts", "num_key_value_heads")
        if hasattr(config, key)
    }
    architecture = read_architecture(config)
    for rule in all_rules(architecture):
        for part in rule.parts:
            for shape, where in [
                (part.shape, part.name),
                *[(place.shape, place.name) for place in part.alternatives],
            ]:
                formula = formula_of(where, shape, architecture)
                assert eval(formula, {"__builtins__": {}}, numbers) == list(shape), (where, formula)
                assert not re.search(r"\b\d\d+\b", formula), (where, formula)


@pytest.mark.parametrize(
    ("name", "megatron", "formula"),
    [
        (
            "qwen2",
            "decoder.layers.0.self_attention.linear_qkv.weight",
            (
                "[num_attention_heads * head_dim + num_key_value_heads * head_dim + num_key_value_heads * "
                "head_dim, hidden_size]"
            ),
        ),
        (
            "mixtral",
            "decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight",
            "[intermediate_size + intermediate_size, hidden_size]",
        ),
        (
            "qwen2_moe",
            "decoder.layers.0.mlp.shared_experts.linear_fc2.weight",
            "[hidden_size, shared_expert_intermediate_size]",
        ),
        ("deepseek_v3", "decoder.layers.1.mlp.router.expert_bias", "[n_routed_experts]"),
        (
            "deepseek_v3",
            "decoder.layers.1.self_attention.linear_kv_down_proj.weight",
            "[kv_lora_rank + qk_rope_head_dim, hidden_size]",
        ),
    ],
)
def test_formulas_of_parameters(name: str, megatron: str, formula: str) -> None:
    architecture = read_architecture(tiny_config(name))
    assert formula_of_parameter(rule_for(megatron, architecture), architecture) == formula
