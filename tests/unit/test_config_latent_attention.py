"""Latent attention in the memory estimate and in the rules; its parameters are counted in
``test_config_memory_experts``."""

from __future__ import annotations

from megarl.config.activations import layer_activation_bytes, operations
from megarl.config.model_facts import facts_of
from megarl.config.rules.parallel import widths_divide
from megarl.config.rules.view import View
from tests.unit.config_samples import complete, raw_grpo
from tests.unit.test_config_memory_experts import DEEPSEEK, SHAPE


def test_latent_attention_keeps_what_its_heads_and_its_vectors_take() -> None:
    """By listing the tensors of one token in two bytes: of two of twelve heads on each of six ranks, and
    those that every rank has."""
    facts = facts_of({**SHAPE, "model_type": "deepseek_v3", **DEEPSEEK, "first_k_dense_replace": 6})
    heads = 2 * (
        3 * 16 + 16 + 14
    )  # query, key, value and output of one width, and what is left of the output
    vectors = 2 * (2 * (30 + 26) + 4)  # before and after the norms, in 4 bytes the scales of these
    mlp, norms, normaliser = 3 * 132 // 6, 4 * 48, 4 * 2
    kept = operations("megatron", "cuda", 2)
    outside = vectors + 2 * norms + 2 * 4
    assert layer_activation_bytes(facts, 1, 6, False, kept) == 2 * (heads + mlp) + normaliser + outside
    assert layer_activation_bytes(facts, 6, 6, True, kept) == 6 * (
        2 * (heads + mlp) + normaliser + outside // 6
    )


def test_latent_vectors_divide_over_tensor_parallel_ranks() -> None:
    facts = facts_of(
        {**SHAPE, "model_type": "deepseek_v3", **DEEPSEEK, "kv_lora_rank": 27, "num_key_value_heads": 12}
    )
    raw = complete(raw_grpo())
    raw["policy"]["megatron_cfg"]["tensor_model_parallel_size"] = 4
    bounds = [violation.bound for violation in widths_divide(View(raw, facts=facts))]
    widths = ("37 columns of latent keys and values", "30 columns of latent queries")
    assert bounds == [f"it must divide the model's {width}" for width in widths]
