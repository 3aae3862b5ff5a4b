"""Figures of validation sets against brute force, and whole runs with several sets whose figures ``megarl
eval`` finds again."""

from __future__ import annotations

import itertools
import json
import math
import random
import shutil
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from fractions import Fraction
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from megarl.checkpoint.manager import CheckpointManager
from megarl.cli import main
from megarl.config import validate_config
from megarl.config.validation_sets import SetPlan, set_plans
from megarl.data.datasets import Example
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.errors import ConfigError, UnusableCheckpointError
from megarl.rollout.collector import Rollouts
from megarl.rollout.environments import final_answers, make_environment
from megarl.rollout.evaluation import (
    ValidatedSet,
    estimates_of,
    half_interval,
    majority,
    metrics_of_set,
    pass_at,
    validation_metrics,
)
from megarl.rollout.samples import validation_seeds
from megarl.run import evaluate as evaluation_command
from megarl.run.evaluate import evaluate, result_of, weights_to_evaluate
from megarl.run.inputs import read_validation
from megarl.run.resume import CheckpointWriter
from megarl.run.run import run
from tests.tables import read_table
from tests.tiers import sampled
from tests.unit.driver_runs import PolicyMaker, make_config, rows
from tests.unit.reference_policy import ReferencePolicy

TABLES = read_table("evaluation.yaml")

TAUGHT = 70


def pass_by_subsets(k: int, answers: Sequence[bool]) -> Fraction:
    """The share of all k answers out of these among which one is right."""
    subsets = list(itertools.combinations(answers, k))
    return Fraction(sum(any(subset) for subset in subsets), len(subsets))


def test_pass_at_k_is_that_of_all_subsets() -> None:
    for answered in range(1, 10):
        for right in range(answered + 1):
            for k in range(1, answered + 1):
                expected = pass_by_subsets(k, [place < right for place in range(answered)])
                assert pass_at(k, answered, right) == pytest.approx(float(expected), rel=1e-14, abs=1e-15), (
                    k,
                    answered,
                    right,
                )


def test_pass_at_k_of_many_answers_is_stable() -> None:
    """The binomial coefficients here have thousands of digits."""
    for k, answered, right in ((100, 20_000, 3), (9_000, 10_000, 1), (1, 10_000, 9_999), (5_000, 10_000, 2)):
        exact = 1 - Fraction(math.comb(answered - right, k), math.comb(answered, k))
        assert pass_at(k, answered, right) == pytest.approx(float(exact), rel=1e-11)


@pytest.mark.parametrize("k", [0, 5])
def test_pass_at_more_than_there_are_answers_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=f"k = {k}: must be at least 1 and at most the 4 responses"):
        pass_at(k, 4, 2)


def majority_by_draws(answers: Sequence[str | None], right: Sequence[bool]) -> Fraction:
    """In slow words: of every answer with the most votes, the share of its responses that are right; the mean
    over such answers."""
    votes = {answer: answers.count(answer) for answer in answers if answer is not None}
    if not votes:
        return Fraction(0)
    winners = [answer for answer, count in votes.items() if count == max(votes.values())]
    shares = [
        Fraction(sum(ok for each, ok in zip(answers, right, strict=True) if each == winner), votes[winner])
        for winner in winners
    ]
    return sum(shares, Fraction(0)) / len(shares)


@pytest.mark.parametrize(
    ("answers", "right", "expected"),
    TABLES["the majority and its ties"],
)
def test_the_majority_and_its_ties(answers: list[str | None], right: list[bool], expected: float) -> None:
    assert majority(answers, right) == pytest.approx(expected)


def drawn_accuracies(
    generator: random.Random, prompts: int, k: int, unscored: float
) -> tuple[list[float], list[str | None]]:
    accuracies, answers = [], []
    for _ in range(prompts):
        for _ in range(k):
            accuracies.append(
                nan if generator.random() < unscored else generator.choice([0.0, 0.0, 1.0, 0.5])
            )
            answers.append(generator.choice(["a", "b", "c", None]))
    return accuracies, answers


