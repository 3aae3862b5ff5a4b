"""Parameters counted by stage and rank against real transformers models, and the estimates against slow
tallies."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from converters.model_config.architecture import ModelFacts
from megarl.config.activations import head_activation_bytes, layer_activation_bytes, most_held, operations
from megarl.config.adapters import adapter_parameters
from megarl.config.arithmetic import BatchPlan
from megarl.config.layout import Layout, chunks_of_stages, consecutive_layers, layers_per_stage
from megarl.config.load import load_config
from megarl.config.memory import estimate, optimizer_bytes
from megarl.config.memory_run import GRAPHS, checkpoint_bytes, checkpoints_kept, disk_bytes, host_memory
from megarl.config.model_facts import facts_of, read_model_facts
from megarl.config.parameters import layer_parameters, model_parameters, stage_parameters
from megarl.config.plan import memory_of_run, size_text
from megarl.config.policy import STATE_KEYS
from megarl.config.report import surroundings_table
from megarl.config.rules.view import View
from megarl.config.tables import KNOWN_MODELS
from megarl.config.validate import validate_config
from megarl.errors import ConfigError
from megarl.models.generation.vllm.configuration import (
    engine_memory,
    engine_weights_fit,
    memory_of_engine,
    sized,
)
from tests.tiers import sampled
from tests.unit.config_samples import FACTS, complete, raw_grpo

SHAPE = {
    "hidden_size": 48,
    "intermediate_size": 132,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "vocab_size": 101,
}
MODELS = {
    "llama": (LlamaConfig, {"tie_word_embeddings": False}),
    "llama-biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True, "head_dim": 10}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": False}),
    "qwen2-tied": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {"head_dim": 14, "tie_word_embeddings": False}),
    "qwen3-tied": (Qwen3Config, {"head_dim": 6, "tie_word_embeddings": True, "attention_bias": True}),
}


def real_model(name: str, folder: Path) -> tuple[ModelFacts, Any]:
    config_class, options = MODELS[name]
    config: PretrainedConfig = config_class(**SHAPE, **options)
    config.save_pretrained(folder)
    facts = read_model_facts(str(folder))
    assert facts is not None
    with torch.device("meta"):
        return facts, AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_one_rank_holds_as_many_parameters_as_transformers(name: str, tmp_path: Path) -> None:
    facts, model = real_model(name, tmp_path)
    assert stage_parameters(facts, 1, 0, [range(facts.num_layers)]) == sum(
        parameter.numel() for parameter in model.parameters()
    )


@sampled(15)
@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("stages", [[6], [2, 4], [1, 2, 3]])
@pytest.mark.parametrize("tensor", [1, 2, 3, 6])
def test_ranks_and_stages_hold_each_parameter_once(
    name: str, stages: list[int], tensor: int, tmp_path: Path
) -> None:
    facts, model = real_model(name, tmp_path)
    padded = -(-facts.vocab_size // tensor) * tensor
    replicated = ("norm", "o_proj.bias", "down_proj.bias")
    expected = 0
    for key, parameter in model.named_parameters():
        count = parameter.numel()
        if "embed_tokens" in key or "lm_head" in key:
            count = padded * facts.hidden_size
        expected += count * (tensor if any(part in key for part in replicated) else 1)
    if facts.tied_embeddings and len(stages) > 1:
        expected += padded * facts.hidden_size
    assert (
        sum(
            stage_parameters(facts, tensor, stage, consecutive_layers(stages)) * tensor
            for stage in range(len(stages))
        )
        == expected
    )


@settings(max_examples=60, derandomize=True)
@given(
    stages=st.integers(1, 6),
    micro_batches=st.integers(1, 9),
)
def test_micro_batches_held_by_playing_the_schedule(stages: int, micro_batches: int) -> None:
    """Plays 1F1B: a stage runs its warm-up forwards, then alternates one forward and one backward."""
    for stage in range(stages):
        warm_up = min(stages - stage - 1, micro_batches)
        moves = (
            ["forward"] * warm_up
            + ["forward", "backward"] * (micro_batches - warm_up)
            + ["backward"] * warm_up
        )
        held = peak = 0
        for move in moves:
            held += 1 if move == "forward" else -1
            peak = max(peak, held)
        assert held == 0
        assert most_held(stage, stages, micro_batches, [7]) == 7 * peak


@settings(max_examples=80, derandomize=True, deadline=None)
@given(
    stages=st.integers(2, 6),
    micro_batches=st.integers(1, 20),
    kept=st.lists(st.integers(0, 50), min_size=2, max_size=4),
)
def test_activations_held_are_those_of_megatron_s_interleaved_schedule(
    stages: int, micro_batches: int, kept: list[int]
) -> None:
    """Megatron-Core's order of passes and warm-up, with megarl's fillers and group, chunks of any sizes."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules

    from megarl.models.megatron.schedule import _fill_interleaved

    config: Any = SimpleNamespace(pipeline_model_parallel_size=stages)
    work: Any = SimpleNamespace(as_filler=lambda: None)
    filled = len(_fill_interleaved([work] * micro_batches, config))
    group = config.microbatch_group_size_per_vp_stage
    table = schedules.get_schedule_table(filled, len(kept), group)
    chunks = [chunk for _, chunk in table]
    for stage in range(stages):
        with pytest.MonkeyPatch.context() as patch:
            sizes = {
                "pipeline_model_parallel_world_size": stages,
                "pipeline_model_parallel_rank": stage,
                "virtual_pipeline_model_parallel_world_size": len(kept),
            }
            for name, size in sizes.items():
                patch.setattr(parallel_state, f"get_{name}", lambda size=size: size)
            total, _, warm_up, left = schedules.get_pp_rank_microbatches(filled, len(kept), group)
        assert total == len(chunks)
        held = peak = 0
        forward, backward = iter(chunks), iter(len(kept) - 1 - chunk for chunk in chunks)
        for move in ["F"] * warm_up + ["F", "B"] * left + ["B"] * warm_up:
            held += kept[next(forward)] if move == "F" else -kept[next(backward)]
            peak = max(peak, held)
        assert held == 0
        assert most_held(stage, stages, micro_batches, kept) == peak


