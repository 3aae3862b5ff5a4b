"""Passes over a batch that every backend runs: training, log-probabilities, top-k tokens and values."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from megarl.algorithms.interfaces import reads_values
from megarl.distributed.device import is_out_of_memory, runtime
from megarl.distributed.parcels import Columns
from megarl.errors import BatchError, ConfigError, MicroBatchMemoryError, NonFiniteError
from megarl.models.engine.backend import Backend, StepOutcome
from megarl.models.engine.batching import Batching, Chunk
from megarl.models.engine.heads import (
    Head,
    HeadOutput,
    LogprobHead,
    Loss,
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
        losses: float32 [global batches], the loss of each global batch over all ranks.
        grad_norms: gradient norm of each global batch; empty in evaluation.
        micro_batch_metrics: for each metric, its values for this replica's micro-batches.
        skipped: global batches whose step was skipped because loss or gradient was not finite.
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
    """Switch the model to evaluation mode without gradients inside the context, and restore its mode
    afterwards."""
    training = backend.is_training()
    backend.set_training(False)
    try:
        with torch.no_grad():
            yield
    finally:
        backend.set_training(training)


def _require_equal_passes(backend: Backend, chunks: Sequence[Chunk]) -> None:
    """Raise BatchError before any pass if the replicas have different numbers of micro-batches. Their
    collectives would otherwise wait for each other indefinitely."""
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
"""Kinds of passes, used in error messages."""
_ADVICE = {
    TRAINING: "policy.train_micro_batch_size, or train_mb_tokens of dynamic_batching or sequence_packing",
    LOGPROB: "policy.logprob_batch_size, or logprob_mb_tokens of dynamic_batching or sequence_packing",
}


class _RecordingHead:
    """A head that records which micro-batch was started last, and delegates to another head."""

    def __init__(self, head: Head, inputs: Sequence[ModelInput]) -> None:
        # Look up by identity: inputs contain tensors, for which == does not return a bool.
        self._head, self._places = head, {id(model_input): place for place, model_input in enumerate(inputs)}
        self.last = 0

    def asks(self, model_input: ModelInput) -> Request | None:
        """Record the micro-batch, and return the other head's request."""
        self.last = self._places.get(id(model_input), self.last)
        return self._head.asks(model_input)

    def __call__(
        self, output: torch.Tensor, model_input: ModelInput, request: Request | None = None
    ) -> HeadOutput:
        """Call the other head; see ``Head``."""
        return self._head(output, model_input, request)


def _run_micro_batches(
    backend: Backend, chunk: Chunk, head: Head, kind: str, *, backward: bool = False
) -> tuple[list[HeadOutput], int]:
    """Run ``backend.forward_backward`` over the micro-batches of a chunk.

    Args:
        backend: the model.
        chunk: rows of one global batch, which are split into micro-batches here.
        head: the head to run.
        kind: ``TRAINING`` or ``LOGPROB``, for messages.
        backward: accumulate gradients in the backend, whose gradients must be zero before.

    Returns:
        The head's results, and the number of positions of all micro-batches.

    Raises:
        MicroBatchMemoryError: the device ran out of memory in a micro-batch.
    """
    inputs = lay_out_all(chunk.micro_batches(backend.shapes), backend.groups.context_share, backend.shapes)
    recording = _RecordingHead(head, inputs)
    try:
        outputs = backend.forward_backward(inputs, recording, backward=backward)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # A pipeline schedule has several micro-batches in progress. The one that was started last ran out of
        # memory.
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
    data: Columns,
    batching: Batching,
    *,
    sampling: SamplingSettings,
    chunk_size: int | None = None,
) -> torch.Tensor:
    """Compute log-probabilities of a batch's tokens under the current weights.

    Args:
        backend: the model.
        data: ``input_ids`` [B, S] and ``input_lengths`` [B], this data-parallel rank's rows, on the backend's
            device; optionally ``WANTED``.
        batching: splits the rows into micro-batches.
        sampling: sampling settings that determine the scored distribution.
        chunk_size: number of positions whose logits exist at a time; None for all positions of a micro-batch.

    Returns:
        [B, S] float32 on every pipeline stage, in the order of ``data``. Column 0 and padding are exactly 0.
        So are tokens outside ``WANTED``, unless the output layer does not support requests.

    Raises:
        BatchError: replicas whose passes share collectives have different numbers of micro-batches, or one of
            them has no rows; raised on all ranks.
    """
    head = LogprobHead(backend.vocabulary, sampling, chunk_size)
    return _run_head(backend, data, batching, head, LOGPROBS)["logprobs"]