@pytest.mark.parametrize("seed", range(20))
def test_figures_of_a_set_are_those_of_a_slow_loop(seed: int) -> None:
    generator = random.Random(seed)
    prompts, k = generator.randint(1, 9), generator.choice([1, 2, 3, 6, 8])
    accuracies, answers = drawn_accuracies(generator, prompts, k, generator.choice([0.0, 0.1, 0.4]))
    means, passes, votes = [], {}, []
    for prompt in range(prompts):
        of_prompt = [(accuracies[prompt * k + sample], answers[prompt * k + sample]) for sample in range(k)]
        kept = [(accuracy, answer) for accuracy, answer in of_prompt if accuracy == accuracy]
        if not kept:
            continue
        means.append(sum(accuracy for accuracy, _ in kept) / len(kept))
        if len(kept) < k:
            continue
        right = [accuracy == 1.0 for accuracy, _ in kept]
        for j in (2, 4, 8, 3, 6):
            if j <= k:
                passes.setdefault(j, []).append(float(pass_by_subsets(j, right)))
        votes.append(float(majority_by_draws([answer for _, answer in kept], right)))
    expected = {f"mean@{k}": sum(means) / len(means)} if means else {}
    if len(means) > 1:
        spread = sum((mean - expected[f"mean@{k}"]) ** 2 for mean in means) / (len(means) - 1)
        expected[f"mean@{k}_ci95"] = 1.959963984540054 * math.sqrt(spread / len(means))
    if k > 1 and means:
        expected[f"pass@{k}_prompts"] = len(votes)
    if k > 1 and votes:
        shown = {2: [2], 3: [2, 3], 6: [2, 4, 6], 8: [2, 4, 8]}[k]
        expected |= {f"pass@{j}": sum(passes[j]) / len(passes[j]) for j in shown if j in passes}
        expected[f"majority@{k}"] = sum(votes) / len(votes)
    assert estimates_of(accuracies, k, answers) == pytest.approx(expected, abs=1e-12), f"seed {seed}"
    without = {name: value for name, value in expected.items() if "majority" not in name}
    assert estimates_of(accuracies, k) == pytest.approx(without, abs=1e-12), f"seed {seed}"


def test_the_interval_is_over_prompts_not_over_answers() -> None:
    """Eight answers to a prompt that are all alike say no more than one."""
    once, eight = [1.0, 0.0, 1.0, 1.0], [value for value in (1.0, 0.0, 1.0, 1.0) for _ in range(8)]
    assert estimates_of(eight, 8)["mean@8_ci95"] == estimates_of(once, 1)["mean@1_ci95"] > 0.4
    assert half_interval([0.5, 0.5]) == 0.0


def test_a_set_of_one_prompt_has_no_interval_and_one_answer_no_estimates() -> None:
    assert estimates_of([1.0, 0.0, 0.0, 1.0], 4, ["a", "b", "c", "a"]) == {
        "mean@4": 0.5,
        "pass@2": pytest.approx(5 / 6),
        "pass@4": 1.0,
        "pass@4_prompts": 1,
        "majority@4": 1.0,
    }
    assert estimates_of([1.0], 1, ["a"]) == {"mean@1": 1.0}
    assert estimates_of([nan, nan], 2, ["a", "b"]) == {}


def test_a_random_number_of_a_validation_depends_on_set_prompt_and_answer_alone() -> None:
    small, large = validation_seeds("few", 2, 3), validation_seeds("few", 5, 3)
    assert small == large[:6] and len(set(large)) == 15
    assert not set(large) & set(validation_seeds("many", 5, 3))
    assert all(0 <= seed < 2**63 for seed in large)


# final answers


