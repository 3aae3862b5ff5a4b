"""The reference: its optimizer schedule, its metrics over several global batches, and what a metric's error
is measured by."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.parity.batches import first_step, token_batch, with_signals
from megarl.parity.case import Case
from megarl.parity.errors import BOUND, relative_error
from megarl.parity.lines import parse
from megarl.parity.losses import make_loss
from megarl.parity.models import ModelShelf
from megarl.parity.reference import ROUNDING, Expected, load_model, token_logprobs
from megarl.parity.reference import trained as train_reference
from megarl.parity.reference_losses import reference_loss
from megarl.parity.routers import Balancing, Judged, Routers
from megarl.parity.settings import DECAY_CALLS, WEIGHT_DECAY, hyperparameters
from tests.tiers import sampled

CASE = Case(seed=3, layers=2, kv=2, group=2, width=5, mbs=2, micro=2, length=9, loss="pg+kl+is")


def trained(directory: Path, case: Case) -> Expected:
    model = load_model(directory)
    tokens = token_batch(case)
    return train_reference(case, model, with_signals(case, tokens, token_logprobs(model, tokens)))


def test_one_call_over_two_batches_is_two_calls_over_one(tmp_path: Path) -> None:
    model = ModelShelf(tmp_path).complete(CASE)
    apart, together = trained(model, CASE), trained(model, replace(CASE, together=True))
    assert together.losses == [[apart.losses[0][0], apart.losses[1][0]]]
    assert all(torch.equal(apart.weights[name], tensor) for name, tensor in together.weights.items())
    first, second = apart.metrics
    whole = together.metrics[0]
    assert whole["kl_penalty"] == pytest.approx((first["kl_penalty"] + second["kl_penalty"]) / 2)
    assert whole["probs_ratio_max"] == max(first["probs_ratio_max"], second["probs_ratio_max"])
    assert whole["global_valid_toks"] == (first["global_valid_toks"] + second["global_valid_toks"]) / 2


def test_warm_up_counts_calls() -> None:
    rates = [hyperparameters(replace(CASE, warmup=True)).rate(call) for call in range(4)]
    assert rates == pytest.approx([CASE.lr / 4, CASE.lr * 5 / 8, CASE.lr, CASE.lr])
    assert hyperparameters(CASE).rate(0) == CASE.lr


@pytest.mark.parametrize(
    ("changes", "rates"),
    [
        ({"schedule": "linear"}, [1.0, 0.7, 0.4, 0.1]),
        ({"schedule": "cosine"}, [1.0, 0.775, 0.325, 0.1]),
        ({"schedule": "linear", "warmup": True}, [0.25, 1.0, 0.55, 0.1]),
        ({"schedule": "inverse-square-root"}, [1.0, 1.0, 2**-0.5, 3**-0.5]),
    ],
)
def test_learning_rates_fall_by_hand(changes: dict[str, Any], rates: list[float]) -> None:
    hyper = hyperparameters(replace(CASE, **changes))
    assert [hyper.rate(call) / CASE.lr for call in range(DECAY_CALLS + 1)] == pytest.approx(rates)


def test_weight_decay_grows_by_hand() -> None:
    for style, values in {
        "constant": [0.1] * 4,
        "linear": [0.02, 0.14 / 3, 0.22 / 3, 0.1],
        "cosine": [0.02, 0.04, 0.08, 0.1],
    }.items():
        hyper = hyperparameters(replace(CASE, decay=style))
        assert [hyper.weight_decay(call) for call in range(4)] == pytest.approx(values), style
    assert hyperparameters(CASE).weight_decay(0) == pytest.approx(WEIGHT_DECAY)


def test_losses_in_float16_are_small_enough_for_loss_scaling() -> None:
    case = replace(CASE, precision="float16")
    data = {"token_mask": torch.ones(1, 4), "sample_mask": torch.ones(1)}
    inputs = (data, torch.tensor(1.0), torch.tensor(3.0))
    plain, quiet = (
        make_loss(replace(one, loss="nll"))(*inputs, next_token_logprobs=torch.full((1, 3), -2.0))
        for one in (CASE, case)
    )
    assert float(quiet[0]) == float(plain[0]) / 64 == quiet[1]["loss"]
    assert make_loss(replace(case, loss="dpo")).rows_together == 2


def test_scales_are_no_smaller_than_the_metric_and_see_through_cancellation(tmp_path: Path) -> None:
    expected = trained(ModelShelf(tmp_path).complete(CASE), CASE)
    for metrics, scales in zip(expected.metrics, expected.scales, strict=True):
        for name in ("loss", "kl_penalty", "probs_ratio"):
            assert math.isfinite(scales[name]) and scales[name] >= abs(metrics[name]) * (1 - 1e-5)
    # rows with advantages of both signs cancel in the loss
    assert any(
        scales["loss"] > 1.5 * abs(metrics["loss"])
        for metrics, scales in zip(expected.metrics, expected.scales, strict=True)
    )


def test_the_scale_of_a_gradient_norm_sees_through_experts_in_balance(tmp_path: Path) -> None:
    sparse = replace(
        CASE, family="mixtral", loss="dpo", masked="all", batching="fixed", experts=3, topk=3, balance="aux"
    )
    uneven = replace(sparse, masked="none", topk=2)
    model = ModelShelf(tmp_path).complete(sparse)
    expected = trained(model, sparse)
    assert expected.norm_scales[0] == expected.norms[0] == [0.0], "nothing counts in the first step"
    # every token goes to all experts: what the balancing loss adds to the gradient is rounding
    alone = trained(model, replace(sparse, masked="some", steps=4))
    rounding = [
        (norm, scale) for (norm,), (scale,) in zip(alone.norms, alone.norm_scales, strict=True) if norm < 1e-6
    ]
    assert rounding and all(scale > 1e-3 for _, scale in rounding), (alone.norms, alone.norm_scales)
    for case in (uneven, replace(uneven, balance="seq"), replace(uneven, balance="none"), CASE):
        expected = trained(ModelShelf(tmp_path).complete(case), case)
        for norms, scales in zip(expected.norms, expected.norm_scales, strict=True):
            assert all(norm <= scale < 20 * norm for norm, scale in zip(norms, scales, strict=True)), case
            assert norms == scales or case.balance != "none"


def test_a_batch_without_valid_tokens_gives_zeros(tmp_path: Path) -> None:
    expected = trained(ModelShelf(tmp_path).complete(CASE), replace(CASE, masked="all"))
    assert expected.losses[0] == [0.0] and expected.norms[0] == [0.0]
    assert expected.norms[1][0] > 0


def test_a_certain_token_is_told_from_padding(tmp_path: Path) -> None:
    case = parse("seed=3 vocab=5 mbs=2 micro=2 length=9")
    model, tokens = load_model(ModelShelf(tmp_path).complete(case)), token_batch(case)
    token = int(tokens["input_ids"][0, 1])
    favour = torch.eye(5)[token] * 1e6
    model.lm_head.register_forward_hook(lambda _, given, logits: logits + favour)  # type: ignore[operator, union-attr]
    found, columns = token_logprobs(model, tokens), torch.arange(9)[None]
    scored = (columns < tokens["input_lengths"][:, None]) & (columns > 0)
    assert torch.equal(found != 0, scored)
    assert bool((found[scored & (tokens["input_ids"] == token)] > -1e-30).all())


def test_ratios_are_clipped_and_not_clipped(tmp_path: Path) -> None:
    case = replace(CASE, length=20, micro=4)
    metrics = trained(ModelShelf(tmp_path).complete(case), case).metrics[0]
    assert metrics["probs_ratio_min"] < 0.8 and metrics["probs_ratio_max"] > 1.28
    assert metrics["probs_ratio_clamped_max"] == pytest.approx(1.28)


def test_masks_of_batches() -> None:
    case = replace(CASE, dp=2)
    share = case.mbs * case.micro
    assert token_batch(case)["sample_mask"].min() == 1
    rank = token_batch(replace(case, masked="rank"))["sample_mask"].view(2, -1)
    assert rank[:, :share].eq(0).all() and rank[:, share:].eq(1).all()
    nothing = token_batch(replace(case, masked="all"))["sample_mask"].view(2, -1)
    assert nothing[0].eq(0).all() and nothing[1].eq(1).all()
    assert len(first_step(case, token_batch(case))["input_ids"]) == case.global_batch


def test_router_figures_of_a_batch_by_hand() -> None:
    class Gate(torch.nn.Module):
        def forward(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return logits, logits, logits.topk(1).indices

    model = torch.nn.Module()
    model.mlp = torch.nn.Module()
    model.mlp.gate = Gate()
    layers = torch.nn.ModuleDict({"layer": model})
    routers = Routers(layers, Balancing("aux", z=True))
    logits = torch.tensor(
        [[2.0, 0.0], [0.0, 3.0], [9.0, 0.0], [1.0, 0.0]]
    )  # rows (2, 2): the third token is padding
    model.mlp.gate(logits)
    data = {
        "input_ids": torch.zeros(2, 2),
        "input_lengths": torch.tensor([2, 0]),
        "sample_mask": torch.ones(2),
    }
    judged = routers.judged(data)
    loss, metrics = judged.loss, judged.metrics
    probabilities = logits[:2].softmax(-1)
    balance = 2 * (0.5 * probabilities[:, 0].mean() + 0.5 * probabilities[:, 1].mean())
    assert metrics["moe_aux_loss"] == pytest.approx(float(balance))
    assert (metrics["moe_expert_load_max"], metrics["moe_expert_load_min"]) == (1.0, 1.0)
    assert metrics["moe_z_loss"] == pytest.approx(float(logits[:2].logsumexp(-1).square().mean()))
    assert loss is not None and float(loss) == pytest.approx(
        0.3 * float(balance) + 0.02 * metrics["moe_z_loss"]
    )
    routers.forget()
    assert routers.judged(data) == Judged()


@sampled(1)
@pytest.mark.parametrize("apart", [1e-4, 4.7e-3, 0.3, -2.0])
def test_rounding_errors_of_a_divergence_are_within_its_scale(apart: float) -> None:
    """Of one token, of which k3 is what cancellation leaves; but an estimate that is another is not within
    it."""
    case = replace(CASE, loss="pg+kl", mbs=1, micro=1, steps=1)
    token = torch.linspace(-9.0, -0.01, 400)[:, None]
    data = {
        name: torch.nn.functional.pad(values, (1, 0))
        for name, values in {
            "advantages": torch.ones_like(token),
            "token_mask": torch.ones_like(token),
            "prev_logprobs": token,
            "generation_logprobs": token,
            "reference_policy_logprobs": token + apart,
        }.items()
    }
    data |= {"input_ids": torch.zeros(400, 2, dtype=torch.int64), "sample_mask": torch.ones(400)}
    worst = 0.0
    for row in range(400):
        one = {key: value[row : row + 1] for key, value in data.items()}
        given = {"next_token_logprobs": token[row : row + 1]}
        scale = max(
            (ROUNDING / BOUND)
            * reference_loss(case).rounded(one, 1.0, 1.0, token[row : row + 1])["kl_penalty"],
            float(reference_loss(case)(one, torch.tensor(1.0), torch.tensor(1.0), **given)[1]["kl_penalty"]),
        )
        found = float(make_loss(case)(one, torch.tensor(1.0), torch.tensor(1.0), **given)[1]["kl_penalty"])
        difference = float(one["reference_policy_logprobs"][0, 1].double() - token[row, 0].double())
        exact = math.expm1(difference) - difference
        worst = max(worst, relative_error(found, exact, scale))
        if abs(apart) > 0.1:
            assert relative_error(math.exp(-difference) + difference - 1, exact, scale) > 100 * BOUND
    assert worst <= BOUND
