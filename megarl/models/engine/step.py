"""The two passes that every backend runs: training on a batch and log-probabilities of a batch."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megarl.models.engine.backend import Backend
from megarl.models.engine.heads import Head, HeadOutput, LogprobHead, LossHead
from megarl.models.engine.microbatches import batch_size, pad_sequences, runs_of_equal_shape, slice_rows, split_rows
from megarl.models.engine.normalizers import global_normalizers
from megarl.observe.metrics import Reduction, default_reduction


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Outcome of :func:`train_on_batch`, the same on every rank of a data-parallel group's replicas.

    Attributes:
        losses: float32 [global batches], each the true loss of its global batch.
        grad_norms: one a global batch; empty in evaluation.
        micro_batch_metrics: a list for each metric over this rank's micro-batches.
    """

    losses: torch.Tensor
    grad_norms: list[float]
    micro_batch_metrics: dict[str, list[float]]


@contextlib.contextmanager
def evaluation_mode(backend: Backend) -> Iterator[None]:
    """Evaluation behaviour without gradients inside, whatever was before outside."""
    training = backend.is_training()
    backend.set_training(False)
    try:
        with torch.no_grad():
            yield
    finally:
        backend.set_training(training)


def _run(backend: Backend, data: Mapping[str, Any], micro_batch_size: int, head: Head, *, backward: bool) -> list[HeadOutput]:
    outputs: list[HeadOutput] = []
    for run in runs_of_equal_shape(split_rows(data, micro_batch_size)):
        outputs.extend(backend.forward_backward(run, head, backward=backward))
    return outputs


def logprobs_of_batch(backend: Backend, data: Mapping[str, Any], *, micro_batch_size: int, temperature: float) -> torch.Tensor:
    """Log-probabilities of the tokens of a batch under the present weights.

    Args:
        backend: the model.
        data: ``input_ids`` [B, S] and ``input_lengths`` [B], this data-parallel rank's rows, on the backend's device.
        micro_batch_size: rows that go through the model together; the last micro-batch may be smaller.
        temperature: logits are divided by it.

    Returns:
        [B, S] float32 on every pipeline stage; column 0 and padding are exactly 0.
    """
    length = data["input_ids"].shape[1]
    backend.sync_parameters()  # a collective over data-parallel ranks, so it comes before anything that depends on this rank's rows
    if batch_size(data) == 0:
        return torch.zeros(0, length, dtype=torch.float32, device=data["input_ids"].device)
    padded = pad_sequences({key: data[key] for key in ("input_ids", "input_lengths")}, backend.sequence_multiple)
    head = LogprobHead(backend.vocabulary, temperature)
    with evaluation_mode(backend):
        outputs = _run(backend, padded, micro_batch_size, head, backward=False)
    if backend.groups.is_last_stage:
        logprobs = torch.cat([output.tensors["logprobs"] for output in outputs])[:, :length].contiguous()
    else:
        logprobs = torch.empty(batch_size(data), length, dtype=torch.float32, device=data["input_ids"].device)
    return backend.groups.from_last_stage(logprobs)


def train_on_batch(
    backend: Backend,
    data: Mapping[str, Any],
    loss_fn: Callable[..., tuple[torch.Tensor, Mapping[str, Any]]],
    *,
    local_batch_size: int,
    micro_batch_size: int,
    temperature: float,
    update: bool,
) -> TrainResult:
    """One optimizer step for each global batch in ``data``; evaluation, which changes nothing, when ``update`` is False.

    Args:
        backend: the model.
        data: this data-parallel rank's rows, on the backend's device; a whole number of global batches.
        loss_fn: a loss of the contract; what it returns adds up over micro-batches and ranks.
        local_batch_size: rows of one global batch on this data-parallel rank.
        micro_batch_size: rows that go through the model together.
        temperature: the sampling temperature.
        update: take optimizer steps and advance the schedule once at the end.
    """
    length = data["input_ids"].shape[1]
    data = pad_sequences(data, backend.sequence_multiple)
    count = batch_size(data) // local_batch_size
    losses: list[torch.Tensor] = []
    grad_norms: list[float] = []
    metrics: dict[str, list[float]] = defaultdict(list)
    mode = contextlib.nullcontext() if update else evaluation_mode(backend)
    with mode:
        for index in range(count):
            part = slice_rows(data, index * local_batch_size, (index + 1) * local_batch_size)
            loss, outputs, extra = _global_batch(backend, part, length, loss_fn, micro_batch_size, temperature, update)
            losses.append(loss)
            if update:
                outcome = backend.apply_gradients()
                grad_norms.append(outcome.grad_norm)
                extra |= {"grad_norm": outcome.grad_norm, "skipped_steps": float(not outcome.stepped)}
            for measured in (*outputs, extra):
                for name, value in measured.items():
                    metrics[name].append(value)
    if update:
        backend.lr_step()
    return TrainResult(torch.stack(losses).float().cpu(), grad_norms, _averaged_over_batches(metrics, loss_fn, count))


def _global_batch(
    backend: Backend,
    part: Mapping[str, Any],
    length: int,
    loss_fn: Callable[..., tuple[torch.Tensor, Mapping[str, Any]]],
    micro_batch_size: int,
    temperature: float,
    update: bool,
) -> tuple[torch.Tensor, Sequence[Mapping[str, float]], dict[str, float]]:
    """Loss of one global batch (gradients are left in the backend), metrics a micro-batch, and metrics of the batch as a whole."""
    normalizers = global_normalizers(part, backend.groups, length)
    head = LossHead(loss_fn, LogprobHead(backend.vocabulary, temperature), normalizers)
    if update:
        backend.zero_grad()
    outputs = _run(backend, part, micro_batch_size, head, backward=update)
    shares = [output.loss.detach().double() for output in outputs if output.loss is not None]
    share = torch.stack(shares).sum() if shares else torch.zeros((), dtype=torch.float64, device=part["input_ids"].device)
    loss = backend.groups.sum_over_data(backend.groups.from_last_stage(share))
    measured = backend.groups.object_from_last_stage([{name: float(value) for name, value in output.metrics.items()} for output in outputs])
    batch_metrics = {
        "global_valid_seqs": float(normalizers.valid_sequences),
        "global_valid_toks": float(normalizers.valid_tokens),
        **backend.schedule_values(),
    }
    return loss, measured, batch_metrics


def _averaged_over_batches(metrics: Mapping[str, list[float]], loss_fn: Any, count: int) -> dict[str, list[float]]:
    """Metrics that are sums over a global batch become shares of their mean over the ``count`` global batches."""
    declared = getattr(loss_fn, "metric_reductions", {})
    return {
        name: [value / count for value in values] if declared.get(name, default_reduction(name)) is Reduction.SUM else list(values)
        for name, values in metrics.items()
    }
