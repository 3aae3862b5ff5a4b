"""``train_mb_tokens: auto``: the plan has room for the number that is chosen and for no larger one, and says
where it cannot know."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.cli import load_and_check, main
from megarl.config.load import load_config
from megarl.config.nested import at, put
from megarl.config.plan import batch_plan, doubt, fullest_moment
from megarl.config.recipes import find
from megarl.config.rules.parallel import layout_of
from megarl.config.rules.view import View
from megarl.config.sections import RunConfig
from megarl.config.token_budget import ROOM
from megarl.config.validate import validate_config
from megarl.errors import ConfigError
from tests.unit.config_samples import changed, raw_dpo

PACKED, DYNAMIC = "policy.sequence_packing.train_mb_tokens", "policy.dynamic_batching.train_mb_tokens"
GIB = 2**30
# recipe, its key, GiB of a device, further words
CASES: list[tuple[str, str, float, list[str]]] = [
    ("grpo-qwen2.5-7b-8gpu-megatron", PACKED, 80, []),
    ("grpo-llama3.1-70b-8x8gpu-megatron", PACKED, 80, []),
    ("grpo-qwen2.5-7b-8gpu-megatron", PACKED, 64, ["policy.megatron_cfg.pipeline_model_parallel_size=2"]),
    ("grpo-qwen3-8b-lora-1gpu-80gb-megatron", PACKED, 60, []),
]


def chosen(recipe: str, key: str, gib: float, words: list[str]) -> RunConfig:
    return load_and_check(recipe, [f"{key}=auto", f"cluster.device_memory_gib={gib}", *words])


def planned(config: RunConfig, key: str, tokens: int) -> float:
    moment = fullest_moment(put(config, key, tokens))
    assert moment is not None
    return moment.total / GIB


@pytest.mark.parametrize(("recipe", "key", "gib", "words"), CASES, ids=str)
def test_the_plan_has_room_for_the_chosen_number_and_for_no_larger_one(
    recipe: str, key: str, gib: float, words: list[str]
) -> None:
    config = chosen(recipe, key, gib, words)
    tokens = at(config, key)
    assert planned(config, key, tokens) <= ROOM * gib and doubt(config, lambda changed: True) is None
    plan = batch_plan(config, layout_of(View(config)))
    useful = (
        plan.global_batch_size
        * plan.sequence_length
        // plan.data_parallel
        // config["policy"]["megatron_cfg"]["pipeline_model_parallel_size"]
    )
    larger = int(tokens * 1.1) + 64
    assert larger > useful or planned(config, key, larger) > ROOM * gib
    # nothing else is changed, so that the configuration of a run's directory, which has the number, is that
    # of the run
    by_hand = load_and_check(recipe, [f"{key}={tokens}", f"cluster.device_memory_gib={gib}", *words])
    assert config == by_hand and validate_config(config) == config


def test_more_memory_gives_more_tokens_up_to_those_of_a_step() -> None:
    found = [
        at(chosen("grpo-qwen2.5-7b-8gpu-megatron", PACKED, gib, []), PACKED) for gib in (56, 80, 141, 4000)
    ]
    assert found == sorted(found) and len(set(found)) == 4
    config = chosen("grpo-qwen2.5-7b-8gpu-megatron", PACKED, 4000, [])
    plan = batch_plan(config, layout_of(View(config)))
    assert found[-1] == pytest.approx(
        plan.global_batch_size * plan.sequence_length / plan.data_parallel, abs=64
    )


def test_dynamic_batches_of_pairs_hold_a_pair_at_least() -> None:
    dynamic = {
        "enabled": True,
        "train_mb_tokens": "auto",
        "logprob_mb_tokens": 4096,
        "sequence_length_round": 1,
    }
    raw = changed(
        raw_dpo(),
        {"policy.dynamic_batching": dynamic, "cluster": {**raw_dpo()["cluster"], "device_memory_gib": 80}},
    )
    raw = changed(raw, {"cluster.device": "cuda", "policy.model_name": "Qwen/Qwen2.5-0.5B"})
    config = validate_config(raw)
    assert at(config, DYNAMIC) >= 2 * config["policy"]["max_total_sequence_length"]


def refusal(*words: str, recipe: str = "grpo-qwen2.5-7b-8gpu-megatron", key: str = PACKED) -> str:
    with pytest.raises(ConfigError) as caught:
        load_and_check(recipe, [f"{key}=auto", *words])
    return str(caught.value)


def test_what_the_plan_cannot_know_is_said() -> None:
    given = "cluster.device_memory_gib=80"
    assert (
        "device_memory_gib is null, so the memory of a device is unknown. Fix: write it, or write a number "
        "of tokens"
    ) in refusal("cluster.device_memory_gib=null")
    assert "are not on this disk. Fix: fetch the model, or write" in refusal(
        given, "policy.model_name=some/unknown-model"
    )
    assert "there is no memory plan for ranks on a CPU" in refusal(
        given,
        "cluster.device=cpu",
        "~policy.generation.backend",
        "policy.megatron_cfg.transformer_engine=auto",
    )
    toy = "policy.generation.backend=tests/toys/transformers_engine.py:KIND"
    assert "the memory of engines of tests/toys" in refusal(given, toy)


def test_a_device_on_which_the_longest_sequence_has_no_room() -> None:
    said = refusal("cluster.device_memory_gib=38")
    assert (
        "takes" in said
        and "with the fewest tokens" in said
        and "megarl train --dry-run shows what would fit" in said
    )


def test_other_faults_come_first_and_other_budgets_are_numbers() -> None:
    assert "policy.megatron_cfg.tensor_model_parallel_size = 3" in refusal(
        "policy.megatron_cfg.tensor_model_parallel_size=3"
    )
    assert "logprob_mb_tokens = 'auto'" in refusal(
        "policy.sequence_packing.logprob_mb_tokens=auto", "cluster.device_memory_gib=80"
    )


def test_a_dry_run_has_the_number(capsys: pytest.CaptureFixture[str]) -> None:
    recipe, words = "grpo-qwen2.5-7b-8gpu-megatron", [f"{PACKED}=auto", "cluster.device_memory_gib=80"]
    assert main(["train", recipe, *words, "--dry-run"]) == 0
    tokens = at(load_and_check(recipe, words), PACKED)
    assert f"{tokens:,}" in capsys.readouterr().out


def raw_of(recipe: str) -> dict[str, Any]:
    return load_config(find(recipe), [])


def test_a_budget_that_is_not_read_is_the_smallest() -> None:
    raw = put(
        raw_of("grpo-qwen2.5-7b-8gpu-megatron"),
        "policy.sequence_packing",
        {"enabled": False, "train_mb_tokens": "auto"},
    )
    assert at(validate_config(raw), PACKED) == raw["policy"]["max_total_sequence_length"]
