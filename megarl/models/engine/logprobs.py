"""Log-probabilities of given tokens, and entropies of their distributions, from logits that are sharded over
the vocabulary.

Shapes: T tokens, V vocabulary columns of this rank, R tensor-parallel ranks.

The log-probability of target y is ``x_y / t - logsumexp_v(x_v / t)`` over the unpadded vocabulary, with
temperature t. Each rank reduces its columns to three numbers per token (maximum, sum of exponentials, target
logit), and one all-gather per micro-batch combines them. The backward pass needs no communication: the
gradient of a column depends only on that column, the maximum and the sum. The maximum is subtracted from the
target logit before the logarithm of the sum is; added to the logarithm first, a large maximum would round it
away.

The entropy of the same distribution p, ``-sum_v p_v log p_v``, needs one more number per rank in the same
pass: the sum of exponentials times logits, both relative to the maximum. The entropy is then ``log(sum) -
E[logit]``. Its derivative with respect to a scaled logit is ``-p_v (log p_v + entropy)``, which is written
together with the derivative of the log-probability.

On a CUDA device with Triton, one kernel reads the logits once in the forward pass, and another reads and
writes them once in the backward pass (``megarl.models.engine.logprob_kernels``). The PyTorch code here runs
elsewhere, and is the kernels' reference. The environment variable ``MEGARL_LOGPROB_KERNEL`` (0 or 1)
overrides the choice.

Further tokens can be scored at each position with the same maximum and sum. This takes a gather of their
columns and an all-reduce of their logits, but no second pass. Their derivative is that of a target.

If tokens are sampled with top-k or top-p, the sum covers the columns that these keep, and y. The target y was
kept when it was sampled. Rounding or an optimizer step may since have moved it beyond the threshold; it still
counts as kept, because a probability of zero would have no gradient to recover from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from megarl.models.engine.kernels import kernels
from megarl.models.generation.sampling import MODEL_ITSELF, SamplingSettings, smallest_kept

# Bytes of the float32 buffer for a chunk. On a CPU it fits into the caches; on a GPU it is large enough to
# keep the kernels busy.
CHUNK_BYTES = {"cpu": 1024 * 1024, "cuda": 64 * 1024 * 1024}
NEGLIGIBLE = -1000.0
"""A finite stand-in for minus infinity in products with an exponential. Its own exponential is 0, even in
float64."""


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """The columns of the output layer on this rank.

    Attributes:
        size: vocabulary size without padding; columns from this index on are padding and never enter a
            softmax.
        start: vocabulary index of this rank's first column.
        group: tensor-parallel group; None if one rank has all columns.
    """

    size: int
    start: int = 0
    group: dist.ProcessGroup | None = None

    def own(self, columns: int) -> int:
        """Return how many of this rank's ``columns`` columns are not padding. These come first."""
        return min(max(self.size - self.start, 0), columns)

    @property
    def ranks(self) -> int:
        """Number of ranks over which the vocabulary is sharded."""
        return 1 if self.group is None else dist.get_world_size(self.group)


def working_dtype(logits: torch.Tensor) -> torch.dtype:
    """Return the dtype of the computation: float64 if the logits are float64, otherwise float32."""
    return torch.promote_types(logits.dtype, torch.float32)


def scaled_chunks(logits: torch.Tensor, own: int, temperature: float) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield slices of rows with the rows' first ``own`` columns divided by the temperature. All chunks share
    one buffer, so each overwrites the previous one."""
    tokens, dtype = logits.shape[0], working_dtype(logits)
    # At least one row per chunk, and no buffer larger than all rows.
    step = min(max(1, CHUNK_BYTES[logits.device.type] // (dtype.itemsize * own)), max(tokens, 1))
    buffer = torch.empty(step, own, dtype=dtype, device=logits.device)
    for first in range(0, tokens, step):
        rows = slice(first, min(first + step, tokens))
        scaled = buffer[: rows.stop - first].copy_(logits[rows, :own])
        yield rows, scaled if temperature == 1.0 else _divided(scaled, temperature)


def _divided(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Divide logits in place, with one correctly rounded division on every device. Only then can they be
    compared with bounds that were computed elsewhere."""
    # Divide by a tensor. Given a Python number, torch multiplies by the reciprocal on a CUDA device, which
    # rounds twice.
    return logits.div_(torch.full((), temperature, dtype=logits.dtype, device=logits.device))


