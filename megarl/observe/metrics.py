"""Reduce a metric's values, one per micro-batch and rank, to one number per step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType


class Reduction(Enum):
    """Rule that combines the values of a metric from all micro-batches to the value of the step."""

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"


FAR = 0.05
MISMATCH_MEAN, MISMATCH_MAX, MISMATCH_SHARE = "mismatch_mean", "mismatch_max", f"mismatch_share_above_{FAR}"
"""Metrics of the absolute per-token difference between the engine's and the policy's log-probabilities."""

# Every micro-batch reports the step's value of these metrics, so a sum would multiply it.
_REPEATED_NAMES = (
    "lr",
    "wd",
    "reward",
    "global_valid_seqs",
    "global_valid_toks",
    "grad_norm",
    "skipped_steps",
    "moe_aux_loss",
    "moe_z_loss",
)

DEFAULT_REDUCTIONS: Mapping[str, Reduction] = MappingProxyType(
    {name: Reduction.MEAN for name in _REPEATED_NAMES}
)
"""Reductions of common metrics for which the default (a sum) would be wrong. A loss need not declare them."""


def default_reduction(name: str) -> Reduction:
    """Return the reduction of a metric that the loss does not declare: from ``DEFAULT_REDUCTIONS``, else by
    suffix (``_min``, ``_max``), else a sum. Prefixes such as ``train/`` are ignored."""
    bare_name = name.rsplit("/", 1)[-1]
    if bare_name in DEFAULT_REDUCTIONS:
        return DEFAULT_REDUCTIONS[bare_name]
    if bare_name.endswith("_min"):
        return Reduction.MIN
    if bare_name.endswith("_max"):
        return Reduction.MAX
    return Reduction.SUM


def reduce_values(values: Sequence[float], reduction: Reduction) -> float:
    """Reduce the values of a metric to one number.

    Args:
        values: numbers or zero-dimensional tensors, at least one.
        reduction: how to combine them. Any NaN gives NaN, also for MIN and MAX, so that a fault on one rank
            is visible.

    Raises:
        ValueError: ``values`` is empty.
    """
    numbers = list(map(float, values))
    if not numbers:
        raise ValueError(f"{reduction.name} of no values is undefined; give at least one value")
    # Python's min and max keep or lose a NaN depending on its position.
    if any(map(math.isnan, numbers)):
        return math.nan
    if reduction is Reduction.MIN:
        return min(numbers)
    if reduction is Reduction.MAX:
        return max(numbers)
    total = _exact_sum(numbers)
    return total / len(numbers) if reduction is Reduction.MEAN else total


def reduce_metrics(
    all_mb_metrics: Mapping[str, Sequence[float]], reductions: Mapping[str, Reduction] | None = None
) -> dict[str, float]:
    """Reduce the metrics of all micro-batches to those of the step.

    Args:
        all_mb_metrics: name -> values of all micro-batches of all data-parallel ranks.
        reductions: reductions that the loss declares (``loss_fn.metric_reductions``); other metrics use
            ``default_reduction``.

    Returns:
        Name -> value. Metrics without any value (every micro-batch was skipped) are omitted.
    """
    declared = reductions or {}
    return {
        name: reduce_values(values, declared[name] if name in declared else default_reduction(name))
        for name, values in all_mb_metrics.items()
        if len(values) > 0
    }


def _exact_sum(numbers: Sequence[float]) -> float:
    """Return the correctly rounded sum, which is independent of the order of the ranks. ``fsum`` raises on
    overflow and on infinities of both signs; the plain sum is used then."""
    try:
        return math.fsum(numbers)
    except (ValueError, OverflowError):
        return sum(numbers)