@pytest.mark.parametrize(
    ("reward", "response", "answer"),
    [
        ("exact_match", " 4 ", "4"),
        ("math", r"so \boxed{\frac{1}{2}}", r"\frac12"),
        ("math", r"first \boxed{3}, then \boxed{ 4 }", "4"),
        ("math", "it is 1,234.50", "1234.5"),
        ("math", "nothing", None),
        ("gsm8k", "#### 72", "72"),
        ("gsm8k", "#### 072.0", "72"),
        ("gsm8k", "#### -0", "0"),
        ("gsm8k", "72", None),
        ("gsm8k", "#### 3/4", None),
        ("gsm8k", f"#### 1{'0' * 60}1", f"1{'0' * 60}1"),
        ("multichoice", "Answer: (B)", "B"),
        ("multichoice", "no idea", None),
    ],
)
def test_a_final_answer_is_what_the_reward_compares(
    reward: str, response: str, answer: str | None, tmp_path: Path
) -> None:
    assert _answers_of({"reward": reward}, response) == [answer]


def _answers_of(env: dict[str, Any], *responses: str) -> list[str | None] | None:
    environment = make_environment(
        {
            "environment": "single_turn",
            "on_error": "mask",
            "on_timeout": "zero",
            "processes": 1,
            "timeout_s": 5.0,
            **env,
        }
    )
    try:
        return final_answers(environment, [Example(0, (), (), "")] * len(responses), responses)
    finally:
        environment.close()


def test_dapo_answers_are_simplified() -> None:
    section = {"reward": "math", "math_verify_impl": "dapo_math_verify"}
    assert _answers_of(section, "Answer: $12$", "answer: 12 cm", r"\boxed{12}") == ["12", "12", None]