def _kept_bounds(
    logits: torch.Tensor, shard: VocabularyShard, sampling: SamplingSettings
) -> torch.Tensor | None:
    """Return the lowest scaled logit that can be sampled at each position, [T] and equal on all ranks; None
    if all columns can be sampled.

    With top-k, each rank contributes its k largest columns to the gather. With top-p alone, all columns are
    gathered, for some tokens at a time.
    """
    if sampling.keeps_all(shard.size):
        return None
    (tokens, columns), dtype = logits.shape, working_dtype(logits)
    own, ranks = shard.own(columns), shard.ranks
    # If the vocabulary is not divisible by the ranks, the last rank may have fewer columns.
    width = max(columns, -(-shard.size // ranks))
    candidates = min(width, sampling.top_k or width)
    step = max(1, CHUNK_BYTES[logits.device.type] // (dtype.itemsize * candidates * ranks))
    bounds = torch.empty(tokens, dtype=dtype, device=logits.device)
    for first in range(0, tokens, step):
        rows = slice(first, min(first + step, tokens))
        # All ranks must gather equal shapes. Padding with minus infinity is never kept.
        scaled = logits.new_full((rows.stop - first, width), -torch.inf, dtype=dtype)
        scaled[:, :own] = logits[rows, :own]
        # Divide before top-k, as generation does. Rounding may make two logits equal, and then both sides
        # must keep both.
        largest = _divided(scaled, sampling.temperature)
        # The k largest columns overall are among the k largest of each rank, so only these are gathered.
        if candidates < width:
            largest = largest.topk(candidates, dim=-1).values
        bounds[rows] = smallest_kept(_columns_of_all(largest, shard), sampling)
    return bounds


def _columns_of_all(largest: torch.Tensor, shard: VocabularyShard) -> torch.Tensor:
    """All-gather the columns [rows, columns] of each rank into [rows, ranks x columns]."""
    if shard.ranks == 1:
        return largest
    gathered = torch.empty(shard.ranks, *largest.shape, dtype=largest.dtype, device=largest.device)
    dist.all_gather_into_tensor(gathered.view(-1, largest.shape[1]), largest.contiguous(), group=shard.group)
    return gathered.transpose(0, 1).reshape(largest.shape[0], -1)


def _local_statistics(
    logits: torch.Tensor,
    targets: torch.Tensor,
    shard: VocabularyShard,
    temperature: float,
    bounds: torch.Tensor | None,
    with_entropies: bool = False,
) -> torch.Tensor:
    """Compute per-token statistics of this rank's columns, [3, T]: the maximum, the sum of exponentials
    relative to the maximum, and the target's logit (0 if it is on another rank). For entropies the result is
    [4, T], with the sum of exponentials times logits, both relative to the maximum."""
    (tokens, columns), dtype = logits.shape, working_dtype(logits)
    own = shard.own(columns)
    statistics = torch.zeros(3 + with_entropies, tokens, dtype=dtype, device=logits.device)
    if own == 0:
        # This rank has only padding. Its maximum must not win over any other, and its sum of 0 adds nothing.
        statistics[0] = -torch.inf
        return statistics
    if (kernels := _kernels_for(logits)) is not None:
        return kernels.statistics(logits, targets, shard.start, own, temperature, bounds, with_entropies)
    local_targets = targets - shard.start
    mine = (local_targets >= 0) & (local_targets < own)
    safe_targets = local_targets.clamp(0, own - 1)
    for rows, scaled in scaled_chunks(logits, own, temperature):
        # Keep the maximum finite: if all columns are minus infinity, their exponentials are then 0, not NaN.
        maximum = scaled.amax(dim=-1).clamp(min=torch.finfo(dtype).min)
        statistics[0, rows] = maximum
        target_logits = scaled.gather(1, safe_targets[rows, None]).squeeze(1)
        statistics[2, rows] = target_logits.where(mine[rows], torch.zeros_like(target_logits))
        if bounds is not None:
            scaled.masked_fill_(scaled < bounds[rows, None], -torch.inf)
        relative = scaled.sub_(maximum[:, None])
        # Work in place unless the entropy needs the logits again.
        shares = relative.exp() if with_entropies else relative.exp_()
        statistics[1, rows] = shares.sum(dim=-1)
        if with_entropies:
            statistics[3, rows] = shares.mul_(relative.clamp_(min=NEGLIGIBLE)).sum(dim=-1)
    return statistics


def _combine(statistics: torch.Tensor, shard: VocabularyShard) -> tuple[torch.Tensor, ...]:
    """Combine the statistics of all ranks. Return target logit, maximum, sum of exponentials relative to the
    maximum, and for entropies the sum of these exponentials times logits; [T] each."""
    if shard.ranks == 1 or not statistics.shape[1]:
        return statistics[2], statistics[0], statistics[1], *statistics[3:]
    gathered = torch.empty(shard.ranks, *statistics.shape, dtype=statistics.dtype, device=statistics.device)
    # One all-gather of three numbers per token, instead of a MAX all-reduce and a SUM all-reduce that must
    # wait for the first.
    dist.all_gather_into_tensor(
        gathered.view(shard.ranks * len(statistics), -1), statistics, group=shard.group
    )
    maximum = gathered[:, 0].amax(dim=0)
    below = gathered[:, 0] - maximum
    total = (gathered[:, 1] * below.exp()).sum(dim=0)
    # Relative to the overall maximum, all logits of a rank are lower by the difference of the two maxima.
    moved = (
        [(gathered[:, 3] + gathered[:, 1] * below.clamp(min=NEGLIGIBLE)) * below.exp()]
        if len(statistics) > 3
        else []
    )
    return gathered[:, 2].sum(dim=0), maximum, total, *(values.sum(dim=0) for values in moved)


def _kernels_for(logits: torch.Tensor) -> ModuleType | None:
    """Return the Triton kernels if they should compute these logits, otherwise None. They support only
    float32 computation."""
    if working_dtype(logits) != torch.float32:
        return None
    return kernels("logprob_kernels", "MEGARL_LOGPROB_KERNEL", logits.device.type)


@dataclass(frozen=True, slots=True)
class SoftmaxSums:
    """Sums over the vocabulary that the backward pass needs in addition to the logits; [T] each, equal on all
    ranks.

    Attributes:
        maximum: maximum of the scaled logits over the vocabulary.
        total: sum of exponentials relative to the maximum, over the kept columns and the target.
        left_out: the target's fraction of ``total`` if the target is not among the kept columns, otherwise 0.
        bounds: columns with a smaller scaled logit are not kept; None if all are kept.
        entropies: entropies of the distribution over the kept columns and the target; None if not requested.
    """

    maximum: torch.Tensor
    total: torch.Tensor
    left_out: torch.Tensor
    bounds: torch.Tensor | None
    entropies: torch.Tensor | None = None


def score(
    logits: torch.Tensor,
    targets: torch.Tensor,
    shard: VocabularyShard,
    sampling: SamplingSettings,
    *,
    with_entropies: bool = False,
) -> tuple[torch.Tensor, SoftmaxSums]:
    """Compute log-probabilities [T] of ``targets`` [T] from ``logits`` [T, V], without autograd. Also return
    the sums that gradients need. See ``vocab_parallel_scores``."""
    bounds = _kept_bounds(logits, shard, sampling)
    statistics = _local_statistics(logits, targets, shard, sampling.temperature, bounds, with_entropies)
    target_logits, maximum, total, *moment = _combine(statistics, shard)
    relative = target_logits - maximum
    # A target counts as kept even if top-k or top-p would exclude it now; see the module's docstring.
    left_out = torch.zeros_like(total)
    if bounds is not None:
        left_out = relative.exp().where(target_logits < bounds, left_out)
        total = total + left_out
    entropies = None
    if with_entropies:
        of_target = left_out * relative.clamp(min=NEGLIGIBLE)
        entropies = total.log() - (moment[0] + of_target) / total
    return relative - total.log(), SoftmaxSums(maximum, total, left_out / total, bounds, entropies)


def score_further(
    logits: torch.Tensor, tokens: torch.Tensor, shard: VocabularyShard, temperature: float, sums: SoftmaxSums
) -> torch.Tensor:
    """Compute log-probabilities [T, K] of ``tokens`` [T, K] from ``logits`` [T, V], without autograd.

    Args:
        logits, shard, temperature: the arguments of ``score``; sampling must keep all tokens.
        tokens: int64 vocabulary indices below ``shard.size``, equal on all ranks of the group.
        sums: the sums that ``score`` returned.
    """
    assert sums.bounds is None, "tokens that sampling leaves out have no log-probability"
    dtype, own = working_dtype(logits), shard.own(logits.shape[1])
    found = torch.zeros(tokens.shape, dtype=dtype, device=logits.device)
    if own > 0:
        places, mine = _own_places(tokens, shard, own)
        picked = logits.gather(1, places).to(dtype)
        found = (picked if temperature == 1.0 else _divided(picked, temperature)).where(mine, found)
    # Only one rank has a value for a token, and the others have 0, so the sum is that value.
    if shard.ranks > 1 and found.numel():
        dist.all_reduce(found, group=shard.group)
    return found - sums.maximum[:, None] - sums.total.log()[:, None]


def _own_places(tokens: torch.Tensor, shard: VocabularyShard, own: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's column for each vocabulary index, and a bool mask of the indices that are on this
    rank. The column of any other index is arbitrary."""
    places = tokens - shard.start
    return places.clamp(0, own - 1), (places >= 0) & (places < own)


def gradient_of_logits(
    logits: torch.Tensor,
    targets: torch.Tensor,
    shard: VocabularyShard,
    temperature: float,
    sums: SoftmaxSums,
    grad_output: torch.Tensor,
    grad_entropies: torch.Tensor | None = None,
    further: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    overwrite: bool,
) -> torch.Tensor:
    """Compute the gradient with respect to the logits, [T, V] in their dtype, of a weighted sum of
    log-probabilities and entropies.

    Args:
        logits, targets, shard, temperature: the arguments of ``score``.
        sums: the sums that ``score`` returned.
        grad_output: [T] float32, weights of the log-probabilities.
        grad_entropies: [T] float32, weights of the entropies; None without entropies.
        further: the tokens [T, K] of ``score_further``, and the weights [T, K] float32 of their
            log-probabilities; None for none.
        overwrite: write the gradient into the memory of ``logits``, and return that tensor.
    """
    columns = logits.shape[1]
    own = shard.own(columns)
    gradient = logits if overwrite else torch.empty_like(logits)
    if own == 0:
        return gradient.zero_()
    weights = _weights_of_gradient(temperature, sums, grad_output, grad_entropies)
    if further is not None:
        weights = replace(
            weights, constant=weights.constant - further[1].sum(dim=1) / temperature / sums.total
        )
    kernels = _kernels_for(logits)
    if kernels is not None:
        place = (logits, targets, shard.start, own, temperature, sums.bounds)
        kernels.write_gradient(
            gradient,
            *place,
            sums.maximum,
            weights.constant,
            weights.at_target,
            weights.slope,
            None if further is None else (further[0], further[1] / temperature),
        )
        if overwrite:
            # Autograd does not see a Triton kernel's writes. With a new version it raises an error on a
            # second backward pass, which would read gradients as logits.
            torch.autograd.graph.increment_version(logits)
        return gradient
    # Padding columns are in no softmax, so their gradient is zero.
    gradient[:, own:] = 0
    local_targets = targets - shard.start
    mine = (local_targets >= 0) & (local_targets < own)
    safe_targets = local_targets.clamp(0, own - 1)
    for rows, scaled in scaled_chunks(logits, own, temperature):
        if sums.bounds is not None:
            scaled.masked_fill_(scaled < sums.bounds[rows, None], -torch.inf)
        relative = scaled.sub_(sums.maximum[rows, None])
        factors = weights.constant[rows, None]
        if weights.slope is not None:
            factors = relative.clamp(min=NEGLIGIBLE).mul_(weights.slope[rows, None]).add_(factors)
        part = relative.exp_().mul_(factors)
        # Add the target's term separately: a target outside the kept columns still is a part of the sum.
        part.scatter_add_(1, safe_targets[rows, None], (weights.at_target * mine)[rows, None])
        if further is not None:
            places, here = _own_places(further[0][rows], shard, own)
            part.scatter_add_(1, places, further[1][rows] / temperature * here)
        gradient[rows, :own] = part
    return gradient


@dataclass(frozen=True, slots=True)
class _GradientWeights:
    """Factors of the gradient with respect to the logits, [T] each.

    For a scaled logit, with x relative to the row's maximum, the derivative is ``exp(x) (constant + slope
    x)``. ``at_target`` is added at the target. A ``slope`` of None is 0.
    """

    constant: torch.Tensor
    slope: torch.Tensor | None
    at_target: torch.Tensor


def _weights_of_gradient(
    temperature: float, sums: SoftmaxSums, grad_output: torch.Tensor, grad_entropies: torch.Tensor | None
) -> _GradientWeights:
    """Compute the factors of the gradient.

    With p = exp(x) / total, the derivative with respect to a logit x that is not the target's is ``-p`` for
    the log-probability, and ``-p (log p + entropy)`` for the entropy.
    """
    weight = grad_output / temperature
    constant, at_target = -weight / sums.total, weight * (1 - sums.left_out)
    if grad_entropies is None:
        return _GradientWeights(constant, None, at_target)
    assert sums.entropies is not None, "entropies have a gradient and were not computed"
    bonus = grad_entropies / temperature
    # The term of a target outside the kept columns. Its log p is the logarithm of ``left_out``.
    of_left_out = torch.special.xlogy(sums.left_out, sums.left_out) + sums.left_out * sums.entropies
    constant = constant - bonus / sums.total * (sums.entropies - sums.total.log())
    return _GradientWeights(constant, -bonus / sums.total, at_target - bonus * of_left_out)


class _VocabParallelScores(torch.autograd.Function):
    """Autograd function behind ``vocab_parallel_scores``: log-probabilities, then entropies if requested,
    then the log-probabilities of further tokens if there are any."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        further: torch.Tensor | None,
        shard: VocabularyShard,
        sampling: SamplingSettings,
        overwrite: bool,
        with_entropies: bool,
    ) -> tuple[torch.Tensor, ...]:
        values, ctx.sums = score(logits, targets, shard, sampling, with_entropies=with_entropies)
        ctx.save_for_backward(logits, targets, further)
        ctx.shard, ctx.temperature, ctx.overwrite, ctx.with_entropies = (
            shard,
            sampling.temperature,
            overwrite,
            with_entropies,
        )
        # Return a copy. An output refers to its autograd node, so a node that stored the output (in ``sums``)
        # would keep itself alive.
        entropies = (ctx.sums.entropies.clone(),) if with_entropies else ()
        return (
            values,
            *entropies,
            *(
                ()
                if further is None
                else (score_further(logits, further, shard, sampling.temperature, ctx.sums),)
            ),
        )

    @staticmethod
    def backward(
        ctx: Any, grad_output: torch.Tensor, *others: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        logits, targets, further = ctx.saved_tensors
        grad_entropies = others[0] if ctx.with_entropies else None
        of_further = None if further is None else (further, others[-1])
        given = (targets, ctx.shard, ctx.temperature, ctx.sums, grad_output, grad_entropies, of_further)
        return (
            gradient_of_logits(logits.detach(), *given, overwrite=ctx.overwrite),
            None,
            None,
            None,
            None,
            None,
            None,
        )


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Scores of tokens; all tensors but the last two have the same shape.

    Attributes:
        logprobs: log-probability of each token.
        entropies: entropy of each token's distribution; None if not requested.
        further: [..., K], log-probabilities of K further tokens under the same distribution; None for none.
        largest: [..., K] int64, the further tokens if they are the most likely ones
            (``megarl.models.engine.topk``), otherwise None.
    """

    logprobs: torch.Tensor
    entropies: torch.Tensor | None = None
    further: torch.Tensor | None = None
    largest: torch.Tensor | None = None

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> TokenScores:
        """Apply ``change`` to every tensor that is not None."""
        others = (self.entropies, self.further, self.largest)
        return TokenScores(
            change(self.logprobs), *(None if values is None else change(values) for values in others)
        )


def vocab_parallel_scores(
    logits: torch.Tensor,
    targets: torch.Tensor,
    shard: VocabularyShard,
    sampling: SamplingSettings = MODEL_ITSELF,
    *,
    overwrite: bool = False,
    with_entropies: bool = False,
    further: torch.Tensor | None = None,
) -> TokenScores:
    """Compute the log-probability of each target token and, with ``with_entropies``, the entropy of its
    distribution. Collective over the tensor-parallel group.

    Args:
        logits: [..., V], this rank's columns, any floating dtype. Computed chunk by chunk in float32, or in
            float64 if they are float64.
        targets: [...] int64 vocabulary indices below ``shard.size`` (checked by the driver, not here), equal
            on all ranks of the group.
        shard: the vocabulary range of these columns.
        sampling: temperature, top-k and top-p with which the targets were sampled. A target that top-k or
            top-p would exclude now still counts as kept.
        overwrite: let the backward pass write the gradient into the memory of the logits, which nothing may
            read afterwards. A second backward pass then raises RuntimeError.
        with_entropies: also compute entropies, in nats.
        further: [..., K] int64, more tokens to score at each position; ``sampling`` must keep all tokens.

    Returns:
        Scores [...] in float32 (float64 for float64 logits), equal on all ranks of the group and
        differentiable with respect to ``logits``.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    # The kernels require contiguous columns.
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    tokens = None if further is None else further.reshape(-1, further.shape[-1])
    logprobs, *others = _VocabParallelScores.apply(
        rows, targets.reshape(-1), tokens, shard, sampling, overwrite, with_entropies
    )
    return TokenScores(
        logprobs.view(targets.shape),
        others[0].view(targets.shape) if with_entropies else None,
        None if further is None else others[-1].view(further.shape),
    )
