"""A start in which there is nothing to learn: when it is said, and with which cause."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from megarl.algorithms.skipped_batches import warn_of_no_signal
from megarl.data.datasets import Example

CONFIG: dict[str, Any] = {
    "run_dir": "runs/mine",
    "env": {"reward": "exact_match"},
    "policy": {"generation": {"max_new_tokens": 8, "stop_token_ids": [1, 2]}},
}


def warned(
    caplog: pytest.LogCaptureFixture,
    rewards: list[float],
    *,
    step: int = 1,
    answer: str = "7",
    advantages: list[float] | None = None,
    masked: list[bool] | None = None,
    truncated: bool = False,
    length: int = 5,
    config: dict[str, Any] = CONFIG,
) -> str:
    """What is logged of groups of two responses."""
    caplog.clear()
    count = len(rewards)
    values = torch.tensor(rewards)
    groups = values.reshape(-1, 2)
    made = (
        (groups - groups.mean(dim=1, keepdim=True)).reshape(-1, 1)
        if advantages is None
        else torch.tensor(advantages).unsqueeze(1)
    )
    samples = {
        "reward": values,
        "masked": torch.tensor(masked or [False] * count),
        "truncated": torch.full((count,), truncated),
        "generation_lengths": torch.full((count,), length),
    }
    records = [Example(0, (1,), (2,), answer)] * count
    warn_of_no_signal(step, samples, made, records, config)
    return " ".join(record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5, 6])
def test_it_is_said_at_the_first_and_at_the_fifth_step(caplog: pytest.LogCaptureFixture, step: int) -> None:
    said = warned(caplog, [0.0, 0.0, 1.0, 1.0], step=step)
    if step not in (1, 5):
        assert said == ""
        return
    assert f"step {step}: all rewards of every group are equal (4 responses, rewards 0, 1)" in said
    assert (
        "this step has no gradient. Look at `megarl samples runs/mine`. Likely cause: none is known" in said
    )


def test_one_group_that_differs_is_something_to_learn(caplog: pytest.LogCaptureFixture) -> None:
    assert warned(caplog, [0.0, 0.0, 1.0, 0.5]) == ""


def test_of_values_only_equal_rewards_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """PPO's advantages differ by the critic's values, whatever the rewards are."""
    differ = [0.1, -0.2, 0.3, 0.1]
    assert "rewards 0.5)" in warned(caplog, [0.5] * 4, advantages=differ)
    assert warned(caplog, [0.5, 0.5, 0.0, 0.0], advantages=differ) == ""


def test_responses_without_a_reward_are_another_fault(caplog: pytest.LogCaptureFixture) -> None:
    assert warned(caplog, [0.0, 0.0], masked=[True, True]) == ""


@pytest.mark.parametrize(
    ("answer", "reward", "cause"),
    [
        ("6 * 7 = 42\n#### 42", "exact_match", "references have '####', .*use env.reward=gsm8k"),
        (r"So $\boxed{42}$", "exact_match", r"references have '\\\\boxed', .*use env.reward=math"),
        ("#### 42", "gsm8k", "none is known"),
        ("42", "exact_match", "none is known"),
    ],
)
def test_references_that_a_reward_cannot_match(
    caplog: pytest.LogCaptureFixture, answer: str, reward: str, cause: str
) -> None:
    config = {**CONFIG, "env": {"reward": reward}}
    assert re.search(cause, warned(caplog, [0.0, 0.0], answer=answer, config=config))


def test_several_rewards_are_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    config = {
        **CONFIG,
        "env": {"rewards": {"right": {"reward": "exact_match"}, "form": {"reward": "format"}}},
    }
    assert "exact_match compares" in warned(caplog, [0.0, 0.0], answer="#### 1", config=config)


def test_responses_that_do_not_end(caplog: pytest.LogCaptureFixture) -> None:
    said = warned(caplog, [0.0, 0.0], truncated=True)
    assert (
        "truncated at policy.generation.max_new_tokens = 8, none ended by one of the stop tokens [1, 2]"
        in said
    )


def test_responses_that_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert "all responses are empty" in warned(caplog, [0.0, 0.0], length=1)
