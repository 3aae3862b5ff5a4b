"""The reference's losses and the trainer's are two programs of the same papers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megarl.parity.case import Case
from megarl.parity.losses import make_loss
from megarl.parity.reference_losses import reference_loss
from tests.unit.test_losses import policy_gradient_batch

KINDS = [
    *("nll", "dpo", "dpo+sft", "dpo+mean", "dpo+sft+mean"),
    *("pg", "pg+kl", "pg+kl+approx", "pg+is", "pg+seq", "pg+dual", "pg+noratio", "pg+kl+approx+is+seq+dual"),
]


@pytest.mark.parametrize("loss", KINDS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_same_loss_gradient_and_metrics(loss: str, seed: int) -> None:
    case = replace(Case(), loss=loss)
    data = policy_gradient_batch(seed, rows=8)
    rows, tokens = data["sample_mask"].sum(), (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum()
    results = []
    for loss_fn in (make_loss(case), reference_loss(case)):
        logprobs = data["current"][:, 1:].clone().requires_grad_()
        value, metrics = loss_fn(data, rows, tokens, next_token_logprobs=logprobs)
        results.append((float(value.detach()), torch.autograd.grad(value, logprobs)[0], metrics))
    (value, gradient, metrics), (other, other_gradient, other_metrics) = results
    assert other == pytest.approx(value, rel=1e-6)
    torch.testing.assert_close(other_gradient, gradient, rtol=1e-6, atol=1e-9)
    assert set(other_metrics) == set(metrics)
    for name, expected in metrics.items():
        assert float(other_metrics[name]) == pytest.approx(float(expected), rel=1e-6, abs=1e-9), name
    assert reference_loss(case).rows_together == getattr(make_loss(case), "rows_together", 1)
