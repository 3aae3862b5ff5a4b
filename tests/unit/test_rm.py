"""Whole runs of a reward model in one process: the real driver, data, checkpoints and logs around the plain
reference policy."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from megarl.algorithms.algorithm import ACTOR, REWARD_MODEL, Role
from megarl.config import validate_config
from megarl.errors import BatchError, ConfigError, DataError, NonFiniteError
from megarl.run.inputs import describe_inputs
from megarl.run.run import run
from tests.unit.driver_runs import STEPS, Crash, PolicyMaker, check_same, make_config, rows


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Sums with a right and a wrong answer. Seven pairs and batches of three: steps run over the ends of
    epochs."""
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    lines = [{"ask": f"{one}+{one}=", "good": str(2 * one), "bad": str(2 * one + 1)} for one in range(7)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def rm_config(run_dir: Path, model: str, pairs: str, **section: Any) -> dict[str, Any]:
    config = make_config("sft", run_dir, model, pairs)
    source = {"path": pairs, "prompt_key": "ask", "chosen_key": "good", "rejected_key": "bad"}
    config["data"] |= {"train": source, "validation": source}
    config["policy"] |= {"train_global_batch_size": 3, "train_micro_batch_size": 1, "generation": None}
    config["policy"]["reward_model_cfg"] = {"enabled": True}
    del config["sft"]
    config["rm"] = {
        "max_num_steps": STEPS,
        "val_period": 2,
        "val_global_batch_size": 4,
        "val_micro_batch_size": 2,
        **section,
    }
    return {**config, "algorithm": "rm"}


def test_a_whole_run_leaves_what_it_promises(tmp_path: Path, model: str, pairs: str) -> None:
    config = rm_config(tmp_path, model, pairs, val_at_start=True)
    config["checkpointing"]["metric_name"] = "val_accuracy"
    assert run(config, PolicyMaker()) == 0
    logged = rows(tmp_path)
    assert [row["step"] for row in logged] == list(range(STEPS + 1))
    for row in logged[1:]:
        assert {
            f"train/{name}" for name in ("loss", "accuracy", "margin", "rewards_chosen_mean", "grad_norm")
        } <= set(row)
        assert row["train/num_valid_samples"] == 3 and row["train/global_valid_seqs"] == 6
        assert row["train/margin"] == pytest.approx(
            row["train/rewards_chosen_mean"] - row["train/rewards_rejected_mean"], abs=1e-6
        )
    first = next(row for row in logged if "validation/loss" in row)
    assert first["validation/samples"] == 7 and first["validation/loss"] == pytest.approx(
        math.log(2), abs=0.3
    )
    info = json.loads((tmp_path / "checkpoints" / "step_4" / "training_info.json").read_text())
    # three pairs a step of seven
    assert (
        info["sampler"]["epoch"] == 1
        and info["sampler"]["position"] == 5
        and "val_accuracy" in info["metrics"]
    )
    exported = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf" / "step_4")
    assert exported.config.num_labels == 1
    AutoTokenizer.from_pretrained(tmp_path / "hf" / "step_4")


def test_it_learns_which_answer_is_right(tmp_path: Path, model: str, pairs: str) -> None:
    config = rm_config(tmp_path, model, pairs, max_num_steps=80, val_period=80, val_at_start=True)
    config["checkpointing"] = {"enabled": False}
    run(config, PolicyMaker())
    before, after = (row for row in rows(tmp_path) if "validation/loss" in row)
    assert (
        after["validation/accuracy"] == pytest.approx(1)
        and after["validation/loss"] < before["validation/loss"] / 3
    )
    assert after["validation/margin"] > 1


def test_a_reward_model_scores_the_answers_of_grpo(tmp_path: Path, model: str, pairs: str, data: str) -> None:
    """Its score, which transformers gives too, is a part of the reward; how right an answer is stays what the
    environment says."""
    assert run(rm_config(tmp_path / "rm", model, pairs), PolicyMaker()) == 0
    judge = tmp_path / "rm" / "hf" / "step_4"
    config = make_config(
        "grpo",
        tmp_path / "grpo",
        model,
        data,
        env_reward_weight=2.0,
        reward_model_weight=-0.5,
        max_num_steps=2,
    )
    config["reward_model"] = {"model_name": str(judge)}
    # an untrained model has no answer right, and rewards of 0 would hide their weight
    (tmp_path / "lengths.py").write_text("def reward(response, answer):\n    return len(response) % 4 / 4\n")
    config["env"] = {"reward": f"{tmp_path / 'lengths.py'}:reward"}
    config["logger"] = {"samples": {"token_ids": True, "num_train_samples": None}}
    assert run(config, PolicyMaker()) == 0
    scorer = AutoModelForSequenceClassification.from_pretrained(judge, dtype=torch.float32).eval()
    samples = [
        json.loads(line)
        for line in (tmp_path / "grpo" / "samples" / "train_step_1.jsonl").read_text().splitlines()
    ]
    assert len(samples) == 12
    for sample in samples:
        with torch.no_grad():
            # at the last token, also where that is the one which pads
            hidden = scorer.model(
                input_ids=torch.tensor([sample["prompt_ids"] + sample["answer_ids"]])
            ).last_hidden_state
            score = float(scorer.score(hidden[0, -1]))
        assert sample["rewards"]["reward_model"] == pytest.approx(score, abs=1e-5)
        assert sample["reward"] == pytest.approx(2.0 * sample["accuracy"] - 0.5 * score, abs=1e-5)
    assert len({sample["accuracy"] for sample in samples}) > 1
    logged = rows(tmp_path / "grpo")
    trained = [row for row in logged if "train/reward" in row]
    assert all({"train/reward/reward_model", "timing/reward_model_s"} <= row.keys() for row in trained)
    assert "critic" not in {path.name for path in (tmp_path / "grpo" / "checkpoints" / "step_2").iterdir()}
    assert not (tmp_path / "grpo" / "checkpoints" / "step_2" / "reward_model").exists(), "it is not trained"


class ScoresAsTold(PolicyMaker):
    """Whose reward model gives one answer another score."""

    def __init__(self, score: float) -> None:
        super().__init__()
        self.score = score

    def __call__(
        self, config: Any, tokenizer: Any, start: Any, stack: Any, role: Role = ACTOR, beside: Any = None
    ) -> Any:
        policy = super().__call__(config, tokenizer, start, stack, role, beside)
        found = policy.score

        def score(*args: Any, **kwargs: Any) -> Any:
            output = found(*args, **kwargs)
            output["scores"][5] = self.score
            return output

        if role == REWARD_MODEL:
            policy.score = score
        return policy


@pytest.mark.parametrize("score", [math.nan, -math.inf])
def test_a_score_that_is_not_finite_ends_the_run_before_anything_is_trained(
    score: float, tmp_path: Path, model: str, data: str
) -> None:
    maker, config = (
        ScoresAsTold(score),
        make_config("grpo", tmp_path, model, data, val_period=0, val_at_start=False),
    )
    config["reward_model"] = {"model_name": model}
    with pytest.raises(
        NonFiniteError,
        match=r"the reward model gives 1 of 12 responses a score that is not finite\. Nothing was trained",
    ):
        run(config, maker)
    assert (
        all(policy.trained_steps == 0 for policy in maker.policies)
        and not (tmp_path / "checkpoints" / "step_1").exists()
    )


def test_an_interrupted_run_ends_like_an_uninterrupted_one(tmp_path: Path, model: str, pairs: str) -> None:
    run(rm_config(tmp_path / "whole", model, pairs), PolicyMaker())
    for crash_after in (1, 3):
        config = rm_config(tmp_path / f"crash{crash_after}", model, pairs)
        with pytest.raises(Crash):
            run(config, PolicyMaker(crash_after))
        run(config, PolicyMaker())
        check_same(tmp_path / f"crash{crash_after}", tmp_path / "whole")


def test_a_validation_is_the_mean_over_its_pairs(tmp_path: Path, model: str, pairs: str) -> None:
    """Whatever its batches are: 4 and 3, or 2, 2, 2 and 1 with rows that only fill."""
    found = []
    for size in (4, 2):
        config = rm_config(
            tmp_path / str(size), model, pairs, max_num_steps=1, val_period=1, val_global_batch_size=size
        )
        run(config, PolicyMaker())
        found.append(
            {
                name: value
                for name, value in rows(tmp_path / str(size))[0].items()
                if name.startswith("validation/")
            }
        )
    assert found[0] == pytest.approx(found[1], rel=1e-5) and len(found[0]) == 6
    config = rm_config(tmp_path / "two", model, pairs, max_num_steps=1, val_period=1, val_batches=1)
    run(config, PolicyMaker())
    assert rows(tmp_path / "two")[0]["validation/samples"] == 4


def test_a_dry_run_says_what_pairs_there_are(tmp_path: Path, model: str, pairs: str) -> None:
    config = validate_config(rm_config(tmp_path, model, pairs))
    config["data"]["train"] = [{**config["data"]["train"], "repeat": 2}]
    assert any(line.startswith("data.train: 14 pairs; prompts of") for line in describe_inputs(config))


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"data.train.chosen_key": "bad"}, DataError, "have two answers with the same tokens"),
        ({"data.train.rejected_key": "nothing"}, DataError, "nothing"),
        ({"data.max_input_seq_length": 3}, DataError, r"7 of 7 pairs exceed data\.max_input_seq_length = 3"),
        ({"policy.train_global_batch_size": 8}, DataError, "data.train has 7 records"),
        ({"policy.reward_model_cfg": None}, ConfigError, r"policy\.reward_model_cfg"),
        ({"policy.generation": {"max_new_tokens": 3}}, ConfigError, r"policy\.generation"),
    ],
)
def test_bad_input(
    changes: dict[str, Any], error: type[Exception], said: str, tmp_path: Path, model: str, pairs: str
) -> None:
    config, maker = rm_config(tmp_path, model, pairs), PolicyMaker()
    for path, value in changes.items():
        *parents, name = path.split(".")
        section: Any = config
        for parent in parents:
            section = section[parent]
        section[name] = value
    with pytest.raises(error, match=said):
        run(config, maker)
    assert not maker.policies


def test_one_pair_too_long_is_named_and_never_cut(tmp_path: Path, model: str) -> None:
    lines = [
        {"ask": "1+1=", "good": "2", "bad": "3"},
        {"ask": "1+1=", "good": "2", "bad": "3333333333333333333333"},
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    config = rm_config(tmp_path / "run", model, str(path))
    config["policy"] |= {"train_global_batch_size": 1}
    with pytest.raises(DataError, match=r"1 of 2 pairs exceed .* line 2\): \d+ tokens"):
        run(config, PolicyMaker())


def test_pairs_are_not_torn_by_a_caller_s_sizes() -> None:
    """The loss says how many rows it reads together; who deals rows asks it."""
    from megarl.algorithms.value_losses import PreferenceLoss

    assert PreferenceLoss.rows_together == 2
    batch: Any = {"sample_mask": torch.ones(1), "input_lengths": torch.ones(1)}
    with pytest.raises(BatchError, match="1 rows, need an even number"):
        PreferenceLoss()(batch, torch.tensor(1.0), torch.tensor(1.0), values=torch.zeros(1, 1))
