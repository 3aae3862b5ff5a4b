"""What a refused configuration is told to write: all of it applied at once breaks no rule about these keys,
and no other."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.cli import main
from megarl.config.arithmetic import divisors_near, multiples_near
from megarl.config.load import load_config
from megarl.config.nested import at, put
from megarl.config.proposals import with_proposals
from megarl.config.recipes import find
from megarl.config.validate import validate_config, validate_policy_config
from megarl.errors import ConfigError, Violation
from tests.tiers import slow
from tests.unit.config_samples import raw_dpo, raw_grpo, raw_ppo, raw_sft

LARGE = "grpo-gsm8k-qwen2.5-7b-8gpu-megatron"
GLOBAL, MICRO, PROMPTS = (
    "policy.train_global_batch_size",
    "policy.train_micro_batch_size",
    "grpo.num_prompts_per_step",
)
LONGEST, PROMPT, NEW = (
    "policy.max_total_sequence_length",
    "data.max_input_seq_length",
    "policy.generation.max_new_tokens",
)
MEGATRON, VLLM, APART = "policy.megatron_cfg", "policy.generation.vllm_cfg", "policy.generation.colocated"
SIZES: Mapping[str, Sequence[Any]] = {
    "cluster.gpus_per_node": range(1, 13),
    "cluster.num_nodes": [1, 1, 2, 3, 5],
    GLOBAL: range(1, 100),
    MICRO: range(1, 9),
    LONGEST: range(100, 900),
    PROMPT: range(10, 600),
    "policy.make_sequence_length_divisible_by": range(1, 9),
    f"{MEGATRON}.tensor_model_parallel_size": [1, 2, 3, 4, 5, 8],
    f"{MEGATRON}.pipeline_model_parallel_size": [1, 1, 2, 3, 4, 7],
    f"{MEGATRON}.context_parallel_size": [1, 1, 2, 3],
    f"{MEGATRON}.virtual_pipeline_model_parallel_size": [None, 2, 3],
    f"{MEGATRON}.sequence_parallel": [False, True],
    f"{MEGATRON}.optimizer.min_lr": [0.0, 1e-3],
    f"{MEGATRON}.scheduler.lr_decay_iters": [4, 20],
    f"{MEGATRON}.scheduler.lr_warmup_iters": [0, 10],
    f"{MEGATRON}.scheduler.end_weight_decay": [0.001, 0.01, 0.1],
}
OF_GENERATION: Mapping[str, Sequence[Any]] = {
    NEW: range(10, 900),
    f"{VLLM}.tensor_parallel_size": [1, 2, 3, 4, 5, 8],
    f"{VLLM}.pipeline_parallel_size": [1, 1, 2, 3],
    f"{VLLM}.expert_parallel_size": [1, 2],
    f"{VLLM}.max_model_len": [100, 1000],
}
OF_OTHERS: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "grpo": {"loss_fn.force_on_policy_ratio": [True, False], "grpo.num_generations_per_prompt": range(2, 9)},
    "ppo": {
        "critic.megatron_cfg.tensor_model_parallel_size": [1, 2, 3, 4],
        "critic.train_global_batch_size": range(1, 100),
        "critic.train_micro_batch_size": range(1, 9),
        "ppo.critic_warmup_steps": [0, 9],
    },
    "sft": {"sft.val_global_batch_size": range(1, 60), "sft.val_micro_batch_size": range(1, 9)},
    "dpo": {"dpo.val_global_batch_size": range(1, 60), "dpo.val_at_end": [True]},
}
BATCHING: Mapping[str, Sequence[Any]] = {
    "policy.dynamic_batching": [
        {"enabled": True},
        {"enabled": True, "train_mb_tokens": 50, "logprob_mb_tokens": 700},
    ],
    "policy.sequence_packing": [{"enabled": True, "train_mb_tokens": 50, "logprob_mb_tokens": 700}],
}
BASES = {"grpo": raw_grpo, "ppo": raw_ppo, "sft": raw_sft, "dpo": raw_dpo}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with the sizes of a model: 10 layers, 12 heads, 4 key-value heads, 640 positions."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {
        "hidden_size": 96,
        "intermediate_size": 180,
        "num_hidden_layers": 10,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    }
    config = {
        "model_type": "qwen2",
        **sizes,
        "vocab_size": 1003,
        "max_position_embeddings": 640,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def drawn(seed: int, model: str) -> dict[str, Any]:
    """A configuration with some sizes drawn at random, nearly always refused."""
    draw = random.Random(seed)
    algorithm = draw.choice(list(BASES))
    config = put(put(BASES[algorithm](), "policy.model_name", model), "policy.tokenizer.name", model)
    sizes = {**SIZES, **OF_OTHERS[algorithm], **BATCHING}
    if algorithm in ("grpo", "ppo"):
        sizes |= {f"{algorithm}.num_prompts_per_step": range(1, 70), NEW: OF_GENERATION[NEW]}
        if draw.random() < 0.7:
            config = put(config, "policy.generation.backend", "vllm")
            sizes |= OF_GENERATION
        if draw.random() < 0.5 and algorithm == "grpo":
            config = put(config, "policy.generation.backend", "vllm")
            config = put(
                config,
                APART,
                {"enabled": False, "resources": {"gpus_per_node": draw.randint(1, 5), "num_nodes": None}},
            )
    for key in draw.sample(list(sizes), draw.randint(2, 7)):
        config = put(config, key, draw.choice(sizes[key]))
    return config


def violations_of(config: Mapping[str, Any]) -> tuple[Violation, ...]:
    try:
        validate_config(config)
    except ConfigError as error:
        return error.violations
    return ()


def printed(violation: Violation) -> dict[str, Any]:
    """What a fix says to write, read from its text; nothing where it only advises."""
    pairs = re.findall(r"([\w.]+)=(\S+)", violation.fix)
    if violation.fix.startswith("write ") and pairs:
        return {key: yaml.safe_load(value) for key, value in pairs}
    alone = re.fullmatch(r"write (null|false|true|-?[\d.e-]+)", violation.fix)
    return {violation.key: yaml.safe_load(alone[1])} if alone and violation.candidates else {}


def check(config: Mapping[str, Any]) -> tuple[int, int]:
    """Apply what is printed of all violations at once. Returns how many say what to write, of those that
    could."""
    found = violations_of(config)
    mended: Mapping[str, Any] = config
    changes: dict[str, Any] = {}
    for violation in found:
        for key, value in printed(violation).items():
            assert changes.setdefault(key, value) == value, f"two values for {key}"
            mended = put(mended, key, value)
    told = {violation.key for violation in found if printed(violation)}
    left = {violation.key for violation in violations_of(mended)}
    assert not left & (told | changes.keys()), (left, changes)
    assert left <= {violation.key for violation in found} - told
    return len(told), len({violation.key for violation in found if violation.candidates})


def test_what_is_printed_mends_drawn_configurations(model: str) -> None:
    told = could = 0
    for seed in range(60):
        try:
            more = check(drawn(seed, model))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        told, could = told + more[0], could + more[1]
    assert could > 100 and told >= 0.9 * could, (told, could)


@slow
@pytest.mark.parametrize("seed", range(1000, 1600))
def test_what_is_printed_mends_many_drawn_configurations(seed: int, model: str) -> None:
    check(drawn(seed, model))


def fixes(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, str]:
    """Fixes that the command line prints, by key."""
    assert main(["train", LARGE, "--dry-run", *words]) == 2
    return dict(re.findall(r"\d+\. (\S+) = .*Fix: (.*)", capsys.readouterr().err))


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (
            ["--with", "base/vllm-apart"],
            {"cluster.gpus_per_node": "write policy.generation.colocated.resources.gpus_per_node=4"},
        ),
        (
            [
                "--with",
                "base/vllm-apart",
                f"{MEGATRON}.tensor_model_parallel_size=1",
                f"{MEGATRON}.sequence_parallel=false",
            ],
            {GLOBAL: f"write {PROMPTS}=35 and {GLOBAL}=560"},
        ),
        (
            ["--with", "base/vllm-apart", "cluster.num_nodes=40"],
            {f"{APART}.resources.num_nodes": "write 8", f"{APART}.resources.gpus_per_node": "write null"},
        ),
        (["cluster.num_nodes=3"], {GLOBAL: f"write {PROMPTS}=33 and {GLOBAL}=528"}),
        ([f"{VLLM}.tensor_parallel_size=3"], {f"{VLLM}.tensor_parallel_size": "write 4"}),
        ([f"{GLOBAL}=500"], {GLOBAL: "write 512"}),
        (
            [f"{MEGATRON}.pipeline_model_parallel_size=3"],
            {
                "cluster.gpus_per_node": f"write {MEGATRON}.pipeline_model_parallel_size=4",
                f"{MEGATRON}.pipeline_model_parallel_size": "write 4",
            },
        ),
    ],
)
def test_what_is_printed_for_a_recipe_is_accepted(
    words: list[str], wanted: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = fixes(capsys, *words)
    assert found == wanted
    own = [f"{key}={fix.removeprefix('write ')}" for key, fix in found.items() if "=" not in fix]
    other = [
        word for fix in found.values() if "=" in fix for word in fix.removeprefix("write ").split(" and ")
    ]
    assert main(["train", LARGE, "--dry-run", *words, *own, *other]) == 0, capsys.readouterr().err


def test_a_key_that_refers_to_a_changed_one_follows_it(
    tmp_path: Path, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = put(put(raw_sft(), "policy.model_name", model), "policy.tokenizer.name", model)
    config = put(put(config, LONGEST, 700), PROMPT, f"${{{LONGEST}}}")
    path = tmp_path / "sft.yaml"
    path.write_text(yaml.safe_dump(config))
    assert main(["train", str(path), "--dry-run"]) == 2
    err = capsys.readouterr().err
    # without following, the longest record would be longer than the longest sequence, and both would have to
    # be written
    assert err.rstrip().endswith("Fix: write 640")
    assert main(["train", str(path), "--dry-run", f"{LONGEST}=640"]) == 0


def test_no_number_is_printed_where_none_satisfies_all_rules(model: str) -> None:
    config = put(put(raw_grpo(), "policy.model_name", model), "policy.tokenizer.name", model)
    config = put(
        config, "cluster", {"gpus_per_node": 6, "num_nodes": 2, "device": "cuda", "device_memory_gib": 0.0001}
    )
    config = put(put(config, "policy.generation.backend", "vllm"), VLLM, {"gpu_memory_utilization": 0.6})
    [violation] = [each for each in violations_of(config) if each.key == f"{VLLM}.tensor_parallel_size"]
    assert violation.candidates and violation.fix == "give the engine more or larger devices"


def test_a_policy_alone_gets_proposals_too() -> None:
    policy = put(raw_sft()["policy"], "megatron_cfg.tensor_model_parallel_size", 4)
    with pytest.raises(ConfigError) as caught:
        validate_policy_config(policy, world_size=4)
    [violation] = [each for each in caught.value.violations if each.key == "cluster.gpus_per_node"]
    changes = printed(violation)
    assert changes
    for key, value in changes.items():
        if key.startswith("policy."):
            policy = put(policy, key.removeprefix("policy."), value)
    validate_policy_config(policy, world_size=changes.get("cluster.gpus_per_node", 4))


def test_candidates_of_two_rules_are_combined() -> None:
    def violations_after(changes: Mapping[str, object]) -> list[Violation]:
        size = changes.get("size", 5)
        assert isinstance(size, int)
        thirds = Violation("size", size, "three divide it", "-", ({"size": 6}, {"size": 12}))
        quarters = Violation("size", size, "four divide it", "-", ({"size": 8}, {"size": 12}))
        other = Violation("other", 1, "it must be the size", "-", ({"other": size},))
        broken = [
            (size % 3, thirds),
            (size % 4, quarters),
            (size == 12 and changes.get("other") != 12, other),
        ]
        return [violation for fault, violation in broken if fault]

    found = with_proposals(violations_after({}), violations_after)
    assert [violation.fix for violation in found] == ["write size=12 and other=12"] * 2


def test_divisors_and_multiples_begin_near_a_value() -> None:
    draw = random.Random(3)
    for _ in range(200):
        number, value = draw.randint(1, 600), draw.randint(1, 600)
        divisors = divisors_near(number, value)
        assert sorted(divisors) == [each for each in range(1, number + 1) if number % each == 0]
        assert max(divisors[0] / value, value / divisors[0]) == min(
            max(each / value, value / each) for each in divisors
        )
        multiples = multiples_near(number, value)
        assert multiples[0] == -(-value // number) * number and all(
            each % number == 0 and each > 0 for each in multiples
        )
        assert len(set(multiples)) == len(multiples)


@pytest.mark.parametrize("number", [10**23, 10**400], ids=["23", "400"])
def test_numbers_that_no_run_has_are_refused_at_once(number: int) -> None:
    """Finding all divisors of such a number takes days."""
    assert divisors_near(number, 10**6)[0] == 10**5
    assert divisors_near(6, number)[0] == 6
    changes = [f"policy.megatron_cfg.context_parallel_size={10**23}"]
    with pytest.raises(ConfigError, match="context_parallel_size"):
        validate_config(load_config(find("grpo-gsm8k-qwen2.5-1.5b-1gpu-megatron"), changes))


def test_the_drawn_configurations_are_of_all_kinds(model: str) -> None:
    configs = [drawn(seed, model) for seed in range(60)]
    assert {config["algorithm"] for config in configs} == set(BASES)
    assert {at(config, f"{APART}.enabled") for config in configs} >= {None, False}