def test_a_user_s_function_may_tell_the_final_answer(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    functions = "def silent(response, answer): return 1.0\ndef telling(response, answer): return 1.0\n"
    file.write_text(functions + "telling.final_answer = lambda response: len(response) or None\n")
    assert _answers_of({"reward": f"{file}:silent"}, "a") is None
    assert _answers_of({"reward": f"{file}:telling"}, "abc", "") == ["3", None]
    several = {"rewards": {"form": {"reward": "format"}, "mine": {"reward": f"{file}:telling"}}}
    assert _answers_of(several, "ab") == ["2"]
    failing = tmp_path / "failing.py"
    failing.write_text(functions + "telling.final_answer = lambda response: 1 / len(response)\n")
    assert _answers_of({"reward": f"{failing}:telling"}, "ab", "") == ["0.5", None]


# figures of made-up samples


def validated(
    name: str, k: int, accuracies: list[float], answers: list[str | None] | None = None, **columns: Any
) -> ValidatedSet:
    rows = len(accuracies)
    samples: BatchedDataDict[Any] = BatchedDataDict(
        {
            "reward": torch.tensor(accuracies),
            "masked": torch.zeros(rows, dtype=torch.bool),
            "generation_lengths": torch.arange(1, rows + 1),
            "truncated": torch.arange(rows) % 4 == 0,
            **columns,
        }
    )
    return ValidatedSet(SetPlan(name, (0,), k), [Rollouts(samples, [], {"reward_errors": 1})], answers)


def test_one_set_of_one_answer_has_the_names_and_values_that_it_always_had() -> None:
    values, masked = [1.0, 0.0, 0.1, 1.0, 0.3], torch.tensor([False, False, False, True, False])
    found = validation_metrics([validated("only", 1, values, masked=masked)])
    assert found == {
        "accuracy": float(torch.tensor([1.0, 0.0, 0.1, 0.3]).mean()),
        "samples": 5,
        "scored": 0.8,
        "generation_length": 3.0,
        "truncated": 0.4,
        "reward_errors": 1,
    }
    assert list(found) == ["accuracy", "samples", "scored", "generation_length", "truncated", "reward_errors"]


def test_several_sets_have_figures_of_their_own_and_a_mean_over_sets() -> None:
    few, many = validated("few", 2, [1.0, 0.0], ["a", "b"]), validated("many", 1, [0.0, 0.0, 1.0, 0.0])
    found = validation_metrics([few, many])
    assert found["accuracy"] == statistics.fmean([0.5, 0.25]), "not 2 of 6"
    assert (found["samples"], found["generation_length"], found["truncated"]) == (6, 13 / 6, 2 / 6)
    assert found["reward_errors"] == 2
    for one in (few, many):
        for name, value in metrics_of_set(one).items():
            assert found[f"{one.plan.name}/{name}"] == value
    assert {
        "few/mean@2",
        "few/pass@2",
        "few/pass@2_prompts",
        "few/majority@2",
        "many/mean@1",
        "many/mean@1_ci95",
    } <= found.keys()
    assert not {"few/mean@2_ci95", "many/pass@1", "many/majority@1"} & found.keys()


def test_an_answer_that_could_not_be_scored_is_in_no_figure() -> None:
    masked = torch.tensor([False, True, False, True])
    found = metrics_of_set(validated("set", 2, [1.0, 0.0, 0.0, 1.0], ["a", "b", "c", "d"], masked=masked))
    assert (found["accuracy"], found["mean@2"], found["pass@2_prompts"]) == (0.5, 0.5, 0)
    assert not {"pass@2", "majority@2"} & found.keys(), "no prompt has two scored answers"
    assert found["samples"] == 4 and found["truncated"] == 0.25 and found["scored"] == 0.5


def test_all_of_pass_at_j_is_over_the_same_prompts() -> None:
    """A prompt that is never right and lost one of its answers would be in pass@2 alone, which then were
    smaller than pass@4."""
    accuracies = [1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, nan]
    assert estimates_of(accuracies, 4, ["a"] * 8) == {
        "mean@4": 0.5,
        "mean@4_ci95": pytest.approx(0.98, abs=1e-4),
        "pass@4_prompts": 1,
        "pass@2": 1.0,
        "pass@4": 1.0,
        "majority@4": 1.0,
    }


def test_a_set_of_which_nothing_could_be_scored_has_no_figure() -> None:
    """A scorer that is down is no accuracy of 0, neither of its set nor in the mean over sets."""
    lost = validated("lost", 2, [0.0, 0.0], ["a", "b"], masked=torch.tensor([True, True]))
    for figures in (metrics_of_set(lost), validation_metrics([lost])):
        assert figures == {
            "samples": 2,
            "scored": 0.0,
            "generation_length": 1.5,
            "truncated": 0.5,
            "reward_errors": 1,
        }
    found = validation_metrics([lost, validated("kept", 1, [1.0, 0.0])])
    assert "accuracy" not in found, "the mean over the other sets is another figure"
    assert (found["kept/accuracy"], found["kept/scored"], found["lost/scored"], found["scored"]) == (
        0.5,
        1.0,
        0.0,
        0.5,
    )


# configuration


def several_sets(tmp_path: Path, model: str, data: str, **grpo: Any) -> dict[str, Any]:
    """A GRPO run with two validation sets: seven sums at mean@4, and three of them answered once."""
    config = make_config("grpo", tmp_path, model, data, **grpo)
    source = config["data"]["train"]
    few = {
        **source,
        "val_set": "few",
        "max_samples": 3,
        "val_num_generations_per_prompt": 1,
        "val_temperature": 0.0,
    }
    config["data"]["validation"] = [{**source, "val_temperature": 0.8}, few]
    config["grpo"] |= {"val_num_generations_per_prompt": 4, "val_batch_size": None}
    return config


def test_keys_of_a_set_go_before_those_of_all(tmp_path: Path, model: str, data: str) -> None:
    config = several_sets(tmp_path, model, data, max_val_samples=5)
    config["policy"]["generation"] |= {"val_top_p": 0.9, "val_top_k": 7}
    config["data"]["validation"][1] |= {"val_top_k": None}
    sums, few = set_plans(validate_config(config))
    assert sums == SetPlan("sums", (0,), 4, 0.8, 0.9, 7, 5) and sums.sampling == {
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 7,
    }
    assert few == SetPlan("few", (1,), 1, 0.0, 0.9, None, 5) and few.sampling is None
    config["data"]["validation"][0]["val_set"] = "few"
    config["data"]["validation"][1] |= {"val_num_generations_per_prompt": 4, "val_temperature": 0.8}
    for key in ("val_num_generations_per_prompt", "val_top_k"):
        for source in config["data"]["validation"]:
            source.pop(key, None)
    assert [plan.places for plan in set_plans(validate_config(config))] == [(0, 1)]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ({"name": "HuggingFaceH4/MATH-500"}, "MATH-500"),
        ({"name": "AIME2024", "path": "elsewhere.parquet"}, "AIME2024"),
        ({"path": "data/my set.v2.jsonl"}, "my_set_v2"),
        ({"path": "data/2024.jsonl"}, "set_2024"),
        ({"path": "data/2024.jsonl", "val_set": "aime"}, "aime"),
    ],
)
def test_a_set_without_a_name_has_one(source: dict[str, str], name: str) -> None:
    from megarl.config.validation_sets import set_name

    assert set_name(source) == name


