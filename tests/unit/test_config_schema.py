"""Shape of a configuration: types, unknown and missing keys, null against absent, and everything in one
report."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

from megarl.config import complete_run, rules, validate_config, validate_policy_config
from megarl.config.algorithms import run_type
from megarl.config.guesses import nearest
from megarl.config.load import load_config
from megarl.config.recipes import find, recipes
from megarl.config.rules.view import View
from megarl.config.schema import check_policy, check_run, known_paths
from megarl.errors import ConfigError, Violation
from tests.tiers import sampled
from tests.unit.config_samples import changed, raw_distillation, raw_dpo, raw_grpo, raw_ppo, raw_sft

MEGATRON = "policy.megatron_cfg"


def violations_after(changes: dict[str, Any]) -> dict[str, Violation]:
    return {violation.key: violation for violation in check_run(changed(raw_grpo(), changes))}


@pytest.mark.parametrize(
    "raw",
    [raw_grpo(), raw_sft(), raw_dpo(), raw_ppo(), raw_distillation()],
    ids=["grpo", "sft", "dpo", "ppo", "distillation"],
)
def test_valid_runs_pass_and_stay_valid_with_their_defaults(raw: dict[str, Any]) -> None:
    assert check_run(raw) == []
    assert check_run(complete_run(raw)) == []
    validate_config(raw)


@pytest.mark.parametrize(
    ("key", "value", "bound"),
    [
        ("seed", "7", "whole number"),
        ("seed", 7.5, "whole number"),
        ("seed", True, "whole number"),
        ("seed", None, "null is not allowed"),
        ("policy.max_total_sequence_length", "610", "whole number"),
        (f"{MEGATRON}.optimizer.lr", "1e-4", "a number"),
        (f"{MEGATRON}.optimizer.lr", True, "a number"),
        (f"{MEGATRON}.optimizer.lr", float("nan"), "finite"),
        (f"{MEGATRON}.optimizer.lr", float("inf"), "finite"),
        (f"{MEGATRON}.enabled", "true", "true or false"),
        (f"{MEGATRON}.enabled", 1, "true or false"),
        ("policy.model_name", 3, "text"),
        ("policy.precision", "bf16", "one of 'float32', 'bfloat16' or 'float16'"),
        (f"{MEGATRON}.empty_unused_memory_level", 3, "one of 0, 1 or 2"),
        ("policy.generation", [1], "a section"),
        ("policy.generation.stop_token_ids", [1, "two"], "whole number"),
        ("policy", 3, "a section"),
        ("env.on_error", "ignore", "one of"),
        ("policy.sequence_packing", {"enabled": False, "algorithm": "best_fit"}, "one of"),
    ],
)
def test_wrong_types_are_refused(key: str, value: object, bound: str) -> None:
    found = violations_after({key: value})
    (violation,) = found.values()
    assert violation.key.startswith(key)
    assert bound in violation.bound
    assert violation.fix


def test_a_removed_value_names_what_to_write() -> None:
    key = f"{MEGATRON}.moe_router_load_balancing_type"
    violation = violations_after({key: "micro_batch_aux_loss"})[key]
    assert violation.bound == "one of 'none', 'aux_loss' or 'seq_aux_loss' is wanted"
    assert (
        "it was removed" in violation.fix
        and "write aux_loss (over the global batch) or seq_aux_loss" in violation.fix
    )


@pytest.mark.parametrize("value", [1, 0.5])
def test_a_whole_number_is_a_number(value: float) -> None:
    assert violations_after({f"{MEGATRON}.optimizer.lr": value}) == {}


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        (f"{MEGATRON}.tensor_model_paralel_size", f"{MEGATRON}.tensor_model_parallel_size"),
        ("sede", "seed"),
        ("max_num_steps", "grpo.max_num_steps"),
        ("policy.temperature", "policy.generation.temperature"),
        ("grpo.num_generation_per_prompt", "grpo.num_generations_per_prompt"),
        ("tensor_model_parallel_size", f"{MEGATRON}.tensor_model_parallel_size"),
        (
            "policy.generation.colocated.resources.gpu_per_node",
            "policy.generation.colocated.resources.gpus_per_node",
        ),
    ],
)
def test_unknown_keys_name_the_nearest_known_key(wrong: str, meant: str) -> None:
    violation = violations_after({wrong: 3})[wrong]
    assert violation.bound == "there is no such key"
    assert repr(meant) in violation.fix


# Shortened names and those of other trainers -> the key of the same section.
GUESSES = {
    "policy.model": "policy.model_name",
    "policy.dtype": "policy.precision",
    "policy.batch_size": "policy.train_global_batch_size",
    "policy.seq_length": "policy.max_total_sequence_length",
    "policy.lora": "policy.peft",
    "policy.peft.rank": "policy.peft.dim",
    "policy.lr": f"{MEGATRON}.optimizer.lr",
    f"{MEGATRON}.tp": f"{MEGATRON}.tensor_model_parallel_size",
    f"{MEGATRON}.ep": f"{MEGATRON}.expert_model_parallel_size",
    "policy.generation.max_tokens": "policy.generation.max_new_tokens",
    "policy.generation.vllm_cfg.tp": "policy.generation.vllm_cfg.tensor_parallel_size",
    "cluster.nodes": "cluster.num_nodes",
    "cluster.gpus": "cluster.gpus_per_node",
    "data.max_length": "data.max_input_seq_length",
    "checkpointing.dir": "checkpointing.checkpoint_dir",
    "checkpointing.save_interval": "checkpointing.save_period",
    "grpo.steps": "grpo.max_num_steps",
    "grpo.epochs": "grpo.max_num_epochs",
    "grpo.num_generations": "grpo.num_generations_per_prompt",
    "loss_fn.kl_coef": "loss_fn.reference_policy_kl_penalty",
    "env.timeout": "env.timeout_s",
    "logger.wandb_project": "logger.wandb.project",
    "nodes": "cluster.num_nodes",
    "model": "policy.model_name",
    # Names that a key of an engine, the profiler, another algorithm or another section has or resembles.
    "tp": f"{MEGATRON}.tensor_model_parallel_size",
    "tensor_parallel_size": f"{MEGATRON}.tensor_model_parallel_size",
    "cp": f"{MEGATRON}.context_parallel_size",
    "steps": "grpo.max_num_steps",
    "epochs": "grpo.max_num_epochs",
    "num_gpus": "cluster.gpus_per_node",
    "cluster.num_gpus": "cluster.gpus_per_node",
    "micro_batch_size": "policy.train_micro_batch_size",
    "eval_interval": "grpo.val_period",
    "kl": "loss_fn.reference_policy_kl_penalty",
    "kl_coef": "loss_fn.reference_policy_kl_penalty",
    "dtype": "policy.precision",
    "timeout": "env.timeout_s",
    "policy.bf16": "policy.precision",
    "cluster.memory": "cluster.device_memory_gib",
    "data.name": "data.train.name",
    f"{MEGATRON}.optimizer.learning_rate": f"{MEGATRON}.optimizer.lr",
}
# Of a key of another section only an equal name is near, unless each section means something else by it.
UNLIKE = ["loss_fn.eps", "env.name", "checkpointing.path", "checkpointing.load", f"{MEGATRON}.dp", "gamma"]


@pytest.mark.parametrize(("guess", "meant"), GUESSES.items())
def test_guessed_keys_name_the_key_of_the_same_section(guess: str, meant: str) -> None:
    assert nearest(guess, known_paths(run_type("grpo")), "grpo") == meant


@pytest.mark.parametrize("guess", UNLIKE)
def test_a_key_of_another_meaning_is_not_proposed(guess: str) -> None:
    assert nearest(guess, known_paths(run_type("grpo")), "grpo") is None


def test_a_dotted_name_in_a_file_is_to_be_nested() -> None:
    violations = check_run({**raw_grpo(), "grpo.max_num_steps": 5})
    assert [violation.fix for violation in violations] == ["write grpo: {max_num_steps: ...}"]


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        ("cluster.device", "gpu", "did you mean 'cuda'?"),
        (f"{MEGATRON}.optimizer.lr", "inf", "write a number alone, without a unit, a comma or quotes"),
        ("cluster.device_memory_gib", "80G", "write a number alone, without a unit, a comma or quotes"),
        ("policy.sequence_packing.enabled", 1, "write true"),
        ("policy.sequence_packing.enabled", "enabled", "write true or false"),
    ],
)
def test_a_value_of_another_form_is_answered_by_what_to_write(key: str, value: object, fix: str) -> None:
    assert violations_after({key: value})[key].fix == fix


@pytest.mark.parametrize(
    ("section", "switch"),
    [("logger.wandb", "logger.wandb_enabled"), (MEGATRON, f"{MEGATRON}.enabled")],
)
def test_true_in_place_of_a_section_names_its_switch(section: str, switch: str) -> None:
    assert violations_after({section: True})[section].fix == f"write {switch}=true"


def test_a_key_like_no_other_is_to_be_removed() -> None:
    assert violations_after({"qqqq_qqqqqqqq": 1})["qqqq_qqqqqqqq"].fix == (
        "remove it; megarl keys qqqqqqqq looks for one like it"
    )


def test_a_missing_algorithm_is_that_of_its_section() -> None:
    assert violations_after({"algorithm": ...})["algorithm"].fix == "add algorithm: grpo"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"grpo.val_period": 10, "data.validation": None},
            "write grpo.val_period=0",
        ),
        (
            {f"{MEGATRON}.context_parallel_size": 2, "policy.make_sequence_length_divisible_by": 1},
            "ranks holds two chunks, so it must be a multiple of",
        ),
    ],
)
def test_a_message_has_the_number_that_was_missed(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate_config(changed(raw_grpo(), changes))
    assert text in str(caught.value)


def test_null_is_allowed_exactly_where_the_type_says_so() -> None:
    allowed = {
        "policy.generation.top_k": None,
        "policy.max_grad_norm": None,
        "data.validation": None,
        "loss_fn.ratio_clip_c": None,
    }
    assert violations_after(allowed) == {}
    refused = [
        "policy.generation.top_p",
        "policy.train_micro_batch_size",
        f"{MEGATRON}.optimizer.min_lr",
        "data.train",
    ]
    assert set(violations_after(dict.fromkeys(refused))) == set(refused)


def test_absent_and_null_are_told_apart() -> None:
    assert repr(violations_after({"seed": ...})["seed"].value) == "<absent>"
    assert violations_after({"seed": None})["seed"].value is None
    assert (
        violations_after({"loss_fn.ratio_clip_c": ...})["loss_fn.ratio_clip_c"].bound
        == "this key is required"
    )


@pytest.mark.parametrize(
    ("scheduler", "keys"),
    [
        ([{"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {}}, {"milestones": [50]}], set()),
        ({"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0}}, set()),
        (None, set()),
        (3, {"policy.scheduler"}),
        ([{"name": 3, "kwargs": {}}], {"policy.scheduler.0.name"}),
        ([{"name": "x"}], {"policy.scheduler.0.kwargs"}),
        ([{"milestones": ["a"]}], {"policy.scheduler.0.milestones.0"}),
    ],
)
def test_a_union_reports_the_form_that_was_meant(scheduler: object, keys: set[str]) -> None:
    assert set(violations_after({"policy.scheduler": scheduler})) == keys


def test_types_rules_and_model_come_in_one_report() -> None:
    changes = {
        "sede": 1,
        "policy.precision": "bf16",
        "loss_fn": ...,
        "cluster.gpus_per_node": 5,
        "policy.model_name": "/no/such/directory",
        "policy.sequence_packing": {"enabled": True, "train_mb_tokens": 1},
    }
    with pytest.raises(ConfigError) as caught:
        validate_config(changed(raw_grpo(), changes))
    keys = {violation.key for violation in caught.value.violations}
    assert {
        "sede",
        "policy.precision",
        "loss_fn",
        "cluster.gpus_per_node",
        "policy.model_name",
        "policy.sequence_packing.train_mb_tokens",
    } <= keys
    assert str(caught.value).startswith(f"{len(caught.value.violations)} configuration errors:")
    assert all(violation.key in str(caught.value) for violation in caught.value.violations)


@pytest.mark.parametrize(
    "config", [{}, {"policy": None}, {"policy": []}, {"policy": {"megatron_cfg": 3}}, {3: 4}]
)
def test_a_broken_configuration_is_still_a_report(config: dict[Any, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        validate_config(config)
    assert caught.value.violations


WRONG: tuple[Any, ...] = ("a", "", None, [], [1, "x"], [["a"]], {}, {"a": 1}, -1, 0, 3.5, True, float("nan"))
ON_VLLM = "grpo-gsm8k-qwen2.5-1.5b-1gpu-megatron"


def report_of(config: dict[str, Any]) -> list[str]:
    """Keys of the violations of a configuration; any other error than the report fails the test."""
    try:
        validate_config(config)
    except ConfigError as error:
        assert error.violations
        return [violation.key for violation in error.violations]
    return []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("policy.precision", "fp16"),
        (f"{MEGATRON}.pipeline_model_parallel_size", 0),
        ("policy.generation.vllm_cfg", []),
        ("policy.generation.vllm_cfg.precision", "fp16"),
        ("policy.generation.vllm_cfg.tensor_parallel_size", 0),
        ("policy.generation.vllm_kwargs", {"max_num_seqs": "x"}),
    ],
)
def test_a_wrong_value_for_engines_is_a_report(key: str, value: object) -> None:
    keys = report_of(changed(copy.deepcopy(raw_vllm()), {key: value}))
    assert any(found.startswith(key) for found in keys)


@pytest.mark.parametrize(
    ("key", "written", "fix"),
    [
        ("policy.max_total_sequence_length", "1e3", "write 1000"),
        ("policy.max_total_sequence_length", "'1e3'", "write 1000"),
        ("policy.max_total_sequence_length", "'512'", "write 512 without quotes"),
        ("policy.max_total_sequence_length", "0.5", "write a value of that kind"),
        ("policy.precision", "fp16", "did you mean 'float16'?"),
        ("policy.precision", "bf16", "did you mean 'bfloat16'?"),
        ("policy.precision", "fp32", "did you mean 'float32'?"),
        ("policy.megatron_cfg", "/x/y.yaml", "--with FILE"),
        ("policy.generation.stop_strings", "</s>", "write it in brackets: [</s>]"),
        ("policy.generation.stop_token_ids", "3", "write it in brackets: [3]"),
        ("policy.tokenizer", "Qwen/Qwen2.5-1.5B", "write policy.tokenizer.name=Qwen/Qwen2.5-1.5B"),
        ("data.train", "/x/y.jsonl", "write data.train.path=/x/y.jsonl"),
        ("data.train", "gsm8k", "write data.train.name=gsm8k"),
    ],
)
def test_the_fix_for_a_value_that_is_written_otherwise(key: str, written: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate_config(load_config(find(ON_VLLM), [f"{key}={written}"]))
    fault = next(fault for fault in caught.value.violations if fault.key == key)
    assert fix in fault.fix


def test_wrong_values_in_recipes_are_reports() -> None:
    """At random, for every recipe that is shipped; all keys are in another test."""
    draw = random.Random(5)
    for recipe in recipes():
        raw = load_config(recipe.path, [])
        full = complete_run(raw)
        paths = list(_paths_of(full))
        for _ in range(4):
            report_of(changed(copy.deepcopy(raw), {draw.choice(paths): draw.choice(WRONG)}))


def test_a_rule_that_fails_is_no_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure that no wrong value explains stays visible."""

    def fails(view: View) -> Iterator[Violation]:
        raise ZeroDivisionError("of the rule")

    monkeypatch.setattr(rules, "RULES", (*rules.RULES, fails))
    with pytest.raises(ZeroDivisionError, match="of the rule"):
        validate_config(raw_grpo())
    assert report_of(changed(raw_grpo(), {"seed": "x"})) == ["seed"]
    assert report_of(changed(raw_grpo(), {"policy.train_micro_batch_size": 0}))


