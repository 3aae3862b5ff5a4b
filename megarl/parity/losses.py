"""The loss that a case names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megarl.algorithms.distillation_loss import DistillationLossFn
from megarl.algorithms.loss_functions import ClippedPGLossFn, DPOLossFn, NLLLoss
from megarl.algorithms.value_losses import PreferenceLoss, ValueLoss
from megarl.config.losses import ClippedPGLossConfig, DistillationLossConfig
from megarl.parity.case import Case

# float16 ends at 65504, and loss scaling starts with a factor of 2**16: a gradient of 1 would overflow, and the step be skipped. In one of
# seven cases some number of a gradient is that large, in none of sixty was one larger than 8. A power of two rounds nothing.
QUIET = 2.0**-6


def loss_weight(case: Case) -> float:
    """Factor of every loss of the case."""
    return QUIET if case.precision == "float16" else 1.0


def make_loss(case: Case) -> Any:
    """The ``LossFunction`` that the workers compute; the reference has its own, ``megarl.parity.reference_losses``."""
    loss_fn, weight = _loss(case), loss_weight(case)
    loss_fn.skips_masked = case.is_fast
    return loss_fn if weight == 1.0 else _Weighted(loss_fn, weight)


class _Weighted:
    """A loss that counts ``weight`` times."""

    def __init__(self, loss_fn: Any, weight: float) -> None:
        self._loss_fn = loss_fn
        self._weight = weight

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loss_fn, name)

    def __call__(self, *arguments: Any, **options: Any) -> tuple[torch.Tensor, Mapping[str, Any]]:
        loss, metrics = self._loss_fn(*arguments, **options)
        return loss * self._weight, {**metrics, "loss": metrics["loss"] * self._weight}


def _loss(case: Case) -> Any:
    options = case.loss_options
    if case.loss_kind == "nll":
        return NLLLoss()
    if case.loss_kind == "rm":
        return PreferenceLoss()
    if case.loss_kind == "value":
        return ValueLoss(VALUE_CLIP if "clip" in options else None)
    if case.loss_kind == "distill":
        return DistillationLossFn(distillation_settings(case))
    if case.loss_kind == "dpo":
        return DPOLossFn(
            {
                "reference_policy_kl_penalty": 0.3,
                "preference_loss_type": "ipo" if "ipo" in options else "sigmoid",
                "preference_loss_weight": 1.0,
                "sft_loss_weight": 0.2 if "sft" in options else 0.0,
                "preference_average_log_probs": "mean" in options,
                "sft_average_log_probs": "mean" in options,
            }
        )
    return ClippedPGLossFn(policy_gradient_settings(case))


def distillation_settings(case: Case) -> DistillationLossConfig:
    """The settings of a divergence from a teacher that a case names."""
    options = case.loss_options
    config: DistillationLossConfig = {
        "kl_type": "forward" if "forward" in options else "mixed" if "mixed" in options else "reverse",
        "mixed_kl_weight": MIXED,
        "outside_topk": "renormalize" if "renorm" in options else "rest",
    }
    return config


MIXED = 0.3
"""Weight of the forward divergence in a sum of both."""
VALUE_CLIP = 0.2
TRUNCATIONS = {"tis": ("tis", 1.1, None), "icepop": ("icepop", 1.15, 0.85), "seq-mask": ("seq-mask-tis", 1.05, 0.93)}
"""Type, upper and lower bound by the option of a case."""


def policy_gradient_settings(case: Case) -> ClippedPGLossConfig:
    """The settings of a clipped policy gradient that a case names."""
    options = case.loss_options
    kind, high, low = next((TRUNCATIONS[option] for option in TRUNCATIONS if option in options), (None, None, None))
    config: ClippedPGLossConfig = {
        "reference_policy_kl_penalty": 0.1 if "kl" in options else 0.0,
        "ratio_clip_min": 0.2,
        "ratio_clip_max": 0.28,
        "ratio_clip_c": 1.5 if "dual" in options else None,
        "use_on_policy_kl_approximation": "approx" in options,
        "use_importance_sampling_correction": "is" in options,
        "truncated_importance_sampling_type": kind,  # type: ignore[typeddict-item]
        "truncated_importance_sampling_ratio": high,
        "truncated_importance_sampling_ratio_min": low,
        "token_level_loss": "seq" not in options,
        "disable_ppo_ratio": "noratio" in options,
        "force_on_policy_ratio": "forced" in options,
        "sequence_level_importance_ratios": bool({"gspo", "gspo-token"} & options),
        "sequence_level_ratio_gradient": "token" if "gspo-token" in options else "sequence",
        "use_cispo": "cispo" in options,
        "sequence_normalizer": 6.0 if "constant" in options else None,
        "reference_policy_kl_type": "k1" if "k1" in options else "k2" if "k2" in options else "k3",
        "entropy_coef": 0.3 if "entropy" in options else 0.0,
    }
    return config


def rows_together(loss_fn: Any) -> int:
    """Consecutive rows that a loss needs in one micro-batch."""
    return int(getattr(loss_fn, "rows_together", 1))
