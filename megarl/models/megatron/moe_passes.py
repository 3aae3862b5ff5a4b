"""Training passes over a mixture of experts: they record and balance routers over the real tokens, and keep
replicas in lockstep.

Replicas that share experts run the collectives of every expert layer together, so they need the same number
of micro-batches. The alltoall dispatcher exchanges token counts. The allgather dispatcher assumes that all
ranks bring the same number of tokens; otherwise it would mix up tokens or wait indefinitely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel

from megarl.checkpoint.collective import gather_objects
from megarl.errors import BatchError
from megarl.models.engine.groups import ParallelGroups
from megarl.models.engine.heads import Head, HeadOutput
from megarl.models.engine.logprobs import VocabularyShard
from megarl.models.engine.microbatches import MicroBatch, Shapes, packed_length
from megarl.models.engine.model_input import ModelInput, lay_out
from megarl.models.engine.output_layer import Request
from megarl.models.generation.sampling import MODEL_ITSELF
from megarl.models.megatron.moe_record import BalanceSettings, ExpertTokenCounts, RoutingRecord
from megarl.models.megatron.moe_router import connect, release
from megarl.models.megatron.parallel import ExpertGroups
from megarl.models.megatron.schedule import forward_backward


def _counted_lengths(model_input: ModelInput) -> torch.Tensor:
    """Return the number of real tokens of each row, [b] int64; 0 for rows whose ``sample_mask`` is 0."""
    data = model_input.micro_batch.data
    lengths = data["input_lengths"].to(torch.int64)
    # A dropped sample is computed with the others, but does not count in the balance of experts.
    return lengths.where(data["sample_mask"] != 0, 0) if "sample_mask" in data else lengths


def sequence_numbers(model_input: ModelInput) -> torch.Tensor:
    """Return the row of each token of this context-parallel rank, [n, t] int64; -1 for padding and dropped
    samples."""
    micro_batch, device = model_input.micro_batch, model_input.tokens.device
    lengths, total = _counted_lengths(model_input), micro_batch.length
    rows = torch.arange(micro_batch.size, device=device)
    starts = model_input.layout.starts
    if starts is None:
        inside = torch.arange(total, device=device) < lengths[:, None]
        numbers = rows[:, None].where(inside, -1)
    else:
        assert model_input.places is not None, "packed rows have places"
        begin = model_input.places.begin
        position = torch.arange(total, device=device)
        # The row of a position is the last one that begins at or before it.
        row = torch.searchsorted(begin, position, right=True) - 1
        numbers = row.where(position - begin[row] < lengths[row], -1)[None]
    context = model_input.layout.context
    return numbers[:, context.index(starts or (0, total), device)] if context.size > 1 else numbers


def take_census(inputs: Sequence[ModelInput], groups: ParallelGroups) -> ExpertTokenCounts:
    """Return the token and sequence counts of the global batch; ``inputs`` are this data-parallel rank's
    share of it. A collective over the data-parallel group."""
    lengths = torch.cat(list(map(_counted_lengths, inputs)))
    # Count in float64, which holds every count exactly, and reduce both numbers in one collective.
    figures = torch.stack([lengths.sum(), (lengths > 0).sum()]).double()
    # Sum over data parallelism only: context and pipeline ranks have the same rows, and would count them
    # again.
    tokens, sequences = groups.sum_over_data(figures).tolist()
    return ExpertTokenCounts(tokens, sequences, max(model_input.micro_batch.size for model_input in inputs))


class _NoHead:
    """The head of a pass that only computes the routing; it needs no output from the output layer."""

    def asks(self, model_input: ModelInput) -> Request | None:
        # Request no positions, so that neither the output layer's product nor the softmax is computed.
        none = model_input.targets.new_empty(0)
        return Request(none, none, VocabularyShard(1), MODEL_ITSELF, None)

    def __call__(
        self, output: torch.Tensor, model_input: ModelInput, request: Request | None = None
    ) -> HeadOutput:
        return HeadOutput()


class RecordedPasses:
    """Training passes that record the routing of the last global batch.

    Args:
        chunks: this rank's model.
        settings: load-balancing settings of the model's routers.
        groups, experts: this rank's groups.
        device: where counts are stored.
    """

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        settings: BalanceSettings,
        groups: ParallelGroups,
        experts: ExpertGroups,
        device: torch.device,
    ) -> None:
        self._chunks = chunks
        self._settings = settings
        self._groups = groups
        self._record = RoutingRecord(settings, experts.same_sequences, device)
        connect(chunks, self._record)

    def forward_backward(self, inputs: Sequence[ModelInput], head: Head) -> list[HeadOutput]:
        """Run one pass with gradients over a global batch. If the balancing loss needs counts of the whole
        batch, a pass without gradients comes first."""
        sequences = list(map(sequence_numbers, inputs))
        self._record.open(take_census(inputs, self._groups))
        try:
            if self._settings.counts_ahead:
                self._record.count_ahead(True)
                # Use no_grad, not evaluation mode, because routers must choose as they do in the pass that
                # trains.
                with torch.no_grad():
                    forward_backward(self._chunks, inputs, _NoHead(), backward=False, sequences=sequences)
                self._record.count_ahead(False)
            return forward_backward(self._chunks, inputs, head, backward=True, sequences=sequences)
        finally:
            self._record.close()
            # Release the tensors of the last micro-batch, with which dispatchers would keep the model in
            # memory.
            release(self._chunks)

    def metrics(self) -> dict[str, float]:
        """Return ``RoutingRecord.metrics``. A collective over the world."""
        return self._record.metrics()


@dataclass(frozen=True, slots=True)
class _Size:
    """Number of tokens of a micro-batch in its present layout, and as one packed row."""

    tokens: int
    packed: int


def _size(model_input: ModelInput, shapes: Shapes) -> _Size:
    micro_batch = model_input.micro_batch
    return _Size(micro_batch.positions, packed_length(micro_batch.data, shapes))


def in_step(
    inputs: Sequence[ModelInput], experts: ExpertGroups, shapes: Shapes, *, equal_tokens: bool
) -> list[ModelInput]:
    """Return the micro-batches in a layout in which the replicas that share this rank's experts can run them
    together. A collective over the replicas.

    Args:
        inputs: micro-batches of this rank.
        experts: expert groups of this rank.
        shapes: the backend's requirements on shapes.
        equal_tokens: every micro-batch must have as many tokens as its counterparts on other replicas. If
            they differ, all of them become packed rows of the length of the longest.

    Returns:
        ``inputs`` themselves if nothing had to change.

    Raises:
        BatchError: replicas have different numbers of micro-batches.
    """
    if experts.replicas is None:
        return list(inputs)
    sizes = gather_objects([_size(model_input, shapes) for model_input in inputs], experts.replicas)
    # All replicas raise the same error, because all have the same list; a mismatch would hang in a layer.
    if len(set(map(len, sizes))) > 1:
        raise BatchError(
            f"data-parallel replicas that share experts have {list(map(len, sizes))} "
            "micro-batches; "
            "give each the same number (shard the batch with megarl.models.policy.batch_plan.shard_batch)"
        )
    uneven, totals = [], []
    for counterparts in zip(*sizes, strict=True):
        uneven.append(len({size.tokens for size in counterparts}) > 1)
        totals.append(max(size.packed for size in counterparts))
    if not equal_tokens or not any(uneven):
        return list(inputs)
    # A pipeline allocates by one shape, so that all micro-batches get the longest total.
    if shapes.equal:
        totals, uneven = [max(totals)] * len(totals), [True] * len(totals)
    return [
        lay_out(MicroBatch(given.micro_batch.data, True, total), given.layout.context, shapes)
        if changed
        else given
        for given, total, changed in zip(inputs, totals, uneven, strict=True)
    ]
