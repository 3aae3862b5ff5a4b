"""How far the log-probabilities of what generated are from those of the policy that is trained: equal weights, other kernels and sums."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.errors import MismatchError

FAR = 0.05
TOKEN_MULT_PROB_ERROR = "token_mult_prob_error"


def mismatch_metrics(generation: Tensor, policy: Tensor, mask: Tensor) -> dict[str, float]:
    """The difference of two log-probabilities of each token.

    Args:
        generation: [B, S] float, where the tokens were drawn.
        policy: [B, S] float, of the policy before its update.
        mask: [B, S], not 0 on the tokens that count.

    Returns:
        Over these tokens: ``mismatch_mean`` and ``mismatch_max`` of the absolute difference, ``mismatch_share_above_0.05`` of the tokens,
        and ``token_mult_prob_error``, the mean of exp(|difference|). A difference that is not a number is counted as infinite. Without
        any token 0, 0, 0 and 1.
    """
    difference = (generation.double() - policy.double()).abs()[mask.bool()]
    difference = torch.where(difference.isnan(), torch.inf, difference)
    if difference.numel() == 0:
        return {"mismatch_mean": 0.0, "mismatch_max": 0.0, f"mismatch_share_above_{FAR}": 0.0, TOKEN_MULT_PROB_ERROR: 1.0}
    return {
        "mismatch_mean": float(difference.mean()),
        "mismatch_max": float(difference.max()),
        f"mismatch_share_above_{FAR}": float((difference > FAR).double().mean()),
        TOKEN_MULT_PROB_ERROR: float(difference.exp().mean()),
    }


def check_mismatch(metrics: dict[str, float], bound: float | None, step: int) -> None:
    """Refuse to train on answers that another policy seems to have given.

    Raises:
        MismatchError: ``token_mult_prob_error`` is above the bound.
    """
    error = metrics[TOKEN_MULT_PROB_ERROR]
    if bound is not None and not error <= bound:
        raise MismatchError(
            f"step {step}: {TOKEN_MULT_PROB_ERROR} = {error:.4g} is above grpo.max_token_mult_prob_error = {bound:g}; the "
            f"log-probabilities of generation and training differ by {metrics['mismatch_mean']:.3g} on average, by more than {FAR} for "
            f"{metrics[f'mismatch_share_above_{FAR}']:.1%} of the tokens. Nothing was trained on these answers. Fix: compare the precision "
            "of the engine with policy.precision, and its log-probabilities with those of transformers on the exported model; raise the "
            "bound only if the difference is understood"
        )
