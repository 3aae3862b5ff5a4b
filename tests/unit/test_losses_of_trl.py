"""TRL's losses of GRPO on a fixed batch, values and gradients, where TRL is installed; and what they were in
its version 1.16."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algorithms.loss_functions import ClippedPGLossFn
from tests.tables import read_table
from tests.tiers import slow

TABLES = read_table("losses_of_trl.yaml")

LONGEST = 8
LOW, HIGH = 0.2, 0.28
DEFAULTS = {
    "reference_policy_kl_penalty": 0.0,
    "ratio_clip_min": LOW,
    "ratio_clip_max": HIGH,
    "ratio_clip_c": None,
    "use_on_policy_kl_approximation": False,
    "use_importance_sampling_correction": False,
    "token_level_loss": False,
}
# TRL's bound of CISPO is that of the ratio itself, and its lower bound is 0
CISPO = {"use_cispo": True, "token_level_loss": True, "ratio_clip_min": 1.0, "ratio_clip_max": 0.25}
WEIGHT = 1.3
TRUNCATED = {"use_importance_sampling_correction": True, "truncated_importance_sampling_ratio": WEIGHT}
# what TRL is told, what ClippedPGLossFn is told, and TRL's loss and the sum of the squares of its gradient
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[float, float]]] = TABLES["cases"]


def fixed_batch() -> dict[str, Tensor]:
    """Float64 [4, 1 + LONGEST], all but the first column answers; no generator draws them, so that any
    version of torch has the same."""
    places = torch.arange(4 * LONGEST, dtype=torch.float64).view(4, LONGEST)
    lengths = torch.tensor([8, 3, 5, 1])
    columns = {
        "current": -1.2 + torch.sin(1.7 * places),
        "prev_logprobs": -1.2 + torch.sin(1.7 * places) + 0.4 * torch.sin(2.9 * places + 1),
        "generation_logprobs": -1.2
        + torch.sin(1.7 * places)
        + 0.4 * torch.sin(2.9 * places + 1)
        + 0.5 * torch.sin(4.3 * places + 2),
        "reference_policy_logprobs": -1.2 + torch.sin(1.7 * places) + 0.6 * torch.sin(3.1 * places + 3),
        "advantages": torch.tensor([[1.5], [-0.5], [-1.0], [0.75]], dtype=torch.float64).expand(4, LONGEST),
        "token_mask": (torch.arange(LONGEST)[None] < lengths[:, None]).double(),
    }
    return {
        **{name: torch.nn.functional.pad(values, (1, 0)) for name, values in columns.items()},
        "sample_mask": torch.ones(4, dtype=torch.float64),
    }


def of_megarl(settings: dict[str, Any]) -> tuple[float, Tensor]:
    data = fixed_batch()
    logprobs = data["current"][:, 1:].clone().requires_grad_()
    loss, _ = ClippedPGLossFn({**DEFAULTS, **settings})(  # type: ignore[typeddict-item]
        data, data["sample_mask"].sum(), data["token_mask"].sum(), next_token_logprobs=logprobs
    )
    return float(loss.detach()), torch.autograd.grad(loss, logprobs)[0]


def of_trl(settings: dict[str, Any]) -> tuple[float, Tensor]:
    data = fixed_batch()
    logprobs = data["current"][:, 1:].clone().requires_grad_()
    loss = loss_of_trl(settings, data, logprobs)
    return float(loss.detach()), torch.autograd.grad(loss, logprobs)[0]


def loss_of_trl(settings: Mapping[str, Any], data: Mapping[str, Tensor], logprobs: Tensor) -> Tensor:
    """``GRPOTrainer._compute_loss`` on a trainer that has the settings and, in the place of a model,
    log-probabilities.

    Args:
        settings: of a case.
        data: [B, 1 + T]; all rows count.
        logprobs: [B, T].
    """
    trainer = pytest.importorskip("trl").GRPOTrainer
    ratios = (
        torch.exp(data["prev_logprobs"] - data["generation_logprobs"])[:, 1:] if "mode" in settings else None
    )
    if ratios is not None:
        # as _generate_and_score_completions makes them
        over = ratios > WEIGHT
        ratios = (
            ratios.clamp(max=WEIGHT)
            if settings["mode"] == "token_truncate"
            else ratios.masked_fill(over, 0.0)
        )
    has = {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "epsilon_low": LOW,
        "epsilon_high": HIGH,
        "beta": 0.0,
        **settings,
    }
    stand_in = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *given, **options: (
            logprobs,
            torch.zeros_like(logprobs),
            None,
        ),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        args=SimpleNamespace(
            delta=has.get("delta"),
            use_bias_correction_kl=has.get("use_bias_correction_kl", False),
            steps_per_generation=1,
        ),
        use_vllm=ratios is not None,
        vllm_importance_sampling_correction=ratios is not None,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        max_completion_length=LONGEST,
        accelerator=SimpleNamespace(
            num_processes=1,
            gather=lambda values: values,
            reduce=lambda values, **options: values,
            sync_gradients=True,
        ),
        **{
            name: has[name]
            for name in ("loss_type", "importance_sampling_level", "epsilon_low", "epsilon_high", "beta")
        },
    )
    mask = data["token_mask"][:, 1:]
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": mask[:, :1].long(),
        "completion_ids": ids,
        "completion_mask": mask.long(),
        "advantages": data["advantages"][:, 1],
        "old_per_token_logps": data["prev_logprobs"][:, 1:] if has.get("old", True) else None,
        "ref_per_token_logps": data["reference_policy_logprobs"][:, 1:],
        "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": ratios,
    }
    return trainer._compute_loss(stand_in, None, inputs)


@pytest.mark.parametrize("name", CASES)
def test_the_numbers_of_trl(name: str) -> None:
    _, settings, (value, squares) = CASES[name]
    loss, gradient = of_megarl(settings)
    assert loss == pytest.approx(value, rel=1e-7)
    assert float(gradient.square().sum()) == pytest.approx(squares, rel=1e-7)


@slow
@pytest.mark.parametrize("name", CASES)
def test_the_loss_and_the_gradient_of_trl(name: str) -> None:
    theirs, settings, (value, squares) = CASES[name]
    loss, gradient = of_megarl(settings)
    other, other_gradient = of_trl(theirs)
    assert loss == pytest.approx(other, rel=1e-7)
    torch.testing.assert_close(gradient, other_gradient, rtol=1e-7, atol=1e-9)
    assert (other, float(other_gradient.square().sum())) == pytest.approx((value, squares), rel=1e-9)