def _paths_of(config: dict[str, Any], above: str = "") -> Iterator[str]:
    for key, value in config.items():
        yield f"{above}{key}"
        if isinstance(value, dict):
            yield from _paths_of(value, f"{above}{key}.")


def test_the_policy_section_alone() -> None:
    policy = raw_grpo()["policy"]
    assert check_policy(policy) == []
    completed = validate_policy_config(policy, world_size=12)
    assert completed["logprob_batch_size"] == 5
    with pytest.raises(ConfigError, match=r"cluster\.gpus_per_node = 9"):
        validate_policy_config(policy, world_size=9)
    with pytest.raises(ConfigError, match=r"policy\.model_nam = 'x'.*'policy\.model_name'"):
        validate_policy_config({**policy, "model_nam": "x"})


def test_defaults_leave_every_given_value_alone() -> None:
    raw = changed(
        raw_grpo(), {"policy.generation.temperature": 0.7, "policy.max_grad_norm": None, "run_dir": "here"}
    )
    full = complete_run(raw, "name")
    assert full["policy"]["generation"]["temperature"] == 0.7
    assert full["policy"]["max_grad_norm"] is None
    assert full["policy"]["megatron_cfg"]["optimizer"]["clip_grad"] == 0.0
    assert full["run_dir"] == "here"
    assert full["checkpointing"]["checkpoint_dir"] == "here/checkpoints"
    assert complete_run(full) == full
    assert complete_run(raw_grpo(), "name")["run_dir"] == "runs/name"


