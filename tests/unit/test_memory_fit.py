"""Whether a run fits its devices: what is refused, what is doubted, and that what is proposed fits; the plan
of what was measured."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.tiny import policy_config
from megarl.config.arithmetic import BatchPlan
from megarl.config.layout import Layout
from megarl.config.load import load_config
from megarl.config.memory import estimate
from megarl.config.memory_run import CONTEXT_REST, GIB, host_memory, process_rest
from megarl.config.model_facts import facts_of
from megarl.config.nested import put
from megarl.config.plan import (
    communicators,
    engine_memory_of,
    fullest_moment,
    ledger,
    memory_of_models,
    memory_of_run,
    size_text,
    state_bytes,
    verdict,
)
from megarl.config.tables import KNOWN_MODELS
from megarl.config.validate import doubt_of_memory, validate_config
from megarl.errors import ConfigError
from megarl.models.generation.vllm.configuration import memory_of_engine

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = "grpo-qwen2.5-1.5b-1gpu-megatron"
LARGE = (
    "policy.model_name=deepseek-ai/DeepSeek-V3",
    "cluster.num_nodes=32",
    "cluster.device_memory_gib=180",
    "policy.megatron_cfg.tensor_model_parallel_size=1",
    "policy.megatron_cfg.sequence_parallel=false",
    "policy.megatron_cfg.pipeline_model_parallel_size=16",
    "policy.megatron_cfg.num_layers_in_first_pipeline_stage=3",
    "policy.megatron_cfg.num_layers_in_last_pipeline_stage=2",
    "policy.megatron_cfg.expert_model_parallel_size=16",
    "policy.generation.vllm_cfg.tensor_parallel_size=8",
    "policy.generation.vllm_cfg.expert_parallel_size=8",
    "policy.generation.vllm_cfg.gpu_memory_utilization=0.9",
    "policy.max_total_sequence_length=16384",
    "policy.sequence_packing.train_mb_tokens=16384",
    "policy.sequence_packing.logprob_mb_tokens=16384",
)
"""671 billion parameters on 256 devices."""


OVER_NODES = (
    "cluster.device_memory_gib=80",
    "policy.generation.vllm_cfg.tensor_parallel_size=32",
    "policy.generation.vllm_cfg.expert_parallel_size=32",
    "policy.sequence_packing.train_mb_tokens=8192",
    "policy.max_total_sequence_length=8192",
)
"""The same on devices of 80 GB, of which an engine needs those of four nodes."""


def config_of(name: str, *overrides: str) -> dict[str, Any]:
    return validate_config(load_config(CONFIGS / f"{name}.yaml", overrides))


def test_what_was_measured_lies_below_its_plan() -> None:
    """``benchmarks.gpu_probe`` on an H200: at most 10 % above what it took."""
    probe = json.loads((CONFIGS.parent / "benchmarks/results/gpu/h200-probe.json").read_text())
    measured = probe["figures"]["train peak GiB"] * GIB
    packing = {"enabled": True, "train_mb_tokens": 8192, "logprob_mb_tokens": 8192}
    changes: dict[str, Any] = {
        "train_global_batch_size": 64,
        "max_total_sequence_length": 2048,
        "sequence_packing": packing,
    }
    policy = policy_config(Path("model"), micro_batch=1, precision="bfloat16", **changes)
    [rank] = estimate(
        policy,
        facts_of(KNOWN_MODELS["Qwen/Qwen2.5-1.5B"]),
        Layout(1, 1, 1, 1, 1),
        plan_of(8192),
        reference=True,
    )
    assert rank.parameters == probe["figures"]["parameters"]
    assert 1.0 <= rank.peak / measured <= 1.1
    [rank] = memory_of_run(config_of(SMALL))[1]
    assert 1.0 <= rank.peak / measured <= 1.1


def plan_of(tokens: int) -> BatchPlan:
    return BatchPlan(64, 1, 64, 1, 1, 2048, tokens, tokens)


def test_state_that_has_no_room_is_refused_with_what_has() -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(SMALL, "cluster.device_memory_gib=24")
    [violation] = caught.value.violations
    assert (violation.key, violation.value) == ("cluster.device_memory_gib", 24)
    # 18 bytes of each of 1,543,714,304 parameters
    assert "weights, gradients and optimizer state of a rank alone take 25.9 GiB" in violation.bound
    in_host_memory = "policy.megatron_cfg.optimizer.optimizer_offload_fraction=1.0"
    assert violation.fix.startswith(
        f"write policy.sequence_packing.train_mb_tokens=4096 and {in_host_memory}"
    )
    written = violation.fix.removeprefix("write ").split(" and ")
    fitting = config_of(SMALL, "cluster.device_memory_gib=24", *written)
    assert doubt_of_memory(fitting) is None and state_bytes(fitting) < 24 * GIB


@pytest.mark.parametrize(
    "overrides",
    [("cluster.device_memory_gib=24", "cluster.memory_check=warn"), ("cluster.device_memory_gib=26",)],
)
def test_what_is_not_refused_is_doubted(overrides: tuple[str, ...]) -> None:
    config = config_of(SMALL, *overrides)
    text = doubt_of_memory(config)
    assert text is not None and "probably has no room: training takes 49.1 GiB" in text
    offered = text.partition("it would with ")[2].split(", or ")
    assert len(offered) == 3
    for changes in offered:
        assert doubt_of_memory(config_of(SMALL, *overrides, *shlex.split(changes))) is None, changes


@pytest.mark.parametrize("size", ["0.5", "1.0", "1.5"])
def test_small_buffers_of_a_refit_hold_the_largest_weight_all_the_same(size: str) -> None:
    """A smaller size than that is refused at the first refit, and the weight is gathered beside them."""
    overrides = ("grpo-qwen3-4b-lora-1gpu-24gb-megatron", "cluster.device_memory_gib=20")
    said = (
        "refit takes 20.3 GiB; it would with policy.generation_batch_size=32 "
        'policy.generation.backend="megatron"'
    )
    for each in (overrides, (*overrides, f"policy.refit_buffer_size_gb={size}")):
        text = doubt_of_memory(config_of(*each))
        assert text is not None and said in text


def test_without_the_size_of_a_device_nothing_is_refused() -> None:
    recipe, huge = "sft-qwen2.5-1.5b-megatron", "policy.model_name=Qwen/Qwen2.5-72B-Instruct"
    config = config_of(recipe, huge)
    assert state_bytes(config) > 80 * GIB
    text = doubt_of_memory(config)
    assert (
        text is not None
        and "a device of 80 GiB (assumed; set cluster.device_memory_gib to the real size)" in text
    )
    with pytest.raises(ConfigError, match=r"optimizer state of a rank alone take .*Fix: write "):
        config_of(recipe, huge, "cluster.device_memory_gib=80")
    assert (
        doubt_of_memory(config_of(recipe, huge, "cluster.device_memory_gib=80", "cluster.device=cpu")) is None
    )


@pytest.mark.parametrize("recipe", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_every_recipe_fits_the_devices_it_is_for(recipe: str) -> None:
    config = config_of(recipe, "cluster.device_memory_gib=80")
    assert doubt_of_memory(config) is None
    moment = fullest_moment(config)
    assert moment is not None
    assert verdict(config) == (
        f"fits 80 GiB: {size_text(moment.total)} at the fullest moment, {moment.name} (planned)"
    )
    assert verdict(put(config, "cluster.device", "cpu")) is None


def test_an_engine_of_latent_attention_keeps_vectors_whole() -> None:
    """Room for the longest sequence beside 156 GiB of weights."""
    config = config_of("grpo-qwen3-30b-a3b-2x8gpu-megatron", *LARGE)
    facts = facts_of(KNOWN_MODELS["deepseek-ai/DeepSeek-V3"])
    engine = memory_of_engine(config, facts)
    assert engine.token == 61 * (512 + 64) * 2
    assert engine.cached_tokens > 16384
    assert fullest_moment(config) is not None


def test_an_engine_that_no_node_holds_is_divided_over_nodes() -> None:
    """671 billion parameters on devices of 80 GB: 42 GiB on each of 32 devices, and training fits too."""
    config = config_of("grpo-qwen3-30b-a3b-2x8gpu-megatron", *LARGE, *OVER_NODES)
    facts = facts_of(KNOWN_MODELS["deepseek-ai/DeepSeek-V3"])
    engine = memory_of_engine(config, facts)
    assert 39 < engine.weights / GIB < 40 and engine.cached_tokens > 8192
    assert doubt_of_memory(config) is None
    with pytest.raises(
        ConfigError, match=r"no room in .* write \S+tensor_parallel_size=32 and \S+expert_parallel_size=32"
    ) as caught:
        config_of("grpo-qwen3-30b-a3b-2x8gpu-megatron", *LARGE, "cluster.device_memory_gib=80")
    assert len(caught.value.violations) == 1


def test_the_refit_of_a_mixture_has_the_engine_s_part_of_a_layer_s_experts_twice() -> None:
    config = config_of("grpo-qwen3-30b-a3b-2x8gpu-megatron")
    facts = facts_of(KNOWN_MODELS["Qwen/Qwen3-30B-A3B"])
    ranks = memory_of_run(config)[1]
    sleeps, refit = ledger(config, facts, ranks)[3:5]
    engine = memory_of_engine(config, facts)
    tensor = config["policy"]["generation"]["vllm_cfg"]["tensor_parallel_size"]
    assert (
        refit.engine - sleeps.engine == engine.weights + 2 * 128 * 3 * 2048 * 768 * 2 // tensor and tensor > 1
    )


APART = "grpo-dapo17k-asynchronous-qwen2.5-7b-8gpu-megatron"
OF_7B, VOCABULARY_OF_7B = 7_615_616_512, 152_064 * 3_584 * 2
"""Parameters of Qwen2.5 7B, and bytes of its largest weight."""


def test_engines_on_devices_of_their_own_are_summed_by_hand() -> None:
    """Four GPUs train and four generate: neither has anything of the other but the transfer buffers."""
    config = config_of(APART)
    facts = facts_of(KNOWN_MODELS["Qwen/Qwen2.5-7B"])
    [rank] = memory_of_run(config)[1]
    training, refit, generation, loading = ledger(config, facts, [rank])
    # world, tensor, data, and tensor with the one pipeline stage
    rest = process_rest(4)
    assert (training.policy, training.engine) == (rest + rank.peak, 0)
    # weights, float32 gradients, and half of 12 bytes a parameter: two data-parallel ranks share the state
    state = rank.parameters * (2 + 4 + 12 // 2)
    assert (refit.policy, refit.engine) == (rest + state, 0)
    assert (generation.policy, generation.engine) == (0, int(0.9 * 80 * GIB)) == (0, loading.engine)
    transfers = [moment.transfer for moment in (training, refit, generation, loading)]
    assert transfers == [number * VOCABULARY_OF_7B for number in (2, 3, 2, 2)]
    # the engines may use 0.9 of a device that they have to themselves
    assert fullest_moment(config) == generation
    # nothing of the policy goes to host memory, and vLLM's weights do not pass through it
    assert host_memory(config, [rank], {}, memory_of_engine(config, facts)) == 0


@pytest.mark.parametrize("on_torch", [False, True])
def test_actor_and_critic_with_adapters_have_one_base(on_torch: bool) -> None:
    """In host memory, to which each goes while the other is on the device."""
    changes = ["policy.peft={enabled: true, dim: 16}", "critic.peft={enabled: true, dim: 8}"]
    if on_torch:
        changes += ["policy.dtensor_cfg.enabled=true", "policy.megatron_cfg.enabled=false"]
        changes += ["policy.optimizer={name: torch.optim.AdamW, kwargs: {lr: 1.0e-5}}"]
    config = config_of("ppo-gsm8k-qwen2.5-1.5b-1gpu-megatron", *changes)
    [rank], beside = memory_of_run(config)[1], memory_of_models(config)
    [critic] = beside["critic"]
    # The two models and their own states, less one base. The plan counts the score layer as frozen.
    apart = rank.weights + rank.optimizer + critic.weights + critic.optimizer
    assert rank.frozen == 2 * 1_543_714_304 and critic.frozen == rank.frozen + 2 * 1_536
    assert host_memory(config, [rank], beside) == apart - (0 if on_torch else rank.frozen)
    # Nothing is shared where the files, the arithmetic or the layout differ.
    for key, value in (
        ("model_name", "another"),
        ("precision", "float32"),
        ("megatron_cfg.tensor_model_parallel_size", 2),
        ("megatron_cfg.model_class", "hybrid"),
        ("dtensor_cfg.enabled", not on_torch),
    ):
        assert host_memory(put(config, f"critic.{key}", value), [rank], beside) == apart


def test_two_models_on_a_cpu_have_a_base_each_while_they_start() -> None:
    changes = ["policy.peft={enabled: true, dim: 16}", "critic.peft={enabled: true, dim: 8}"]
    config = config_of("ppo-gsm8k-qwen2.5-1.5b-1gpu-megatron", *changes)
    config["cluster"]["device"] = "cpu"
    [rank], beside = memory_of_run(config)[1], memory_of_models(config)
    [critic] = beside["critic"]
    assert host_memory(config, [rank], beside) == rank.peak + critic.peak - rank.frozen
    small = {name: 0 for name in ("activations", "recomputed", "logits", "scoring", "generation_cache")}
    rank, critic = (replace(each, **small, optimizer=0) for each in (rank, critic))
    alone = rank.weights + rank.gradients + critic.weights + critic.gradients
    assert host_memory(config, [rank], {"critic": [critic]}) == alone


def test_engines_of_the_policy_s_own_backend_are_summed_by_hand() -> None:
    config = config_of(APART, "~policy.generation.backend", "policy.offload_optimizer_for_logprob=true")
    facts = facts_of(KNOWN_MODELS["Qwen/Qwen2.5-7B"])
    [rank] = memory_of_run(config)[1]
    engine = engine_memory_of(config, facts)
    assert engine is not None and (engine.weights, engine.host) == (2 * OF_7B, 2 * OF_7B)
    # 64 sequences of 4,096 tokens: keys and values of 4 heads of 128 numbers in each of 28 layers
    assert engine.token == 28 * 2 * 4 * 128 * 2 and engine.cached_tokens == 64 * 4096
    # four copies of the model, in one process group, with Megatron's gradient buffers
    parts = engine.weights, 4 * OF_7B, engine.token * 64 * 4096, process_rest(2)
    assert engine.budget == sum(parts)
    # of the node's eight ranks four train, and the others have a whole model there while a refit lasts
    assert host_memory(config, [rank], {}, engine) == 4 * rank.optimizer + 4 * 2 * OF_7B
    halved = config_of(
        APART, "~policy.generation.backend", "policy.generation.engine_cfg={tensor_parallel_size: 2}"
    )
    half = engine_memory_of(halved, facts)
    assert half is not None and half.token == engine.token // 2
    # norms are on both ranks
    assert 0 < half.weights - engine.weights // 2 < 2**20


@pytest.mark.parametrize("backend", ["dtensor", "fsdp1"])
def test_engines_of_a_torch_backend_shard_their_weights(backend: str) -> None:
    """Float32 shards over the copies of the model, and in bfloat16 what is gathered while a pass lasts."""
    recipe = f"grpo-qwen2.5-1.5b-{backend}"
    apart = "policy.generation.colocated={enabled: false, resources: {gpus_per_node: 2}}"
    config = config_of(recipe, apart, "~policy.generation.backend", "cluster.gpus_per_node=10")
    facts = facts_of(KNOWN_MODELS["Qwen/Qwen2.5-1.5B"])
    engine = engine_memory_of(config, facts)
    assert engine is not None
    shard = -(-1_543_714_304 // 2)
    layers = 2 * (1_543_714_304 - 151_936 * 1_536 - 1_536) // 28
    gathered = 2 * (layers + 151_936 * 1_536 + 1_536)
    assert engine.weights == 4 * shard + gathered


def test_an_engine_without_room_is_doubted_with_what_has_room() -> None:
    own = (APART, "~policy.generation.backend", "cluster.device_memory_gib=80")
    assert doubt_of_memory(config_of(*own)) is None
    text = doubt_of_memory(config_of(*own, "policy.generation_batch_size=192"))
    assert text is not None and "generation, a device of an engine takes 88.0 GiB" in text
    assert "policy.generation_batch_size=96" in text
    assert doubt_of_memory(config_of(*own, "policy.generation_batch_size=96")) is None


def test_communicators_are_counted_by_hand() -> None:
    config = config_of("grpo-qwen3-30b-a3b-2x8gpu-megatron")
    # world, data, pipeline, pipeline and tensor together, expert
    assert communicators(Layout(2, 8, 1, 1, 8), config["policy"]) == 5
    assert communicators(Layout(1, 1, 1, 1, 1), {"megatron_cfg": {}}) == 0
    # 24 channels: 4 MiB, LL128's 640 threads x 120 x 8 steps x 8 bytes, LL's 512 threads x 8 lines x 8 steps
    # x 16 bytes
    assert process_rest(2) - CONTEXT_REST == 2 * 24 * (4_194_304 + 4_915_200 + 524_288)