def topk_of_batch(
    backend: Backend,
    data: Columns,
    batching: Batching,
    *,
    count: int,
    sampling: SamplingSettings,
    vocabulary_size: int | None = None,
    chunk_size: int | None = None,
) -> dict[str, torch.Tensor]:
    """Compute the most likely next tokens at each position under the current weights, in the same pass as the
    log-probabilities.

    Args:
        backend, data, batching, chunk_size: as in ``logprobs_of_batch``.
        count: number K of tokens per position, at most the vocabulary size.
        sampling: gives the temperature; must not exclude any token.
        vocabulary_size: exclude tokens with this id or a higher one, because the student's output layer has
            fewer rows than this model's; None for the full vocabulary.

    Returns:
        ``logprobs`` [B, S] as in ``logprobs_of_batch``. ``topk_logits`` [B, S, K] float32 in descending
        order: log-probabilities, normalized over the vocabulary. ``topk_indices`` [B, S, K] int64, the token
        ids; of equally likely tokens the lower id comes first. Entry i of the latter two describes the token
        after token i, and is 0 if there is none. Entries for tokens outside ``WANTED`` are 0 too, unless the
        output layer does not support requests.

    Raises:
        BatchError: see ``logprobs_of_batch``; or ``count`` is not between 1 and the vocabulary size.
        ConfigError: sampling excludes tokens.
    """
    size = min(backend.vocabulary.size, vocabulary_size or backend.vocabulary.size)
    if not 1 <= count <= size:
        raise BatchError(
            f"k = {count}: must be from 1 to the vocabulary's size {size}. Fix: give such a number"
        )
    _require_all_tokens(sampling, size, "the most likely tokens")
    # With a smaller vocabulary size, the remaining columns count as padding, which is in no softmax.
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


def values_of_batch(backend: Backend, data: Columns, batching: Batching) -> torch.Tensor:
    """Compute the scalar output of a reward or value model at each token of a batch, under the current
    weights.

    Args:
        backend: the model.
        data: as in ``logprobs_of_batch``.
        batching: splits the rows into micro-batches.

    Returns:
        [B, S] float32 on every pipeline stage, in the order of ``data``. Entry i is the output at token i;
        padding is exactly 0.

    Raises:
        BatchError: see ``logprobs_of_batch``.
    """
    return _run_head(backend, data, batching, ValueHead(), {"values": ((), torch.float32)})["values"]


# The tensors that a head returns: by name, the dimensions after [B, S] and the dtype.
_Columns = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
LOGPROBS: _Columns = MappingProxyType({"logprobs": ((), torch.float32)})


def _run_head(
    backend: Backend, data: Columns, batching: Batching, head: Head, columns: _Columns
) -> dict[str, torch.Tensor]:
    """Run a head over a batch without gradients. Return its tensors [B, S, ...] in the order of ``data``.
    ``columns`` has their further dimensions and dtypes."""
    rows, length = data["input_ids"].shape
    device = data["input_ids"].device
    # A collective over data-parallel ranks. Run it before anything that depends on this rank's rows, which
    # may raise or return early.
    backend.sync_parameters()
    # Select the model's columns, so that no others are sliced and padded for each micro-batch.
    chunks = batching.chunks({key: data[key] for key in MODEL_KEYS if key in data}) if rows else []
    # A pipeline needs micro-batches of one shape, so the last one is filled with copies of a row. Their
    # results are dropped below.
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
            # Pad to the caller's width, because micro-batches of dynamic batching have their own lengths.
            rectangles = [fit_sequences(output.tensors, length) for output in outputs]
            # Only the last pipeline stage has outputs; on the others there is nothing to concatenate.
            for name, found in parts.items() if rectangles else ():
                found.append(torch.cat([rectangle[name] for rectangle in rectangles])[: chunk.rows])
    joined = {}
    for name, (shape, dtype) in columns.items():
        # The other stages allocate a tensor for the broadcast to write into.
        here = (
            torch.cat(parts[name])
            if backend.groups.is_last_stage
            else torch.empty(rows, length, *shape, dtype=dtype, device=device)
        )
        # One broadcast for all micro-batches.
        joined[name] = backend.groups.from_last_stage(here)
    return joined


