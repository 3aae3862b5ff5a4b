"""Baselines and advantages against a loop over rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.advantages import calculate_baseline_and_std_per_prompt, group_advantages
from megarl.errors import BatchError


def slow_baseline(groups: list[int], rewards: list[float], valid: list[bool], leave_one_out: bool) -> tuple[list[float], list[float]]:
    baselines, deviations = [], []
    for row, group in enumerate(groups):
        peers = [
            rewards[other]
            for other in range(len(groups))
            if groups[other] == group and valid[other] and not (leave_one_out and other == row)
        ]
        mean = sum(peers) / len(peers) if peers else rewards[row]
        baselines.append(mean)
        deviations.append(math.sqrt(sum((peer - mean) ** 2 for peer in peers) / len(peers)) if peers else 0.0)
    return baselines, deviations


rows_strategy = st.lists(st.tuples(st.integers(0, 3), st.floats(-5, 5, width=32), st.booleans()), min_size=1, max_size=17)


@given(rows=rows_strategy, leave_one_out=st.booleans())
@settings(max_examples=200)
def test_baseline_equals_the_loop(rows: list[tuple[int, float, bool]], leave_one_out: bool) -> None:
    groups, rewards, valid = (list(column) for column in zip(*rows, strict=True))
    prompts = torch.tensor([[7, group, 9] for group in groups])
    baseline, std = calculate_baseline_and_std_per_prompt(
        prompts, torch.tensor(rewards, dtype=torch.float64), torch.tensor(valid).float(), leave_one_out
    )
    expected_baseline, expected_std = slow_baseline(groups, rewards, valid, leave_one_out)
    assert baseline.tolist() == pytest.approx(expected_baseline, rel=1e-9, abs=1e-9)
    assert std.tolist() == pytest.approx(expected_std, rel=1e-6, abs=1e-6)


@given(rows=rows_strategy)
@settings(max_examples=100)
def test_leave_one_out_advantages_sum_to_zero_in_each_group(rows: list[tuple[int, float, bool]]) -> None:
    groups, rewards, valid = (list(column) for column in zip(*rows, strict=True))
    prompts = torch.tensor([[group] for group in groups])
    for normalize in (False, True):
        advantages = group_advantages(prompts, torch.tensor(rewards, dtype=torch.float64), torch.tensor(valid), True, normalize)
        assert bool(torch.isfinite(advantages).all())
        assert all(value == 0 for value, counts in zip(advantages.tolist(), valid, strict=True) if not counts)
        for group in set(groups):
            members = [value for value, other in zip(advantages.tolist(), groups, strict=True) if other == group]
            assert sum(members) == pytest.approx(0, abs=1e-6 * max(1.0, *map(abs, members)))


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -3.7, 1e6, 16777217.0])
@pytest.mark.parametrize("leave_one_out", [True, False])
def test_equal_rewards_have_no_advantage(reward: float, leave_one_out: bool) -> None:
    prompts = torch.zeros(7, 2, dtype=torch.int64)
    advantages = group_advantages(prompts, torch.full((7,), reward), torch.ones(7), leave_one_out, normalize_rewards=True)
    assert torch.equal(advantages, torch.zeros(7))


@pytest.mark.parametrize("rewards", [[0.1 + 0.2 - 0.3, 0, 0, 0], [5e-7, -5e-7, 0, 0], [0.7 + 0.1 - 0.8 + 1, 1, 1, 1]])
@pytest.mark.parametrize("std", ["population", "sample"])
def test_rewards_that_differ_by_rounding_have_no_advantage(rewards: list[float], std: Any) -> None:
    values = torch.tensor(rewards, dtype=torch.float64)
    advantages = group_advantages(torch.zeros(4, 2, dtype=torch.int64), values, torch.ones(4), True, normalize_rewards=True, std=std)
    assert torch.equal(advantages, torch.zeros(4, dtype=torch.float64))


def test_rewards_that_differ_by_more_than_rounding_have_an_advantage() -> None:
    values = torch.tensor([1e-5, 0.0, 0.0, 0.0], dtype=torch.float64)
    advantages = group_advantages(torch.zeros(4, 2, dtype=torch.int64), values, torch.ones(4), False, normalize_rewards=True)
    assert advantages.tolist() == pytest.approx([3**0.5, *[-(3**-0.5)] * 3])


def test_either_standard_deviation() -> None:
    prompts = torch.tensor([[1], [1], [1], [1], [2], [2], [2], [3]])
    rewards, valid = torch.tensor([1.0, 0.5, 0.0, 0.25, 3.0, 1.0, 9.0, 1.0]), torch.tensor([1.0, 1, 1, 1, 1, 1, 0, 1])
    sample = group_advantages(prompts, rewards, valid, False, normalize_rewards=True, std="sample")
    expected = [*((rewards[:4] - rewards[:4].mean()) / rewards[:4].std()), 1 / 2**0.5, -1 / 2**0.5, 0.0, 0.0]
    assert sample.tolist() == pytest.approx([float(value) for value in expected])
    population = group_advantages(prompts, rewards, valid, False, normalize_rewards=True)
    assert float(population[0] / sample[0]) == pytest.approx(1.1547, rel=1e-4)


def test_one_right_answer_among_wrong_ones_stays_bounded() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0])
    advantages = group_advantages(torch.zeros(5, 1, dtype=torch.int64), rewards, torch.ones(5), True, normalize_rewards=True)
    # Leave-one-out advantage 1 and -1/4, population deviation sqrt(1/5 * 4/5) = 0.4.
    assert advantages.tolist() == pytest.approx([2.5, -0.625, -0.625, -0.625, -0.625])
    assert float(advantages.max()) <= 5 / math.sqrt(4) + 1e-6


def test_a_single_answer_has_no_advantage() -> None:
    prompts = torch.tensor([[1], [2], [2]])
    baseline, std = calculate_baseline_and_std_per_prompt(prompts, torch.tensor([3.0, 1.0, 0.0]), torch.tensor([1.0, 1.0, 0.0]))
    assert baseline.tolist() == [3.0, 1.0, 1.0]
    assert std.tolist() == [0.0, 0.0, 0.0]


def test_rows_of_one_group_need_not_be_neighbours() -> None:
    prompts = torch.tensor([[4, 5], [6, 7], [4, 5], [6, 7]])
    baseline, _ = calculate_baseline_and_std_per_prompt(prompts, torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.ones(4))
    assert baseline.tolist() == [3.0, 4.0, 1.0, 2.0]


def test_invalid_rows_may_hold_anything() -> None:
    prompts = torch.zeros(3, 1, dtype=torch.int64)
    advantages = group_advantages(prompts, torch.tensor([1.0, 0.0, math.nan]), torch.tensor([1.0, 1.0, 0.0]), True, True)
    assert advantages.tolist() == pytest.approx([2.0, -2.0, 0.0])


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(BatchError, match="valid_mask"):
        calculate_baseline_and_std_per_prompt(torch.zeros(3, 1, dtype=torch.int64), torch.zeros(3), torch.zeros(2))


def test_no_rows() -> None:
    baseline, std = calculate_baseline_and_std_per_prompt(torch.zeros(0, 4, dtype=torch.int64), torch.zeros(0), torch.zeros(0))
    assert baseline.shape == std.shape == (0,)
