"""The passes that every backend runs: training on a batch, and computing log-probabilities or values of a
batch."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from megarl.algorithms.interfaces import reads_values
from megarl.distributed.device import is_out_of_memory, runtime
from megarl.errors import BatchError, ConfigError, MicroBatchMemoryError, NonFiniteError
from megarl.models.engine.backend import Backend, StepOutcome
from megarl.models.engine.batching import Batching, Chunk
from megarl.models.engine.heads import (
    Head,
    HeadOutput,
    LogprobHead,
    LossHead,
    TopkHead,
    ValueHead,
    ValueLossHead,
)
from megarl.models.engine.microbatches import HOST_LENGTHS, WANTED, fit_sequences
from megarl.models.engine.model_input import ModelInput, lay_out_all
from megarl.models.engine.nonfinite import SkipLimit, SkippedBatch, find, on_all_ranks
from megarl.models.engine.normalizers import global_normalizers
from megarl.models.engine.output_layer import Request
from megarl.models.generation.sampling import SamplingSettings
from megarl.observe.metrics import Reduction, default_reduction


@dataclass(frozen=True, slots=True)
class TrainResult:
    """Outcome of ``train_on_batch``, equal on all ranks of a data-parallel replica.

    Attributes:
        losses: float32 [global batches], each the true loss of its global batch.
        grad_norms: one per global batch; empty in evaluation.
        micro_batch_metrics: for each metric a list over this replica's micro-batches.
        skipped: global batches after which no step was taken, because their loss or gradient was not finite.
        positions: number of positions in this replica's micro-batches, including padding, over all
            context-parallel ranks.
    """

    losses: torch.Tensor
    grad_norms: list[float]
    micro_batch_metrics: dict[str, list[float]]
    skipped: list[SkippedBatch]
    positions: int


@contextlib.contextmanager
def evaluation_mode(backend: Backend) -> Iterator[None]:
    """Put the model into evaluation mode without gradients inside the context, and restore its mode
    afterwards."""
    training = backend.is_training()
    backend.set_training(False)
    try:
        with torch.no_grad():
            yield
    finally:
        backend.set_training(training)


def _require_equal_passes(backend: Backend, chunks: Sequence[Chunk]) -> None:
    """Raise, before any pass, if replicas have different numbers of micro-batches and would wait for each
    other indefinitely."""
    group = backend.replicas_in_step
    if group is None:
        return
    counts: list[int] = [0] * dist.get_world_size(group)
    dist.all_gather_object(
        counts, sum(len(chunk.micro_batches(backend.shapes)) for chunk in chunks), group=group
    )
    if len(set(counts)) > 1:
        raise BatchError(
            f"data-parallel replicas have {counts} micro-batches, but their passes share "
            "collectives; give each the same number (shard the batch with "
            "megarl.models.policy.batch_plan.shard_batch)"
        )


TRAINING, LOGPROB = "training", "log-probability"
"""Kinds of passes over a model."""
_ADVICE = {
    TRAINING: "policy.train_micro_batch_size, or train_mb_tokens of dynamic_batching or sequence_packing",
    LOGPROB: "policy.logprob_batch_size, or logprob_mb_tokens of dynamic_batching or sequence_packing",
}


class _RecordingHead:
    """A head that records which micro-batch was requested last."""

    def __init__(self, head: Head, inputs: Sequence[ModelInput]) -> None:
        # Look inputs up by identity: they hold tensors, whose comparison with == is not a bool.
        self._head, self._places = head, {id(model_input): place for place, model_input in enumerate(inputs)}
        self.last = 0

    def asks(self, model_input: ModelInput) -> Request | None:
        """Record the micro-batch; see ``Head``."""
        self.last = self._places.get(id(model_input), self.last)
        return self._head.asks(model_input)

    def __call__(
        self, output: torch.Tensor, model_input: ModelInput, request: Request | None = None
    ) -> HeadOutput:
        """Call the recorded head; see ``Head``."""
        return self._head(output, model_input, request)


def _run_micro_batches(
    backend: Backend, chunk: Chunk, head: Head, kind: str, *, backward: bool = False
) -> tuple[list[HeadOutput], int]:
    """Run ``backend.forward_backward`` over the micro-batches of a chunk.

    Args:
        backend: the model.
        chunk: the rows and their division into micro-batches.
        head: as for ``forward_backward``.
        kind: ``TRAINING`` or ``LOGPROB``.
        backward: leave gradients in the backend, which must have none before.

    Returns:
        The head's results, and the number of positions of the micro-batches.

    Raises:
        MicroBatchMemoryError: a micro-batch does not fit in memory.
    """
    inputs = lay_out_all(chunk.micro_batches(backend.shapes), backend.groups.context_share, backend.shapes)
    recording = _RecordingHead(head, inputs)
    try:
        outputs = backend.forward_backward(inputs, recording, backward=backward)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # The micro-batch requested last is the one that ran out of memory, although a pipeline schedule has
        # several in progress.
        raise _error_of(error, kind, inputs, recording.last) from error
    return outputs, sum(each.micro_batch.positions for each in inputs)


def _error_of(
    error: BaseException, kind: str, inputs: Sequence[ModelInput], number: int
) -> MicroBatchMemoryError:
    micro_batch, here = inputs[number].micro_batch, runtime()
    rows, tokens, positions = micro_batch.size, sum(micro_batch.lengths), micro_batch.positions
    peak, limit = here.memory().peak_reserved_mb / 1024, here.memory_limit() / 2**30
    first_line = next(iter(str(error).splitlines()), "")
    return MicroBatchMemoryError(
        f"out of memory in a {kind} pass, at micro-batch {number + 1} of {len(inputs)}: {rows} rows, "
        f"{tokens} tokens in {positions} "
        f"positions; peak {peak:.2f} GiB, limit {limit:.2f} GiB ({type(error).__name__}: {first_line}). No "
        "weight was changed by it. "
        f"Fix: a smaller {_ADVICE[kind]}; policy.logprob_chunk_size; recomputed activations; or more ranks "
        "that share a layer."
    )


MODEL_KEYS = ("input_ids", "input_lengths", HOST_LENGTHS, WANTED)


def logprobs_of_batch(
    backend: Backend,
    data: Mapping[str, Any],
    batching: Batching,
    *,
    sampling: SamplingSettings,
    chunk_size: int | None = None,
) -> torch.Tensor:
    """Compute log-probabilities of a batch's tokens under the present weights.

    Args:
        backend: the model.
        data: ``input_ids`` [B, S] and ``input_lengths`` [B], this data-parallel rank's rows, on the backend's
            device; optionally ``WANTED``.
        batching: division of the rows into micro-batches.
        sampling: how tokens are sampled, and therefore scored.
        chunk_size: number of positions whose logits exist at a time; None for all positions of a micro-batch.

    Returns:
        [B, S] float32 on every pipeline stage, in the order of ``data``; column 0 and padding are exactly 0.
        Tokens that are not in ``WANTED`` are 0 too, unless the output layer cannot skip them.

    Raises:
        BatchError: replicas whose passes share collectives have different numbers of micro-batches, or one of
            them has no rows; raised on all ranks.
    """
    head = LogprobHead(backend.vocabulary, sampling, chunk_size)
    return _run_head(backend, data, batching, head, LOGPROBS)["logprobs"]


def topk_of_batch(
    backend: Backend,
    data: Mapping[str, Any],
    batching: Batching,
    *,
    count: int,
    sampling: SamplingSettings,
    vocabulary_size: int | None = None,
    chunk_size: int | None = None,
) -> dict[str, torch.Tensor]:
    """Compute the most likely tokens after each token of a batch under the present weights, in the same pass
    as the log-probabilities.

    Args:
        backend, data, batching, chunk_size: as for ``logprobs_of_batch``.
        count: K, tokens per position; at most the vocabulary.
        sampling: the temperature; it must keep all tokens.
        vocabulary_size: exclude tokens from this id on, for a reader whose output layer has fewer rows than
            the model's; None for the model's whole vocabulary.

    Returns:
        ``logprobs`` [B, S] as from ``logprobs_of_batch``. ``topk_logits`` [B, S, K] float32, the largest
        first: logarithms of probabilities, that is, logits whose exponentials sum to 1 over the vocabulary.
        ``topk_indices`` [B, S, K] int64, their tokens; among equally likely tokens the lower comes first.
        Entry i belongs to the token that follows token i, and is 0 if none follows. Entries of tokens that
        are not in ``WANTED`` are 0 too, unless the output layer cannot skip them.

    Raises:
        BatchError: as for ``logprobs_of_batch``, or ``count`` is not between 1 and the vocabulary.
        ConfigError: sampling excludes tokens.
    """
    size = min(backend.vocabulary.size, vocabulary_size or backend.vocabulary.size)
    if not 1 <= count <= size:
        raise BatchError(
            f"k = {count}: must be from 1 to the vocabulary's size {size}. Fix: give such a number"
        )
    _require_all_tokens(sampling, size, "the most likely tokens")
    # A smaller vocabulary makes the other columns padding, which is in no softmax.
    shard = replace(backend.vocabulary, size=size)
    head = TopkHead(LogprobHead(shard, sampling, chunk_size, largest=count))
    columns = {**LOGPROBS, "topk_logits": ((count,), torch.float32), "topk_indices": ((count,), torch.int64)}
    return _run_head(backend, data, batching, head, columns)


def _require_all_tokens(sampling: SamplingSettings, size: int, what: str) -> None:
    if not sampling.keeps_all(size):
        raise ConfigError(
            f"policy.generation: top_k = {sampling.top_k}, top_p = {sampling.top_p} leave tokens out, and "
            "those have no log-probability: "
            f"{what} cannot be scored. Fix: write top_k: null and top_p: 1.0"
        )


def values_of_batch(backend: Backend, data: Mapping[str, Any], batching: Batching) -> torch.Tensor:
    """Compute the values of a batch's tokens under the present weights, with a value model.

    Args:
        backend: the model.
        data: as for ``logprobs_of_batch``.
        batching: division of the rows into micro-batches.

    Returns:
        [B, S] float32 on every pipeline stage, in the order of ``data``. Entry i is the model's value at
        token i; padding is exactly 0.

    Raises:
        BatchError: as for ``logprobs_of_batch``.
    """
    return _run_head(backend, data, batching, ValueHead(), {"values": ((), torch.float32)})["values"]


# What a head returns for each token: by name, the dimensions behind [B, S] and the dtype.
_Columns = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
LOGPROBS: _Columns = MappingProxyType({"logprobs": ((), torch.float32)})


def _run_head(
    backend: Backend, data: Mapping[str, Any], batching: Batching, head: Head, columns: _Columns
) -> dict[str, torch.Tensor]:
    """Run a head over a batch without gradients. Return its tensors [B, S, ...] in the order of ``data``."""
    rows, length = data["input_ids"].shape
    device = data["input_ids"].device
    # This is a collective over data-parallel ranks, so that it must precede anything that depends on this
    # rank's rows.
    backend.sync_parameters()
    # Pass only the model's keys, so that each micro-batch slices and pads no others.
    chunks = batching.chunks({key: data[key] for key in MODEL_KEYS if key in data}) if rows else []
    # Fill the last micro-batch with copies, because a pipeline takes one shape. Their results are dropped
    # below.
    even = [chunk.without_ragged_end() if backend.shapes.equal else chunk for chunk in chunks]
    _require_equal_passes(backend, even)
    if rows == 0:
        return {
            name: torch.zeros(0, length, *shape, dtype=dtype, device=device)
            for name, (shape, dtype) in columns.items()
        }
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in columns}
    with evaluation_mode(backend):
        for chunk, cut in zip(chunks, even, strict=True):
            outputs, _ = _run_micro_batches(backend, cut, head, LOGPROB)
            # Restore the caller's width, because dynamic micro-batches were shortened to their own lengths.
            rectangles = [fit_sequences(output.tensors, length) for output in outputs]
            # Only the last pipeline stage has outputs.
            for name, found in parts.items() if rectangles else ():
                found.append(torch.cat([rectangle[name] for rectangle in rectangles])[: chunk.rows])
    joined = {}
    for name, (shape, dtype) in columns.items():
        # The other stages allocate memory of the same shape, into which the broadcast writes.
        here = (
            torch.cat(parts[name])
            if backend.groups.is_last_stage
            else torch.empty(rows, length, *shape, dtype=dtype, device=device)
        )
        # Broadcast once for all micro-batches, not once for each.
        joined[name] = backend.groups.from_last_stage(here)
    return joined


def train_on_batch(
    backend: Backend,
    data: Mapping[str, Any],
    loss_fn: Callable[..., tuple[torch.Tensor, Mapping[str, Any]]],
    batching: Batching,
    *,
    sampling: SamplingSettings,
    limit: SkipLimit | None,
    chunk_size: int | None = None,
) -> TrainResult:
    """Take one optimizer step for each global batch in ``data``; without a ``limit``, evaluate only and
    change nothing.

    If the loss or gradient of a global batch is not finite on any rank, no step follows it: weights,
    optimizer and schedule stay unchanged.

    Args:
        backend: the model.
        data: this data-parallel rank's rows, on the backend's device; a whole number of global batches.
        loss_fn: a ``LossFunction``, whose results are summed over micro-batches and ranks.
        batching: division of this rank's rows into global batches and micro-batches.
        sampling: how tokens are sampled, and therefore scored.
        chunk_size: number of positions whose logits exist at a time; None for all positions of a micro-batch.
        limit: the maximum number of skipped steps. With it, optimizer steps are taken, and the schedule
            advances once at the end if there was a step.

    Raises:
        NonFiniteError: ``limit`` is exceeded; raised on all ranks.
    """
    update = limit is not None
    losses: list[float] = []
    grad_norms: list[float] = []
    metrics: dict[str, list[float]] = defaultdict(list)
    skipped: list[SkippedBatch] = []
    steps = positions = 0
    # Training keeps the mode that prepare_for_training set.
    mode = contextlib.nullcontext() if update else evaluation_mode(backend)
    with_entropies, further = (
        getattr(loss_fn, "needs_entropies", False),
        getattr(loss_fn, "scored_tokens", None),
    )
    if further is not None:
        _require_all_tokens(sampling, backend.vocabulary.size, f"the tokens of {further}")
    of_language = LogprobHead(backend.vocabulary, sampling, chunk_size, with_entropies, further)
    reads = ValueHead() if reads_values(loss_fn) else of_language
    chunks = batching.chunks(data)
    with mode:
        for number, chunk in enumerate(chunks):
            done = _global_batch(backend, chunk, loss_fn, reads, update)
            losses.append(done.loss)
            positions += done.positions
            extra = done.metrics
            if limit is not None:
                outcome, is_finite = _step(backend, done.loss, data["input_ids"].device)
                grad_norms.append(outcome.grad_norm)
                extra = {**extra, "grad_norm": outcome.grad_norm, **outcome.metrics}
                steps += outcome.stepped
                if outcome.stepped:
                    limit.stepped()
                # A float16 overflow with a finite loss is not a fault of the batch: the scale decreases and
                # training continues.
                elif not is_finite:
                    first_row = sum(earlier.rows for earlier in chunks[:number])
                    seen = find(done.outputs, chunk.micro_batches(backend.shapes), first_row, backend.groups)
                    skipped.append(SkippedBatch(number, done.loss, outcome.grad_norm, seen))
                    try:
                        limit.skipped(skipped[-1])
                    except NonFiniteError as error:
                        # Attach the skipped batches, because the driver records them even if the last one
                        # ends the run.
                        error.skipped = [batch.as_record() for batch in skipped]
                        raise
            for measured in (*done.measured, extra):
                for name, value in measured.items():
                    metrics[name].append(value)
    figures = _averaged_over_batches(metrics, loss_fn, len(chunks))
    if update:
        # Report one number for the whole call, equal on every replica.
        figures["skipped_steps"] = [float(len(chunks) - steps)]
        if steps:
            # Step the schedule once per call, whatever the number of global batches, because the schedule
            # counts calls.
            backend.lr_step()
    return TrainResult(
        torch.tensor(losses, dtype=torch.float64).float(), grad_norms, figures, skipped, positions
    )


def _step(backend: Backend, loss: float, device: torch.device) -> tuple[StepOutcome, bool]:
    """Take an optimizer step if loss and gradient are finite on all ranks. Return its outcome, and whether
    the batch is finite; an overflow of float16's loss scaling counts as finite if the loss is."""
    loss_is_finite = math.isfinite(loss)
    # Agree inside the step: the norm is known only there, and either all ranks must step or none.
    outcome = backend.apply_gradients(
        lambda norm: on_all_ranks(loss_is_finite and math.isfinite(norm), device)
    )
    return outcome, outcome.stepped or (outcome.overflowed and on_all_ranks(loss_is_finite, device))