# whole runs


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory, model: str, data: str) -> str:
    """A model that is right now and then."""
    run_dir = tmp_path_factory.mktemp("taught")
    config = make_config("sft", run_dir, model, data, max_num_steps=TAUGHT, val_period=0)
    config["checkpointing"]["enabled"] = False
    run(config, PolicyMaker())
    return str(run_dir / "hf" / f"step_{TAUGHT}")


def of_validation(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name.startswith("validation/")}


def test_a_checkpoint_evaluated_alone_has_the_figures_of_its_step(
    tmp_path: Path, taught: str, data: str
) -> None:
    config = several_sets(tmp_path, taught, data, max_num_steps=2)
    config["checkpointing"] |= {"metric_name": "validation/sums/mean@4", "keep_top_k": 1}
    maker = PolicyMaker()
    assert run(config, maker) == 0
    first, _, last = rows(tmp_path)
    assert 0 < first["validation/sums/mean@4"] < 1 and of_validation(first) != of_validation(last)
    # each set in one call
    calls = [call for call in maker.policies[0].generations if call[2] is not None or call[1]]
    sampling = {"temperature": 0.8, "top_p": 1.0, "top_k": None}
    assert calls == [(28, False, sampling, validation_seeds("sums", 7, 4)), (3, True, None, [])] * 2
    checkpoint = tmp_path / "checkpoints" / "step_2"
    info = json.loads((checkpoint / "training_info.json").read_text())["metrics"]
    assert info["val_sums/mean@4"] == info["validation/sums/mean@4"] == last["validation/sums/mean@4"]
    checked = validate_config(config)
    for weights, row in ((weights_to_evaluate(checkpoint), last), (weights_to_evaluate(None), first)):
        result = result_of(evaluate(checked, weights, PolicyMaker()), checked, weights)
        assert result["metrics"] == of_validation(row)
        assert result["step"] == (2 if row is last else None)
        assert {name: found["samples"] for name, found in result["sets"].items()} == {"sums": 28, "few": 3}
        assert result["sets"]["sums"]["mean@4_ci95"] == row["validation/sums/mean@4_ci95"]
    # neither the order of the sets, nor the seed of the run, nor how many prompts go together changes an
    # answer
    config["data"]["validation"].reverse()
    config |= {"seed": 12}
    config["grpo"]["val_batch_size"] = 2
    checked = validate_config(config)
    weights = weights_to_evaluate(checkpoint)
    assert result_of(evaluate(checked, weights, PolicyMaker()), checked, weights)["metrics"] == of_validation(
        last
    )


def test_a_metric_of_no_set_ranks_no_checkpoint(tmp_path: Path, taught: str, data: str) -> None:
    config = several_sets(tmp_path, taught, data)
    config["checkpointing"]["metric_name"] = "validation/sums/mean@8"
    with pytest.raises(
        ConfigError,
        match=r"'validation/sums/mean@8': this run has no such metric\. Fix: write validation/sums/mean@4",
    ):
        run(config, PolicyMaker())


LOSES_ANSWERS = """
from megarl.rollout.environment import EnvironmentReturn

class Judge:
    def __init__(self, section): self.lost, self.validations = section["options"]["lost"], 0

    def step(self, turn):
        count = len(turn.responses)
        # a step has 12 responses, a validation 6, 6 and 2
        masked = [count != 12 and self.validations in self.lost and place % 2 == 0 for place in range(count)]
        self.validations += count == 2
        return EnvironmentReturn([float(len(text) % 2) for text in turn.responses], [True] * count, masked)

    def fault_of_reference(self, answer): return None

    def close(self): pass
"""


