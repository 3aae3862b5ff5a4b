"""Mixtures of experts: facts and parameters counted against real transformers models, divided over ranks in
every way."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from converters.families import FAMILIES
from converters.families.read import read_architecture
from converters.model_config.architecture import ModelFacts
from megarl.config.activations import layer_activation_bytes, operations, sparse_layer_activation_bytes
from megarl.config.adapters import adapter_parameters
from megarl.config.arithmetic import BatchPlan
from megarl.config.layout import Layout, consecutive_layers
from megarl.config.memory import estimate
from megarl.config.model_facts import facts_of, read_model_facts
from megarl.config.parameters import (
    expert_layer_parameters,
    layer_parameters,
    layers_by_kind,
    sparse_layers,
    stage_parameters,
)
from megarl.errors import ConfigError
from tests.tiers import sampled
from tests.unit.config_samples import complete, raw_grpo

SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 132,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "head_dim": 10,
    "vocab_size": 101,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 28}
GLM4_MOE: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 28,
    "n_shared_experts": 3,
    "first_k_dense_replace": 2,
    "attention_bias": True,
}
DEEPSEEK: dict[str, Any] = {
    **{
        key: GLM4_MOE[key]
        for key in ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts")
    },
    "first_k_dense_replace": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 26,
    "q_lora_rank": 30,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 10,
    "v_head_dim": 14,
}
MODELS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "deepseek_v2": (DeepseekV2Config, {**DEEPSEEK, "q_lora_rank": None}),
    "deepseek_v3": (DeepseekV3Config, DEEPSEEK),
    "glm4_moe": (Glm4MoeConfig, GLM4_MOE),
    "glm4_moe-norms": (
        Glm4MoeConfig,
        {**GLM4_MOE, "use_qk_norm": True, "attention_bias": False, "first_k_dense_replace": 0},
    ),
    "gpt_oss": (
        GptOssConfig,
        {"num_local_experts": 8, "num_experts_per_tok": 3, "layer_types": ["full_attention"] * 6},
    ),
    "mistral": (MistralConfig, {}),
    "mixtral": (MixtralConfig, {"num_local_experts": 8, "num_experts_per_tok": 3}),
    "qwen2_moe": (Qwen2MoeConfig, {**EXPERTS, "shared_expert_intermediate_size": 36}),
    "qwen2_moe-mixed": (
        Qwen2MoeConfig,
        {
            **EXPERTS,
            "shared_expert_intermediate_size": 36,
            "mlp_only_layers": [3],
            "qkv_bias": False,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2_moe-without": (Qwen2MoeConfig, {**EXPERTS, "num_experts": 0}),
    "qwen3_moe": (Qwen3MoeConfig, EXPERTS),
    "qwen3_moe-mixed": (
        Qwen3MoeConfig,
        {**EXPERTS, "mlp_only_layers": [0, 5], "decoder_sparse_step": 2, "tie_word_embeddings": True},
    ),
    "qwen3_moe-dense": (Qwen3MoeConfig, {**EXPERTS, "decoder_sparse_step": 7}),
    "qwen3_moe-without": (Qwen3MoeConfig, {**EXPERTS, "num_experts": 0}),
}


# where a class of transformers has defaults that make no valid model
_VALID = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "glm4_moe": {"head_dim": 128},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2},
    "qwen3_5": {"vision_config": {"out_hidden_size": 4096}},
    "qwen3_5_moe": {"vision_config": {"out_hidden_size": 2048}},
}


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_what_a_file_leaves_out_is_what_transformers_fills_in(name: str) -> None:
    """``Family.defaults`` are those of the config's class, and facts of a file that leaves them out are those
    of a converted model."""
    family = FAMILIES[name]
    config = CONFIG_MAPPING[family.config_like or name]()
    filled_in = {key: getattr(config, key) for key in family.defaults}
    if family.defaults.get("use_sliding_window") is False and "sliding_window" in filled_in:
        # transformers takes the window away where it is not in use
        filled_in["sliding_window"] = CONFIG_MAPPING[name](use_sliding_window=True).sliding_window
    assert filled_in == dict(family.defaults)
    said = {key: value for key, value in config.to_dict().items() if key not in family.defaults}
    said |= {"model_type": name, **_VALID.get(name, {})}
    architecture, facts = read_architecture(said), facts_of(said)
    assert facts.windows == architecture.windows
    # megarl trains neither prediction layers nor what sees, and counts the longest sequence with the rotary
    # scaling
    other = {"sliding_window", "window_layers", "prediction_layers", "vision", "max_position"}
    names = {field.name for field in dataclasses.fields(facts)} - other
    assert {name: getattr(facts, name) for name in names} == {
        name: getattr(architecture, name) for name in names
    }


def real_model(name: str, folder: Path) -> tuple[ModelFacts, Any]:
    config_class, options = MODELS[name]
    config = config_class(**SHAPE, **options)
    config.save_pretrained(folder)
    facts = read_model_facts(str(folder))
    assert facts is not None
    with torch.device("meta"):
        return facts, AutoModelForCausalLM.from_config(config)


@sampled(30)
@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("stages", [[6], [2, 4], [1, 2, 3]])
@pytest.mark.parametrize(("tensor", "expert", "expert_tensor"), [(1, 1, 1), (2, 4, 1), (3, 2, 2), (6, 8, 4)])
def test_ranks_and_stages_hold_each_parameter_once(
    name: str, stages: list[int], tensor: int, expert: int, expert_tensor: int, tmp_path: Path
) -> None:
    facts, model = real_model(name, tmp_path)
    padded = -(-facts.vocab_size // tensor) * tensor
    outside = inside = 0
    for key, parameter in model.named_parameters():
        if ".experts." in key:
            inside += parameter.numel()
            continue
        count = padded * facts.hidden_size if "embed_tokens" in key or "lm_head" in key else parameter.numel()
        everywhere = "norm" in key or ".router." in key or key.endswith(("gate.weight", "o_proj.bias"))
        outside += count * (tensor if everywhere else 1)
    if facts.tied_embeddings and len(stages) > 1:
        outside += padded * facts.hidden_size
    assert outside == sum(
        stage_parameters(facts, tensor, stage, consecutive_layers(stages)) * tensor
        for stage in range(len(stages))
    )
    sparse = sum(
        sparse_layers(layers_by_kind(facts, consecutive_layers(stages)[stage]))
        for stage in range(len(stages))
    )
    if facts.mlp_bias:  # such experts are not cut
        expert_tensor = 1
    assert inside == sparse * expert_layer_parameters(facts, expert, expert_tensor) * expert * expert_tensor
    assert [facts.is_sparse(layer) for layer in range(6)] == [
        hasattr(layer.mlp, "experts") for layer in model.model.layers
    ]


def test_facts_of_experts() -> None:
    mixtral = facts_of({**SHAPE, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2})
    assert mixtral.mixture is not None and not mixtral.has_dense_layers
    assert (mixtral.num_experts, mixtral.mixture.experts_per_token, mixtral.mixture.ffn_hidden_size) == (
        8,
        2,
        132,
    )
    qwen = {**SHAPE, "model_type": "qwen3_moe", **EXPERTS, "mlp_only_layers": [1]}
    facts = facts_of(qwen)
    assert facts.mixture is not None
    assert (facts.num_experts, facts.mixture.experts_per_token, facts.mixture.ffn_hidden_size) == (8, 3, 28)
    assert [facts.is_sparse(layer) for layer in range(6)] == [True, False, True, True, True, True]
    assert (facts.has_dense_layers, facts.ffn_hidden_size, facts.qk_norm) == (True, 132, True)
    dense = facts_of({**qwen, "mlp_only_layers": list(range(6))})
    assert (dense.num_experts, dense.mixture, dense.has_dense_layers) == (0, None, True)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_a_mixture_that_does_not_say_how_many_experts_is_refused(family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, "model_type": family}))
    with pytest.raises(ConfigError, match="num_experts = None: a positive whole number is needed"):
        read_model_facts(str(tmp_path))


FACTS = facts_of({**SHAPE, "model_type": "qwen3_moe", **EXPERTS, "mlp_only_layers": [1]})


GPU = operations("megatron", "cuda", 2)


def test_activations_of_a_gpu_by_listing_the_tensors() -> None:
    tokens, tensor, element, expert_tensor = 24, 2, 2, 4
    attention = layer_activation_bytes(
        dataclasses.replace(FACTS, ffn_hidden_size=0), tokens, tensor, True, GPU
    )
    own = tokens // tensor
    routed = own * 3
    width = 28 // expert_tensor
    # its input is whole on each of an expert's ranks; gate and up, and their product, are those of all of its
    # ranks
    listed = [routed * FACTS.hidden_size * expert_tensor, *[routed * width * expert_tensor] * 3, routed]
    # scores, whether a token goes to an expert, its weight; places of the chosen ones, before and after they
    # are sorted, and their scores
    router = [own * 8 * 4, own * 8, own * 8 * element, 2 * routed * 8, routed * 4]
    expected = attention + sum(listed) * element + sum(router)
    sizes = (FACTS, tokens, tensor, True, expert_tensor, GPU)
    assert sparse_layer_activation_bytes(*sizes) == expected
    normaliser = tokens * 4 * FACTS.num_attention_heads // tensor
    for recomputed, kept in (
        (["moe"], attention),
        (["core_attn"], expected - normaliser),
        (["mlp"], expected),
    ):
        assert sparse_layer_activation_bytes(*sizes, recomputed) == kept
    assert sparse_layer_activation_bytes(*sizes, ["moe", "core_attn"]) == attention - normaliser


SHARED = facts_of(
    {
        **SHAPE,
        "model_type": "qwen2_moe",
        **EXPERTS,
        "mlp_only_layers": [1],
        "shared_expert_intermediate_size": 36,
    }
)


def test_a_shared_expert_is_counted_like_the_mlp_of_a_dense_layer() -> None:
    """Its gate and the scores that it weighs are each rank's own."""
    assert SHARED.mixture is not None
    without = dataclasses.replace(
        SHARED, mixture=dataclasses.replace(SHARED.mixture, shared_ffn_hidden_size=0)
    )
    assert (SHARED.qkv_bias, SHARED.attention_output_bias, SHARED.qk_norm) == (True, False, False)
    assert (SHARED.mixture.shared_ffn_hidden_size, SHARED.mixture.has_shared_gate) == (36, True)
    assert facts_of({**SHAPE, "model_type": "qwen2_moe", **EXPERTS, "num_experts": 0}).mixture is None
    assert layer_parameters(SHARED, 0, 3) - layer_parameters(without, 0, 3) == 3 * 36 // 3 * 48 + 48
    tokens, tensor, element = 24, 2, 2
    listed = [tokens * 36 // tensor] * 3 + [tokens // tensor * 48, tokens // tensor]
    difference = sparse_layer_activation_bytes(
        SHARED, tokens, tensor, True, 1, GPU
    ) - sparse_layer_activation_bytes(without, tokens, tensor, True, 1, GPU)
    assert difference == sum(listed) * element


def test_a_shared_expert_without_a_width_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, "model_type": "qwen2_moe", **EXPERTS}))
    with pytest.raises(ConfigError, match="shared_expert_intermediate_size = None: a positive"):
        read_model_facts(str(tmp_path))


