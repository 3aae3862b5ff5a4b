"""Every rule between keys: a valid run passes, and each rule is seen to fire on the key it is about."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from converters.families import FAMILIES
from converters.model_config.architecture import ModelFacts
from megarl.config import check, complete_run
from megarl.config.algorithms import run_type
from megarl.config.rules import RULES, bounded_keys
from megarl.config.rules.not_yet import NOT_YET_RULES
from megarl.config.rules.table import ROWS_OF_MODELS, ROWS_OF_RUNS
from megarl.config.rules.view import NotApplicableError, View, apply_rules
from megarl.models.generation.vllm.configuration import RULES as VLLM_RULES
from tests.tables import read_table
from tests.tiers import sampled
from tests.unit.config_samples import (
    FACTS,
    complete,
    gated_delta,
    mixture,
    raw_distillation,
    raw_dpo,
    raw_grpo,
    raw_ppo,
    raw_rm,
    raw_sft,
)

MEGATRON = "policy.megatron_cfg"
DTENSOR = "policy.dtensor_cfg"
SHORT = {
    "m": MEGATRON,
    "d": DTENSOR,
    "o": f"{MEGATRON}.optimizer",
    "s": f"{MEGATRON}.scheduler",
    "g": "policy.generation",
}
SHORT["ddp"] = DATA_PARALLEL = f"{MEGATRON}.distributed_data_parallel_config"
ON_DTENSOR = {"m.enabled": False, "d.enabled": True, "d.tensor_parallel_size": 2, "o": ...}
MIXTURE = {"mixture": mixture()}


def long(path: str) -> str:
    """A dotted path with its section written out."""
    section, dot, rest = path.partition(".")
    return SHORT.get(section, section) + dot + rest


# rule -> cases; their form is written there
CASES: dict[str, list[dict[str, Any]]] = read_table("broken_rules.yaml")
RAW = {
    "grpo": raw_grpo,
    "sft": raw_sft,
    "dpo": raw_dpo,
    "rm": raw_rm,
    "ppo": raw_ppo,
    "distillation": raw_distillation,
}
PACKS = {"policy.sequence_packing": {"enabled": True, "train_mb_tokens": 1300, "logprob_mb_tokens": 700}}


def changed_run(case: dict[str, Any]) -> dict[str, Any]:
    changes = {**case.get("changes", {}), **dict.fromkeys(case.get("without", []), ...)}
    return complete(RAW[case.get("in", "grpo")](), {long(path): value for path, value in changes.items()})


def facts_of(case: dict[str, Any]) -> ModelFacts:
    sizes = dict(case.get("sizes", {}))
    if "mixture" in sizes:
        sizes["mixture"] = mixture(**sizes["mixture"])
    if "gated_delta" in sizes:
        sizes["gated_delta"] = gated_delta(**sizes["gated_delta"])
    return dataclasses.replace(FACTS, **sizes)


BY_NAME = {rule.__name__: rule for rule in (*RULES, *NOT_YET_RULES, *VLLM_RULES)}


def keys_named(rule: str, config: dict[str, Any], facts: Any = None) -> set[str]:
    """The keys that one rule complains about; every complaint says all four things."""
    try:
        violations = list(BY_NAME[rule](View(config, facts=facts)))
    except NotApplicableError:
        return set()
    assert all(violation.bound and violation.fix for violation in violations)
    return {violation.key for violation in violations}


def test_valid_runs_break_no_rule() -> None:
    assert check(complete(raw_grpo()), FACTS) == []
    assert check(complete(raw_sft()), FACTS) == []
    assert check(complete(raw_sft(), {"data.train.prompt_key": []}), FACTS) == []
    assert check(complete(raw_dpo()), FACTS) == []
    assert check(complete(raw_ppo()), FACTS, (), {"critic": FACTS}) == []
    assert check(complete(raw_distillation()), FACTS, (), {"teacher": FACTS}) == []
    packed = {"policy.sequence_packing": {"enabled": True, "train_mb_tokens": 1220, "logprob_mb_tokens": 610}}
    assert check(complete(raw_dpo(), packed), FACTS) == []
    assert check(complete(raw_rm()), FACTS) == [] == check(complete(raw_rm(), PACKS), FACTS)


@pytest.mark.parametrize(
    ("rule", "case"),
    [
        pytest.param(rule, case, id=f"{rule}-{number}")
        for rule in CASES
        for number, case in enumerate(CASES[rule])
    ],
)
def test_rule_fires_on_its_key(rule: str, case: dict[str, Any]) -> None:
    run = case.get("in", "grpo")
    # the others' rules are silent about the model
    knows = run in {"grpo", "distillation"}
    config, facts = changed_run(case), facts_of(case) if knows else None
    keys = {long(key) for key in case["keys"]}
    assert keys_named(rule, config, facts) == keys
    assert keys <= {violation.key for violation in check(config, facts)}
    assert keys_named(rule, complete(RAW[run]()), FACTS if knows else None) == set()


def test_only_an_algorithm_that_reads_pairs_has_a_model_that_scores_and_pairs() -> None:
    config = complete(
        raw_sft(), {"policy.reward_model_cfg": {"enabled": True}, "data.train.chosen_key": "better"}
    )
    keys = {violation.key for violation in check(config)}
    assert keys == {"policy.reward_model_cfg.enabled", "data.train.chosen_key"}


SAID_ANYWAY: dict[str, dict[str, Any]] = read_table("kept_rules.yaml")


def test_only_dense_layers_have_a_width_to_divide() -> None:
    config, key = complete(raw_grpo()), f"{MEGATRON}.tensor_model_parallel_size"
    facts = dataclasses.replace(FACTS, ffn_hidden_size=181)
    assert keys_named("widths_divide", config, facts) == {key}
    assert keys_named("widths_divide", config, dataclasses.replace(facts, **MIXTURE)) == set()
    assert keys_named(
        "widths_divide", config, dataclasses.replace(facts, mixture=mixture(dense_layers=[1]))
    ) == {key}


@pytest.mark.parametrize("case", SAID_ANYWAY)
def test_what_is_so_anyway_may_be_written_down(case: str) -> None:
    assert check(changed_run(SAID_ANYWAY[case]), facts_of(SAID_ANYWAY[case])) == []


def test_the_class_of_every_known_family_is_accepted_as_its_converter() -> None:
    for model_type, family in FAMILIES.items():
        config = complete(raw_grpo(), {f"{MEGATRON}.converter_type": family.architecture_class})
        assert (
            keys_named("converter_is_the_model_s", config, dataclasses.replace(FACTS, family=model_type))
            == set()
        )


def test_every_row_of_the_table_fires() -> None:
    views = [View(changed_run(case), facts=facts_of(case)) for cases in CASES.values() for case in cases]
    silent = [
        row
        for row in (*ROWS_OF_MODELS, *ROWS_OF_RUNS)
        if not any(list(apply_rules([row.violations], view)) for view in views)
    ]
    assert not silent


def test_no_rule_is_untested() -> None:
    assert set(BY_NAME) == set(CASES)
    assert len(BY_NAME) == len(RULES) + len(NOT_YET_RULES) + len(VLLM_RULES)


RANGES = {path: key.bounds for path, key in bounded_keys(run_type(None)).items() if key.bounds is not None}


@pytest.mark.parametrize("key", sorted(RANGES))
def test_range_accepts_its_inside_and_refuses_its_outside(key: str) -> None:
    allowed = RANGES[key]
    inside = [
        bound
        for bound, is_open in ((allowed.low, allowed.low_open), (allowed.high, allowed.high_open))
        if bound is not None and not is_open
    ]
    outside = [allowed.low - 1] if allowed.low is not None else []
    outside += [allowed.low] if allowed.low_open and allowed.low is not None else []
    outside += [allowed.high + 1] if allowed.high is not None else []
    outside += [allowed.high] if allowed.high_open and allowed.high is not None else []
    assert outside
    for value in inside:
        assert key not in keys_named("values_in_range", complete(raw_grpo(), {key: value})), value
    for value in outside:
        assert key in keys_named("values_in_range", complete(raw_grpo(), {key: value})), value


def test_rule_on_a_key_is_silent_where_the_feature_is_not_built() -> None:
    facts = dataclasses.replace(FACTS, **MIXTURE, num_key_value_heads=5)
    violations = check(complete(raw_grpo(), {long(path): value for path, value in ON_DTENSOR.items()}), facts)
    assert [violation.bound for violation in violations if violation.key == "policy.model_name"] == [
        "the model is a mixture of 8 experts, which on the dtensor backend is not in this version"
    ]


def test_all_broken_rules_come_at_once() -> None:
    changes = {
        "cluster.gpus_per_node": 5,
        f"{DATA_PARALLEL}.average_in_collective": True,
        "loss_fn.ratio_clip_c": 1.0,
    }
    keys = {violation.key for violation in check(complete(raw_grpo(), changes), FACTS)}
    assert keys == set(changes)


def test_the_fix_of_absent_validation_data_names_every_key() -> None:
    changes = {"data.validation": None, "grpo.val_period": 5, "grpo.val_at_start": True}
    [violation] = check(complete(raw_grpo(), changes), FACTS)
    assert violation.fix == (
        "give data.validation, such as {name: AIME2024}, or write grpo.val_period=0 grpo.val_at_start=false"
    )


def test_a_parameter_with_the_name_of_a_column_is_the_answer(tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("def reward(response, gold):\n    return 0.0\n")
    changes = {"env.reward": f"{reward}:reward", "data.train.answer_key": "gold"}
    [violation] = check(complete(raw_grpo(), changes), FACTS)
    assert violation.fix.startswith("your answer_key gold is the parameter answer; use these names: ")


@sampled(2)
@pytest.mark.parametrize(
    "raw",
    [raw_grpo(), raw_sft(), raw_dpo(), raw_ppo(), raw_distillation()],
    ids=["grpo", "sft", "dpo", "ppo", "distillation"],
)
def test_no_rule_stumbles_over_an_absent_key(raw: dict[str, Any]) -> None:
    full = complete_run(raw)
    for path in _paths(full):
        check(_without(full, path), FACTS)
    check({}, FACTS)


@sampled(2)
@pytest.mark.parametrize("value", ["text", None, [3], -1, 0])
def test_no_rule_stumbles_over_a_faulty_value(value: object) -> None:
    full = complete_run(raw_grpo())
    for path in _paths(full):
        check(_with(full, path, value), FACTS, faulty={".".join(path)})


def test_a_list_with_a_faulty_member_is_left_to_the_type_check() -> None:
    config = complete(raw_grpo(), {"policy.generation.stop_token_ids": [1, "two", 5000]})
    assert check(config, FACTS, faulty={"policy.generation.stop_token_ids.1"}) == []


def test_range_keys_exist_in_the_schema() -> None:
    from megarl.config.schema import known_paths

    assert len(RANGES) > 80 and set(RANGES) <= set(known_paths(run_type(None)))


def _paths(config: dict[str, Any], above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for key, value in config.items():
        found.append((*above, key))
        if isinstance(value, dict):
            found.extend(_paths(value, (*above, key)))
    return found


def _without(config: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    return {
        key: (_without(value, path[1:]) if key == path[0] and len(path) > 1 else value)
        for key, value in config.items()
        if key != path[0] or len(path) > 1
    }


def _with(config: dict[str, Any], path: tuple[str, ...], new: object) -> dict[str, Any]:
    return {
        key: ((_with(value, path[1:], new) if len(path) > 1 else new) if key == path[0] else value)
        for key, value in config.items()
    }
