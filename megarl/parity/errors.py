"""Relative errors of log-probabilities, numbers and tensors.

The error of a log-probability is relative to its size, but at least to 1; the error of a number is relative
to its size or the size of the terms that it is computed from; the error of a tensor is relative to its norm.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BOUND = 1e-5
"""Largest accepted relative error in float32, and in 16-bit precision for quantities that 16-bit rounding
does not affect."""

# In exp(d) - d - 1 each subtraction rounds once, and exp is off by up to two units. That is at most 4 float32
# units in total, relative to the sum of the absolute terms.
ROUNDING = 4 * 2.0**-24


def relative_error(found: float, expected: float, scale: float = 0.0) -> float:
    """Return ``|found - expected|`` divided by the larger of ``|expected|`` and ``scale``.

    The result is 0 for equal numbers, including equal infinities, and infinite for NaN.
    """
    if found == expected:
        return 0.0
    size = max(abs(expected), scale)
    if not (math.isfinite(found) and math.isfinite(expected)) or size == 0:
        return math.inf
    return abs(found - expected) / size


def token_errors(found: Tensor, expected: Tensor) -> Tensor:
    """Return the error of each log-probability, in the shape of ``found``.

    Where ``expected`` is exactly 0 (column 0 and padding), any other value counts as an infinite error.
    """
    error = (found - expected).abs() / expected.abs().clamp(min=1.0)
    return torch.where((expected == 0) & (found != 0), math.inf, error).nan_to_num(
        nan=math.inf, posinf=math.inf
    )


def tensor_error(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference divided by the norm of ``expected``.

    The result is infinite for NaN, and for any non-zero difference if ``expected`` is all zeros.
    """
    difference, size = float((found.float() - expected.float()).norm()), float(expected.float().norm())
    return difference / size if math.isfinite(difference) and size else math.inf if difference else 0.0


def root_mean_square(errors: Tensor) -> float:
    """Return the root mean square of all elements; 0 for an empty tensor."""
    return float(errors.double().square().mean().sqrt()) if errors.numel() else 0.0