@pytest.mark.parametrize(
    "changes",
    [
        {"pipeline_model_parallel_size": 3, "virtual_pipeline_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 3},
        {"pipeline_model_parallel_size": 4},
        {
            "pipeline_model_parallel_size": 3,
            "virtual_pipeline_model_parallel_size": 2,
            "num_layers_in_first_pipeline_stage": 2,
            "num_layers_in_last_pipeline_stage": 4,
        },
        {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 5},
    ],
)
def test_chunks_of_stages_are_megatron_s(changes: dict[str, Any]) -> None:
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    section: Any = {
        "virtual_pipeline_model_parallel_size": None,
        "num_layers_in_first_pipeline_stage": None,
        "num_layers_in_last_pipeline_stage": None,
        "pipeline_model_parallel_layout": None,
        **changes,
    }
    dtype = torch.float32
    config = TransformerConfig(
        num_layers=12, hidden_size=24, num_attention_heads=2, pipeline_dtype=dtype, **changes
    )
    chunks = range(section["virtual_pipeline_model_parallel_size"] or 1)
    expected = []
    for stage in range(changes["pipeline_model_parallel_size"]):
        layers = []
        for chunk in chunks if len(chunks) > 1 else [None]:
            start = get_transformer_layer_offset(config, vp_stage=chunk, pp_rank=stage)
            layers.append(
                range(start, start + get_num_layers_to_build(config, vp_stage=chunk, pp_rank=stage))
            )
        expected.append(layers)
    assert chunks_of_stages(section, 12) == expected


def test_written_layers_of_interleaved_stages() -> None:
    section: Any = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|tt|ttt|L"}
    assert chunks_of_stages(section, 6) == [[range(1), range(3, 6)], [range(1, 3), range(6, 6)]]


def test_activations_of_a_gpu_by_listing_the_tensors() -> None:
    """What hooks cannot count on a CPU: norms, gate and product in one operation, whose inputs alone are
    kept."""
    tokens, tensor, element = 14, 2, 2
    kept = operations("megatron", "cuda", element)
    heads, groups, width = (
        FACTS.num_attention_heads // tensor,
        FACTS.num_key_value_heads // tensor,
        FACTS.head_dim,
    )
    ffn = FACTS.ffn_hidden_size // tensor
    joined = (heads + 2 * groups) * width
    divided = [joined, heads * width, groups * width, heads * width, 2 * ffn, ffn]
    whole = [FACTS.hidden_size] * 4
    normaliser, scales = heads * 4, 2 * 4
    inside, outside = sum(divided) * element + normaliser, sum(whole) * element + scales
    sizes = (FACTS, tokens, tensor)
    assert layer_activation_bytes(*sizes, False, kept) == tokens * (inside + outside)
    assert layer_activation_bytes(*sizes, True, kept) == tokens * (inside + outside // tensor)
    without_mlp = sum(divided[:4]) * element + normaliser
    for recomputed, inner in (
        (["mlp"], without_mlp),
        (["core_attn"], inside - normaliser),
        (["moe"], inside),
    ):
        assert layer_activation_bytes(*sizes, False, kept, recomputed) == tokens * (inner + outside)


@pytest.mark.parametrize(
    ("optimizer", "weight", "gradient", "expected"),
    [
        # The rows of Megatron-Core's table, less weights and gradients: 20 - 4, 18 - 6, 16 - 8.
        ("adam", 2, 2, 16),
        ("adam", 2, 4, 12),
        ("adam", 4, 4, 8),
        ("sgd", 4, 4, 4),
    ],
)
def test_optimizer_state(optimizer: str, weight: int, gradient: int, expected: int) -> None:
    assert optimizer_bytes({"optimizer": optimizer, "sgd_momentum": 0.9}, weight, gradient) == expected
    assert optimizer_bytes({"optimizer": "sgd", "sgd_momentum": 0.0}, 4, 4) == 0


@pytest.mark.parametrize(
    ("states", "weight", "gradient", "expected"),
    [
        (("float32", "bfloat16", "bfloat16"), 2, 2, 4 + 2 + 2),
        (("float32", "float32", "8bit"), 2, 4, 4 + 4 + 1 + 4 / 256),
        (("bfloat16", "8bit", "8bit"), 2, 4, 2 + 8 / 256),
        (("float32", "8bit", "bfloat16"), 4, 4, 1 + 4 / 256 + 2),
    ],
)
def test_state_below_float32(
    states: tuple[str, str, str], weight: int, gradient: int, expected: float
) -> None:
    """Gradients are not copied: they are read where they were reduced."""
    optimizer = dict(zip(STATE_KEYS, states, strict=True))
    assert optimizer_bytes({"optimizer": "adam", **optimizer}, weight, gradient) == expected


def estimate_of(changes: dict[str, Any], reference: bool = True) -> Any:
    config = complete(raw_grpo(), changes)
    plan = BatchPlan(15, 4, 30, 3, 5, 610)
    return estimate(config["policy"], FACTS, Layout(2, 3, 1, 2, 6), plan, reference=reference)


def test_estimate_of_two_stages() -> None:
    first, last = estimate_of({})
    assert [first.layers, last.layers] == layers_per_stage(10, 2)
    layers = 5 * layer_parameters(FACTS, 0, 2)
    vocabulary = 502 * 96
    assert (first.parameters, last.parameters) == (layers + vocabulary, layers + vocabulary + 96)
    assert (first.weights, first.gradients) == (2 * first.parameters, 2 * first.parameters)
    assert first.optimizer == -(-16 * first.parameters // 3)
    kept = operations("megatron", "cuda", 2)
    output = head_activation_bytes(FACTS, 5 * 610, 2, False, kept) + 502 * 96 * 2
    assert (first.logits, last.logits) == (0, 5 * 610 * 502 * 2 + output)
    assert first.scoring == 5 * 610 * max(layer_activation_bytes(FACTS, 1, 2, False, kept), 0)
    assert first.generation_cache == 5 * 610 * 5 * 2 * (2 * 8) * 2
    assert first.activations == 2 * last.activations
    assert first.reference_weights == first.weights
    assert last.peak == last.weights + last.gradients + last.optimizer + last.activations + last.logits
    assert (last.recomputed, last.state) == (0, last.weights + last.gradients + last.optimizer)


def test_estimate_follows_the_switches() -> None:
    plain = estimate_of({})
    megatron = "policy.megatron_cfg"
    checkpointed = estimate_of({f"{megatron}.activation_checkpointing": True})
    assert checkpointed[0].activations < plain[0].activations
    selective = {
        "activation_checkpointing": True,
        "recompute_granularity": "selective",
        "recompute_modules": ["mlp"],
    }
    without_mlps = estimate_of({f"{megatron}.{key}": value for key, value in selective.items()})
    assert checkpointed[0].activations < without_mlps[0].activations < plain[0].activations
    assert (
        estimate_of({f"{megatron}.optimizer.use_distributed_optimizer": False})[0].optimizer
        == 16 * plain[0].parameters
    )
    wide = estimate_of({f"{megatron}.distributed_data_parallel_config.grad_reduce_in_fp32": True})[0]
    assert (wide.gradients, wide.optimizer) == (4 * wide.parameters, 12 * wide.parameters // 3)
    assert estimate_of({"policy.precision": "float32"})[0].weights == 4 * plain[0].parameters
    assert estimate_of({"policy.generation": None})[0].generation_cache == 0
    assert estimate_of({}, reference=False)[0].reference_weights == 0
    scoring = estimate_of({"policy.logprob_batch_size": 50})[1]
    assert (scoring.scoring, scoring.logits) == (50 * plain[1].scoring // 5, plain[1].logits)
    # in float32, and their gradient once more in 16 bit
    assert estimate_of({f"{megatron}.float32_logits": True})[1].logits - plain[1].logits == 5 * 610 * 502 * 4
    chunked = estimate_of({"policy.logprob_chunk_size": 100})[1]
    assert plain[1].logits - chunked.logits == (5 * 610 - 100) * 502 * 2 - 502 * 96 * 4
    generating = estimate_of({"policy.generation_batch_size": 5000})[0]
    assert (
        generating.peak
        == generating.weights + generating.gradients + generating.optimizer + generating.generation_cache
    )


def test_facts_of_old_and_new_ways_to_write_rope(tmp_path: Path) -> None:
    base = {**SHAPE, "model_type": "llama", "max_position_embeddings": 640}
    for extra, expected in [
        ({}, 640),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 640}},
            2560,
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 64,
                }
            },
            640,
        ),
        ({"rope_parameters": None, "max_position_embeddings": None}, None),
    ]:
        (tmp_path / "config.json").write_text(json.dumps({**base, **extra}))
        facts = read_model_facts(str(tmp_path))
        assert facts is not None and facts.max_position == expected


