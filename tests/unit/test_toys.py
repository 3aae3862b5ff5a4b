"""A new algorithm, environment and reward, each in one file of tests/toys, in whole runs around the reference
policy."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.config.memory_run import checkpoints_kept
from megarl.config.resume_changes import changed_keys
from megarl.config.validate import validate_config
from megarl.data.datasets import Example
from megarl.data.tokenization import get_tokenizer
from megarl.errors import BatchError, ConfigError, DataError
from megarl.import_path import forget_objects, load_object
from megarl.models.generation import configure_generation_config
from megarl.observe.sample_files import DIRECTORY, TRAIN, list_samples, read_samples
from megarl.observe.timing import PhaseTimer
from megarl.rollout.collector import Collector, add_metrics
from megarl.rollout.environment import EnvironmentReturn, Turn
from megarl.rollout.samples import sampling_seeds
from megarl.run.run import run
from tests.unit.driver_runs import PolicyMaker, comparable, final_weights, make_config, rows
from tests.unit.reference_policy import ReferencePolicy

TOYS = Path(__file__).parents[1] / "toys"


def reinforce(run_dir: Path, model: str, data: str) -> dict[str, Any]:
    """A run of the toy algorithm in the toy environment."""
    config = make_config("grpo", run_dir, model, data)
    del config["grpo"], config["loss_fn"]
    config |= {"algorithm": f"{TOYS}/reinforce.py:Reinforce", "reinforce": {"prompts": 6, "max_num_steps": 4}}
    return config | {"env": {"environment": f"{TOYS}/as_long.py:AsLong", "options": {"farthest": 7}}}


def test_an_algorithm_and_an_environment_of_ones_own(tmp_path: Path, model: str, data: str) -> None:
    assert run(reinforce(tmp_path / "a", model, data), PolicyMaker()) == 0
    logged = rows(tmp_path / "a")
    assert [row["step"] for row in logged] == [1, 2, 3, 4]
    expected = {
        "train/reward",
        "train/empty",
        "train/grad_norm",
        "timing/reward_s",
        "performance/tokens_per_s",
    }
    assert all(expected <= set(row) for row in logged)
    assert len({row["train/reward"] for row in logged}) > 1
    stopped = {**reinforce(tmp_path / "b", model, data)}
    stopped["reinforce"] = {"prompts": 6, "max_num_steps": 2}
    assert run(stopped, PolicyMaker()) == 0
    assert run(reinforce(tmp_path / "b", model, data), PolicyMaker()) == 0
    assert comparable(tmp_path / "b") == comparable(tmp_path / "a")
    whole, resumed = final_weights(tmp_path / "a"), final_weights(tmp_path / "b")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


VARIANTS = TOYS / "variants.py"


def weights_after(
    run_dir: Path, model: str, data: str, changes: dict[str, Any], name: str = "grpo"
) -> dict[str, Tensor]:
    """Weights after a GRPO run with other settings of its own section and its loss."""
    config = make_config(
        "grpo", run_dir, model, data, val_period=0, val_at_start=False, **changes.get("grpo", {})
    )
    config["loss_fn"] |= {"reference_policy_kl_penalty": 0.0, **changes.get("loss_fn", {})}
    environment = {"environment": f"{TOYS}/as_long.py:AsLong", "options": {"farthest": 7}}
    assert run({**config, "algorithm": name, "env": environment}, PolicyMaker()) == 0
    return final_weights(run_dir)


def assert_alike(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=2e-6)


def test_an_estimator_of_ones_own_trains_as_the_built_in_one_that_it_repeats(
    tmp_path: Path, model: str, data: str
) -> None:
    expected = weights_after(tmp_path / "rloo", model, data, {"grpo": {"adv_estimator": {"name": "rloo"}}})
    own = {"name": f"{VARIANTS}:above_the_others"}
    assert_alike(weights_after(tmp_path / "own", model, data, {"grpo": {"adv_estimator": own}}), expected)
    other = weights_after(
        tmp_path / "scaled", model, data, {"grpo": {"adv_estimator": {**own, "options": {"scale": -1.0}}}}
    )
    assert any(not torch.allclose(other[name], expected[name], rtol=0, atol=1e-4) for name in expected)


def test_a_loss_of_ones_own_trains_as_the_built_in_one_that_it_repeats(
    tmp_path: Path, model: str, data: str
) -> None:
    expected = weights_after(tmp_path / "built-in", model, data, {"loss_fn": {"disable_ppo_ratio": True}})
    own = {"function": f"{VARIANTS}:PlainGradient"}
    assert_alike(weights_after(tmp_path / "own", model, data, {"loss_fn": own}), expected)
    other = weights_after(tmp_path / "scaled", model, data, {"loss_fn": {**own, "options": {"scale": -1.0}}})
    assert any(not torch.allclose(other[name], expected[name], rtol=0, atol=1e-4) for name in expected)


LOSSES = """
class ForLogits:
    loss_type = None
    def __init__(self, section): pass
    def __call__(self, next_token_logits, data, global_valid_seqs, global_valid_toks): pass

