"""Loss functions of a case, as the workers compute them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megarl.algorithms.distillation_loss import DistillationLossFn
from megarl.algorithms.loss_functions import ClippedPGLossFn, DPOLossFn, NLLLoss
from megarl.algorithms.value_losses import PreferenceLoss, ValueLoss
from megarl.config.losses import ClippedPGLossConfig, DistillationLossConfig, DPOLossConfig
from megarl.parity.case import Case
from megarl.parity.lines import CaseError

# float16 overflows at 65504, and loss scaling starts at 2**16, so a gradient element of 1 would overflow and
# the step would be skipped. One case in seven has a gradient element that large; none of sixty cases had one
# larger than 8. A power of two as factor adds no rounding.
QUIET = 2.0**-6
# IPO's loss is quadratic: its gradient grows with the distance of the margin from 1 / (2 beta). Norms of up
# to 440 occurred.
QUIET_SQUARE = 2.0**-10


def loss_weight(case: Case) -> float:
    """Return the factor on the case's loss and balancing losses, which keeps float16 gradients from
    overflowing; 1 in other precisions."""
    if case.precision != "float16":
        return 1.0
    return QUIET_SQUARE if "ipo" in case.loss_options else QUIET


def make_loss(case: Case) -> Any:
    """Return the ``LossFunction`` that the workers compute.

    The reference has independent implementations in ``megarl.parity.reference_losses``.
    """
    loss_fn, weight = _loss(case), loss_weight(case)
    # Cover both ways of the engine: with masked positions skipped, and with all positions computed.
    loss_fn.skips_masked = case.is_fast
    return loss_fn if weight == 1.0 else _Weighted(loss_fn, weight)


class _Weighted:
    """Wrapper that multiplies a loss and its ``loss`` metric by ``weight``."""

    def __init__(self, loss_fn: Any, weight: float) -> None:
        self._loss_fn = loss_fn
        self._weight = weight

    # The engine also reads attributes of a loss, such as ``rows_together``.
    def __getattr__(self, name: str) -> Any:
        return getattr(self._loss_fn, name)

    def __call__(self, *arguments: Any, **options: Any) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        loss, metrics = self._loss_fn(*arguments, **options)
        return loss * self._weight, {**metrics, "loss": metrics["loss"] * self._weight}


def _loss(case: Case) -> Any:
    options = case.loss_options
    if case.loss_kind == "nll":
        return NLLLoss()
    if case.loss_kind == "rm":
        return PreferenceLoss()
    if case.loss_kind == "value":
        return ValueLoss(case.loss_number("clip") if "clip" in options else None)
    if case.loss_kind == "distill":
        return DistillationLossFn(distillation_settings(case))
    if case.loss_kind == "dpo":
        return DPOLossFn(preference_settings(case))
    return ClippedPGLossFn(policy_gradient_settings(case))


def preference_settings(case: Case) -> DPOLossConfig:
    """Return the DPO loss configuration of a case."""
    options = case.loss_options
    return {
        "reference_policy_kl_penalty": _number(case, "beta"),
        "preference_loss_type": "ipo" if "ipo" in options else "sigmoid",
        "preference_loss_weight": _number(case, "weight"),
        "sft_loss_weight": _number(case, "sft") if "sft" in options else 0.0,
        "preference_average_log_probs": "mean" in options,
        "sft_average_log_probs": "sft-mean" in options,
    }


def distillation_settings(case: Case) -> DistillationLossConfig:
    """Return the distillation loss configuration of a case."""
    options = case.loss_options
    return {
        "kl_type": "forward" if "forward" in options else "mixed" if "mixed" in options else "reverse",
        "mixed_kl_weight": _number(case, "mixed"),
        "outside_topk": "renormalize" if "renorm" in options else "rest",
    }


TRUNCATIONS = {"tis": "tis", "icepop": "icepop", "seq-mask": "seq-mask-tis"}
"""Configuration value of ``truncated_importance_sampling_type`` for each truncation option of a case."""


def _bounds_of_weights(case: Case) -> tuple[float | None, float | None]:
    """Return the lower and upper bound of the importance weights; None for no bound."""
    # A loss has at most one of these options.
    for option in TRUNCATIONS.keys() & case.loss_options:
        # ``tis`` has an upper bound only.
        *low, high = case.loss_numbers(option)
        return (low[0] if low else None), high
    return None, None


def policy_gradient_settings(case: Case) -> ClippedPGLossConfig:
    """Return the clipped-policy-gradient loss configuration of a case."""
    options = case.loss_options
    kind = next((TRUNCATIONS[option] for option in TRUNCATIONS if option in options), None)
    low, high = _bounds_of_weights(case)
    below, above = case.loss_numbers("cliprange")
    assert below is not None and above is not None
    return {
        "reference_policy_kl_penalty": _number(case, "kl") if "kl" in options else 0.0,
        "ratio_clip_min": below,
        "ratio_clip_max": above,
        "ratio_clip_c": case.loss_number("dual") if "dual" in options else None,
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
        "sequence_normalizer": case.loss_number("constant") if "constant" in options else None,
        "reference_policy_kl_type": "k1" if "k1" in options else "k2" if "k2" in options else "k3",
        "reference_policy_kl_gradient": "pathwise" if "pathwise" in options else "exact",
        "use_kl_in_reward": "in-reward" in options,
        "log_ratio_clamp_value": case.loss_number("ratio-clamp"),
        "kl_input_clamp_value": case.loss_number("kl-input-clamp"),
        "kl_output_clamp_value": case.loss_number("kl-output-clamp"),
        "entropy_coef": _number(case, "entropy") if "entropy" in options else 0.0,
    }


def _number(case: Case, option: str) -> float:
    number = case.loss_number(option)
    if number is None:
        raise CaseError(f"case word 'loss={case.loss}': {option} needs a number, not none")
    return number


def rows_together(loss_fn: Any) -> int:
    """Return the number of consecutive rows that a loss needs in the same micro-batch (2 for preference
    pairs)."""
    return int(getattr(loss_fn, "rows_together", 1))