def test_facts_of_experts_and_of_a_text_config_inside(tmp_path: Path) -> None:
    inner = {**SHAPE, "model_type": "gemma3_text", "num_local_experts": 4}
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": inner, "tie_word_embeddings": True})
    )
    facts = read_model_facts(str(tmp_path))
    assert facts is not None
    assert dataclasses.astuple(facts)[:2] == ("gemma3_text", 6)
    assert (facts.num_experts, facts.tied_embeddings, facts.head_dim) == (4, True, 4)


ROOT = Path(__file__).parents[2]
LARGE = "configs/grpo-llama3.1-70b-8x8gpu-megatron.yaml"
LARGE_FACTS = facts_of(KNOWN_MODELS["meta-llama/Llama-3.1-70B-Instruct"])


ENGINE = {"precision": "bfloat16", "gpu_memory_utilization": 0.6}


def with_engine(*overrides: str) -> dict[str, Any]:
    """A large recipe with an engine of one rank, unless its overrides say otherwise."""
    return load_config(
        ROOT / LARGE,
        ("policy.generation.vllm_cfg.tensor_parallel_size=1", *overrides),
        [str(ROOT / "configs/base/vllm.yaml")],
    )


def test_an_engine_whose_weights_have_no_room_is_refused_with_sizes_and_fix() -> None:
    with pytest.raises(ConfigError) as caught:
        validate_config(with_engine())
    [violation] = caught.value.violations
    assert violation.key == "policy.generation.vllm_cfg.tensor_parallel_size" and violation.value == 1
    # 70,553,706,496 parameters of 2 bytes
    assert (
        "131.4 GiB of weights" in violation.bound
        and "gpu_memory_utilization = 0.6 of cluster.device_memory_gib = 80 GiB" in violation.bound
    )
    assert violation.fix.startswith("write 4")