def called_at_once(data, global_valid_seqs, global_valid_toks, next_token_logprobs): pass
def makes_one(section): return lambda *given, **further: None
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ForLogits", r"cannot be called as \(data, global_valid_seqs, .*log-probabilities, not logits"),
        ("called_at_once", "it is <function called_at_once at .*, but must be a class"),
        ("makes_one", "it constructs a function without a loss_type"),
    ],
)
def test_what_is_no_loss_is_refused_with_the_reason(
    name: str, message: str, tmp_path: Path, model: str, data: str
) -> None:
    (tmp_path / "own.py").write_text(LOSSES)
    config = make_config("grpo", tmp_path, model, data)
    config["loss_fn"]["function"] = f"{tmp_path}/own.py:{name}"
    with pytest.raises(ConfigError, match=message):
        validate_config(config)


def test_a_variant_of_an_algorithm_overrides_one_part_of_its_step(
    tmp_path: Path, model: str, data: str
) -> None:
    weights_after(tmp_path / "variant", model, data, {}, f"{VARIANTS}:OnlyBetter")
    weights_after(tmp_path / "grpo", model, data, {})
    found, expected = rows(tmp_path / "variant")[0], rows(tmp_path / "grpo")[0]
    assert expected["train/advantages_min"] < 0 == found["train/advantages_min"]
    assert (
        found["train/advantages_max"] == expected["train/advantages_max"]
        and found["train/reward"] == expected["train/reward"]
    )


def test_what_a_run_has_loaded_stays_as_it_was_until_the_next_run(tmp_path: Path) -> None:
    """A file that is saved in the middle of a run would change its algorithm without a word."""
    path = tmp_path / "own.py"
    path.write_text("def one(inputs): return 1")
    first = load_object(f"{path}:one", "key")
    path.write_text("def one(inputs): return 2")
    assert load_object(f"{path}:one", "key") is first
    path.unlink()
    assert load_object(f"{path}:one", "key") is first
    path.write_text("def one(inputs): return 3")
    forget_objects()
    assert load_object(f"{path}:one", "key")(None) == 3


def test_rules_follow_the_section_of_an_algorithm_of_ones_own(tmp_path: Path, model: str, data: str) -> None:
    """One that has GRPO's keys under another name."""
    path = tmp_path / "mine.py"
    path.write_text(
        "from megarl.algorithms.grpo import GRPO, GRPOConfig\n"
        "class Mine(GRPO):\n"
        "    SECTIONS = {'mine': GRPOConfig, **{name: each for name, each in GRPO.SECTIONS.items() if name "
        "!= 'grpo'}}\n"
        "    PROMPTS, GENERATIONS = 'mine.num_prompts_per_step', 'mine.num_generations_per_prompt'\n"
    )
    config = make_config("grpo", tmp_path, model, data, adv_estimator={"name": "grpoo"})
    config |= {"algorithm": f"{path}:Mine", "mine": config.pop("grpo")}
    with pytest.raises(ConfigError, match=r"mine\.adv_estimator\.name = 'grpoo'.*did you mean 'grpo'"):
        validate_config(config)