@dataclass(frozen=True, slots=True)
class _GlobalBatch:
    """Outcome of one global batch: its loss, this rank's results and metrics by micro-batch, metrics of the
    batch as a whole, and the number of positions in this rank's micro-batches."""

    loss: float
    outputs: Sequence[HeadOutput]
    measured: Sequence[Mapping[str, float]]
    metrics: Mapping[str, float]
    positions: int


def _global_batch(
    backend: Backend,
    chunk: Chunk,
    loss_fn: Callable[..., tuple[torch.Tensor, Mapping[str, Any]]],
    reads: LogprobHead | ValueHead,
    update: bool,
) -> _GlobalBatch:
    """Run forward, and with ``update`` backward, over one global batch; gradients are left in the backend."""
    # Compute the counts before any pass, because each micro-batch's loss is divided by counts of the whole
    # global batch.
    normalizers = global_normalizers(chunk.data, backend.groups)
    head: Head = (
        ValueLossHead(loss_fn, reads, normalizers)
        if isinstance(reads, ValueHead)
        else LossHead(loss_fn, reads, normalizers)
    )
    if update:
        backend.zero_grad()
    else:
        # Do it before the pass: a step that has run out of memory is no micro-batch that has.
        backend.sync_parameters()
    outputs, positions = _run_micro_batches(backend, chunk, head, TRAINING, backward=update)
    # Sum in float64, so that the logged loss does not depend on the number of micro-batches.
    shares = [output.loss.detach().double() for output in outputs if output.loss is not None]
    share = (
        torch.stack(shares).sum()
        if shares
        else torch.zeros((), dtype=torch.float64, device=chunk.data["input_ids"].device)
    )
    # Use a sum, not a mean, because each share is already divided by counts of the whole global batch.
    loss = backend.groups.sum_over_data(backend.groups.from_last_stage(share))
    figures: list[Any] = [loss, normalizers.valid_sequences, normalizers.valid_tokens]
    for output in outputs:
        figures += output.metrics.values()
    # Copy all numbers of the batch at once, because each .item() would wait for the device.
    loss_value, sequences, tokens, *values = as_floats(figures)
    of_outputs = iter(values)
    # Only the last stage has outputs, and every rank must report the same metrics.
    measured = backend.groups.object_from_last_stage(
        [{name: next(of_outputs) for name in output.metrics} for output in outputs]
    )
    batch_metrics = {"global_valid_seqs": sequences, "global_valid_toks": tokens, **backend.schedule_values()}
    return _GlobalBatch(loss_value, outputs, measured, batch_metrics, positions)