@pytest.mark.parametrize(
    ("changes", "fits"),
    [
        (("policy.generation.vllm_cfg.tensor_parallel_size=2",), False),
        (("policy.generation.vllm_cfg.tensor_parallel_size=4",), True),
        (("policy.generation.vllm_cfg.tensor_parallel_size=2", "cluster.device_memory_gib=141"), True),
        (
            (
                "policy.generation.vllm_cfg.tensor_parallel_size=2",
                "policy.generation.vllm_cfg.gpu_memory_utilization=0.9",
            ),
            True,
        ),
    ],
)
def test_what_makes_an_engine_fit(changes: tuple[str, ...], fits: bool) -> None:
    config = with_engine(*changes)
    if fits:
        validate_config(config)
    else:
        with pytest.raises(ConfigError, match=r"65\.7 GiB of weights .*write 4"):
            validate_config(config)


def test_room_for_keys_and_values_is_counted_by_hand() -> None:
    config = validate_config(with_engine("policy.generation.vllm_cfg.tensor_parallel_size=4"))
    engine = memory_of_engine(config, LARGE_FACTS)
    # 80 layers, 8 key-value heads of 128 over 4 ranks, keys and values, 2 bytes
    assert engine.token == 80 * 2 * 128 * 2 * 2
    # counters of 512 rows of a step over 16 engines, over the vocabulary, in 4 bytes, and graphs
    assert engine.rest == 32 * 128_256 * 4 + GRAPHS
    room = engine.budget - engine.weights - engine.rest
    assert engine.budget == int(0.6 * 80 * 2**30) and engine.cached_tokens == room // engine.token