SECTIONED = """
from typing import NotRequired, Annotated
import typing
from typing_extensions import TypedDict
from megarl.key import AT_LEAST_1, Key
from megarl.models.generation.engines import EngineKind

class Inner(TypedDict):
    size: NotRequired[Annotated[int, Key("of it.", AT_LEAST_1, default=4)]]

class Section(TypedDict):
    inner: NotRequired[Annotated[Inner, Key("inside.", default={})]]

GOOD = EngineKind("good", start=None, section=Section)
WRONG = EngineKind("wrong", start=None, section=dict)
"""


def test_sections_of_an_engine_of_ones_own_are_checked_and_filled_in(
    tmp_path: Path, model: str, data: str
) -> None:
    (tmp_path / "own.py").write_text(SECTIONED)
    config = make_config("grpo", tmp_path, model, data)
    generation = config["policy"]["generation"]
    generation |= {
        "backend": f"{tmp_path}/own.py:GOOD",
        "colocated": {"enabled": False, "resources": {"gpus_per_node": 1}},
    }
    config["cluster"]["gpus_per_node"] = 2
    for given in ({}, {"engine_cfg": {}}, {"engine_cfg": {"inner": {}}}):
        filled = validate_config(
            {**config, "policy": {**config["policy"], "generation": {**generation, **given}}}
        )
        assert filled["policy"]["generation"]["engine_cfg"] == {"inner": {"size": 4}}
    generation["engine_cfg"] = {"inner": {"size": 0}}
    with pytest.raises(ConfigError, match=r"engine_cfg\.inner\.size = 0: it must be at least 1"):
        validate_config(config)
    generation |= {"backend": f"{tmp_path}/own.py:WRONG"}
    with pytest.raises(ConfigError, match="must be a TypedDict of typing_extensions"):
        validate_config(config)


def test_changed_options_are_told_at_a_resume() -> None:
    before = {"loss_fn": {"options": {}}, "grpo": {"adv_estimator": {"options": {"scale": 1.0}}}}
    now = {"loss_fn": {"options": {"scale": -1.0}}, "grpo": {"adv_estimator": {"options": {}}}}
    assert changed_keys(before, now) == {
        "loss_fn.options.scale": (None, -1.0),
        "grpo.adv_estimator.options.scale": (1.0, None),
    }


def test_the_section_of_an_algorithm_is_checked(tmp_path: Path, model: str, data: str) -> None:
    config = reinforce(tmp_path, model, data)
    config["reinforce"] = {"prompts": "six", "max_num_steps": 4, "scales": 1.0}
    with pytest.raises(ConfigError) as error:
        validate_config(config)
    assert {violation.key for violation in error.value.violations} == {
        "reinforce.prompts",
        "reinforce.scales",
    }
    assert "did you mean 'reinforce.scale'?" in str(error.value)
    config["reinforce"] = {"prompts": 5, "max_num_steps": 4}
    with pytest.raises(
        ConfigError, match=r"policy\.train_global_batch_size = 6: it must divide the 5 prompts x 1 responses"
    ):
        validate_config(config)
    del config["reinforce"]
    with pytest.raises(
        ConfigError, match=r"reinforce = <absent>: algorithm '.*reinforce\.py:Reinforce' needs this section"
    ):
        validate_config(config)
    config["algorithm"] = f"{TOYS}/reinforce.py:WeightedLikelihood"
    with pytest.raises(ConfigError, match=r"algorithm = .*it is not an algorithm: it lacks SECTIONS"):
        validate_config(config)


