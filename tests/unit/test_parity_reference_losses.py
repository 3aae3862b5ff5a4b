"""The reference's losses and the trainer's are two programs of the same papers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megarl.parity.batches import token_batch, with_signals
from megarl.parity.case import Case
from megarl.parity.losses import make_loss
from megarl.parity.reference_losses import reference_loss
from tests.tables import read_table
from tests.tiers import sampled
from tests.unit.test_losses import policy_gradient_batch
from tests.unit.test_policy_gradients import given_to, scores_of

TABLES = read_table("parity_reference_losses.yaml")

KINDS = TABLES["kinds"]


@sampled("values")
@pytest.mark.parametrize("loss", KINDS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_same_loss_gradient_and_metrics(loss: str, seed: int) -> None:
    _check_the_same(loss, policy_gradient_batch(seed, rows=8))


@pytest.mark.parametrize("loss", ["pg+kl", "pg+kl+approx", "pg+kl+approx+is+seq+dual"])
def test_the_same_where_a_step_has_gone_past_the_clamps(loss: str) -> None:
    data = policy_gradient_batch(4, rows=8)
    counted = (data["token_mask"] * data["sample_mask"][:, None]).nonzero()
    # k3 is 10 at 2.6 above; the log ratio is bounded by 20 on either side
    keys, changes = ["reference_policy_logprobs"] * 4 + ["prev_logprobs"] * 2, (2.5, 2.7, 21, -12, 21, -21)
    for (row, token), key, above in zip(counted[counted[:, 1] > 0].tolist(), keys, changes, strict=False):
        data[key][row, token] = data["current"][row, token] + above
    _check_the_same(loss, data)


@pytest.mark.parametrize("loss", ["pg+seq+gspo", "pg+seq+gspo-token"])
def test_the_same_where_the_ratio_of_a_sequence_is_past_its_clamp(loss: str) -> None:
    data = policy_gradient_batch(5, rows=8)
    # the objective of a bad answer is the ratio that is not clipped
    data["advantages"] = -data["advantages"].abs()
    data["prev_logprobs"][0] -= 25
    gradient = _check_the_same(loss, data)
    assert not gradient[0].any() and gradient[2:].any()


@pytest.mark.parametrize("loss", [f"distill{kind}" for kind in ("", "+forward", "+mixed", "+renorm")])
@pytest.mark.parametrize("count", [3, 5, 12])
def test_the_same_with_the_teacher_of_a_case(loss: str, count: int) -> None:
    """A third of a vocabulary of 9 and half of it, in float64 because float32 knows the rest of a sharp
    teacher to 1e-7 alone; and all of it in float32, where the rest is nothing but rounding."""
    case = Case(seed=5, mbs=4, micro=2, length=9, vocab=9, loss=f"{loss}+topk:{count}")
    batch = with_signals(case, token_batch(case), -torch.rand(case.total_rows, case.length))
    likeliest = batch["teacher_topk_logits"][..., 0].exp()
    assert 0.3 < float((likeliest > 0.989).float().mean()) < 0.7 and float(likeliest.max()) < 0.99999
    dtype = torch.float32 if count >= 9 else torch.float64
    batch["teacher_topk_logits"] = batch["teacher_topk_logits"].to(dtype)
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(
        case.total_rows, case.length - 1, 9, generator=generator, dtype=dtype
    ).requires_grad_()
    results = []
    for loss_fn in (make_loss(case), reference_loss(case)):
        scored = logits.log_softmax(-1).gather(2, batch["teacher_topk_indices"][:, :-1])
        sizes = batch["sample_mask"].sum(), (batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]).sum()
        value, metrics = loss_fn(batch, *sizes, scored[..., 0].detach(), scored)
        assert all(math.isfinite(float(metric)) for metric in metrics.values())
        results.append((value.detach(), torch.autograd.grad(value, logits)[0]))
    (value, gradient), (expected, expected_gradient) = results
    bound = 1e-5 if dtype == torch.float32 else 2e-7  # the reference gives float32
    assert float(value) == pytest.approx(float(expected), rel=bound)
    assert float((gradient - expected_gradient).norm()) < bound * float(expected_gradient.norm())


def _check_the_same(loss: str, data: dict[str, Tensor]) -> Tensor:
    case = replace(Case(), loss=loss, vocab=9)
    # what a value model learns from; the clip is at 0.2, and the advantages are of order 1
    data |= {
        "returns": data["advantages"],
        "prev_values": (data["current"] + 0.3 * data["advantages"]).roll(1, dims=1),
    }
    teacher = torch.stack(
        [data["entropies"], data["advantages"], data["prev_logprobs"], data["current"]], dim=-1
    ).log_softmax(-1)[..., :3]
    data |= {"teacher_topk_logits": teacher, "teacher_topk_indices": torch.arange(3).expand(teacher.shape)}
    data["input_lengths"] = torch.arange(len(data["sample_mask"])) % data["current"].shape[1] + 1
    rows, tokens = data["sample_mask"].sum(), (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum()
    results = []
    for loss_fn in (make_loss(case), reference_loss(case)):
        scores = (data["current"].clone() if case.scores else scores_of(data)).requires_grad_()
        value, metrics = loss_fn(
            data, rows, tokens, *([scores] if case.scores else given_to(loss_fn, scores).values())
        )
        results.append((float(value.detach()), torch.autograd.grad(value, scores)[0], metrics))
    (value, gradient, metrics), (other, other_gradient, other_metrics) = results
    assert other == pytest.approx(value, rel=1e-6)
    torch.testing.assert_close(other_gradient, gradient, rtol=1e-6, atol=1e-9)
    assert set(other_metrics) == set(metrics)
    for name, expected in metrics.items():
        assert float(other_metrics[name]) == pytest.approx(float(expected), rel=1e-6, abs=1e-9), name
    assert reference_loss(case).rows_together == getattr(make_loss(case), "rows_together", 1)
    return gradient[0]
