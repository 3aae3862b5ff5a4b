"""Log-probabilities of given tokens from logits that are split over the vocabulary.

Legend: T tokens, V vocabulary columns of this rank, R tensor-parallel ranks.

For one token with target y the result is ``x_y / t - logsumexp_v(x_v / t)`` over the true vocabulary (t: temperature). Each rank reduces
its own columns to three numbers a token (maximum, sum of exponentials, target logit); one all-gather a micro-batch brings them together.
The backward pass needs no communication: the gradient of a column depends on that column, the maximum and the sum alone. The maximum is
always subtracted first, and never added to the logarithm of the sum, which large logits would round away.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# float32 working memory: on a CPU what stays in its caches, on a device what keeps its kernels busy
CHUNK_BYTES = {"cpu": 1024 * 1024, "cuda": 64 * 1024 * 1024}


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """The columns of the output layer that this rank holds.

    Attributes:
        size: true vocabulary size; columns from here on are padding and never enter a softmax.
        start: vocabulary index of this rank's first column.
        group: tensor-parallel group; None when one rank holds all columns.
    """

    size: int
    start: int = 0
    group: dist.ProcessGroup | None = None


def _scaled_chunks(logits: torch.Tensor, valid: int, temperature: float) -> Iterator[tuple[slice, torch.Tensor]]:
    """Rows and their first ``valid`` columns, divided by the temperature, in float32: one buffer, overwritten by each next chunk."""
    tokens = logits.shape[0]
    step = min(max(1, CHUNK_BYTES[logits.device.type] // (4 * valid)), max(tokens, 1))
    buffer = torch.empty(step, valid, dtype=torch.float32, device=logits.device)
    for first in range(0, tokens, step):
        rows = slice(first, min(first + step, tokens))
        scaled = buffer[: rows.stop - first].copy_(logits[rows, :valid])
        yield rows, scaled if temperature == 1.0 else scaled.div_(temperature)


def _local_statistics(logits: torch.Tensor, targets: torch.Tensor, shard: VocabularyShard, temperature: float) -> torch.Tensor:
    """[3, T] float32: maximum, sum of exponentials relative to it, and target logit (0 where the target lives on another rank)."""
    tokens, columns = logits.shape
    valid = min(max(shard.size - shard.start, 0), columns)
    statistics = torch.zeros(3, tokens, dtype=torch.float32, device=logits.device)
    if valid == 0:
        statistics[0] = -torch.inf
        return statistics
    local_targets = targets - shard.start
    mine = (local_targets >= 0) & (local_targets < valid)
    safe_targets = local_targets.clamp(0, valid - 1)
    for rows, scaled in _scaled_chunks(logits, valid, temperature):
        # finite even where all columns are minus infinity, so that their exponentials are 0 and not undefined
        maximum = scaled.amax(dim=-1).clamp(min=torch.finfo(torch.float32).min)
        statistics[0, rows] = maximum
        target_logits = scaled.gather(1, safe_targets[rows, None]).squeeze(1)
        statistics[2, rows] = target_logits.where(mine[rows], torch.zeros_like(target_logits))
        statistics[1, rows] = scaled.sub_(maximum[:, None]).exp_().sum(dim=-1)
    return statistics


def _combine(statistics: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Over all ranks of ``group``: target logit relative to the maximum, maximum, sum of exponentials relative to it; [T] each."""
    size = 1 if group is None else dist.get_world_size(group)
    if size == 1:
        return statistics[2] - statistics[0], statistics[0], statistics[1]
    gathered = torch.empty(size, *statistics.shape, dtype=statistics.dtype, device=statistics.device)
    dist.all_gather_into_tensor(gathered.view(size * 3, -1), statistics, group=group)
    maximum = gathered[:, 0].amax(dim=0)
    total = (gathered[:, 1] * (gathered[:, 0] - maximum).exp()).sum(dim=0)
    return gathered[:, 2].sum(dim=0) - maximum, maximum, total


class _VocabParallelLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, shard: VocabularyShard, temperature: float) -> torch.Tensor:
        target_logits, maximum, total = _combine(_local_statistics(logits, targets, shard, temperature), shard.group)
        ctx.save_for_backward(logits, targets, maximum, total)
        ctx.shard, ctx.temperature = shard, temperature
        return target_logits - total.log()

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, targets, maximum, total = ctx.saved_tensors
        shard, temperature = ctx.shard, ctx.temperature
        columns = logits.shape[1]
        valid = min(max(shard.size - shard.start, 0), columns)
        gradient = torch.zeros_like(logits) if valid < columns else torch.empty_like(logits)
        if valid == 0:
            return gradient, None, None, None
        local_targets = targets - shard.start
        mine = (local_targets >= 0) & (local_targets < valid)
        safe_targets = local_targets.clamp(0, valid - 1)
        for rows, scaled in _scaled_chunks(logits, valid, temperature):
            weight = grad_output[rows, None] / temperature
            part = scaled.sub_(maximum[rows, None]).exp_().mul_(-weight / total[rows, None])
            part.scatter_add_(1, safe_targets[rows, None], weight * mine[rows, None])
            gradient[rows, :valid] = part
        return gradient, None, None, None


def vocab_parallel_logprobs(logits: torch.Tensor, targets: torch.Tensor, shard: VocabularyShard, temperature: float = 1.0) -> torch.Tensor:
    """Log-probability of each target token.

    Args:
        logits: [..., V] this rank's columns, any floating dtype; computed in float32, chunk by chunk.
        targets: [...] int64 vocabulary indices below ``shard.size`` (checked on the driver, not here), the same on all ranks of the group.
        shard: which columns these are.
        temperature: positive; logits are divided by it.

    Returns:
        [...] float32, the same on all ranks of the group; differentiable with respect to ``logits``.
    """
    flat = _VocabParallelLogprob.apply(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), shard, temperature)
    return flat.view(targets.shape)
