"""The comparison itself: what counts as equal, relative to what, and that nothing can be missing unseen."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megarl.parity.batches import token_batch
from megarl.parity.case import Case
from megarl.parity.compare import Difference, compare
from megarl.parity.errors import BOUND, relative_error
from megarl.parity.jobs import Share
from megarl.parity.noise import FACTOR, Bounds
from megarl.parity.reference import Expected

CASE = Case(length=4, mbs=2)
CONFIG: dict[str, Any] = {"make_sequence_length_divisible_by": 1}
METRICS = {"loss": 2.0, "num_valid_samples": 2.0, "lr": 0.1, "grad_norm": 3.0}
WEIGHTS = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([[1.0]])}
BATCH = token_batch(CASE)
LOGPROBS = -torch.rand(CASE.total_rows, CASE.length, generator=torch.Generator().manual_seed(0)) - 0.5
LOGPROBS[:, 0] = 0.0
MASK = BATCH["token_mask"] * BATCH["sample_mask"][:, None]


def measured(**changes: Any) -> Share:
    calls = [
        {
            "global_loss": torch.tensor([2.0]),
            "grad_norm": torch.tensor(3.0),
            "all_mb_metrics": {
                "loss": [0.5, 1.5],
                "num_valid_samples": [1.0, 1.0],
                "lr": [0.1],
                "grad_norm": [3.0],
            },
        }
        for _ in range(2)
    ]
    return Share(
        **{
            "data_rank": 0,
            "logprobs": LOGPROBS.clone(),
            "logprobs_after": LOGPROBS.clone(),
            "repeated": True,
            "under_mask": [LOGPROBS * MASK, LOGPROBS * MASK],
            "reference_logprobs": [],
            "likeliest": [],
            "evaluation": None,
            "calls": calls,
            "weights": {name: tensor.clone() for name, tensor in WEIGHTS.items()},
            **changes,
        }
    )


def expected() -> Expected:
    return Expected(
        [[2.0], [2.0]],
        [[3.0], [3.0]],
        [[3.0], [3.0]],
        [METRICS, METRICS],
        [dict(METRICS), dict(METRICS)],
        WEIGHTS,
        LOGPROBS,
    )


def wrong(share: Share, case: Case = CASE, bounds: Bounds | None = None) -> list[Difference]:
    return [
        found
        for found in compare(case, CONFIG, BATCH, [share], LOGPROBS, expected(), bounds or Bounds())
        if not found.passes
    ]


def changed_call(**changes: Any) -> Share:
    share = measured()
    share.calls[1].update(changes)  # type: ignore[attr-defined]
    return share


def test_what_is_equal_passes() -> None:
    assert wrong(measured()) == []


@pytest.mark.parametrize(("factor", "passes"), [(1 + 0.5 * BOUND, True), (1 + 2 * BOUND, False)])
def test_the_bound_is_relative(factor: float, passes: bool) -> None:
    assert (
        wrong(measured(weights={name: tensor * factor for name, tensor in WEIGHTS.items()})) == []
    ) is passes
    assert (wrong(changed_call(grad_norm=torch.tensor(3.0, dtype=torch.float64) * factor)) == []) is passes


def test_noise_loosens_the_bound_of_its_own_quantity_alone() -> None:
    share = measured(weights={name: tensor * 1.01 for name, tensor in WEIGHTS.items()})
    assert [found.what for found in wrong(share, bounds=Bounds({"weight a": 0.02}))] == ["rank 0 weight b"]
    assert (
        Bounds({"weight a": 0.02}).of("weight a") == FACTOR * 0.02
        and Bounds({"weight a": 0.02}).of("weight b") == BOUND
    )
    late = changed_call(global_loss=torch.tensor([2.02]), grad_norm=torch.tensor(3.03))
    assert wrong(late, bounds=Bounds({"call 0 loss 0": 0.02, "call 0 grad_norm": 0.02})) == wrong(late)
    everything = Bounds({"call 1 loss 0": 0.02, "call 1 loss": 0.02, "call 1 grad_norm": 0.02})
    assert {found.kind for found in wrong(late, bounds=everything)} <= {"loss"}  # ranks among themselves
    assert len(wrong(late, bounds=everything)) < len(wrong(late))


def test_a_gradient_norm_is_relative_to_the_terms_that_cancel_in_it() -> None:
    share = changed_call(grad_norm=torch.tensor(3.001))
    assert {found.kind for found in wrong(share)} == {"grad_norm"}
    wide = expected()
    wide.norm_scales[1] = [1000.0]
    assert all(found.passes for found in compare(CASE, CONFIG, BATCH, [share], LOGPROBS, wide, Bounds()))


def test_every_quantity_is_looked_at() -> None:
    logprobs = LOGPROBS.clone()
    logprobs[1, 2] += 1e-3
    metrics = measured().calls[1]["all_mb_metrics"]
    shares = {
        "logprobs": measured(logprobs=logprobs),
        "loss": changed_call(global_loss=torch.tensor([2.001])),
        "grad_norm": changed_call(grad_norm=torch.tensor(3.001)),
        "metric": changed_call(all_mb_metrics={**metrics, "num_valid_samples": [1.0, 2.0]}),
        "weights": measured(weights={**WEIGHTS, "b": torch.tensor([[1.001]])}),
    }
    for kind, share in shares.items():
        assert kind in {found.kind for found in wrong(share)}, kind


def test_a_metric_that_is_missing_or_unknown_is_a_difference() -> None:
    metrics = measured().calls[1]["all_mb_metrics"]
    assert any("lr" in found.what for found in wrong(changed_call(all_mb_metrics={**metrics, "lr": []})))
    assert any("new" in found.what for found in wrong(changed_call(all_mb_metrics={**metrics, "new": [1.0]})))


def test_a_weight_that_is_missing_or_too_many_is_a_difference() -> None:
    assert [found.what for found in wrong(measured(weights={"a": WEIGHTS["a"]}))] == ["rank 0 weight b"]
    assert [found.what for found in wrong(measured(weights={**WEIGHTS, "c": torch.ones(1)}))] == [
        "rank 0 weight c"
    ]


def test_zeros_of_column_0_and_padding_are_exact() -> None:
    logprobs = LOGPROBS.clone()
    logprobs[0, 0] = 1e-12
    assert wrong(measured(logprobs=logprobs))[0].error == math.inf


def test_ranks_that_hold_the_same_rows_have_to_agree() -> None:
    other = measured(logprobs=LOGPROBS + 0.1 * (LOGPROBS != 0))
    found = compare(CASE, CONFIG, BATCH, [measured(), other], LOGPROBS, expected(), Bounds())
    assert any("rank 1" in one.what and not one.passes for one in found)


def test_an_evaluation_has_to_report_the_first_loss() -> None:
    case = replace(CASE, evaluate=True)
    assert wrong(measured(evaluation={"global_loss": torch.tensor([2.0])}), case) == []
    assert "evaluation" in wrong(measured(evaluation={"global_loss": torch.tensor([2.1])}), case)[0].what
    assert "evaluation" in wrong(measured(), case)[0].what


def test_reference_logprobs_have_to_be_those_from_before() -> None:
    case = replace(CASE, reference=True)
    assert wrong(measured(reference_logprobs=[LOGPROBS, LOGPROBS]), case) == []
    assert "reference" in wrong(measured(reference_logprobs=[LOGPROBS, LOGPROBS * 1.01]), case)[0].what
    assert "before" in wrong(measured(reference_logprobs=[LOGPROBS * 1.01, LOGPROBS]), case)[0].what
    assert "after those of the reference" in wrong(measured(repeated=False))[0].what
    assert "after training" in wrong(measured(logprobs_after=LOGPROBS * 1.01))[0].what


@pytest.mark.parametrize(
    ("found", "target", "scale", "error"),
    [
        (0.0, 0.0, 0.0, 0.0),
        (math.inf, math.inf, 0.0, 0.0),
        (math.inf, -math.inf, 0.0, math.inf),
        (math.nan, 1.0, 1.0, math.inf),
        (1.0, math.nan, 1.0, math.inf),
        (math.nan, math.nan, 1.0, math.inf),
        (1e-30, 0.0, 0.0, math.inf),
        (1.1, 1.0, 0.0, pytest.approx(0.1)),
        (1.1, 1.0, 10.0, pytest.approx(0.01)),
    ],
)
def test_relative_error_of_every_kind_of_number(
    found: float, target: float, scale: float, error: float
) -> None:
    assert relative_error(found, target, scale) == error


@pytest.mark.parametrize("number", [0, 1])
def test_what_is_under_a_mask_has_to_be_computed_and_nothing_else(number: int) -> None:
    shown = MASK * (LOGPROBS != 0)
    assert 0 < shown.sum() < (LOGPROBS != 0).sum()
    for changed in (LOGPROBS, LOGPROBS * MASK * 1.001, LOGPROBS * 0):
        parts = [LOGPROBS * MASK, LOGPROBS * MASK]
        parts[number] = changed
        assert {found.kind for found in wrong(measured(under_mask=parts))} == {"logprobs"}
    assert wrong(measured(under_mask=[]), replace(CASE, paths="plain")) == []