def train_on_batch(
    backend: Backend,
    data: Columns,
    loss_fn: Loss,
    batching: Batching,
    *,
    sampling: SamplingSettings,
    limit: SkipLimit | None,
    chunk_size: int | None = None,
) -> TrainResult:
    """Take one optimizer step for each global batch in ``data``. Without a ``limit``, evaluate only and
    change nothing.

    If the loss or gradient of a global batch is not finite on any rank, its step is skipped: weights,
    optimizer state and schedule stay unchanged.

    Args:
        backend: the model.
        data: this data-parallel rank's rows, on the backend's device; they must form complete global batches.
        loss_fn: a ``LossFunction``; its results are summed over micro-batches and ranks.
        batching: splits the rows into global batches and micro-batches.
        sampling: sampling settings that determine the scored distribution.
        chunk_size: number of positions whose logits exist at a time; None for all positions of a micro-batch.
        limit: counts skipped steps and raises at the maximum. If it is given, optimizer steps are taken, and
            the schedule advances once at the end unless all steps were skipped.

    Raises:
        NonFiniteError: ``limit`` is reached; raised on all ranks.
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
                # A float16 overflow with a finite loss is normal: the loss scale is lowered and training
                # continues.
                elif not is_finite:
                    first_row = sum(earlier.rows for earlier in chunks[:number])
                    seen = find(done.outputs, chunk.micro_batches(backend.shapes), first_row, backend.groups)
                    skipped.append(SkippedBatch(number, done.loss, outcome.grad_norm, seen))
                    try:
                        limit.skipped(skipped[-1])
                    except NonFiniteError as error:
                        # Attach the skipped batches: the driver logs them even if the last one ends the run.
                        error.skipped = [batch.as_record() for batch in skipped]
                        raise
            for measured in (*done.measured, extra):
                for name, value in measured.items():
                    metrics[name].append(value)
    figures = _averaged_over_batches(metrics, loss_fn, len(chunks))
    if update:
        # One number for the whole call, equal on every replica.
        figures["skipped_steps"] = [float(len(chunks) - steps)]
        if steps:
            # The schedule counts calls, not global batches.
            backend.lr_step()
    return TrainResult(
        torch.tensor(losses, dtype=torch.float64).float(), grad_norms, figures, skipped, positions
    )


def _step(backend: Backend, loss: float, device: torch.device) -> tuple[StepOutcome, bool]:
    """Take an optimizer step if loss and gradient are finite on all ranks. Return its outcome, and whether
    the batch is finite. A gradient overflow of float16 loss scaling counts as finite if the loss is
    finite."""
    loss_is_finite = math.isfinite(loss)
    # The ranks must agree inside the step, where the norm is known: either all of them step or none.
    outcome = backend.apply_gradients(
        lambda norm: on_all_ranks(loss_is_finite and math.isfinite(norm), device)
    )
    return outcome, outcome.stepped or (outcome.overflowed and on_all_ranks(loss_is_finite, device))


@dataclass(frozen=True, slots=True)
class _GlobalBatch:
    """Outcome of one global batch.

    Attributes:
        loss: loss over all ranks.
        outputs: results of this rank's micro-batches.
        measured: metrics of each micro-batch of this replica.
        metrics: metrics of the global batch.
        positions: number of positions in this rank's micro-batches.
    """

    loss: float
    outputs: Sequence[HeadOutput]
    measured: Sequence[Mapping[str, float]]
    metrics: Mapping[str, float]
    positions: int


def _global_batch(
    backend: Backend,
    chunk: Chunk,
    loss_fn: Loss,
    reads: LogprobHead | ValueHead,
    update: bool,
) -> _GlobalBatch:
    """Run the forward pass and, with ``update``, the backward pass over one global batch. Gradients stay in
    the backend."""
    # Compute these before any pass, because each micro-batch's loss is divided by counts of the global batch.
    normalizers = global_normalizers(chunk.data, backend.groups)
    head: Head = (
        ValueLossHead(loss_fn, reads, normalizers)
        if isinstance(reads, ValueHead)
        else LossHead(loss_fn, reads, normalizers)
    )
    if update:
        backend.zero_grad()
    else:
        # Outside the pass, so that running out of memory in a pending step is not blamed on a micro-batch.
        backend.sync_parameters()
    outputs, positions = _run_micro_batches(backend, chunk, head, TRAINING, backward=update)
    # Sum in float64, so that the logged loss does not depend on the number of micro-batches.
    shares = [output.loss.detach().double() for output in outputs if output.loss is not None]
    share = (
        torch.stack(shares).sum()
        if shares
        else torch.zeros((), dtype=torch.float64, device=chunk.data["input_ids"].device)
    )
    # A sum, not a mean, because each share is already divided by counts of the global batch.
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
    """Convert numbers and one-element tensors to floats. The host waits once for each device, not once per
    tensor."""
    # Group by dtype too: torch.stack would promote int64 to float32 and lose digits before .double().
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
    """Divide metrics that are sums over a global batch by ``count``, the number of global batches. Their sum
    over the call is then a mean over global batches."""
    declared = getattr(loss_fn, "metric_reductions", {})
    averaged = {}
    for name, values in metrics.items():
        # Divide sums by the number of global batches, with which they would grow. Means and maxima do not
        # grow.
        is_sum = declared.get(name, default_reduction(name)) is Reduction.SUM
        averaged[name] = [value / count for value in values] if is_sum else list(values)
    return averaged