def test_defaults_follow_what_they_depend_on() -> None:
    full = complete_run(
        changed(raw_sft(), {"policy.precision": "float16", f"{MEGATRON}.optimizer.weight_decay": 0.25})
    )
    megatron = full["policy"]["megatron_cfg"]
    assert (megatron["optimizer"]["bf16"], megatron["optimizer"]["fp16"], megatron["pipeline_dtype"]) == (
        False,
        True,
        "float16",
    )
    assert megatron["scheduler"]["start_weight_decay"] == megatron["scheduler"]["end_weight_decay"] == 0.25
    assert full["policy"]["make_sequence_length_divisible_by"] == 2
    assert full["sft"]["val_global_batch_size"] == 30
    assert complete_run(raw_sft())["policy"]["generation"] is None


def test_defaults_are_not_shared_between_configurations() -> None:
    first, second = complete_run(raw_grpo()), complete_run(raw_grpo())
    first["policy"]["dtensor_cfg"]["enabled"] = True
    first["policy"]["generation"]["colocated"]["enabled"] = False
    assert second == complete_run(raw_grpo())


def test_a_learning_rate_that_nothing_reads_is_answered_by_the_optimizer_s() -> None:
    with pytest.raises(ConfigError, match=rf"Fix: write {MEGATRON}\.optimizer\.lr=2e-06$"):
        validate_config(changed(raw_grpo(), {"policy.learning_rate": 2e-6}))


