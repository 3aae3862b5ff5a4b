"""The answer of ``Policy.train`` as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from megarl.observe.metrics import reduce_metrics

if TYPE_CHECKING:
    from megarl.algorithms.interfaces import LossFunction


def step_metrics(result: Mapping[str, Any], loss_fn: LossFunction) -> dict[str, float]:
    """Metrics of a training call.

    ``loss`` and ``grad_norm`` are means over its global batches, the others are reduced as the loss declares. There is no ``grad_norm``
    after an evaluation.
    """
    metrics = reduce_metrics(result["all_mb_metrics"], loss_fn.metric_reductions)
    metrics["loss"] = float(torch.as_tensor(result["loss"], dtype=torch.float64).mean())
    if "grad_norm" not in metrics and result.get("grad_norm") is not None:
        metrics["grad_norm"] = float(torch.as_tensor(result["grad_norm"], dtype=torch.float64).mean())
    return metrics