ALGORITHM = """
from typing import NotRequired
from typing_extensions import TypedDict
from megarl.algorithms.algorithm import Algorithm
from megarl.config.environments import EnvConfig

class Own(TypedDict):
    prompts: NotRequired[int]
    max_num_steps: int
    val_period: NotRequired[int]

class Loss(TypedDict):
    beta: float

class Half(TypedDict):
    prompts: int

class Base(Algorithm):
    SECTIONS = {"own": Own, "loss_fn": Loss, "env": EnvConfig}
    PROMPTS = "own.prompts"

class Good(Base):
    def step(self, step):
        return {}

class Endless(Good):
    SECTIONS = {"half": Half}

class Lost(Good):
    PROMPTS = "own.prompt"

class Taken(Good):
    SECTIONS = {"own": Own, "data": Loss}
"""


def own_algorithm(directory: Path, model: str, data: str, name: str) -> dict[str, Any]:
    """A configuration of one of the classes above."""
    path = directory / "own algorithms.py"
    path.write_text(ALGORITHM)
    config = make_config("grpo", directory, model, data)
    del config["grpo"]
    return config | {
        "algorithm": f"{path}:{name}",
        "own": {"prompts": 6, "max_num_steps": 2},
        "loss_fn": {"beta": 0.5},
    }


def test_an_algorithm_has_sections_under_any_name(tmp_path: Path, model: str, data: str) -> None:
    """Also one that is called like another algorithm's, with keys of its own."""
    config = own_algorithm(tmp_path, model, data, "Good")
    checked = validate_config(config)
    assert checked["loss_fn"] == {"beta": 0.5} and checked["env"]["timeout_s"] == 5.0
    assert checkpoints_kept(checked) >= 1
    config["loss_fn"] = {"ratio_clip_min": 0.2}
    with pytest.raises(ConfigError) as error:
        validate_config(config)
    assert {violation.key for violation in error.value.violations} == {
        "loss_fn.beta",
        "loss_fn.ratio_clip_min",
    }
    config["loss_fn"], config["own"]["val_period"], config["data"]["validation"] = {"beta": 1.0}, 1, None
    with pytest.raises(ConfigError, match=r"own\.val_period = 1: there is no data\.validation"):
        validate_config(config)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Base", "it does not implement step"),
        ("Endless", "its first section, half, has no max_num_steps"),
        ("Lost", r"its PROMPTS = 'own\.prompt' is not a key of its SECTIONS"),
        ("Taken", "its SECTIONS have data, which every run has"),
        ("Absent", "has no Absent"),
    ],
)
def test_what_an_algorithm_lacks_is_all_that_is_said(
    name: str, said: str, tmp_path: Path, model: str, data: str
) -> None:
    """Its sections are not called unknown, which only it could know."""
    with pytest.raises(ConfigError, match=said) as error:
        validate_config(own_algorithm(tmp_path, model, data, name))
    assert [
        violation.key for violation in error.value.violations if not violation.key.startswith("loss_fn")
    ] == ["algorithm"]


@dataclass
class Telling:
    """An environment whose reward tells which record, text and tokens it is for."""

    short: int

    def step(self, turn: Turn) -> EnvironmentReturn:
        lengths = [len(ids) for ids in turn.response_ids]
        rewards = [
            record.index + len(text) / 64 + sum(ids) / 2**20
            for record, text, ids in zip(*parts(turn), strict=True)
        ]
        masked = [length <= self.short for length in lengths]
        return EnvironmentReturn(
            [None if out else reward for reward, out in zip(rewards, masked, strict=True)],
            [True] * len(lengths),
            masked,
        )

    def fault_of_reference(self, answer: str) -> str | None:
        return None

    def close(self) -> None: ...


def parts(turn: Turn) -> tuple[Sequence[Example], Sequence[str], Sequence[Sequence[int]]]:
    return turn.records, turn.responses, turn.response_ids