def test_memory_in_mib_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"device_memory_gib = 24576: .*at most 4,096"):
        validate_config(changed(raw_grpo(), {"cluster.device_memory_gib": 24576}))


def test_a_section_that_nobody_reads_is_shown_by_its_beginning() -> None:
    with pytest.raises(ConfigError, match=r"grpo = \{.{10,100}\.\.\.\}: algorithm 'sft'") as caught:
        validate_config({**raw_grpo(), "algorithm": "sft"})
    assert "begin with a recipe of this algorithm" in str(caught.value)


def test_nearest_prefers_the_same_section() -> None:
    known = ["a.size", "b.sizes", "b.x"]
    assert nearest("b.size", known) == "b.sizes"
    assert nearest("c.size", known) == "a.size"
    assert nearest("zzz", known) is None
    far = "policy.generation.vllm_cfg.kv_cache_"
    assert nearest(f"{far}dtype", {f"{far}gb"}) is None, "a part of the name is not the meaning"


def test_configuration_needs_neither_torch_nor_ray() -> None:
    code = (
        "import sys, megarl, megarl.config, megarl.cli, megarl.config.report, megarl.config.load, "
        "megarl.models.policy.interfaces\n"
        "import megarl.models.generation.interfaces, megarl.config.validate\n"
        "megarl.config.read_model_facts('owner/none')\n"
        "megarl.cli.build_parser()\n"
        "sys.exit(','.join(name for name in ('torch', 'ray', 'transformers', 'megatron') if name in "
        "sys.modules) or None)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@cache
def loaded(name: str) -> dict[str, Any]:
    return load_config(find(name), [])


def raw_vllm() -> dict[str, Any]:
    return loaded(ON_VLLM)


def _further(path: str) -> list[Callable[[], dict[str, Any]]]:
    starts: dict[Callable[[], dict[str, Any]], tuple[str, ...]] = {
        raw_vllm: ("policy", "cluster", "grpo", "algorithm"),
        raw_dpo: ("dpo", "data"),
        raw_ppo: ("ppo", "critic", "policy"),
        raw_distillation: ("distillation", "teacher", "data", "policy.generation"),
    }
    return [raw for raw, sections in starts.items() if path.startswith(sections)]


@sampled(40)
@pytest.mark.parametrize("path", known_paths(run_type(None)))
def test_no_value_of_any_key_gives_a_traceback(path: str) -> None:
    """Also where others follow from it: a text for a batch size is one for the batch size of a validation
    too."""
    *sections, key = path.split(".")
    for value in WRONG:
        for raw in (raw_grpo, raw_sft, *_further(path)):
            config: Any = copy.deepcopy(raw())
            section = config
            for name in sections:
                section = section.setdefault(name, {}) if isinstance(section, dict) else None
            if isinstance(section, dict):
                section[key] = value
                report_of(config)
