"""The loss that a case names."""

from __future__ import annotations

from typing import Any

from megarl.algorithms.loss_functions import ClippedPGLossFn, DPOLossFn, NLLLoss
from megarl.parity.case import Case


def make_loss(case: Case) -> Any:
    """A loss of the contract. The reference calls the same one, once, on the whole global batch."""
    options = case.loss_options
    if case.loss_kind == "nll":
        return NLLLoss()
    if case.loss_kind == "dpo":
        return DPOLossFn(
            {
                "reference_policy_kl_penalty": 0.3,
                "preference_loss_weight": 1.0,
                "sft_loss_weight": 0.2 if "sft" in options else 0.0,
                "preference_average_log_probs": "mean" in options,
                "sft_average_log_probs": "mean" in options,
            }
        )
    return ClippedPGLossFn(
        {
            "reference_policy_kl_penalty": 0.1 if "kl" in options else 0.0,
            "ratio_clip_min": 0.2,
            "ratio_clip_max": 0.28,
            "ratio_clip_c": 1.5 if "dual" in options else None,
            "use_on_policy_kl_approximation": "approx" in options,
            "use_importance_sampling_correction": "is" in options,
            "token_level_loss": "seq" not in options,
            "disable_ppo_ratio": "noratio" in options,
        }
    )


def rows_together(loss_fn: Any) -> int:
    """Consecutive rows that a loss needs in one micro-batch."""
    return int(getattr(loss_fn, "rows_together", 1))
