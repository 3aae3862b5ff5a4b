"""A new algorithm, environment and reward, each in one file of tests/toys, in whole runs around the reference policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.algorithms.run import run
from megarl.config.validate import validate_config
from megarl.errors import ConfigError, DataError
from tests.unit.driver_runs import PolicyMaker, comparable, final_weights, make_config, rows

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
    expected = {"train/reward", "train/empty", "train/grad_norm", "timing/reward_s", "performance/tokens_per_s"}
    assert all(expected <= set(row) for row in logged)
    assert any(row["train/reward"] > 1 / 8 for row in logged)
    stopped = {**reinforce(tmp_path / "b", model, data)}
    stopped["reinforce"] = {"prompts": 6, "max_num_steps": 2}
    assert run(stopped, PolicyMaker()) == 0
    assert run(reinforce(tmp_path / "b", model, data), PolicyMaker()) == 0
    assert comparable(tmp_path / "b") == comparable(tmp_path / "a")
    whole, resumed = final_weights(tmp_path / "a"), final_weights(tmp_path / "b")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_the_section_of_an_algorithm_is_checked(tmp_path: Path, model: str, data: str) -> None:
    config = reinforce(tmp_path, model, data)
    config["reinforce"] = {"prompts": "six", "max_num_steps": 4, "scales": 1.0}
    with pytest.raises(ConfigError) as error:
        validate_config(config)
    assert {violation.key for violation in error.value.violations} == {"reinforce.prompts", "reinforce.scales"}
    assert "did you mean 'reinforce.scale'?" in str(error.value)
    config["reinforce"] = {"prompts": 5, "max_num_steps": 4}
    with pytest.raises(ConfigError, match=r"policy\.train_global_batch_size = 6: it must divide the 5 prompts x 1 answers"):
        validate_config(config)
    del config["reinforce"]
    with pytest.raises(ConfigError, match=r"reinforce = <absent>: algorithm '.*reinforce\.py:Reinforce' needs this section"):
        validate_config(config)
    config["algorithm"] = f"{TOYS}/reinforce.py:WeightedLikelihood"
    with pytest.raises(ConfigError, match=r"algorithm = .*it is no algorithm: it lacks SECTIONS"):
        validate_config(config)


def test_an_environment_says_which_records_are_of_no_use(tmp_path: Path, model: str, data: str) -> None:
    with Path(data).open("a") as file:
        file.write('\n{"prompt": "1+1=", "answer": "two"}')
    with pytest.raises(DataError, match="it is no number"):
        run(reinforce(tmp_path, model, data), PolicyMaker())


def test_a_reward_of_ones_own(tmp_path: Path, model: str) -> None:
    """The scores of the pool are those of the function."""
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{left}+{left}=", "answer": str(20 + left)}) for left in range(7)))
    config = make_config("grpo", tmp_path / "run", model, str(path))
    config["env"] = {"reward": f"{TOYS}/digits.py:reward"}
    assert run(config, PolicyMaker()) == 0
    logged = [row for row in rows(tmp_path / "run") if row["step"]]
    assert all((row["train/reward_errors"], row["train/reward_timeouts"]) == (0, 0) for row in logged)
    rewards = [row["train/reward"] * 24 for row in logged]
    assert any(rewards) and rewards == pytest.approx([round(reward) for reward in rewards], abs=1e-5)
