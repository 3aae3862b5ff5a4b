"""Log-probabilities of given tokens from logits that are split over the vocabulary.

Legend: T tokens, V vocabulary columns of this rank, R tensor-parallel ranks.

For one token with target y the result is ``x_y / t - logsumexp_v(x_v / t)`` over the true vocabulary (t: temperature). Each rank reduces
its own columns to three numbers a token (maximum, sum of exponentials, target logit); one all-gather a micro-batch brings them together.
The backward pass needs no communication: the gradient of a column depends on that column, the maximum and the sum alone. The maximum is
always subtracted first, and never added to the logarithm of the sum, which large logits would round away.

On a CUDA device with Triton one kernel reads the logits once forward, another reads and writes them once backward
(``megarl.models.engine.logprob_kernels``). The PyTorch code here runs elsewhere, and is their reference; the environment variable
``MEGARL_LOGPROB_KERNEL`` (0 or 1) chooses one of them by hand.

Where tokens are drawn with top-k or top-p, the sum goes over the columns that these keep, and
over y, which was drawn and therefore was kept: rounding, or a step of the optimizer, may since have moved it over the edge, and a
probability of zero would have no gradient that leads back.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from megarl import env
from megarl.models.generation.sampling import MODEL_ITSELF, SamplingSettings, smallest_kept

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

    def own(self, columns: int) -> int:
        """Return how many of this rank's ``columns`` columns are not padding; they come first."""
        return min(max(self.size - self.start, 0), columns)

    @property
    def ranks(self) -> int:
        """Ranks that hold the vocabulary together."""
        return 1 if self.group is None else dist.get_world_size(self.group)