def as_floats(values: Sequence[Any]) -> list[float]:
    """Convert numbers and one-element tensors to floats. The host waits only once for all tensors of a
    device."""
    # Group by dtype too: torch.stack would promote int64 to float32, and digits would be lost before
    # .double().
    kinds: dict[torch.device, dict[torch.dtype, list[int]]] = defaultdict(lambda: defaultdict(list))
    floats: list[float] = []
    for place, value in enumerate(values):
        is_tensor = isinstance(value, torch.Tensor)
        floats.append(0.0 if is_tensor else float(value))
        if is_tensor:
            kinds[value.device][value.dtype].append(place)
    for by_dtype in kinds.values():
        parts, positions = [], []
        for places in by_dtype.values():
            parts.append(torch.stack([values[place].reshape(()) for place in places]).double())
            positions += places
        for place, number in zip(positions, torch.cat(parts).tolist(), strict=True):
            floats[place] = number
    return floats


def _averaged_over_batches(
    metrics: Mapping[str, list[float]], loss_fn: Any, count: int
) -> dict[str, list[float]]:
    """Divide metrics that are sums over a global batch by ``count``, the number of global batches, so that
    their sum is a mean over global batches."""
    declared = getattr(loss_fn, "metric_reductions", {})
    averaged = {}
    for name, values in metrics.items():
        # Divide sums by the number of global batches, with which they would grow. Means and maxima do not
        # grow.
        is_sum = declared.get(name, default_reduction(name)) is Reduction.SUM
        averaged[name] = [value / count for value in values] if is_sum else list(values)
    return averaged
