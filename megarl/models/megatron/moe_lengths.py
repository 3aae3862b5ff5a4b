"""Keeps replicas whose tokens meet in the same experts in step.

Their passes meet in the collectives of every layer with experts, so that they need the same number of micro-batches. The alltoall
dispatcher says how many tokens come; the allgather dispatcher takes it for granted that all ranks bring the same number, and would mix up
tokens, or wait for ever, if they did not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from megarl.errors import BatchError
from megarl.models.engine.microbatches import MicroBatch, Shapes, round_up
from megarl.models.engine.model_input import ModelInput, lay_out
from megarl.models.megatron.parallel import ExpertGroups


@dataclass(frozen=True, slots=True)
class _Size:
    """Tokens of a micro-batch as it is laid out, and as one packed row."""

    tokens: int
    packed: int


def _size(model_input: ModelInput, shapes: Shapes) -> _Size:
    micro_batch = model_input.micro_batch
    packed = sum(round_up(length, shapes.packed_multiple) for length in micro_batch.data["input_lengths"].tolist())
    return _Size(micro_batch.length * (1 if micro_batch.packed else micro_batch.size), packed)


def in_step(inputs: Sequence[ModelInput], experts: ExpertGroups, shapes: Shapes, *, equal_tokens: bool) -> list[ModelInput]:
    """The same micro-batches, laid out so that the replicas that share this rank's experts can run them together.

    Args:
        inputs: of this rank.
        experts: its groups.
        shapes: what the backend wants of shapes.
        equal_tokens: every micro-batch has to have as many tokens as its counterparts. Where that is not so, all of them become packed rows
            of the length of the longest.

    Returns:
        ``inputs`` themselves where nothing had to change. A collective over the replicas.

    Raises:
        BatchError: replicas have different numbers of micro-batches.
    """
    if experts.replicas is None:
        return list(inputs)
    sizes: list[list[_Size]] = [[]] * dist.get_world_size(experts.replicas)
    dist.all_gather_object(sizes, [_size(model_input, shapes) for model_input in inputs], group=experts.replicas)
    if len({len(replica) for replica in sizes}) > 1:
        raise BatchError(
            f"data-parallel replicas that share experts have {[len(replica) for replica in sizes]} micro-batches; "
            "give each the same number (shard the batch with megarl.models.policy.batch_plan.shard_batch)"
        )
    counterparts = list(zip(*sizes, strict=True))
    uneven = [len({size.tokens for size in one}) > 1 for one in counterparts]
    if not equal_tokens or not any(uneven):
        return list(inputs)
    totals = [max(size.packed for size in one) for one in counterparts]
    if shapes.equal:
        totals, uneven = [max(totals)] * len(totals), [True] * len(totals)
    return [
        lay_out(MicroBatch(given.micro_batch.data, True, total), given.layout.context, shapes) if changed else given
        for given, total, changed in zip(inputs, totals, uneven, strict=True)
    ]
