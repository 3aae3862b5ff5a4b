"""Plan which data-parallel replica and micro-batch gets each row of a batch. The driver plans from sequence
lengths alone.

Every replica gets the same number of micro-batches, because collectives inside a forward pass (FSDP, expert
parallelism) must match across ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch

from megarl.config.arithmetic import sequence_share
from megarl.config.backend import enabled_backend
from megarl.config.policy import DynamicBatchingConfig, PolicyConfig, SequencePackingConfig
from megarl.data.packing import DEFAULT_PACKING_ALGORITHM
from megarl.distributed.batched_data_dict import BatchedDataDict, DealtRows, SlicedDataDict, with_columns
from megarl.distributed.shard_plan import DynamicBatchingArgs, SequencePackingArgs

Phase = Literal["train", "logprob"]
DEFAULT_ROUND = 64
DEFAULT_HIDDEN_SIZE = 2048


STAGE_KEYS = frozenset(("input_ids", "input_lengths", "token_mask", "sample_mask", "response_tokens"))
"""Batch columns that every pipeline stage needs in training: the tokens, their lengths, and the masks that
the loss normalizers count. Only the last stage computes the loss, so only it gets the other columns."""


@dataclass(frozen=True)
class ShardedBatch:
    """A batch distributed over data-parallel replicas.

    Attributes:
        dealt: for each replica, its row numbers in order and its micro-batch plan.
        rows: number of rows in the original batch. Row numbers from ``rows`` up are padding: copies of the
            last row.
    """

    dealt: list[DealtRows]
    rows: int

    @cached_property
    def shards(self) -> list[SlicedDataDict]:
        """The shard of each replica, as the worker receives it."""
        return [deal.shard() for deal in self.dealt]

    @cached_property
    def order(self) -> list[int]:
        """The row numbers in the batch, in the order of the concatenated shards."""
        return [row for deal in self.dealt for row in deal.rows]

    def rows_of(self, replica: int, first: int, last: int) -> list[int]:
        """Return the batch's row numbers for rows ``first`` (inclusive) to ``last`` (exclusive) of one
        replica."""
        return list(self.dealt[replica].rows[first:last])

    def by_stage(self, stages: int) -> list[list[DealtRows]]:
        """Return the data for each pipeline stage: all replicas' rows, with only ``STAGE_KEYS`` for every
        stage but the last."""
        # Repeat one list for all earlier stages, so that the columns are selected and packed only once.
        return [*[with_columns(self.dealt, STAGE_KEYS)] * (stages - 1), self.dealt]

    def restore(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Merge the replicas' results into one tensor in the row order of the batch, without the padding
        rows."""
        restored = parts[0].new_empty(len(self.order), *parts[0].shape[1:])
        for deal, part in zip(self.dealt, parts, strict=True):
            # Scatter by row number, because packing and dynamic batching do not keep the order of the rows.
            restored[torch.as_tensor(deal.rows, dtype=torch.int64)] = part
        return restored[: self.rows]


def shard_batch(
    data: BatchedDataDict[Any],
    policy: PolicyConfig,
    replicas: int,
    *,
    phase: Phase,
    global_batch: int | None = None,
    rows_together: int = 1,
    hidden_size: int = DEFAULT_HIDDEN_SIZE,
) -> ShardedBatch:
    """Distribute the rows of a batch over data-parallel replicas.

    Uses ``policy.sequence_packing`` or ``policy.dynamic_batching`` if enabled; otherwise every replica gets
    the same number of consecutive rows.

    Args:
        data: ``input_ids`` [B, S], ``input_lengths`` [B] and any other columns.
        policy: the policy configuration.
        replicas: number of data-parallel replicas.
        phase: selects the token budget (``train_mb_tokens`` or ``logprob_mb_tokens``). In ``logprob`` any
            number of rows is allowed: the batch is padded with copies of its last row.
        global_batch: rows per optimizer step; None for all rows in one step.
        rows_together: number of consecutive rows that must stay in one micro-batch (2 for preference pairs).
        hidden_size: the model's hidden size, which determines the cost of attention relative to matmuls.

    Raises:
        BatchError: the number of rows is not divisible as required, or a sequence exceeds the token budget.
        PackingError: with packing, a sequence exceeds the token budget, or there are fewer rows than
            replicas.
    """
    rows = data.size
    # Pad only for log-probabilities, whose extra rows are discarded. In training, a copy would add to the
    # loss.
    if phase == "logprob":
        data = _filled(data, replicas * rows_together)
    packing, dynamic = policy.get("sequence_packing"), policy.get("dynamic_batching")
    dynamic_args: DynamicBatchingArgs | None = None
    packing_args: SequencePackingArgs | None = None
    if packing and packing["enabled"]:
        packing_args = _packing_args(packing, policy, phase, rows_together, hidden_size)
    elif dynamic and dynamic["enabled"]:
        dynamic_args = _dynamic_args(dynamic, policy, phase, rows_together)
    dealt = data.deal(
        replicas, global_batch, dynamic_batching_args=dynamic_args, sequence_packing_args=packing_args
    )
    return ShardedBatch(dealt, rows)


def _filled(data: BatchedDataDict[Any], multiple: int) -> BatchedDataDict[Any]:
    missing = -data.size % multiple
    return data.select_indices([*range(data.size), *[data.size - 1] * missing]) if missing else data


def sequence_multiple(policy: PolicyConfig) -> int:
    """Return the number that must divide a padded sequence length so that context- and sequence-parallel
    ranks get equal shards."""
    backend = enabled_backend(policy)
    if backend == "megatron":
        megatron = policy["megatron_cfg"]
        return sequence_share(
            megatron["tensor_model_parallel_size"],
            megatron["context_parallel_size"],
            megatron["sequence_parallel"],
        )
    if backend == "dtensor":
        dtensor = policy["dtensor_cfg"]
        return sequence_share(
            dtensor["tensor_parallel_size"], dtensor["context_parallel_size"], dtensor["sequence_parallel"]
        )
    return 1


def _packing_args(
    packing: SequencePackingConfig, policy: PolicyConfig, phase: Phase, rows_together: int, hidden_size: int
) -> SequencePackingArgs:
    return {
        "max_tokens_per_microbatch": packing["train_mb_tokens"]
        if phase == "train"
        else packing["logprob_mb_tokens"],
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
        "algorithm": packing.get("algorithm") or DEFAULT_PACKING_ALGORITHM.value,
        "sequence_length_pad_multiple": sequence_multiple(policy),
        # At this sequence length, causal attention costs as many FLOPs as the matmuls; see ``sequence_cost``.
        "attention_crossover_length": 12 * hidden_size,
        "rows_together": rows_together,
    }


def _dynamic_args(
    dynamic: DynamicBatchingConfig, policy: PolicyConfig, phase: Phase, rows_together: int
) -> DynamicBatchingArgs:
    # Rounded lengths must be multiples of this too, or a rounded micro-batch could not be split over the
    # ranks.
    multiple = math.lcm(sequence_multiple(policy), policy.get("make_sequence_length_divisible_by") or 1)
    return {
        "max_tokens_per_microbatch": dynamic["train_mb_tokens"]
        if phase == "train"
        else dynamic["logprob_mb_tokens"],
        "sequence_length_round": math.lcm(dynamic.get("sequence_length_round") or DEFAULT_ROUND, multiple),
        "width_multiple": multiple,
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
        "rows_together": rows_together,
    }