def memory(expert: int, expert_tensor: int, facts: ModelFacts = FACTS, **changes: Any) -> Any:
    megatron = "policy.megatron_cfg"
    sizes = {
        f"{megatron}.expert_model_parallel_size": expert,
        f"{megatron}.expert_tensor_parallel_size": expert_tensor,
    }
    sizes[f"{megatron}.sequence_parallel"] = True
    config = complete(raw_grpo(), sizes | {f"{megatron}.{key}": value for key, value in changes.items()})
    return estimate(
        config["policy"], facts, Layout(2, 4, 1, 2, 16), BatchPlan(15, 4, 30, 3, 5, 610), reference=True
    )


def test_kinds_of_layers_are_counted_on_the_stages_that_hold_them() -> None:
    """The dense one of six layers is the second: interleaved one by one, it belongs to the second stage."""
    plain = memory(1, 1)
    first, last = memory(1, 1, virtual_pipeline_model_parallel_size=3)
    dense = layer_parameters(FACTS, 1, 2)
    sparse = layer_parameters(FACTS, 2, 2) + expert_layer_parameters(FACTS, 1, 1)
    assert dense != sparse
    assert first.parameters - plain[0].parameters == sparse - dense == plain[1].parameters - last.parameters
    assert (first.layers, last.layers) == (3, 3)
    # 15 prompts of 4 in micro-batches of 3 or 5: each stage holds more than 1F1B would.
    assert first.activations > plain[0].activations and last.activations > plain[1].activations


