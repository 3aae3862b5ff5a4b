"""Baselines and advantages against a loop over rows."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.algorithms.advantages import (
    calculate_baseline_and_std_per_prompt,
    clipped,
    estimated_advantages,
    group_advantages,
    whitened,
)
from megarl.algorithms.grpo import GRPO, GRPOConfig
from megarl.config.losses import ClippedPGLossConfig
from megarl.errors import BatchError
from megarl.key import defaults_of

BASE = Path(__file__).parents[2] / "configs" / "base"


def slow_baseline(
    groups: list[int], rewards: list[float], valid: list[bool], leave_one_out: bool
) -> tuple[list[float], list[float]]:
    baselines, deviations = [], []
    for row, group in enumerate(groups):
        peers = [
            rewards[other]
            for other in range(len(groups))
            if groups[other] == group and valid[other] and not (leave_one_out and other == row)
        ]
        exact = [Fraction(peer) for peer in peers]
        mean = sum(exact) / len(exact) if peers else Fraction(rewards[row])
        baselines.append(float(mean))
        deviations.append(math.sqrt(sum((peer - mean) ** 2 for peer in exact) / len(exact)) if peers else 0.0)
    return baselines, deviations


rows_strategy = st.lists(
    st.tuples(st.integers(0, 3), st.floats(-5, 5, width=32), st.booleans()), min_size=1, max_size=17
)


@given(rows=rows_strategy, leave_one_out=st.booleans())
@settings(max_examples=200)
def test_baseline_equals_the_loop(rows: list[tuple[int, float, bool]], leave_one_out: bool) -> None:
    groups, rewards, valid = (list(column) for column in zip(*rows, strict=True))
    prompts = torch.tensor([[7, group, 9] for group in groups])
    baseline, std = calculate_baseline_and_std_per_prompt(
        prompts, torch.tensor(rewards, dtype=torch.float64), torch.tensor(valid).float(), leave_one_out
    )
    expected_baseline, expected_std = slow_baseline(groups, rewards, valid, leave_one_out)
    assert baseline.tolist() == pytest.approx(expected_baseline, rel=1e-12, abs=1e-12)
    if not leave_one_out:
        assert std.tolist() == pytest.approx(expected_std, rel=1e-12, abs=1e-12)
    # what is left of a group without its outlier is a difference of squares that are as large as the group's
    for found, expected, group in zip(std.tolist(), expected_std, groups, strict=True):
        members = [
            reward
            for reward, other, counts in zip(rewards, groups, valid, strict=True)
            if other == group and counts
        ]
        square = max(((max(members) - min(members)) ** 2), 1.0) if members else 1.0
        assert found**2 == pytest.approx(expected**2, rel=1e-12, abs=1e-12 * square)


@given(
    rows=rows_strategy,
    leave_one_out=st.booleans(),
    normalize=st.booleans(),
    std=st.sampled_from(["population", "sample"]),
)
@settings(max_examples=200, deadline=None)
def test_advantages_equal_exact_arithmetic(
    rows: list[tuple[int, float, bool]], leave_one_out: bool, normalize: bool, std: Any
) -> None:
    """GRPO's, in fractions up to the one root. A group whose rewards are the same but for rounding has none.
    Of float32 rewards, as a run has them, the differences are float32 too; here they are float64."""
    groups, rewards, valid = (list(column) for column in zip(*rows, strict=True))
    prompts = torch.tensor([[group] for group in groups])
    found = group_advantages(
        prompts,
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(valid),
        leave_one_out,
        normalize,
        std,
    )
    for row, group in enumerate(groups):
        members = [other for other, counts in enumerate(valid) if groups[other] == group and counts]
        peers = [Fraction(rewards[other]) for other in members if not (leave_one_out and other == row)]
        if not valid[row] or not peers:
            assert float(found[row]) == 0
            continue
        expected = float(Fraction(rewards[row]) - sum(peers) / len(peers))
        if normalize:
            everyone = [Fraction(rewards[other]) for other in members]
            mean = sum(everyone) / len(everyone)
            squares = sum((reward - mean) ** 2 for reward in everyone)
            if math.sqrt(squares / len(everyone)) <= 1e-6 * max(1.0, abs(mean)):
                expected = 0.0
            else:
                expected /= math.sqrt(squares / (len(everyone) - (std == "sample")))
        # a mean is known to a few units in the last place of the rewards, of up to 5, and so is what a small
        # deviation divides
        deviation = math.sqrt(squares / len(everyone)) if normalize and expected else 1.0
        assert float(found[row]) == pytest.approx(expected, rel=1e-12, abs=1e-12 / min(1.0, deviation))


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, -3.7, 1e6, 16777217.0])
@pytest.mark.parametrize("leave_one_out", [True, False])
def test_equal_rewards_have_no_advantage(reward: float, leave_one_out: bool) -> None:
    prompts = torch.zeros(7, 2, dtype=torch.int64)
    advantages = group_advantages(
        prompts, torch.full((7,), reward), torch.ones(7), leave_one_out, normalize_rewards=True
    )
    assert torch.equal(advantages, torch.zeros(7))


@pytest.mark.parametrize(
    "rewards",
    [
        [0.1 + 0.2 - 0.3, 0, 0, 0],
        [5e-7, -5e-7, 0, 0],
        [0.7 + 0.1 - 0.8 + 1, 1, 1, 1],
        [-4e6 + 1, *[-4e6] * 3],
    ],
)
@pytest.mark.parametrize("std", ["population", "sample"])
def test_rewards_that_differ_by_rounding_have_no_advantage(rewards: list[float], std: Any) -> None:
    values = torch.tensor(rewards, dtype=torch.float64)
    advantages = group_advantages(
        torch.zeros(4, 2, dtype=torch.int64), values, torch.ones(4), True, normalize_rewards=True, std=std
    )
    assert torch.equal(advantages, torch.zeros(4, dtype=torch.float64))


def test_rewards_that_differ_by_more_than_rounding_have_an_advantage() -> None:
    values = torch.tensor([1e-5, 0.0, 0.0, 0.0], dtype=torch.float64)
    advantages = group_advantages(
        torch.zeros(4, 2, dtype=torch.int64), values, torch.ones(4), False, normalize_rewards=True
    )
    assert advantages.tolist() == pytest.approx([3**0.5, *[-(3**-0.5)] * 3])


@pytest.mark.parametrize(("count", "factor"), [(4, 1.54), (16, 1.10)])
def test_base_grpo_is_larger_than_trl_by_a_factor(count: int, factor: float) -> None:
    """TRL: (r - mean) / std, of all answers to the prompt, as ``torch.std`` has it; it adds 1e-4 to the
    deviation."""
    rewards = torch.randn(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
    expected = (rewards - rewards.mean()) / rewards.std()
    prompts, valid, found = (
        torch.zeros(count, 1, dtype=torch.int64),
        torch.ones(count, dtype=torch.float64),
        {},
    )
    for layer in ("grpo", "trl"):
        settings = {**defaults_of(GRPOConfig), **yaml.safe_load((BASE / f"{layer}.yaml").read_text())["grpo"]}
        samples = {
            "prompt_ids": prompts,
            "reward": rewards,
            "sample_mask": valid,
            "token_mask": valid.unsqueeze(1),
        }
        found[layer] = estimated_advantages(settings, samples, valid).squeeze(1)
    torch.testing.assert_close(found["trl"], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found["grpo"], expected * (count / (count - 1)) ** 1.5, rtol=1e-12, atol=1e-12)
    assert (count / (count - 1)) ** 1.5 == pytest.approx(factor, abs=0.005)


def test_invalid_rows_may_hold_anything() -> None:
    prompts = torch.zeros(3, 1, dtype=torch.int64)
    advantages = group_advantages(
        prompts, torch.tensor([1.0, 0.0, math.nan]), torch.tensor([1.0, 1.0, 0.0]), True, True
    )
    assert advantages.tolist() == pytest.approx([2.0, -2.0, 0.0])


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(BatchError, match="valid_mask"):
        calculate_baseline_and_std_per_prompt(
            torch.zeros(3, 1, dtype=torch.int64), torch.zeros(3), torch.zeros(2)
        )


def test_no_rows() -> None:
    baseline, std = calculate_baseline_and_std_per_prompt(
        torch.zeros(0, 4, dtype=torch.int64), torch.zeros(0), torch.zeros(0)
    )
    assert baseline.shape == std.shape == (0,)


# estimators


def step_samples(seed: int, groups: int = 3, generations: int = 4, length: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = groups * generations
    lengths = torch.randint(1, length, (rows,), generator=generator)
    sample_mask = (torch.rand(rows, generator=generator) > 0.2).double()
    token_mask = (
        (torch.arange(length)[None] > 0) & (torch.arange(length)[None] <= lengths[:, None])
    ).double()
    token_mask *= (torch.rand(rows, length, generator=generator) > 0.2).double()
    return {
        "prompt_ids": torch.arange(groups).repeat_interleave(generations)[:, None],
        "reward": torch.randn(rows, generator=generator, dtype=torch.float64),
        "sample_mask": sample_mask,
        "trained": sample_mask * (torch.rand(rows, generator=torch.Generator().manual_seed(seed + 1)) > 0.3),
        "token_mask": token_mask,
        "reward/one": torch.randn(rows, generator=generator, dtype=torch.float64),
        "reward/other": 100 * torch.randn(rows, generator=generator, dtype=torch.float64),
        "penalties": torch.randn(rows, length, generator=generator, dtype=torch.float64)
        * token_mask
        * sample_mask[:, None],
    }


def settings_of(name: str, minus_baseline: bool = False, **more: Any) -> dict[str, Any]:
    estimator = {"name": name, "minus_baseline": minus_baseline}
    return {
        "adv_estimator": estimator,
        "use_leave_one_out_baseline": True,
        "normalize_rewards": True,
        "std": "population",
        "env_reward_weight": 1.0,
        **more,
    }


def slow_whitening(values: list[float]) -> list[float]:
    mean = math.fsum(values) / len(values)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
    return [(value - mean) / deviation for value in values]


def slow_group_mean(
    samples: dict[str, Tensor], rewards: list[float], row: int, without_itself: bool, valid: list[bool]
) -> float:
    group = samples["prompt_ids"].flatten().tolist()
    peers = [
        rewards[other]
        for other in range(len(group))
        if group[other] == group[row] and valid[other] and not (without_itself and other == row)
    ]
    return math.fsum(peers) / len(peers) if peers else rewards[row]


@pytest.mark.parametrize("minus_baseline", [False, True])
@pytest.mark.parametrize("penalised", [False, True])
@pytest.mark.parametrize("trained", ["sample_mask", "trained"])
@pytest.mark.parametrize("seed", range(4))
def test_reinforce_plus_plus_equals_the_loop(
    minus_baseline: bool, penalised: bool, trained: str, seed: int
) -> None:
    samples = step_samples(seed)
    penalties = samples["penalties"] if penalised else None
    found = estimated_advantages(
        settings_of("reinforce_plus_plus", minus_baseline), samples, samples[trained], penalties
    )
    counts = ((samples["token_mask"] * samples[trained][:, None]) != 0).tolist()
    # responses that are not trained on stay in their groups
    rewards, valid = samples["reward"].tolist(), [bool(mask) for mask in samples["sample_mask"]]
    places, returns = [], []
    for row, row_counts in enumerate(counts):
        for place, counted in enumerate(row_counts):
            if not counted:
                assert float(found[row, place]) == 0
                continue
            value = rewards[row] - (
                slow_group_mean(samples, rewards, row, False, valid) if minus_baseline else 0.0
            )
            for later in range(place, len(row_counts)):
                value -= float(penalties[row, later]) if penalties is not None and row_counts[later] else 0.0
            places.append((row, place))
            returns.append(value)
    for (row, place), expected in zip(places, slow_whitening(returns), strict=True):
        assert float(found[row, place]) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_a_truncated_response_stays_in_the_baseline() -> None:
    """Rewards 1, 1, 0 are trained on and a truncated 0 is not: each is compared with 1/2. Another prompt has
    0, 0, 1 and a truncated 1."""
    samples = {
        "prompt_ids": torch.arange(2).repeat_interleave(4)[:, None],
        "reward": torch.tensor([1.0, 1, 0, 0, 0, 0, 1, 1], dtype=torch.float64),
        "sample_mask": torch.ones(8, dtype=torch.float64),
        "token_mask": torch.ones(8, 1, dtype=torch.float64),
    }
    trained = torch.tensor([1.0, 1, 1, 0, 1, 1, 1, 0], dtype=torch.float64)
    found = estimated_advantages(settings_of("reinforce_plus_plus", minus_baseline=True), samples, trained)
    # all 1/2 above or below, so that the deviation is 1/2
    assert found.flatten().tolist() == pytest.approx([1, 1, -1, 0, -1, -1, 1, 0])


class Rewarded:
    """A GRPO without models, which makes the advantages of two prompts with three responses each, and a
    divergence in the reward."""

    def __init__(self, name: str, **settings: Any) -> None:
        self.algorithm: Any = object.__new__(GRPO)
        clips = {"advantage_clip_low": None, "advantage_clip_high": None}
        self.algorithm.config = {**settings_of(name, **settings), **clips, "num_generations_per_prompt": 3}
        self.algorithm.reward_weights, self.algorithm.estimator = {}, None
        divergence = {
            "reference_policy_kl_penalty": 0.5,
            "use_kl_in_reward": True,
            "reference_policy_kl_type": "k1",
        }
        self.algorithm.loss_config = {**defaults_of(ClippedPGLossConfig), **divergence}
        self.samples = {
            "reward": torch.tensor([1.0, 0.0, 2.0, 0.0, 1.0, 1.0], dtype=torch.float64),
            "sample_mask": torch.tensor([1.0, 1, 1, 1, 1, 0], dtype=torch.float64),
            "token_mask": torch.tensor([[0.0, 1, 1]] * 6, dtype=torch.float64),
        }
        self.above = torch.tensor(
            [[0.1, 0.3], [0.5, 0.4], [1.0, 2.0], [0.2, 0.2], [-0.4, 0.0], [7.0, 7.0]], dtype=torch.float64
        )
        reference = -torch.ones(6, 3, dtype=torch.float64)
        self.batch = {
            "prev_logprobs": reference + torch.nn.functional.pad(self.above, (1, 0)),
            "reference_policy_logprobs": reference,
            "token_mask": torch.tensor([[0.0, 1, 1]] * 6, dtype=torch.float64),
            # the third response was truncated, or its log-probabilities are too far apart
            "sample_mask": torch.tensor([1.0, 1, 0, 1, 1, 0], dtype=torch.float64),
        }

    def advantages(self) -> tuple[list[float], dict[str, float]]:
        found, metrics = self.algorithm.advantages(self.samples, self.batch)
        return found.flatten().tolist(), metrics


@pytest.mark.parametrize("name", ["rloo", "grpo"])
def test_a_response_that_is_left_out_keeps_its_divergence_in_the_group(name: str) -> None:
    given = Rewarded(name, normalize_rewards=False)
    found, metrics = given.advantages()
    one, two, three, four, five = (1 - 0.5 * 0.4, 0 - 0.5 * 0.9, 2 - 0.5 * 3.0, 0 - 0.5 * 0.4, 1 + 0.5 * 0.4)
    assert found == pytest.approx(
        [one - (two + three) / 2, two - (one + three) / 2, 0, four - five, five - four, 0]
    )
    # of the tokens that are trained on
    assert metrics["kl_in_reward"] == pytest.approx((0.4 + 0.9 + 0.4 - 0.4) / 8)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_response_that_is_left_out_with_a_nan_spoils_no_group(value: float) -> None:
    given = Rewarded("rloo")
    given.batch["prev_logprobs"][2, 1] = value
    given.batch["reference_policy_logprobs"][2, 1] = value
    found, _ = given.advantages()
    one, two, three = 1 - 0.5 * 0.4, 0 - 0.5 * 0.9, 2 - 0.5 * 2.0
    assert found[:3] == pytest.approx([one - (two + three) / 2, two - (one + three) / 2, 0])


@pytest.mark.parametrize("seed", range(4))
def test_rloo_equals_the_loop(seed: int) -> None:
    samples = step_samples(seed)
    found = estimated_advantages(settings_of("rloo"), samples, samples["sample_mask"], samples["penalties"])
    rewards = [
        float(reward - taken.sum())
        for reward, taken in zip(samples["reward"], samples["penalties"], strict=True)
    ]
    valid = [bool(mask) for mask in samples["sample_mask"]]
    for row, reward in enumerate(rewards):
        expected = reward - slow_group_mean(samples, rewards, row, True, valid) if valid[row] else 0.0
        assert found[row].tolist() == pytest.approx([expected], rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_gdpo_equals_the_loop(seed: int) -> None:
    samples = step_samples(seed)
    samples["reward/other"][2] = math.nan
    weights = {"one": 0.7, "other": 0.3}
    settings = settings_of("gdpo", use_leave_one_out_baseline=False)
    found = estimated_advantages(settings, samples, samples["sample_mask"], reward_weights=weights)
    valid, groups = [bool(mask) for mask in samples["sample_mask"]], samples["prompt_ids"].flatten().tolist()
    total = [0.0] * len(valid)
    for name, weight in weights.items():
        values = samples[f"reward/{name}"].tolist()
        known = [counts and not math.isnan(value) for counts, value in zip(valid, values, strict=True)]
        for row in [row for row, has_part in enumerate(known) if has_part]:
            mean = slow_group_mean(samples, values, row, False, known)
            peers = [
                values[other] for other in range(len(values)) if groups[other] == groups[row] and known[other]
            ]
            deviation = math.sqrt(math.fsum((peer - mean) ** 2 for peer in peers) / len(peers))
            total[row] += weight * (values[row] - mean) / deviation if deviation else 0.0
    rows = [row for row, counts in enumerate(valid) if counts]
    for row, expected in zip(rows, slow_whitening([total[row] for row in rows]), strict=True):
        assert found[row].tolist() == pytest.approx([expected], rel=1e-12, abs=1e-12)
    assert all(found[row].tolist() == [0.0] for row, counts in enumerate(valid) if not counts)


def test_gdpo_compares_the_rewards_of_named_environments_by_their_own_names() -> None:
    samples, weights = step_samples(3), {"one": 0.7, "other": 0.3}
    settings = settings_of("gdpo", use_leave_one_out_baseline=False)
    expected = estimated_advantages(settings, samples, samples["sample_mask"], reward_weights=weights)
    of_first = torch.arange(len(samples["reward"])) % 3 > 0
    for name in weights:
        values = samples.pop(f"reward/{name}")
        samples[f"reward/first/{name}"] = torch.where(of_first, values, math.nan)
        samples[f"reward/second/{name}"] = torch.where(of_first, math.nan, values)
    samples["reward/first"], samples["reward/second"] = samples["reward"], samples["reward"].flip(0)
    found = estimated_advantages(settings, samples, samples["sample_mask"], reward_weights=weights)
    assert torch.equal(found, expected) and found.any()


@pytest.mark.parametrize("part", ["reward1", "game/reward1", "game"])
def test_gdpo_weighs_the_rewards_of_environments_of_ones_own_beside_a_reward_model(part: str) -> None:
    """The columns of an environment of NeMo-RL's interface, alone or by name, and of one with one reward."""

    def made(environment: float, weights: dict[str, float]) -> list[float]:
        given = Rewarded("gdpo", use_leave_one_out_baseline=False, env_reward_weight=environment)
        values = torch.tensor([0.0, 1.0, 0.0, 3.0, 1.0, 2.0], dtype=torch.float64)
        given.samples |= {f"reward/{part}": given.samples["reward"], "reward/reward_model": values}
        given.algorithm.reward_weights = {"reward_model": 0.5, **weights}
        return given.advantages()[0]

    expected = made(7.0, {part.rpartition("/")[2]: 0.25})
    assert made(0.25, {}) == expected != made(1.0, {})


