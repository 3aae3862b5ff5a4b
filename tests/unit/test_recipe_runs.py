"""The recipes on public data run whole on tiny models, with rows of the published form of their sets, around
the plain reference policy."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from megarl.cli import load_and_check
from megarl.config import load_config
from megarl.config.environments import rewards_of
from megarl.config.recipes import find
from megarl.config.validation_sets import set_plans
from megarl.data.datasets import Reading, load_dataset
from megarl.data.records import read_records
from megarl.data.tokenization import get_tokenizer
from megarl.distributed.token_batches import supervised_batch
from megarl.rollout.rewards import RewardSpec, Task, get_reward
from megarl.run.run import run
from tests.small_recipes import ANSWERS, RECIPES, ROWS, STEPS, make_small_model, small
from tests.tiers import sampled
from tests.unit.driver_runs import PolicyMaker, rows

SHIPPED = ("gsm8k.jsonl", "dapo-math-17k.jsonl", "ultrachat-200k.jsonl", "ultrafeedback-binarized.jsonl")
SETS = {"gsm8k.jsonl": "gsm8k", "dapo-math-17k.jsonl": "DAPOMath17K"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    directory = tmp_path_factory.mktemp("models")
    return {family: make_small_model(directory / family, family) for family in ("qwen2", "qwen3_moe")}


def stored(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROWS / name).read_text(encoding="utf-8").splitlines()]


def test_every_recipe_on_public_rows_is_run() -> None:
    """A new recipe on one of these sets has to come here too."""
    public = {"gsm8k", "dapo17k", "messages", "ultrafeedback"}
    shipped = {path.stem for path in ROWS.parent.glob("*.yaml") if path.stem.split("-")[1] in public}
    assert shipped == set(RECIPES)


@sampled(1)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_runs_whole(recipe: str, models: Mapping[str, Path], tmp_path: Path) -> None:
    config = small(recipe, models[RECIPES[recipe][1]], tmp_path)
    assert run(config, PolicyMaker()) == 0
    logged = rows(tmp_path / "run")
    trained = [row for row in logged if "train/loss" in row]
    assert [row["step"] for row in trained] == [1, STEPS] and all(
        row["train/grad_norm"] is not None for row in trained
    )
    if recipe.startswith(("grpo", "ppo")):
        # 10 of the shipped rows, whose answers the environment could be asked about
        answers = ANSWERS if "dapo17k" in recipe else 1
        assert logged[0]["validation/samples"] == 10 * answers and 0 <= logged[0]["validation/accuracy"] <= 1
        assert ("train/reward/short" in trained[0]) == ("dapo17k" in recipe)
    else:
        assert logged[-1]["validation/loss"] > 0
    assert (tmp_path / "run" / "hf" / f"step_{STEPS}" / "config.json").is_file()


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if "dapo17k" in recipe])
def test_aime_is_sampled_and_each_problem_asked_once(recipe: str, tmp_path: Path) -> None:
    """Published are 32 copies of each of the 30 problems, which a greedy policy answers 32 times alike."""
    [plan] = set_plans(load_and_check(str(find(recipe)), []))
    assert (plan.generations, plan.temperature, plan.top_p) == (32, 1.0, 0.7)
    assert plan.max_prompts is None or plan.max_prompts >= 30
    path = tmp_path / "aime.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in 32 * stored("dapo-math-17k.jsonl")[:30]))
    asked = [
        (record.prompt, record.answer)
        for record in read_records({"name": "DAPOMathAIME2024", "path": str(path)})
    ]
    assert len(asked) == len(set(asked)) == min(30, len(stored("dapo-math-17k.jsonl")))
    assert len(list(read_records({"name": "DAPOMathAIME2024", "path": str(path), "max_samples": 7}))) == 7


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if "dapo17k" in recipe])
def test_the_reward_of_dapo_is_that_of_its_paper_but_for_a_constant(recipe: str) -> None:
    """Equations 7 and 13 of arXiv 2503.14476: 1 or -1, and a penalty down to -1; advantages within a group
    know of no constant."""
    config = load_and_check(str(find(recipe)), [])
    longest, cache = config["policy"]["generation"]["max_new_tokens"], 512
    rewards = [
        (section, get_reward(RewardSpec.of_section(section)))
        for section in rewards_of(config["env"]).values()
    ]
    beyond = set()
    for answer, length in itertools.product(
        ("34", "35"), (1, longest - cache, longest - 300, longest, longest + 1)
    ):
        penalty = (
            0.0
            if length <= longest - cache
            else -1.0
            if length > longest
            else (longest - cache - length) / cache
        )
        task = Task(f"Answer: {answer}", "34", length)
        given = sum(section.get("weight", 1) * reward.judge(task) for section, reward in rewards)
        beyond.add(round(given - penalty - (1.0 if answer == "34" else -1.0), 12))
    assert len(beyond) == 1


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_rows_are_some_dozens(name: str) -> None:
    assert len(stored(name)) >= 24


@pytest.mark.parametrize("name", SETS)
def test_rows_and_their_parquet_form_are_the_same_records(name: str, tmp_path: Path) -> None:
    """The sets are published as parquet."""
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(stored(name)), path)
    sources: list[Any] = [{"name": SETS[name], "path": str(each)} for each in (path, ROWS / name)]
    first, second = (
        [(record.prompt, record.answer) for record in read_records(source)] for source in sources
    )
    assert first == second and all(answer.lstrip("-").isdecimal() for _, answer in first)


def test_the_solutions_of_word_problems_compute_their_answers() -> None:
    """``<<48/2=24>>`` says what a step computes, and the last line has the answer of the last step."""
    for row in stored("gsm8k.jsonl"):
        *steps, last = row["answer"].split("\n")
        results = []
        for step in steps:
            said, result = step.split("<<")[1].split(">>")[0].split("=")
            assert eval(said, {"__builtins__": {}}) == float(result), row
            results.append(result)
        assert last == f"#### {int(results[-1]):,}"


def test_thinking_is_on_or_off_in_the_prompt(models: Mapping[str, Path]) -> None:
    for recipe, ends_thinking in (("thinking", False), ("without-thinking", True)):
        policy = load_config(find(f"grpo-dapo17k-qwen3-30b-a3b-{recipe}-2x8gpu-megatron"))["policy"]
        values = policy["tokenizer"]["chat_template_kwargs"]
        tokenizer = get_tokenizer({"name": str(models["qwen3_moe"])})
        source: Any = {"name": "DAPOMath17K", "path": str(ROWS / "dapo-math-17k.jsonl")}
        config: Any = {"train": source, "max_input_seq_length": 999}
        examples = load_dataset(source, Reading(config, tokenizer, False, template_kwargs=values)).examples
        prompts = [tokenizer.decode(example.prompt_ids) for example in examples]
        assert all(
            prompt.endswith("<think></think>") == ends_thinking and "Answer:" in prompt for prompt in prompts
        )


def test_of_a_pair_the_last_turns_are_learned_and_nothing_else(models: Mapping[str, Path]) -> None:
    tokenizer = get_tokenizer({"name": str(models["qwen2"])})
    source: Any = {
        "path": str(ROWS / "ultrafeedback-binarized.jsonl"),
        "chosen_key": "chosen",
        "rejected_key": "rejected",
    }
    config: Any = {"train": source, "max_input_seq_length": 999}
    data = load_dataset(source, Reading(config, tokenizer, True, pairs=True))
    batch = supervised_batch(list(data.examples), tokenizer.pad_token_id)
    answers = [
        row[key][-1]["content"]
        for row in stored("ultrafeedback-binarized.jsonl")
        for key in ("chosen", "rejected")
    ]
    for ids, mask, answer in zip(batch["input_ids"], batch["token_mask"], answers, strict=True):
        assert tokenizer.decode(ids[mask > 0]) == f"{answer}{tokenizer.eos_token}"


def test_every_turn_of_the_assistant_is_learned_and_nothing_else(models: Mapping[str, Path]) -> None:
    tokenizer = get_tokenizer({"name": str(models["qwen2"])})
    source: Any = {"path": str(ROWS / "ultrachat-200k.jsonl"), "messages_key": "messages"}
    config: Any = {"train": source, "max_input_seq_length": 999}
    examples = list(load_dataset(source, Reading(config, tokenizer, True)).examples)
    batch = supervised_batch(examples, tokenizer.pad_token_id)
    for ids, mask, row in zip(
        batch["input_ids"], batch["token_mask"], stored("ultrachat-200k.jsonl"), strict=True
    ):
        said = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        assert tokenizer.decode(ids[mask > 0]) == "".join(
            f"{content}{tokenizer.eos_token}" for content in said
        )
