"""Arithmetic that the losses share, and seeding."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megarl.distributed.device import seed_everything

# Keeps an empty mask at 0 / epsilon = 0, and is below half a unit in the last place of any float32 count of 1
# or more.
_EPSILON = 1e-8


def masked_mean(
    values: Tensor,
    mask: Tensor,
    dim: int | None = None,
    global_normalization_factor: Tensor | float | None = None,
) -> Tensor:
    """Return ``sum(values * mask) / (factor + 1e-8)``, where the factor is the mask's sum unless a global one
    is given.

    Values under a zero mask never reach the result, not even NaN or infinity. An empty mask gives exactly 0.

    Args:
        values: any shape, float or bool.
        mask: same shape (or broadcastable), weights that are 0 where a value does not count.
        dim: dimension to reduce; None reduces all.
        global_normalization_factor: the divisor, for example the valid tokens of the whole global batch.
    """
    weights = mask.to(values.dtype if values.is_floating_point() else torch.float32)
    # Do not use a product alone: 0 times NaN or infinity is NaN.
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

    With ``d = reference - policy`` (J. Schulman, "Approximating KL Divergence", 2020): ``k1`` is -d,
    unbiased; ``k2`` d^2 / 2, biased, but its gradient is the divergence's; ``k3`` exp(d) - d - 1, unbiased
    and negative only by rounding, which exceeds its value for small d. Autograd through the result gives
    gradients of the value, which stop at a clamp and are not those of the divergence for k1 and k3;
    ``ClippedPGLossFn`` has the correct ones. Same shape and dtype as the inputs.

    Args:
        logprobs, logprobs_reference: same shape, float; of the policy and of the reference.
        kl_type: which estimator.
        input_clamp_value: d is clamped to plus and minus this; None for no clamp.
        output_clamp_value: the estimate is clamped likewise; None for no clamp.
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
    """Call ``calculate_kl`` with the estimator k3, under the name that the NeMo-RL policy API has for it."""
    return calculate_kl(logprobs_policy, logprobs_reference, "k3", input_clamp_value, output_clamp_value)


def set_seed(seed: int) -> None:
    """Seed the generators of Python, numpy and torch (all devices) of this process."""
    seed_everything(seed)