def test_room_for_states_of_gated_delta_nets_is_counted_by_hand() -> None:
    config = validate_config(load_config(ROOT / "configs/grpo-qwen3.5-9b-8gpu-megatron.yaml"))
    engine = memory_of_engine(config, facts_of(KNOWN_MODELS["Qwen/Qwen3.5-9B"]))
    # 8 layers have attention, 4 key-value heads of 256; 24 have states of 32 heads, [128, 128] in float32,
    # and 3 tokens of 8,192 channels, of which a sequence of 4,096 tokens has one each
    states = 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert engine.token == 8 * 4 * 256 * 2 * 2 + states // 4096


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        # 60 rows, 12 ranks
        ({}, 5),
        (
            {
                "policy.generation.vllm_cfg.tensor_parallel_size": 3,
                "policy.generation.vllm_cfg.pipeline_parallel_size": 2,
            },
            30,
        ),
        ({"policy.generation.colocated": {"enabled": False, "resources": {"num_nodes": 1}}}, 10),
        ({"grpo.use_dynamic_sampling": True, "grpo.batch_multiplier": 1.5}, 8),
        ({"grpo.num_prompts_per_step": 6000}, 1024),
        ({"policy.generation.vllm_kwargs": {"max_num_seqs": 7}}, 7),
        # more ranks than there are, which another rule refuses
        ({"policy.generation.vllm_cfg.tensor_parallel_size": 16}, 60),
    ],
)
def test_the_rows_of_an_engine_are_counted_by_hand(changes: dict[str, Any], rows: int) -> None:
    config = complete(raw_grpo(), {"policy.generation.backend": "vllm", **changes})
    assert sized(View(config))["vllm_kwargs"] == {"max_num_seqs": rows}
    counters = engine_memory(sized(View(config)), {"device_memory_gib": 80.0}, FACTS).rest - GRAPHS
    assert counters == rows * 1003 * 4


def test_an_engine_whose_rows_are_not_known_takes_vllm_s_own_number() -> None:
    config = complete(raw_grpo(), {"policy.generation.backend": "vllm"})
    assert sized(View(config, faulty={"grpo.num_prompts_per_step"}))["vllm_kwargs"] == {}


