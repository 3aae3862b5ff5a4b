"""Reduction of a metric's values, one per micro-batch and rank, to one number per step. Pure Python."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType


class Reduction(Enum):
    """Reduction of a metric's micro-batch values to its value for the step."""

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"


FAR = 0.05
MISMATCH_MEAN, MISMATCH_MAX, MISMATCH_SHARE = "mismatch_mean", "mismatch_max", f"mismatch_share_above_{FAR}"
"""Metrics of the absolute difference, per token, between the log-probabilities of generation and of the
policy."""

# Every micro-batch reports the same value of these, so that adding them would multiply it.
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
"""Reductions of well-known metrics that are not sums. A loss need not declare them."""


def default_reduction(name: str) -> Reduction:
    """Return the reduction of an undeclared metric: by well-known name, else by suffix (``_min``, ``_max``),
    else a sum.

    A prefix such as ``train/`` is ignored.
    """
    bare_name = name.rsplit("/", 1)[-1]
    if bare_name in DEFAULT_REDUCTIONS:
        return DEFAULT_REDUCTIONS[bare_name]
    if bare_name.endswith("_min"):
        return Reduction.MIN
    if bare_name.endswith("_max"):
        return Reduction.MAX
    return Reduction.SUM


def reduce_values(values: Sequence[float], reduction: Reduction) -> float:
    """Reduce the values of one metric to a number.

    Args:
        values: numbers, or zero-dimensional tensors; at least one.
        reduction: how to combine them. Any NaN among the values gives NaN under every reduction, so that a
            fault on one rank shows regardless of the order of the ranks.

    Raises:
        ValueError: there is no value.
    """
    numbers = list(map(float, values))
    if not numbers:
        raise ValueError(f"{reduction.name} of no values is undefined; give at least one value")
    # Check for NaN first, because Python's min and max keep or lose a NaN depending on its position.
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
    """Reduce the metrics of micro-batches to those of the step.

    Args:
        all_mb_metrics: per name, the values of all micro-batches of all data-parallel ranks.
        reductions: reductions that the loss declares (``loss_fn.metric_reductions``); missing names follow
            ``default_reduction``.

    Returns:
        One float per name. A name without values (every micro-batch was skipped) is left out.
    """
    declared = reductions or {}
    return {
        name: reduce_values(values, declared[name] if name in declared else default_reduction(name))
        for name, values in all_mb_metrics.items()
        if len(values) > 0
    }


def _exact_sum(numbers: Sequence[float]) -> float:
    """Return a sum that does not depend on the order of the ranks. Fall back to ``sum`` if ``fsum`` refuses,
    for infinities of both signs or overflow."""
    try:
        return math.fsum(numbers)
    except (ValueError, OverflowError):
        return sum(numbers)
