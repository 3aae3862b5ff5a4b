"""The penalty on the divergence leads to the optimum that it defines, from wherever the policy starts: one
state, five tokens, and the expectation over all of them in the place of samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algorithms.loss_functions import ClippedPGLossFn

BETA = 0.5
REWARDS = torch.tensor([1.2, 1.0, 0.5, 0.0, 0.3], dtype=torch.float64)
REFERENCE = torch.tensor([-14.0, 0.0, 0.4, -0.3, -0.9], dtype=torch.float64).log_softmax(0)
"""The first token, which has the largest reward, is 14 nats less likely than others."""
OPTIMUM = (REFERENCE + REWARDS / BETA).log_softmax(0)
"""Maximises E[reward] - BETA KL(policy || reference): the reference times exp(reward / BETA), normalised."""
FAR = torch.tensor([9.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64)
"""Logits of a policy that has run away to the first token: 22 nats above the reference there, and up to 9
below it elsewhere."""


def divergence(policy: Tensor, other: Tensor) -> float:
    return float((policy.exp() * (policy - other)).sum())


def loss_function(**settings: Any) -> ClippedPGLossFn:
    config: Any = {
        "reference_policy_kl_penalty": BETA,
        "ratio_clip_min": 0.2,
        "ratio_clip_max": 0.2,
        "ratio_clip_c": None,
        "use_on_policy_kl_approximation": False,
        "use_importance_sampling_correction": False,
        "token_level_loss": True,
        "force_on_policy_ratio": True,
        **settings,
    }
    return ClippedPGLossFn(config)


def expected_gradient(loss_fn: ClippedPGLossFn, logits: Tensor) -> Tensor:
    """The gradient of the mean of the loss over tokens, each as often as the policy samples it, by the
    logits."""
    logits = logits.clone().requires_grad_()
    policy = logits.log_softmax(0)
    sampled = policy.detach()

    def column(values: Tensor) -> Tensor:
        return torch.stack((torch.zeros_like(values), values), dim=1)

    data: Any = {
        "advantages": column(REWARDS - (sampled.exp() * REWARDS).sum()),
        "generation_logprobs": column(sampled),
        "reference_policy_logprobs": column(REFERENCE),
        "token_mask": column(sampled.exp()),
        "sample_mask": torch.ones(5, dtype=torch.float64),
    }
    one = torch.ones((), dtype=torch.float64)
    loss, _ = loss_fn(data, one, one, next_token_logprobs=policy[:, None])
    return torch.autograd.grad(loss, logits)[0]


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("approximation", [False, True])
@pytest.mark.parametrize(
    ("difference", "estimate"),
    [(20.0, 10.0), (4.0, 10.0), (20.0, 0.05), (None, 10.0), (20.0, None), (None, None)],
)
def test_a_policy_far_from_the_reference_comes_back_to_the_optimum(
    kind: str, approximation: bool, difference: float | None, estimate: float | None
) -> None:
    settings = {
        "reference_policy_kl_type": kind,
        "use_on_policy_kl_approximation": approximation,
        "kl_input_clamp_value": difference,
        "kl_output_clamp_value": estimate,
    }
    loss_fn, logits = loss_function(**settings), FAR
    assert divergence(logits.log_softmax(0), OPTIMUM) > 8
    for _ in range(100):
        # natural policy gradient: by the probability of each token, so that rare ones move as fast as others
        logits = logits - expected_gradient(loss_fn, logits) / logits.log_softmax(0).exp()
    assert divergence(logits.log_softmax(0), OPTIMUM) < 1e-9


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("estimate", [10.0, 0.05, None])
def test_the_gradient_is_that_of_the_divergence_however_far(kind: str, estimate: float | None) -> None:
    logits = FAR.clone().requires_grad_()
    policy = logits.log_softmax(0)
    objective = (policy.exp() * (BETA * (policy - REFERENCE) - REWARDS)).sum()
    (true,) = torch.autograd.grad(objective, logits)
    settings = {
        "reference_policy_kl_type": kind,
        "kl_input_clamp_value": None,
        "kl_output_clamp_value": estimate,
    }
    torch.testing.assert_close(expected_gradient(loss_function(**settings), FAR), true, rtol=1e-6, atol=1e-9)