def test_experts_divide_over_their_own_ranks() -> None:
    outside = [stage_parameters(FACTS, 2, stage, consecutive_layers([3, 3])) for stage in range(2)]
    for expert, expert_tensor in [(1, 1), (2, 1), (4, 2), (8, 1), (2, 4)]:
        first, last = memory(expert, expert_tensor)
        experts = expert_layer_parameters(FACTS, expert, expert_tensor)
        assert experts * expert * expert_tensor == 8 * 3 * 48 * 28
        assert (first.parameters, last.parameters) == (outside[0] + 2 * experts, outside[1] + 3 * experts)
        assert last.weights == 2 * last.parameters
        # 8 ranks of a stage hold 4 copies of everything else, and as many copies of an expert as its own
        # groups leave.
        assert last.optimizer == -(-16 * outside[1] // 4) - (
            -16 * 3 * experts // (8 // (expert * expert_tensor))
        )


def test_recomputation_keeps_the_largest_layer() -> None:
    plain, checkpointed = memory(4, 1)[0], memory(4, 1, activation_checkpointing=True)[0]
    assert checkpointed.activations < plain.activations
    dense = memory(4, 1, dataclasses.replace(FACTS, mixture=None))[0]
    assert dense.parameters == 3 * layer_parameters(dataclasses.replace(FACTS, mixture=None), 0, 2) + 51 * 48