@sampled(1)
@pytest.mark.parametrize(("lost", "best"), [([1], 4), ([2], 2), ([0, 1], 4), ([0, 1, 2], 4)])
def test_a_figure_that_a_validation_has_not_ends_no_run(
    lost: list[int], best: int, tmp_path: Path, model: str, data: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One answer of each prompt cannot be scored, so that there is no pass@2: of that step, of the first
    ones, of all."""
    config = make_config("grpo", tmp_path, model, data, val_num_generations_per_prompt=2)
    (tmp_path / "judge.py").write_text(LOSES_ANSWERS)
    config["env"] = {"environment": f"{tmp_path / 'judge.py'}:Judge", "options": {"lost": lost}}
    config["policy"]["generation"]["val_temperature"] = 1.0
    config["checkpointing"] |= {"metric_name": "val_pass@2", "export_hf": False}
    assert run(config, PolicyMaker()) == 0
    logged = rows(tmp_path)
    assert [place for place, row in enumerate(logged[::2]) if "validation/pass@2" not in row] == lost
    assert [logged[2 * place]["validation/scored"] for place in lost] == [0.5] * len(lost)
    manager = CheckpointManager({**config["checkpointing"], "checkpoint_dir": tmp_path / "checkpoints"})
    assert manager.get_best_checkpoint_path() == tmp_path / "checkpoints" / f"step_{best}"
    assert caplog.text.count("checkpointing.metric_name = val_pass@2 is not among the metrics") == 1


def test_a_metric_that_an_earlier_launch_had_may_be_absent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager({"checkpoint_dir": tmp_path, "metric_name": "train/of_mine", "keep_top_k": 1})
    writer = CheckpointWriter(manager, {}, 1)
    with pytest.raises(ConfigError, match="this run has no such metric"):
        writer.require_metric({"train/loss": 1.0})
    for step, metrics in enumerate(({"train/of_mine": 0.5}, {"train/loss": 1.0}, {"train/loss": 1.0}), 1):
        later = CheckpointWriter(manager, {}, 1)
        later.require_metric(metrics)
        with later.saving(step, {}, metrics):
            pass
    assert manager.get_best_checkpoint_path() == tmp_path / "step_1"
    assert caplog.text.count("have no metric 'train/of_mine'") == 1


def test_a_validation_of_one_set_is_cut_to_its_first_prompts(tmp_path: Path, taught: str, data: str) -> None:
    config = make_config("grpo", tmp_path, taught, data, max_num_steps=1, val_period=0, max_val_samples=5)
    maker = PolicyMaker()
    run(config, maker)
    [row, _] = rows(tmp_path)
    assert list(of_validation(row)) == [
        f"validation/{name}"
        for name in ("accuracy", "samples", "scored", "generation_length", "truncated", *FAULTS)
    ]
    assert row["validation/samples"] == 5
    # val_batch_size = 3
    assert [call for call in maker.policies[0].generations if call[1]] == [
        (3, True, None, []),
        (2, True, None, []),
    ]


FAULTS = ("reward_errors", "reward_timeouts")


def test_what_is_no_checkpoint_is_refused(tmp_path: Path, taught: str, data: str) -> None:
    run(
        make_config("grpo", tmp_path, taught, data, max_num_steps=2, val_period=0, val_at_start=False),
        PolicyMaker(),
    )
    step = tmp_path / "checkpoints" / "step_2"
    with pytest.raises(ConfigError, match=rf"no training_info\.json with a step\. Fix: give one of {step}"):
        weights_to_evaluate(tmp_path)
    with pytest.raises(ConfigError, match="Fix: give the directory step_N"):
        weights_to_evaluate(tmp_path / "nothing")
    next(
        path for path in (step / "policy" / "weights").iterdir() if path.suffix == ".safetensors"
    ).write_bytes(b"")
    with pytest.raises(UnusableCheckpointError, match="step_2 is damaged"):
        weights_to_evaluate(step)


def written(config: dict[str, Any], path: Path) -> str:
    path.write_text(json.dumps(config))  # JSON is YAML
    return str(path)


def test_the_command_prints_a_table_and_writes_json(
    tmp_path: Path,
    taught: str,
    model: str,
    data: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[ReferencePolicy] = []

    def without_workers(config: Any, weights: Any) -> Any:
        maker = PolicyMaker()
        found = evaluate(config, weights, maker)
        made.extend(maker.policies)
        return found

    monkeypatch.setattr(evaluation_command, "evaluate", without_workers)
    file = written(several_sets(tmp_path / "run", model, data), tmp_path / "run.yaml")
    assert main(["eval", file, "--dry-run", "--model", taught]) == 0
    said = capsys.readouterr().out
    assert (
        "sums" in said
        and "temperature 0.8, top-p 1" in said
        and "greedy" in said
        and f"model: {taught}" in said
    )
    assert not made and not (tmp_path / "run").exists()
    assert main(["eval", file, "--model", taught, "grpo.val_num_generations_per_prompt=2"]) == 0
    said = capsys.readouterr().out
    path = tmp_path / "run" / "evaluations" / f"step_{TAUGHT}.json"
    assert f"written to {path}" in said
    result = json.loads(path.read_text())
    assert result["model"] == taught and result["checkpoint"] is None
    assert f"{result['sets']['sums']['mean@2']:.4f}" in said and "majority@k" in said
    assert main(["eval", file, "--json", str(tmp_path / "there.json")]) == 0
    assert json.loads((tmp_path / "there.json").read_text())["model"] == model
    assert not list((tmp_path / "run").glob("checkpoints")), "nothing but the result is left"
    made.clear()
    assert main(["eval", file, "--json", str(tmp_path)]) == 2
    assert f"--json = '{tmp_path}': it is a directory" in capsys.readouterr().err
    assert not made, "it is refused before anything is evaluated"
    words = ["policy.generation.temperature=0.7", "grpo.num_generations_per_prompt=3"]
    assert main(["eval", file, "--dry-run", *words]) == 0
    said = capsys.readouterr().err
    for key in ("policy.generation.val_temperature", "grpo.val_num_generations_per_prompt"):
        assert f"an evaluation does not read it: write {key}" in said


def test_a_model_is_not_evaluated_with_the_tokens_of_another(
    tmp_path: Path, model: str, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same function, whose token ids are others: a run's configuration names the first tokenizer."""
    other = Path(shutil.copytree(model, tmp_path / "other"))
    known = json.loads((other / "tokenizer.json").read_text())
    vocabulary = known["model"]["vocab"]
    one, two = (next(token for token, index in vocabulary.items() if index == place) for place in (7, 8))
    vocabulary[one], vocabulary[two] = 8, 7
    (other / "tokenizer.json").write_text(json.dumps(known))
    config = several_sets(tmp_path / "run", model, data)
    config["policy"]["tokenizer"] = {**config["policy"].get("tokenizer", {}), "name": model}
    file = written(config, tmp_path / "run.yaml")
    assert main(["eval", file, "--model", str(other)]) == 2
    said = capsys.readouterr().err
    assert "2 of its" in said and f"other tokens: first {one!r} = 7, there 8" in said
    assert f"policy.tokenizer.name={other}" in said
    # A run may have taught a checkpoint these tokens, so that training only warns.
    checked = validate_config({**config, "policy": {**config["policy"], "model_name": str(other)}})
    with ExitStack() as stack:
        read_validation(checked, stack, of_checkpoint=True)
    (other / "tokenizer.json").write_text('{"model": {"type": "a newer one"}}')
    with ExitStack() as stack:
        read_validation(checked, stack)


def test_an_adapter_is_part_of_the_model(
    tmp_path: Path,
    taught: str,
    data: str,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whatever adapters the configuration would train; what does not fit is refused before anything
    starts."""
    adapter = tmp_path / "adapter"
    get_peft_model(
        AutoModelForCausalLM.from_pretrained(taught), LoraConfig(r=2, target_modules="all-linear")
    ).save_pretrained(adapter)
    config = several_sets(tmp_path / "run", taught, data)
    config["policy"]["peft"] = {"enabled": True}
    file = written(config, tmp_path / "run.yaml")
    with caplog.at_level("INFO"):
        assert main(["eval", file, "--dry-run", "--adapter", str(adapter)]) == 0
    said = capsys.readouterr().out
    assert (
        f"adapter: {adapter}" in said
        and "evaluations/adapter.json" in said
        and f"it was trained on the base model {taught}" in caplog.text
    )
    # there are neither gradients nor states of an optimizer, for which there would be no room
    small = ["cluster.device=cuda", "cluster.device_memory_gib=0.0001"]
    assert main(["eval", file, "--dry-run", "--adapter", str(adapter), *small]) == 0
    with pytest.raises(SystemExit):
        main(["eval", file, "--dry-run", "--adapter", str(adapter), "--checkpoint", "some/step_2"])
    capsys.readouterr()
    assert main(["eval", file, "--dry-run", "--adapter", taught]) == 2
    assert "has no adapter_model.safetensors" in capsys.readouterr().err
    said_by_peft = json.loads((adapter / "adapter_config.json").read_text())
    for change, message in (
        ({"use_dora": True}, "use_dora = true"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"r": 3}, "rank 3"),
    ):
        (adapter / "adapter_config.json").write_text(json.dumps({**said_by_peft, **change}))
        assert main(["eval", file, "--dry-run", "--adapter", str(adapter)]) == 2
        assert message in capsys.readouterr().err


def test_a_result_replaces_none_of_other_weights(tmp_path: Path, taught: str, model: str, data: str) -> None:
    """Two models of one name, another checkpoint of that step, other sampling, a file that is none: each has
    its own, found again."""
    run(
        make_config(
            "grpo", tmp_path / "other", model, data, max_num_steps=2, val_period=0, val_at_start=False
        ),
        PolicyMaker(),
    )
    steps = [tmp_path / name / "checkpoints" / "step_2" for name in ("other", "moved")]
    shutil.copytree(steps[0], steps[1])
    twin = shutil.copytree(taught, tmp_path / "twin" / Path(taught).name)
    config = several_sets(tmp_path / "run", taught, data, max_val_samples=2)
    fewer = several_sets(tmp_path / "run", taught, data, max_val_samples=1)
    cases = [
        (config, None),
        (several_sets(tmp_path / "run", str(twin), data, max_val_samples=2), None),
        (fewer, None),
    ]
    cases += [(config, checkpoint) for checkpoint in steps]
    names = [f"step_{TAUGHT}", f"step_{TAUGHT}-2", f"step_{TAUGHT}-3", "step_2", "step_2-3"]
    directory = tmp_path / "run" / "evaluations"
    directory.mkdir(parents=True)
    (directory / "step_2-2.json").write_text("notes")
    for _ in range(2):
        for (case, checkpoint), name in zip(cases, names, strict=True):
            checked, weights = validate_config(case), weights_to_evaluate(checkpoint)
            path = evaluation_command.result_path(checked, weights)
            assert path == directory / f"{name}.json"
            path.write_text(
                json.dumps(result_of(evaluate(checked, weights, PolicyMaker()), checked, weights))
            )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda config: config["data"].pop("validation"),
            "data.validation = None: there is nothing to evaluate on",
        ),
        (
            lambda config: config["data"]["validation"][0].update(val_temperature=0),
            "greedy responses to a prompt are all the same",
        ),
    ],
)
def test_an_evaluation_that_says_nothing_is_refused(
    change: Callable[[Any], Any],
    said: str,
    tmp_path: Path,
    model: str,
    data: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = several_sets(tmp_path, model, data, val_period=0, val_at_start=False)
    change(config)
    assert main(["eval", written(config, tmp_path / "run.yaml"), "--dry-run"]) == 2
    assert said in capsys.readouterr().err


def test_supervised_training_has_nothing_to_evaluate_by(
    tmp_path: Path, model: str, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["eval", written(make_config("sft", tmp_path, model, data), tmp_path / "run.yaml"), "--dry-run"])
        == 2
    )
    assert "algorithm = 'sft': megarl eval samples responses and scores them" in capsys.readouterr().err
