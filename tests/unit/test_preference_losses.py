"""DPO and IPO against their equations, worked out by hand one pair at a time in float64: values, gradients
and metrics."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algorithms.loss_functions import DPOLossFn
from megarl.config.rules.losses import faults_of_preference_loss
from tests.unit.test_losses import normalizers, policy_gradient_batch

EPSILON = 1e-8
"""What ``masked_mean`` adds to a normaliser."""
CHOICES: dict[str, tuple[Any, ...]] = {
    "preference_loss_type": ("sigmoid", "ipo"),
    "preference_average_log_probs": (False, True),
    "sft_loss_weight": (0.0, 0.25),
    "sft_average_log_probs": (False, True),
}
SETTINGS = [dict(zip(CHOICES, values, strict=True)) for values in itertools.product(*CHOICES.values())]


def preference_batch(seed: int) -> dict[str, Tensor]:
    """Five pairs: one that does not count, one of which a row does not, one with an answer of which no token
    counts."""
    data = policy_gradient_batch(seed, rows=10)
    data["sample_mask"] = torch.tensor([1.0, 1, 0, 0, 1, 1, 1, 0, 1, 1], dtype=torch.float64)
    assert not data["token_mask"][9].any() and data["token_mask"][8, 1:].any()
    return data


def worked_out(
    data: dict[str, Tensor], beta: float, weight: float, settings: dict[str, Any]
) -> tuple[dict[str, float], Any]:
    """Metrics, and the gradient by the log-probabilities [B, S-1], token by token."""
    pairs = float(data["sample_mask"].sum()) / 2 + EPSILON
    names = (
        "loss",
        "sft_loss",
        "preference_loss",
        "accuracy",
        "rewards_chosen_mean",
        "rewards_rejected_mean",
    )
    out, gradient = dict.fromkeys(names, 0.0), torch.zeros_like(data["current"][:, 1:])
    for first in range(0, len(data["current"]), 2):
        if not (data["sample_mask"][first] and data["sample_mask"][first + 1]):
            continue
        places = [
            [place for place in range(1, data["current"].shape[1]) if data["token_mask"][row, place]]
            for row in (first, first + 1)
        ]
        shares = [
            1 / max(len(of_row), 1) if settings["preference_average_log_probs"] else 1.0 for of_row in places
        ]
        rewards = [
            share
            * math.fsum(
                float(data["current"][row, place] - data["reference"][row, place]) for place in of_row
            )
            for row, of_row, share in zip((first, first + 1), places, shares, strict=True)
        ]
        margin = rewards[0] - rewards[1]
        if settings["preference_loss_type"] == "ipo":
            value, slope = (margin - 1 / (2 * beta)) ** 2, 2 * (margin - 1 / (2 * beta))
        else:
            value, slope = math.log1p(math.exp(-beta * margin)), -beta / (1 + math.exp(beta * margin))
        for row, sign, of_row, share in zip((first, first + 1), (1, -1), places, shares, strict=True):
            for place in of_row:
                gradient[row, place - 1] += weight * sign * slope * share / pairs
        likelihood = 0.0
        if settings["sft_loss_weight"]:
            share = 1 / max(len(places[0]), 1) if settings["sft_average_log_probs"] else 1.0
            likelihood = -share * math.fsum(float(data["current"][first, place]) for place in places[0])
            for place in places[0]:
                gradient[first, place - 1] -= settings["sft_loss_weight"] * share / pairs
        out["preference_loss"] += value / pairs
        out["sft_loss"] += likelihood / pairs
        out["accuracy"] += (margin > 0) / pairs
        out["rewards_chosen_mean"] += rewards[0] / pairs
        out["rewards_rejected_mean"] += rewards[1] / pairs
    out["loss"] = weight * out["preference_loss"] + settings["sft_loss_weight"] * out["sft_loss"]
    return out, gradient


@pytest.mark.parametrize(
    "settings", SETTINGS, ids=lambda settings: "-".join(str(value) for value in settings.values())
)
@pytest.mark.parametrize(("seed", "beta", "weight"), [(1, 0.4, 0.9), (2, 0.05, 1.0), (3, 2.0, 3.0)])
def test_values_and_gradients(settings: dict[str, Any], seed: int, beta: float, weight: float) -> None:
    data = preference_batch(seed)
    data["reference"] = data["reference_policy_logprobs"]
    data["reference_policy_logprobs"] = data["reference"].roll(-1, 1)
    expected, gradient = worked_out(data, beta, weight, settings)
    rows, tokens = normalizers(data)
    logprobs = data["current"][:, 1:].clone().requires_grad_()
    loss_fn = DPOLossFn({"reference_policy_kl_penalty": beta, "preference_loss_weight": weight, **settings})  # type: ignore[typeddict-item]
    loss, metrics = loss_fn(data, rows, tokens, next_token_logprobs=logprobs)
    assert float(loss.detach()) == pytest.approx(expected["loss"], rel=1e-12)
    for name, value in expected.items():
        assert float(metrics[name]) == pytest.approx(value, rel=1e-12, abs=1e-15), name
    torch.testing.assert_close(torch.autograd.grad(loss, logprobs)[0], gradient, rtol=1e-12, atol=1e-15)
    assert set(metrics) == set(loss_fn.metric_reductions) and not any(
        value.requires_grad for value in metrics.values()
    )


@pytest.mark.parametrize(
    "settings", SETTINGS, ids=lambda settings: "-".join(str(value) for value in settings.values())
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_pair_that_does_not_count_may_hold_anything(settings: dict[str, Any], value: float) -> None:
    """Pairs of which both rows are masked, or one, in the policy's log-probabilities or the reference's."""
    outcomes = []
    for spoiled in (None, "current", "reference_policy_logprobs"):
        data = preference_batch(5)
        if spoiled is not None:
            data[spoiled][[2, 3, 6, 7]] = value
        logprobs = data["current"][:, 1:].clone().requires_grad_()
        loss, _ = DPOLossFn(settings)(data, *normalizers(data), next_token_logprobs=logprobs)  # type: ignore[arg-type]
        outcomes.append((loss.detach(), torch.autograd.grad(loss, logprobs)[0]))
    for found in outcomes[1:]:
        assert torch.equal(found[0], outcomes[0][0]) and torch.equal(found[1], outcomes[0][1])
    assert bool(outcomes[0][1].any())


def test_a_tie_is_no_pair_that_was_told_apart() -> None:
    """Before the first step policy and reference are one: all rewards are 0."""
    data = preference_batch(4)
    data["reference_policy_logprobs"] = data["current"].roll(-1, 1)
    rows, tokens = normalizers(data)
    loss, metrics = DPOLossFn({})(data, rows, tokens, next_token_logprobs=data["current"][:, 1:])
    # three whole pairs in seven rows that count
    assert float(metrics["accuracy"]) == 0 and float(loss) == pytest.approx(math.log(2) * 3 / 3.5)


def test_what_would_do_nothing_is_refused() -> None:
    [fault] = faults_of_preference_loss({"sft_average_log_probs": True, "sft_loss_weight": 0.0}, "dpo")
    assert fault.key == "dpo.sft_average_log_probs" and fault.bound and fault.fix
    assert not list(faults_of_preference_loss({"sft_average_log_probs": True, "sft_loss_weight": 0.1}, "dpo"))