@pytest.mark.parametrize(
    "chosen",
    [
        {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
        {"target_modules": ["*.experts.*"]},
    ],
)
def test_adapters_of_experts_divide_as_the_experts_do(chosen: dict[str, Any]) -> None:
    """Gate and up share A in a stack."""
    in_stacks = "target_parameters" in chosen
    config = complete(
        raw_grpo(),
        {"policy.peft": {"enabled": True, "dim": 5, "exclude_modules": ["*"] if in_stacks else [], **chosen}},
    )
    for expert, expert_tensor in [(1, 1), (2, 1), (4, 2)]:
        per_expert = (48 if in_stacks else 2 * 48) + 2 * 28 // expert_tensor + 28 // expert_tensor + 48
        expected = 3 * 8 // expert * 5 * per_expert
        assert (
            adapter_parameters(config["policy"]["peft"], FACTS, range(3, 6), 2, (8 // expert, expert_tensor))
            == expected
        )
        megatron = {
            "expert_model_parallel_size": expert,
            "expert_tensor_parallel_size": expert_tensor,
            "sequence_parallel": True,
        }
        policy = {**config["policy"], "megatron_cfg": {**config["policy"]["megatron_cfg"], **megatron}}
        last = estimate(
            policy, FACTS, Layout(2, 4, 1, 2, 16), BatchPlan(15, 4, 30, 3, 5, 610), reference=True
        )[1]
        assert last.optimizer == -(-16 * expected // (8 // (expert * expert_tensor)))
