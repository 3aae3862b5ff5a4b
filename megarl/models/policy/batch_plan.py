"""Batch plan: which row goes to which data-parallel replica and micro-batch, and back, planned on the driver
from lengths alone.

The plan gives every replica the same number of micro-batches, so that collectives inside a forward pass
(FSDP, expert parallelism) meet.
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
"""Columns of a training batch that every pipeline stage reads: tokens, where they end, and what normalisers
count. All else is the loss's, which the last stage computes."""


@dataclass(frozen=True)
class ShardedBatch:
    """A batch dealt to replicas.

    Attributes:
        dealt: the rows of each replica, in order, with their micro-batch plans; what is sent to it.
        rows: rows of the batch; from here on ``order`` names copies that only fill.
    """

    dealt: list[DealtRows]
    rows: int

    @cached_property
    def shards(self) -> list[SlicedDataDict]:
        """The rows of each replica as it gets them."""
        return [deal.shard() for deal in self.dealt]

    @cached_property
    def order(self) -> list[int]:
        """Return for each row of the stacked shards its row in the batch."""
        return [row for deal in self.dealt for row in deal.rows]

    def rows_of(self, replica: int, first: int, last: int) -> list[int]:
        """Rows of the batch that a replica has as its rows ``first`` to ``last`` (exclusive)."""
        return list(self.dealt[replica].rows[first:last])

    def by_stage(self, stages: int) -> list[list[DealtRows]]:
        """The rows of each replica for each pipeline stage, with the columns that the stage reads."""
        return [*[with_columns(self.dealt, STAGE_KEYS)] * (stages - 1), self.dealt]

    def restore(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the replicas' results for their rows in the order of the batch."""
        restored = parts[0].new_empty(len(self.order), *parts[0].shape[1:])
        for deal, part in zip(self.dealt, parts, strict=True):
            # By row numbers: packing and dynamic batching deal rows in another order.
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
    """Deal a batch to data-parallel replicas, as ``policy.sequence_packing`` or ``policy.dynamic_batching``
    asks, otherwise evenly.

    Args:
        data: ``input_ids`` [B, S], ``input_lengths`` [B] and any other columns.
        policy: the policy configuration.
        replicas: data-parallel replicas.
        phase: which token budget counts. For log-probabilities any number of rows is legal: copies of the
            last row fill up.
        global_batch: rows of an optimizer step; None takes all rows as one.
        rows_together: consecutive rows that stay in one micro-batch (2 for preference pairs).
        hidden_size: of the model; balances attention against matrix multiplications.

    Raises:
        BatchError: sizes do not divide, or a sequence does not fit the token budget.
        PackingError: a sequence does not fit the token budget, or fewer rows than replicas.
    """
    rows = data.size
    # Only here: a copy that is trained on would count twice.
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
    """Return what sequence lengths must be a multiple of, so that the ranks of ``policy``'s layout get equal
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
