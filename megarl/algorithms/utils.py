"""Arithmetic shared by the losses, and seeding."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megarl.distributed.device import seed_everything

# Makes the mean of an empty mask 0 / epsilon = 0. Less than half an ulp of any float32 count from 1 on, so
# that other means are unchanged.
_EPSILON = 1e-8


def masked_mean(
    values: Tensor,
    mask: Tensor,
    dim: int | None = None,
    global_normalization_factor: Tensor | float | None = None,
) -> Tensor:
    """Return ``sum(values * mask) / (factor + 1e-8)``. The factor is the sum of the mask, unless a global
    factor is given.

    Values under a zero mask never reach the result, not even NaN or infinity. An empty mask gives exactly 0.

    Args:
        values: any shape, float or bool.
        mask: same shape or broadcastable; weights, 0 for values that do not count.
        dim: dimension to reduce; None reduces all.
        global_normalization_factor: the divisor, such as the number of valid tokens in the global batch.
    """
    weights = mask.to(values.dtype if values.is_floating_point() else torch.float32)
    # where before the product: 0 times NaN or infinity is NaN.
    kept = (
        torch.where(
            weights != 0,
            values.to(weights.dtype),
            torch.zeros((), dtype=weights.dtype, device=weights.device),
        )
        * weights
    )
    total = kept.sum() if dim is None else kept.sum(dim=dim)
    if global_normalization_factor is None:
        factor: Tensor | float = (
            weights.expand_as(kept).sum() if dim is None else weights.expand_as(kept).sum(dim=dim)
        )
    else:
        factor = global_normalization_factor
    return total / (factor + _EPSILON)


def calculate_kl(
    logprobs: Tensor,
    logprobs_reference: Tensor,
    kl_type: Literal["k1", "k2", "k3"] = "k3",
    input_clamp_value: float | None = None,
    output_clamp_value: float | None = None,
) -> Tensor:
    """Estimate KL(policy || reference) for each token sampled from the policy.

    With ``d = reference - policy`` (J. Schulman, "Approximating KL Divergence", 2020): ``k1`` is -d and
    unbiased. ``k2`` is d^2 / 2 and biased, but its gradient is that of the KL. ``k3`` is exp(d) - d - 1 and
    unbiased; it is negative only by rounding, whose error exceeds the value for small d.

    Autograd through the result differentiates the value. That gradient stops at a clamp, and for k1 and k3 it
    is not the gradient of the KL; ``ClippedPGLossFn`` computes the correct one. The result has the shape and
    dtype of the inputs.

    Args:
        logprobs, logprobs_reference: log-probabilities of the policy and the reference, float, same shape.
        kl_type: the estimator.
        input_clamp_value: clamp d to plus and minus this; None for no clamp.
        output_clamp_value: clamp the estimate to plus and minus this; None for no clamp.
    """
    difference = logprobs_reference - logprobs
    if input_clamp_value is not None:
        difference = difference.clamp(-input_clamp_value, input_clamp_value)
    if kl_type == "k1":
        estimate = -difference
    elif kl_type == "k2":
        estimate = difference.square() / 2
    else:
        estimate = torch.exp(difference) - difference - 1
    return estimate if output_clamp_value is None else estimate.clamp(-output_clamp_value, output_clamp_value)


def calculate_kl_penalty_joschu2020(
    logprobs_policy: Tensor,
    logprobs_reference: Tensor,
    input_clamp_value: float | None = None,
    output_clamp_value: float | None = None,
) -> Tensor:
    """Call ``calculate_kl`` with the estimator k3. Exists for its name in the NeMo-RL policy API."""
    return calculate_kl(logprobs_policy, logprobs_reference, "k3", input_clamp_value, output_clamp_value)


def set_seed(seed: int) -> None:
    """Seed Python, numpy and torch (all devices) in this process."""
    seed_everything(seed)
