"""Reduction of metrics: how the values of one, one per micro-batch and rank, become the number of a step.
Pure Python."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType


class Reduction(Enum):
    """Reduction of the micro-batch values of a metric to its value for the step."""

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"


FAR = 0.05
MISMATCH_MEAN, MISMATCH_MAX, MISMATCH_SHARE = "mismatch_mean", "mismatch_max", f"mismatch_share_above_{FAR}"
"""Metrics of the difference between the log-probabilities of generation and of the policy, of each token."""

# The same number is reported by every micro-batch, so adding them would multiply it.
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
"""Reductions of the names that are not sums and that no loss has to declare."""


def default_reduction(name: str) -> Reduction:
    """Return the reduction of a metric that nobody declared: by known name, then by suffix (``_min``,
    ``_max``), else a sum.

    A prefix such as ``train/`` plays no part.
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
    """Return one number from the values of one metric.

    Args:
        values: numbers, or zero-dimensional tensors; at least one.
        reduction: how to combine them. A NaN among the values gives NaN under every reduction, so that a
            fault on one rank is seen whatever the order of the ranks.

    Raises:
        ValueError: there is no value.
    """
    numbers = [float(value) for value in values]
    if not numbers:
        raise ValueError(f"{reduction.name} of no values is undefined; give at least one value")
    # min and max of Python keep a NaN or lose it, by its position.
    if any(math.isnan(number) for number in numbers):
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
    """Return the metrics of a step from those of its micro-batches.

    Args:
        all_mb_metrics: per name, the values of all micro-batches of all data-parallel ranks.
        reductions: what the loss declares (``loss_fn.metric_reductions``); names missing there follow
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
    """Return a sum that does not depend on the order of the ranks; ``fsum`` refuses infinities of both signs
    and overflow."""
    try:
        return math.fsum(numbers)
    except (ValueError, OverflowError):
        return sum(numbers)
