"""Batch plan: the assignment of rows to data-parallel replicas and micro-batches, and its reversal. The
driver plans from lengths only.

Every replica gets the same number of micro-batches, so that collectives inside a forward pass (FSDP, expert
parallelism) match.
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
"""Columns of a training batch that every pipeline stage reads: tokens, their lengths, and what normalisers
count. Other columns are for the loss, which the last stage computes."""


@dataclass(frozen=True)
class ShardedBatch:
    """A batch distributed over replicas.

    Attributes:
        dealt: rows of each replica, in order, with their micro-batch plans, as sent to the replica.
        rows: number of rows of the batch; row numbers from this on are copies that only fill up.
    """

    dealt: list[DealtRows]
    rows: int

    @cached_property
    def shards(self) -> list[SlicedDataDict]:
        """Rows of each replica as the replica receives them."""
        return [deal.shard() for deal in self.dealt]

    @cached_property
    def order(self) -> list[int]:
        """Row number in the batch of each row of the concatenated shards."""
        return [row for deal in self.dealt for row in deal.rows]

    def rows_of(self, replica: int, first: int, last: int) -> list[int]:
        """Return the row numbers in the batch of a replica's rows ``first`` to ``last`` (exclusive)."""
        return list(self.dealt[replica].rows[first:last])

    def by_stage(self, stages: int) -> list[list[DealtRows]]:
        """Return each replica's rows for each pipeline stage, with the columns that the stage reads."""
        return [*[with_columns(self.dealt, STAGE_KEYS)] * (stages - 1), self.dealt]

    def restore(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the replicas' results for their rows, in the order of the batch."""
        restored = parts[0].new_empty(len(self.order), *parts[0].shape[1:])
        for deal, part in zip(self.dealt, parts, strict=True):
            # Restore by row numbers, because packing and dynamic batching distribute rows in another order.
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
    """Distribute a batch over data-parallel replicas, by ``policy.sequence_packing`` or
    ``policy.dynamic_batching`` if enabled, otherwise evenly.

    Args:
        data: ``input_ids`` [B, S], ``input_lengths`` [B] and any other columns.
        policy: the policy configuration.
        replicas: number of data-parallel replicas.
        phase: selects the token budget. For log-probabilities any number of rows is allowed; copies of the
            last row fill up.
        global_batch: rows per optimizer step; None for all rows in one.
        rows_together: consecutive rows that stay in one micro-batch (2 for preference pairs).
        hidden_size: hidden size of the model; balances attention against matrix multiplications.

    Raises:
        BatchError: sizes do not divide, or a sequence does not fit the token budget.
        PackingError: a sequence does not fit the token budget, or there are fewer rows than replicas.
    """
    rows = data.size
    # Add copies only for log-probabilities: in training, a copied row would count twice.
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
    """Return the number that must divide sequence lengths, so that the ranks of ``policy``'s layout get equal
    parts."""
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
        "attention_crossover_length": 12 * hidden_size,
        "rows_together": rows_together,
    }


def _dynamic_args(
    dynamic: DynamicBatchingConfig, policy: PolicyConfig, phase: Phase, rows_together: int
) -> DynamicBatchingArgs:
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