def _scaled_chunks(logits: torch.Tensor, own: int, temperature: float) -> Iterator[tuple[slice, torch.Tensor]]:
    """Rows and their first ``own`` columns, divided by the temperature, in float32: one buffer, overwritten by each next chunk."""
    tokens = logits.shape[0]
    step = min(max(1, CHUNK_BYTES[logits.device.type] // (4 * own)), max(tokens, 1))
    buffer = torch.empty(step, own, dtype=torch.float32, device=logits.device)
    for first in range(0, tokens, step):
        rows = slice(first, min(first + step, tokens))
        scaled = buffer[: rows.stop - first].copy_(logits[rows, :own])
        yield rows, scaled if temperature == 1.0 else _divided(scaled, temperature)


def _divided(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Divide float32 logits in place, each quotient rounded once on every device, so that logits compare with bounds made elsewhere."""
    # by a number of Python's, torch multiplies with its reciprocal on a CUDA device
    return logits.div_(torch.full((), temperature, dtype=torch.float32, device=logits.device))


def _kept_bounds(logits: torch.Tensor, shard: VocabularyShard, sampling: SamplingSettings) -> torch.Tensor | None:
    """[T] float32, the same on all ranks: columns with at least this scaled logit can be drawn; None where all can.

    Where top-p alone decides, every rank sees all columns of some tokens at a time; with top-k, the k largest ones of each rank.
    """
    if sampling.keeps_all(shard.size):
        return None
    tokens, columns = logits.shape
    own, ranks = shard.own(columns), shard.ranks
    # the last rank of a vocabulary that does not divide may hold fewer columns than the others
    width = max(columns, -(-shard.size // ranks))
    candidates = min(width, sampling.top_k or width)
    step = max(1, CHUNK_BYTES[logits.device.type] // (4 * candidates * ranks))
    bounds = torch.empty(tokens, dtype=torch.float32, device=logits.device)
    for first in range(0, tokens, step):
        rows = slice(first, min(first + step, tokens))
        scaled = logits.new_full((rows.stop - first, width), -torch.inf, dtype=torch.float32)
        scaled[:, :own] = logits[rows, :own]
        largest = _divided(scaled, sampling.temperature)
        if candidates < width:
            largest = largest.topk(candidates, dim=-1).values
        bounds[rows] = smallest_kept(_columns_of_all(largest, shard), sampling)
    return bounds


def _columns_of_all(largest: torch.Tensor, shard: VocabularyShard) -> torch.Tensor:
    """[rows, ranks x columns] from the [rows, columns] of each rank."""
    if shard.ranks == 1:
        return largest
    gathered = torch.empty(shard.ranks, *largest.shape, dtype=largest.dtype, device=largest.device)
    dist.all_gather_into_tensor(gathered.view(-1, largest.shape[1]), largest.contiguous(), group=shard.group)
    return gathered.transpose(0, 1).reshape(largest.shape[0], -1)


def _local_statistics(
    logits: torch.Tensor, targets: torch.Tensor, shard: VocabularyShard, temperature: float, bounds: torch.Tensor | None
) -> torch.Tensor:
    """[3, T] float32: maximum, sum of exponentials relative to it, and target logit (0 where the target lives on another rank)."""
    tokens, columns = logits.shape
    own = shard.own(columns)
    statistics = torch.zeros(3, tokens, dtype=torch.float32, device=logits.device)
    if own == 0:
        statistics[0] = -torch.inf
        return statistics
    if (kernels := _kernels(logits.device.type)) is not None:
        return kernels.statistics(logits, targets, shard.start, own, temperature, bounds)
    local_targets = targets - shard.start
    mine = (local_targets >= 0) & (local_targets < own)
    safe_targets = local_targets.clamp(0, own - 1)
    for rows, scaled in _scaled_chunks(logits, own, temperature):
        # finite even where all columns are minus infinity, so that their exponentials are 0 and not undefined
        maximum = scaled.amax(dim=-1).clamp(min=torch.finfo(torch.float32).min)
        statistics[0, rows] = maximum
        target_logits = scaled.gather(1, safe_targets[rows, None]).squeeze(1)
        statistics[2, rows] = target_logits.where(mine[rows], torch.zeros_like(target_logits))
        if bounds is not None:
            scaled.masked_fill_(scaled < bounds[rows, None], -torch.inf)
        statistics[1, rows] = scaled.sub_(maximum[:, None]).exp_().sum(dim=-1)
    return statistics


def _combine(statistics: torch.Tensor, shard: VocabularyShard) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Over all ranks: target logit, maximum, sum of exponentials relative to it; [T] each."""
    if shard.ranks == 1 or not statistics.shape[1]:
        return statistics[2], statistics[0], statistics[1]
    gathered = torch.empty(shard.ranks, *statistics.shape, dtype=statistics.dtype, device=statistics.device)
    dist.all_gather_into_tensor(gathered.view(shard.ranks * 3, -1), statistics, group=shard.group)
    maximum = gathered[:, 0].amax(dim=0)
    total = (gathered[:, 1] * (gathered[:, 0] - maximum).exp()).sum(dim=0)
    return gathered[:, 2].sum(dim=0), maximum, total


@functools.cache
def _kernels(device: str) -> ModuleType | None:
    """The Triton kernels, where ``MEGARL_LOGPROB_KERNEL`` asks for them; where it is unset, on CUDA devices with Triton."""
    if not env.flag("MEGARL_LOGPROB_KERNEL", device == "cuda" and importlib.util.find_spec("triton") is not None):
        return None
    from megarl.models.engine import logprob_kernels

    return logprob_kernels


@dataclass(frozen=True, slots=True)
class SoftmaxSums:
    """Softmax sums: what the gradient of log-probabilities needs besides the logits; each [T] float32, the same on all ranks.

    Attributes:
        maximum: of the scaled logits over the vocabulary.
        total: sum of exponentials relative to it, over the columns kept and the target.
        left_out: share of the target in it, where the target is not among the columns kept, else 0.
        bounds: columns with a smaller scaled logit are not kept; None where all are.
    """

    maximum: torch.Tensor
    total: torch.Tensor
    left_out: torch.Tensor
    bounds: torch.Tensor | None


def score(
    logits: torch.Tensor, targets: torch.Tensor, shard: VocabularyShard, sampling: SamplingSettings
) -> tuple[torch.Tensor, SoftmaxSums]:
    """Log-probabilities [T] float32 of ``targets`` [T] by ``logits`` [T, V], which autograd does not see; see
    ``vocab_parallel_logprobs``."""
    bounds = _kept_bounds(logits, shard, sampling)
    statistics = _local_statistics(logits, targets, shard, sampling.temperature, bounds)
    target_logits, maximum, total = _combine(statistics, shard)
    relative = target_logits - maximum
    left_out = torch.zeros_like(total)
    if bounds is not None:
        left_out = relative.exp().where(target_logits < bounds, left_out)
        total = total + left_out
    return relative - total.log(), SoftmaxSums(maximum, total, left_out / total, bounds)


def gradient_of_logits(
    logits: torch.Tensor,
    targets: torch.Tensor,
    shard: VocabularyShard,
    temperature: float,
    sums: SoftmaxSums,
    grad_output: torch.Tensor,
    *,
    overwrite: bool,
) -> torch.Tensor:
    """[T, V] in the dtype of ``logits``: the gradient of a sum of log-probabilities weighted by ``grad_output`` [T].

    Args:
        logits, targets, shard, temperature: as given to ``score``.
        sums: what it returned.
        grad_output: float32.
        overwrite: write the gradient over the logits, and return these.
    """
    columns = logits.shape[1]
    own = shard.own(columns)
    gradient = logits if overwrite else torch.empty_like(logits)
    if own == 0:
        return gradient.zero_()
    weight = grad_output / temperature
    kernels = _kernels(logits.device.type)
    if kernels is not None:
        place = (logits, targets, shard.start, own, temperature, sums.bounds)
        kernels.write_gradient(gradient, *place, sums.maximum, -weight / sums.total, weight * (1 - sums.left_out))
        if overwrite:
            # autograd sees torch's own writes alone; with this it refuses a second backward pass over what is no longer logits
            torch.autograd.graph.increment_version(logits)
        return gradient
    gradient[:, own:] = 0
    local_targets = targets - shard.start
    mine = (local_targets >= 0) & (local_targets < own)
    safe_targets = local_targets.clamp(0, own - 1)
    for rows, scaled in _scaled_chunks(logits, own, temperature):
        if sums.bounds is not None:
            scaled.masked_fill_(scaled < sums.bounds[rows, None], -torch.inf)
        part = scaled.sub_(sums.maximum[rows, None]).exp_().mul_(-weight[rows, None] / sums.total[rows, None])
        # a target that is not among the columns kept has its own share of the sum
        part.scatter_add_(1, safe_targets[rows, None], (weight * mine * (1 - sums.left_out))[rows, None])
        gradient[rows, :own] = part
    return gradient


class _VocabParallelLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, shard: VocabularyShard, sampling: SamplingSettings, overwrite: bool
    ) -> torch.Tensor:
        values, ctx.sums = score(logits, targets, shard, sampling)
        ctx.save_for_backward(logits, targets)
        ctx.shard, ctx.temperature, ctx.overwrite = shard, sampling.temperature, overwrite
        return values

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        logits, targets = ctx.saved_tensors
        gradient = gradient_of_logits(logits.detach(), targets, ctx.shard, ctx.temperature, ctx.sums, grad_output, overwrite=ctx.overwrite)
        return gradient, None, None, None, None


def vocab_parallel_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    shard: VocabularyShard,
    sampling: SamplingSettings = MODEL_ITSELF,
    *,
    overwrite: bool = False,
) -> torch.Tensor:
    """Log-probability of each target token.

    Args:
        logits: [..., V] this rank's columns, any floating dtype; computed in float32, chunk by chunk.
        targets: [...] int64 vocabulary indices below ``shard.size`` (checked on the driver, not here), the same on all ranks of the group.
        shard: which columns these are.
        sampling: how the targets were drawn: the temperature that logits are divided by, and what top-k and top-p keep.
        overwrite: nobody reads the logits after the backward pass, which may write their gradient into their memory. A second backward
            pass is then a RuntimeError of autograd.

    Returns:
        [...] float32, the same on all ranks of the group; differentiable with respect to ``logits``.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    return _VocabParallelLogprob.apply(rows, targets.reshape(-1), shard, sampling, overwrite).view(targets.shape)
