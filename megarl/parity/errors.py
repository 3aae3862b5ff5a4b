"""Relative errors: a log-probability's to itself or 1, a number's to itself or the size of its terms, a
weight's to its tensor."""

from __future__ import annotations

import math

import torch
from torch import Tensor

BOUND = 1e-5
"""Largest relative error in float32, and elsewhere of what rounding does not touch."""

# exp(d), the difference to d and that to 1 each round once, exp by up to two units: 4 units of float32 of the
# sum of the terms at most
ROUNDING = 4 * 2.0**-24


def relative_error(found: float, expected: float, scale: float = 0.0) -> float:
    """``|found - expected|`` by the larger of ``|expected|`` and ``scale``; 0 for equal numbers, also
    infinities, infinite for what is no number."""
    if found == expected:
        return 0.0
    size = max(abs(expected), scale)
    if not (math.isfinite(found) and math.isfinite(expected)) or size == 0:
        return math.inf
    return abs(found - expected) / size


def token_errors(found: Tensor, expected: Tensor) -> Tensor:
    """Return the error of every log-probability, in their shape; where ``expected`` is exactly 0 (column 0,
    padding) nothing else will do."""
    error = (found - expected).abs() / expected.abs().clamp(min=1.0)
    return torch.where((expected == 0) & (found != 0), math.inf, error).nan_to_num(
        nan=math.inf, posinf=math.inf
    )


def tensor_error(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference by that of ``expected``; infinite for what is no number and for
    anything but 0 where 0 is expected."""
    difference, size = float((found.float() - expected.float()).norm()), float(expected.float().norm())
    return difference / size if math.isfinite(difference) and size else math.inf if difference else 0.0


def root_mean_square(errors: Tensor) -> float:
    """Root mean square of all numbers; 0 where there are none."""
    return float(errors.double().square().mean().sqrt()) if errors.numel() else 0.0