def test_each_reward_is_that_of_its_row(model: str, tmp_path: Path, data: str) -> None:
    config = validate_config(make_config("grpo", tmp_path, model, data))["policy"]
    tokenizer = get_tokenizer({"name": model}, False)
    config["generation"] = configure_generation_config(config["generation"], tokenizer)
    policy: Any = ReferencePolicy(config, tokenizer)
    records = [Example(30 - row, tuple(range(4, 6 + row)), (), "") for row in range(3)]
    collector = Collector(policy, tokenizer, Telling(2), PhaseTimer())
    samples = collector.collect(records, 2, sampling_seeds(3, 1, 3, 2), weight_version=9).samples
    assert samples.size == 6 and samples["weight_version"].tolist() == [9] * 6
    for row in range(6):
        record = records[row // 2]
        start, end = len(record.prompt_ids), int(samples["input_lengths"][row])
        ids = samples["input_ids"][row, start:end].tolist()
        assert samples["input_ids"][row, :start].tolist() == list(record.prompt_ids)
        text = tokenizer.decode(ids, skip_special_tokens=True)
        masked = len(ids) <= 2
        assert samples["masked"][row].item() is masked and samples["sample_mask"][row] == float(
            not masked and len(ids) > 0
        )
        assert samples["reward"][row].item() == (
            0.0 if masked else pytest.approx(record.index + len(text) / 64 + sum(ids) / 2**20)
        )
    with pytest.raises(BatchError, match="no records"):
        collector.collect([])


def test_an_environment_has_no_metric_of_the_run_s_own() -> None:
    assert add_metrics({"loss": 1.0}, [{"even": 2, "odd": 1}, {"even": 3}, {}]) == {
        "loss": 1.0,
        "even": 5,
        "odd": 1,
    }
    with pytest.raises(BatchError, match="the metrics loss, reward, whose"):
        add_metrics({"loss": 1.0, "reward": 0.0}, [{"reward": 42}, {"loss": 99}])


def test_a_reference_answer_that_ends_the_program_is_a_fault(tmp_path: Path, model: str, data: str) -> None:
    path = tmp_path / "ends.py"
    path.write_text(
        "def reward(response, answer): return 1\nreward.fault_of_reference = lambda answer: exit(0)\n"
    )
    config = make_config("grpo", tmp_path / "run", model, data) | {
        "env": {"reward": f"{path}:reward", "processes": 1}
    }
    with pytest.raises(DataError, match="fault_of_reference fails on it: SystemExit: 0"):
        run(config, PolicyMaker())


def test_an_environment_says_which_records_are_of_no_use(tmp_path: Path, model: str, data: str) -> None:
    with Path(data).open("a") as file:
        file.write('\n{"prompt": "1+1=", "answer": "two"}')
    with pytest.raises(DataError, match="it is no number"):
        run(reinforce(tmp_path, model, data), PolicyMaker())


def test_a_reward_of_ones_own(tmp_path: Path, model: str) -> None:
    """The scores of the pool are those of the function."""
    path = tmp_path / "sums.jsonl"
    path.write_text(
        "\n".join(json.dumps({"prompt": f"{left}+{left}=", "answer": str(20 + left)}) for left in range(7))
    )
    config = make_config("grpo", tmp_path / "run", model, str(path))
    config["env"] = {"reward": f"{TOYS}/digits.py:reward"}
    assert run(config, PolicyMaker()) == 0
    logged = [row for row in rows(tmp_path / "run") if row["step"]]
    assert all((row["train/reward_errors"], row["train/reward_timeouts"]) == (0, 0) for row in logged)
    rewards = [row["train/reward"] * 24 for row in logged]
    assert any(rewards) and rewards == pytest.approx([round(reward) for reward in rewards], abs=1e-5)


def guessing(run_dir: Path, model: str, data: str, steps: int = 4, **more: Any) -> dict[str, Any]:
    """A run of GRPO with conversations of up to three turns."""
    config = make_config("grpo", run_dir, model, data, max_num_steps=steps, max_rollout_turns=3, **more)
    config["policy"]["generation"] |= {"stop_token_ids": list(range(0, 20, 2))}
    config["policy"]["max_total_sequence_length"] = 48
    config["logger"] = {**config.get("logger", {}), "samples": {"period": 1, "token_ids": True}}
    return config | {"env": {"environment": f"{TOYS}/guess.py:Guess", "options": {"near": 3}}}


def test_conversations_of_several_turns_in_a_whole_run(tmp_path: Path, model: str, data: str) -> None:
    own = tmp_path / "sums.jsonl"
    own.write_text("".join(f'{{"prompt": "{n}+{n}=", "answer": "{2 * n}"}}\n' for n in range(7)))
    data = str(own)
    assert run(guessing(tmp_path / "a", model, data), PolicyMaker()) == 0
    logged = [row for row in rows(tmp_path / "a") if row["step"]]
    assert all(1 < row["train/turns"] <= 3 and row["train/observed_tokens"] > 0 for row in logged)
    assert all(row["train/no_numbers"] > 0 for row in logged) and "validation/accuracy" in logged[-1]
    assert run(guessing(tmp_path / "b", model, data, 2), PolicyMaker()) == 0
    assert run(guessing(tmp_path / "b", model, data), PolicyMaker()) == 0
    assert comparable(tmp_path / "b") == comparable(tmp_path / "a")
    whole, resumed = final_weights(tmp_path / "a"), final_weights(tmp_path / "b")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    tokenizer = get_tokenizer({"name": model})
    kept = [row for _, path in list_samples(tmp_path / "a" / DIRECTORY, TRAIN) for row in read_samples(path)]
    assert kept and {row["ended"] for row in kept} <= {"done", "turns", "length", "tokens"}
    for row in kept:
        said = [turn["text"] for turn in row["turns"]]
        assert "".join(said) == tokenizer.decode(row["answer_ids"], skip_special_tokens=False)
        roles = [turn["role"] for turn in row["turns"]]
        assert roles == [["assistant", "environment"][place % 2] for place in range(len(roles))]
    shown = subprocess.run(
        [sys.executable, "-m", "megarl", "samples", str(tmp_path / "a"), "--step", "4"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "turns, " in shown.stdout and "prompt" in shown.stdout


@pytest.mark.parametrize("algorithm", ["ppo", "distillation"])
def test_algorithms_that_sample_have_conversations(
    tmp_path: Path, model: str, data: str, algorithm: str
) -> None:
    own = tmp_path / "sums.jsonl"
    own.write_text("".join(f'{{"prompt": "{n}+{n}=", "answer": "{2 * n}"}}\n' for n in range(7)))
    config = guessing(tmp_path / "run", model, str(own), 2)
    section = config.pop("grpo")
    if algorithm == "ppo":
        config |= {"critic": {"megatron_cfg": {"optimizer": {"lr": 0.01}}}}
    else:
        del config["loss_fn"]
        config |= {"teacher": {"model_name": model}}
        section["topk_logits_k"] = 8
    assert run({**config, "algorithm": algorithm, algorithm: section}, PolicyMaker()) == 0
    logged = [row for row in rows(tmp_path / "run") if row["step"]]
    assert all(
        1 < row["train/turns"] <= 3 and row["train/observed_tokens"] > 0 and row["train/grad_norm"] >= 0
        for row in logged
    )


def test_a_template_without_turns_of_tools_is_refused_before_anything_starts(
    tmp_path: Path, model: str, data: str
) -> None:
    """What the tools say would be left out without a word."""
    template = "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}<eos>{% endif %}{% endfor %}"
    config = make_config("grpo", tmp_path / "run", model, data, max_rollout_turns=3)
    config["policy"]["tokenizer"] = {"name": model, "chat_template": template}
    config["env"] = {
        "environment": "tools",
        "reward": "exact_match",
        "tool_parser": "hermes",
        "tools": {"calculator": {}},
    }
    makers = PolicyMaker()
    with pytest.raises(
        DataError,
        match=r"chat_template leaves out a turn of 'tool'.*Fix: use the template of a model",
    ):
        run(config, makers)
    assert not makers.policies