def test_whitening_is_over_all_tokens_given_and_not_of_a_share() -> None:
    samples = step_samples(7)
    mask = samples["token_mask"] * samples["sample_mask"][:, None]
    whole = whitened(samples["reward"][:, None].expand_as(mask), mask)
    counted = whole[mask != 0]
    assert float(counted.mean()) == pytest.approx(0, abs=1e-12) and float(
        counted.square().mean()
    ) == pytest.approx(1, rel=1e-12)
    share = whitened(samples["reward"][:4, None].expand_as(mask[:4]), mask[:4])
    assert not torch.allclose(share, whole[:4])


@pytest.mark.parametrize("name", ["grpo", "rloo", "gdpo", "reinforce_plus_plus"])
def test_equal_rewards_groups_of_one_and_no_valid_row_give_nothing(name: str) -> None:
    samples = step_samples(3)
    for part in ("reward", "reward/one", "reward/other"):
        samples[part].fill_(0.1)
    assert not estimated_advantages(settings_of(name), samples, samples["sample_mask"]).any()
    samples = step_samples(3)
    samples["sample_mask"].zero_()
    assert not estimated_advantages(settings_of(name), samples, samples["sample_mask"]).any()
    samples = step_samples(3, groups=5, generations=1)
    found = estimated_advantages(settings_of(name), samples, samples["sample_mask"])
    assert bool(found.isfinite().all()) and bool(found.any()) == (name == "reinforce_plus_plus")


