"""Relative errors: of a log-probability to its own size or 1, of a number to its own size or that of its
terms, of a weight to its tensor."""

from __future__ import annotations

import math

import torch
from torch import Tensor

BOUND = 1e-5
"""Largest relative error in float32, and in other precisions of quantities that rounding does not affect."""

# In exp(d) - d - 1 each difference rounds once, and exp by up to two units: at most 4 units of float32,
# relative to the sum of the terms.
ROUNDING = 4 * 2.0**-24


def relative_error(found: float, expected: float, scale: float = 0.0) -> float:
    """Return ``|found - expected|`` divided by the larger of ``|expected|`` and ``scale``. The result is 0
    for equal numbers, including infinities, and infinite for NaN."""
    if found == expected:
        return 0.0
    size = max(abs(expected), scale)
    if not (math.isfinite(found) and math.isfinite(expected)) or size == 0:
        return math.inf
    return abs(found - expected) / size


def token_errors(found: Tensor, expected: Tensor) -> Tensor:
    """Return the error of every log-probability, in their shape. Where ``expected`` is exactly 0 (column 0,
    padding), any other value has an infinite error."""
    error = (found - expected).abs() / expected.abs().clamp(min=1.0)
    return torch.where((expected == 0) & (found != 0), math.inf, error).nan_to_num(
        nan=math.inf, posinf=math.inf
    )


def tensor_error(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference divided by that of ``expected``; infinite for NaN, and for any
    non-zero tensor if 0 is expected."""
    difference, size = float((found.float() - expected.float()).norm()), float(expected.float().norm())
    return difference / size if math.isfinite(difference) and size else math.inf if difference else 0.0


def root_mean_square(errors: Tensor) -> float:
    """Return the root mean square of all numbers; 0 if there are none."""
    return float(errors.double().square().mean().sqrt()) if errors.numel() else 0.0