@pytest.mark.parametrize("tied", [False, True])
def test_the_fullest_stage_of_an_engine_is_counted_by_hand(tied: bool) -> None:
    """Ten layers over four stages: the most are three, and an end has a matrix of the vocabulary beside
    them."""
    facts = dataclasses.replace(FACTS, tied_embeddings=tied)
    generation = {"vllm_cfg": {**ENGINE, "tensor_parallel_size": 2, "pipeline_parallel_size": 4}}
    engine = engine_memory(generation, {"device_memory_gib": 80.0}, facts)
    vocabulary = 1003 * 96 // 2
    of_layers = model_parameters(facts, 2) - (1 if tied else 2) * vocabulary
    assert engine.weights == 2 * (-(-of_layers * 3 // 10) + vocabulary)
    # three layers, two of four key-value heads of 8, keys and values, 2 bytes
    assert engine.token == 3 * 2 * 8 * 2 * 2


def test_an_engine_without_room_for_one_longest_sequence_is_refused() -> None:
    facts = dataclasses.replace(FACTS, tied_embeddings=True)
    weights, token = 2 * model_parameters(facts), 10 * 4 * 8 * 2 * 2
    for tokens, refused in ((609, True), (611, False)):
        # 60 rows over 12 engines
        gib = (weights + 5 * facts.vocab_size * 4 + GRAPHS + (tokens + 0.5) * token) / 0.5 / 2**30
        changes = {
            "policy.generation.backend": "vllm",
            "policy.generation.vllm_cfg.gpu_memory_utilization": 0.5,
        }
        config = complete(raw_grpo(), {**changes, "cluster.device": "cuda", "cluster.device_memory_gib": gib})
        found = list(engine_weights_fit(View(config, facts=facts)))
        assert [violation.key for violation in found] == [
            "policy.generation.vllm_cfg.gpu_memory_utilization"
        ] * refused
        assert all(
            "609 tokens, but policy.generation.vllm_cfg.max_model_len = 610" in violation.bound
            for violation in found
        )


def test_host_memory_and_disk_of_a_run() -> None:
    config = validate_config(
        with_engine("policy.generation.vllm_cfg.tensor_parallel_size=4", "checkpointing.keep_top_k=3")
    )
    _, ranks = memory_of_run(config)
    fullest = max(2 * rank.reference_weights + rank.optimizer + rank.weights for rank in ranks)
    assert host_memory(config, ranks) == 8 * fullest
    # weights in bfloat16, float32 copies and two moments
    parameters = model_parameters(LARGE_FACTS)
    assert parameters == 70_553_706_496
    assert checkpoint_bytes(config["policy"], LARGE_FACTS) == parameters * 14
    assert checkpoints_kept(config) == 5, "three, the newest, and the one that is being written"
    assert disk_bytes(config, LARGE_FACTS) == parameters * (5 * 14 + 2 * config["checkpointing"]["export_hf"])
    config["checkpointing"]["async_save"] = True
    table = surroundings_table(config, LARGE_FACTS, ranks, {})
    shared = list(table.columns[0].cells).index("its part of a node, held in /dev/shm (async_save)")
    assert list(table.columns[1].cells)[shared] == size_text(
        parameters * 14 // config["cluster"]["num_nodes"]
    )
    config["cluster"]["device"] = "cpu"
    assert host_memory(config, ranks) == 8 * max(rank.peak + 2 * rank.reference_weights for rank in ranks)


def test_adapters_alone_have_gradients_and_optimizer_state() -> None:
    """Beside them everything of the policy stays, the reference policy takes no memory, and a checkpoint is
    the adapters'."""
    raw = with_engine("policy.generation.vllm_cfg.tensor_parallel_size=4")
    whole = validate_config(raw)
    raw["policy"]["peft"] = {"enabled": True, "dim": 16}
    beside = validate_config(raw)
    layout, before = memory_of_run(whole)
    after = memory_of_run(beside)[1]
    first = 0
    for rank, other in zip(before, after, strict=True):
        adapters = adapter_parameters(
            beside["policy"]["peft"], LARGE_FACTS, range(first, first + rank.layers), layout.tensor
        )
        first += rank.layers
        assert 0 < adapters < rank.parameters / 50
        assert other.parameters == rank.parameters + adapters and other.weights == rank.weights + 2 * adapters
        assert other.gradients * rank.parameters == rank.gradients * adapters
        assert other.optimizer == pytest.approx(rank.optimizer * adapters / rank.parameters, abs=1)
        assert (
            other.reference_weights == 0
            and other.activations == rank.activations
            and other.logits <= rank.logits
        )
    stored = adapter_parameters(beside["policy"]["peft"], LARGE_FACTS, range(LARGE_FACTS.num_layers))
    assert checkpoint_bytes(beside["policy"], LARGE_FACTS) == stored * 14
