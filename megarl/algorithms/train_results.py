"""Conversion of the results of training calls and forward passes to plain numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.interfaces import LossFunction, reads_values
from megarl.models.engine.microbatches import under_mask
from megarl.observe.metrics import Reduction, default_reduction, reduce_metrics, reduce_values
from megarl.observe.timing import Sequences


def step_metrics(result: Mapping[str, Any], loss_fn: LossFunction) -> dict[str, float]:
    """Return the metrics of a training call.

    ``loss`` and ``grad_norm`` are means over its global batches; others are reduced as the loss declares.
    After an evaluation there is no ``grad_norm``.
    """
    metrics = reduce_metrics(result["all_mb_metrics"], getattr(loss_fn, "metric_reductions", {}))
    metrics["loss"] = float(torch.as_tensor(result["loss"], dtype=torch.float64).mean())
    if "grad_norm" not in metrics and result.get("grad_norm") is not None:
        metrics["grad_norm"] = float(torch.as_tensor(result["grad_norm"], dtype=torch.float64).mean())
    return metrics


def metrics_of_epochs(results: Sequence[Mapping[str, Any]], loss_fn: LossFunction) -> dict[str, float]:
    """Combine the metrics of several training calls with the same batch. Metrics that the loss reduces by
    minimum or maximum are reduced in the same way, all others averaged. A metric that only some calls have is
    reduced over these."""
    values: dict[str, list[float]] = defaultdict(list)
    for result in results:
        for name, value in step_metrics(result, loss_fn).items():
            values[name].append(value)
    declared, metrics = getattr(loss_fn, "metric_reductions", {}), {}
    for name, each in values.items():
        way = declared.get(name, default_reduction(name))
        metrics[name] = reduce_values(each, Reduction.MEAN if way is Reduction.SUM else way)
    return metrics


def trained_sequences(
    batch: Mapping[str, Tensor], result: Mapping[str, Any], loss_fn: LossFunction
) -> Sequences:
    """Describe the sequences of a training call, to compute the throughput of its phase.

    Args:
        batch: the batch.
        result: result of ``Policy.train``.
        loss_fn: loss function of the call.
    """
    scored = scored_tokens(batch) if getattr(loss_fn, "skips_masked", False) else None
    if reads_values(loss_fn):
        scored = int(
            batch["input_lengths"].sum()
        )  # A scalar head is cheap, but computes a value for each token.
    return Sequences(batch["input_lengths"].numpy(), positions=result.get("positions"), scored=scored)


def scored_tokens(batch: Mapping[str, Tensor]) -> int:
    """Return the number of tokens whose log-probabilities a forward pass computes: those under the masks,
    without the first token of each row."""
    return int(under_mask(batch)[:, 1:].count_nonzero())