def test_what_is_masked_may_hold_anything() -> None:
    for name in ("grpo", "rloo", "gdpo", "reinforce_plus_plus"):
        samples = step_samples(5)
        clean = estimated_advantages(
            settings_of(name), samples, samples["sample_mask"], samples["penalties"] * 0
        )
        for part in ("reward", "reward/one", "reward/other"):
            samples[part][samples["sample_mask"] == 0] = math.nan
        assert torch.equal(
            estimated_advantages(
                settings_of(name), samples, samples["sample_mask"], samples["penalties"] * 0
            ),
            clean,
        )


def test_gdpo_wants_several_rewards() -> None:
    samples = {name: values for name, values in step_samples(1).items() if name != "reward/other"}
    with pytest.raises(BatchError, match=r"\['one'\]"):
        estimated_advantages(settings_of("gdpo"), samples, samples["sample_mask"])


def test_advantages_are_clipped_where_there_are_bounds() -> None:
    values = torch.tensor([-3.0, -0.5, 0.0, 2.0])
    assert clipped(values, None, None) is values
    assert clipped(values, -1.0, None).tolist() == [-1.0, -0.5, 0.0, 2.0]
    assert clipped(values, None, 1.0).tolist() == [-3.0, -0.5, 0.0, 1.0]


OWN = """
import torch

def by_token(inputs):
    return inputs.mask * torch.arange(inputs.mask.shape[1], dtype=inputs.rewards.dtype)

def one(inputs):
    return inputs.rewards.sum()

def nothing(inputs):
    return None

def infinite(inputs):
    return inputs.rewards / 0.0

def too_large(inputs):
    return inputs.rewards.double() + 1e300

def complex_numbers(inputs):
    return inputs.rewards * 1j

def with_a_gradient(inputs):
    return inputs.rewards * torch.ones((), requires_grad=True)

def changes_all(inputs):
    for column in (inputs.groups, inputs.rewards, inputs.compared, inputs.mask):
        column.zero_()
    inputs.settings.clear()
    return inputs.rewards

def of_what_does_not_count(inputs):
    return torch.where(inputs.mask.any(dim=1), 1.0, float("nan"))
"""


def test_an_estimator_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    samples = step_samples(3)

    def found(name: str) -> Tensor:
        return estimated_advantages(settings_of(f"{tmp_path}/own.py:{name}"), samples, samples["trained"])

    mask = samples["token_mask"] * samples["trained"][:, None]
    assert torch.equal(found("by_token"), mask * torch.arange(mask.shape[1]))
    assert torch.equal(found("of_what_does_not_count").squeeze(1), (mask.any(dim=1)).double())
    rows, length = mask.shape
    copies = {name: column.clone() for name, column in samples.items()}
    assert not found("changes_all").any() and all(
        torch.equal(samples[name], column) for name, column in copies.items()
    )
    assert not found("with_a_gradient").requires_grad
    samples["reward"] = samples["reward"].float()
    for name, said in (
        ("complex_numbers", "dense real numbers"),
        ("too_large", "advantages that are not finite"),
        ("one", r"returned a tensor \[\]"),
        ("nothing", "returned NoneType"),
        ("infinite", "advantages that are not finite"),
    ):
        with pytest.raises(BatchError, match=said) as error:
            found(name)
        assert name not in (
            "one",
            "nothing",
        ) or f"of responses [{rows}] or of tokens [{rows}, {length}]" in str(error.value)
