"""Verifiable rewards."""

from __future__ import annotations

import threading

import pytest
import torch

from megarl.environments.rewards import REWARDS, compute_rewards, get_reward
from megarl.errors import ConfigError


@pytest.mark.parametrize(
    ("response", "answer", "stripped", "literal"),
    [("12", "12", 1, 1), (" 12\n", "12", 1, 0), ("12", " 12", 1, 0), ("1 2", "12", 0, 0), ("", "", 1, 1), ("12.", "12", 0, 0)],
)
def test_exact_match(response: str, answer: str, stripped: float, literal: float) -> None:
    assert get_reward("exact_match")(response, answer) == stripped
    assert get_reward("exact_match", strip=False)(response, answer) == literal


MATHEMATICS = [
    (r"so the answer is $\frac{1}{2}$", "0.5", 1.0),
    (r"\boxed{12}", "12", 1.0),
    ("It is 13.", "12", 0.0),
    (r"$x^2+2x+1$", r"$(x+1)^2$", 1.0),
    ("no idea", "12", 0.0),
    ("", "12", 0.0),
    (r"$\frac{1}{$", "12", 0.0),
]


@pytest.mark.parametrize(("response", "answer", "expected"), MATHEMATICS)
def test_math_verify(response: str, answer: str, expected: float) -> None:
    assert get_reward("math_verify")(response, answer) == expected


def test_math_verify_outside_the_main_thread() -> None:
    results: list[float] = []
    thread = threading.Thread(target=lambda: results.extend(get_reward("math_verify")(given, gold) for given, gold, _ in MATHEMATICS))
    thread.start()
    thread.join()
    assert results == [expected for _, _, expected in MATHEMATICS]


def test_unknown_rewards_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"env\.reward = 'exakt': must be one of exact_match, math_verify"):
        get_reward("exakt")
    assert set(REWARDS) == {"exact_match", "math_verify"}


def test_compute_rewards() -> None:
    rewards = compute_rewards(get_reward("exact_match"), ["1", "2", "x"], ["1", "3", "x"])
    assert rewards.values.dtype == torch.float32
    assert rewards.values.tolist() == [1.0, 0.0, 1.0]
    assert rewards.timed_out == 0
    with pytest.raises(ValueError):
        compute_rewards(get_reward("exact_match"), ["1"], [])
