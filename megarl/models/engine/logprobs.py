"""Log-probabilities of given tokens, and entropies of the distributions of these tokens, from logits that are
sharded over the vocabulary.

Legend: T tokens, V vocabulary columns of this rank, R tensor-parallel ranks.

For one token with target y the result is ``x_y / t - logsumexp_v(x_v / t)`` over the true vocabulary (t:
temperature). Each rank reduces its own columns to three numbers per token (maximum, sum of exponentials,
target logit); one all-gather per micro-batch combines them. The backward pass needs no communication: the
gradient of a column depends only on that column, the maximum and the sum. The maximum is always subtracted
first, and never added to the logarithm of the sum, which large logits would round away.

The entropy of the same distribution p, ``-sum_v p_v log p_v``, needs one more number from each rank in the
same pass, the sum of exponentials times logits, both relative to the maximum: the entropy is ``log(sum) -
E[logit]``. Its derivative by a scaled logit is ``-p_v (log p_v + entropy)``, which is written together with
that of the log-probability.

On a CUDA device with Triton one kernel reads the logits once in the forward pass, and another reads and
writes them once in the backward pass (``megarl.models.engine.logprob_kernels``). The PyTorch code here runs
elsewhere, and is the kernels' reference; the environment variable ``MEGARL_LOGPROB_KERNEL`` (0 or 1) selects
one of the two explicitly.

Further tokens may be scored at each position with the same maximum and sum: a gather of their columns and an
all-reduce of their logits, without a second pass. The derivative of each further token is that of a target.

If tokens are sampled with top-k or top-p, the sum covers the columns that these keep, and y. The target y was
sampled and therefore kept, but rounding, or a step of the optimizer, may since have moved it beyond the
threshold, and a probability of zero would have no gradient to recover from.
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

# Sizes of the float32 working memory: on a CPU it fits into the caches, on a device it keeps the kernels
# busy.
CHUNK_BYTES = {"cpu": 1024 * 1024, "cuda": 64 * 1024 * 1024}
NEGLIGIBLE = -1000.0
"""Bound below which every exponential is 0, also in float64, so that a product with the exponential may use
this number instead of minus infinity."""


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """The columns of the output layer that this rank holds.

    Attributes:
        size: true vocabulary size; columns from this index on are padding and never enter a softmax.
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
        """Number of ranks that hold the vocabulary together."""
        return 1 if self.group is None else dist.get_world_size(self.group)


def working_dtype(logits: torch.Tensor) -> torch.dtype:
    """Return the dtype of the computation: float32, or float64 if the logits are float64."""
    return torch.promote_types(logits.dtype, torch.float32)


def scaled_chunks(logits: torch.Tensor, own: int, temperature: float) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield slices of rows, and the rows' first ``own`` columns divided by the temperature, in one buffer
    that each next chunk overwrites."""
    tokens, dtype = logits.shape[0], working_dtype(logits)
    # Take at least one row, but no buffer larger than all rows.
    step = min(max(1, CHUNK_BYTES[logits.device.type] // (dtype.itemsize * own)), max(tokens, 1))
    buffer = torch.empty(step, own, dtype=dtype, device=logits.device)
    for first in range(0, tokens, step):
        rows = slice(first, min(first + step, tokens))
        scaled = buffer[: rows.stop - first].copy_(logits[rows, :own])
        yield rows, scaled if temperature == 1.0 else _divided(scaled, temperature)


def _divided(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Divide logits in place. Each quotient is rounded once on every device, so that logits can be compared
    with bounds that were computed elsewhere."""
    # Divide by a tensor: to divide by a Python number, torch multiplies by the reciprocal on a CUDA device.
    return logits.div_(torch.full((), temperature, dtype=logits.dtype, device=logits.device))


def _kept_bounds(
    logits: torch.Tensor, shard: VocabularyShard, sampling: SamplingSettings
) -> torch.Tensor | None:
    """Return each position's lowest scaled logit that can still be sampled, [T] and equal on all ranks, or
    None if all columns can be sampled.

    If only top-p limits the columns, every rank gathers all columns of some tokens at a time; with top-k, it
    gathers the k largest columns of each rank.
    """
    if sampling.keeps_all(shard.size):
        return None
    (tokens, columns), dtype = logits.shape, working_dtype(logits)
    own, ranks = shard.own(columns), shard.ranks
    # If the vocabulary does not divide evenly, the last rank may hold fewer columns than the others.
    width = max(columns, -(-shard.size // ranks))
    candidates = min(width, sampling.top_k or width)
    step = max(1, CHUNK_BYTES[logits.device.type] // (dtype.itemsize * candidates * ranks))
    bounds = torch.empty(tokens, dtype=dtype, device=logits.device)
    for first in range(0, tokens, step):
        rows = slice(first, min(first + step, tokens))
        # Pad to the full width with minus infinity: all ranks gather equal shapes, and padding is never kept.
        scaled = logits.new_full((rows.stop - first, width), -torch.inf, dtype=dtype)
        scaled[:, :own] = logits[rows, :own]
        # Divide before top-k, as generation does: rounding may make two logits equal, and both sides then
        # keep the tie.
        largest = _divided(scaled, sampling.temperature)
        # The k largest of all ranks are among the k largest of each rank, so that few columns are gathered.
        if candidates < width:
            largest = largest.topk(candidates, dim=-1).values
        bounds[rows] = smallest_kept(_columns_of_all(largest, shard), sampling)
    return bounds


def _columns_of_all(largest: torch.Tensor, shard: VocabularyShard) -> torch.Tensor:
    """Gather the columns [rows, columns] of each rank into [rows, ranks x columns]."""
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
    """Compute [3, T] from this rank's columns: maximum, sum of exponentials relative to the maximum, and
    target logit (0 if the target is on another rank). For entropies the result is [4, T], with the sum of
    exponentials times logits, both relative to the maximum."""
    (tokens, columns), dtype = logits.shape, working_dtype(logits)
    own = shard.own(columns)
    statistics = torch.zeros(3 + with_entropies, tokens, dtype=dtype, device=logits.device)
    if own == 0:
        # This rank holds padding only: its maximum must not win, and its sum of 0 adds nothing.
        statistics[0] = -torch.inf
        return statistics
    if (kernels := _kernels_for(logits)) is not None:
        return kernels.statistics(logits, targets, shard.start, own, temperature, bounds, with_entropies)
    local_targets = targets - shard.start
    mine = (local_targets >= 0) & (local_targets < own)
    safe_targets = local_targets.clamp(0, own - 1)
    for rows, scaled in scaled_chunks(logits, own, temperature):
        # Keep the maximum finite even if all columns are minus infinity, so that their exponentials are 0 and
        # not NaN.
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
    """Combine the statistics of all ranks: target logit, maximum, sum of exponentials relative to the
    maximum, and for entropies the sum of these exponentials times logits; [T] each."""
    if shard.ranks == 1 or not statistics.shape[1]:
        return statistics[2], statistics[0], statistics[1], *statistics[3:]
    gathered = torch.empty(shard.ranks, *statistics.shape, dtype=statistics.dtype, device=statistics.device)
    # Use one gather of three numbers per token, not a MAX and a SUM all-reduce, of which the second has to
    # wait for the first.
    dist.all_gather_into_tensor(
        gathered.view(shard.ranks * len(statistics), -1), statistics, group=shard.group
    )
    maximum = gathered[:, 0].amax(dim=0)
    below = gathered[:, 0] - maximum
    total = (gathered[:, 1] * below.exp()).sum(dim=0)
    # Relative to the largest maximum of all ranks, each logit of a rank is lower by as much as the rank's
    # maximum is.
    moved = (
        [(gathered[:, 3] + gathered[:, 1] * below.clamp(min=NEGLIGIBLE)) * below.exp()]
        if len(statistics) > 3
        else []
    )
    return gathered[:, 2].sum(dim=0), maximum, total, *(values.sum(dim=0) for values in moved)


def _kernels_for(logits: torch.Tensor) -> ModuleType | None:
    """Return the Triton kernels if they are to compute these logits, otherwise None; the kernels compute in
    float32."""
    if working_dtype(logits) != torch.float32:
        return None
    return kernels("logprob_kernels", "MEGARL_LOGPROB_KERNEL", logits.device.type)


@dataclass(frozen=True, slots=True)
class SoftmaxSums:
    """Sums over the vocabulary that gradients of log-probabilities and entropies need besides the logits; [T]
    each, equal on all ranks.

    Attributes:
        maximum: maximum of the scaled logits over the vocabulary.
        total: sum of exponentials relative to the maximum, over the columns kept and the target.
        left_out: the target's share of ``total`` if the target is not among the columns kept, otherwise 0.
        bounds: columns with a smaller scaled logit are not kept; None if all are kept.
        entropies: entropies of the distribution over the columns kept and the target; None if not requested.
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
    """Compute log-probabilities [T] of ``targets`` [T] from ``logits`` [T, V], without autograd; see
    ``vocab_parallel_logprobs``."""
    bounds = _kept_bounds(logits, shard, sampling)
    statistics = _local_statistics(logits, targets, shard, sampling.temperature, bounds, with_entropies)
    target_logits, maximum, total, *moment = _combine(statistics, shard)
    relative = target_logits - maximum
    # Count a target as kept even if top-k or top-p would no longer keep it: see the module's docstring.
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
        logits, shard, temperature: as given to ``score``; sampling must keep all tokens.
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
    # Only the rank that has the token holds a value, and the others hold 0, so that a sum returns the value.
    if shard.ranks > 1 and found.numel():
        dist.all_reduce(found, group=shard.group)
    return found - sums.maximum[:, None] - sums.total.log()[:, None]


def _own_places(tokens: torch.Tensor, shard: VocabularyShard, own: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's columns of vocabulary indices, arbitrary for an index that another rank holds, and a
    bool mask of the indices that this rank holds."""
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
    """Compute the gradient [T, V], in the dtype of ``logits``, of a sum of log-probabilities weighted by
    ``grad_output`` [T] and of entropies weighted by ``grad_entropies`` [T].

    Args:
        logits, targets, shard, temperature: as given to ``score``.
        sums: the sums that ``score`` returned.
        grad_output, grad_entropies: float32; ``grad_entropies`` is None if there are no entropies.
        further: the tokens [T, K] of ``score_further``, and the weights [T, K] float32 of their
            log-probabilities; None for none.
        overwrite: write the gradient over the logits, and return that tensor.
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
            # autograd notices only torch's own writes. With a new version it refuses a second backward pass
            # over memory that no longer holds logits.
            torch.autograd.graph.increment_version(logits)
        return gradient
    # Columns of padding are in no softmax, and their weights must not change.
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
        # Add the target's part separately: a target outside the kept columns still has its own share of the
        # sum.
        part.scatter_add_(1, safe_targets[rows, None], (weights.at_target * mine)[rows, None])
        if further is not None:
            places, here = _own_places(further[0][rows], shard, own)
            part.scatter_add_(1, places, further[1][rows] / temperature * here)
        gradient[rows, :own] = part
    return gradient


@dataclass(frozen=True, slots=True)
class _GradientWeights:
    """Factors of the gradient of logits, [T] each. The derivative by a scaled logit x of a row is ``exp(x)
    (constant + slope x)``, with x relative to the maximum; the target's has ``at_target`` added. ``slope`` is
    None for 0."""

    constant: torch.Tensor
    slope: torch.Tensor | None
    at_target: torch.Tensor


def _weights_of_gradient(
    temperature: float, sums: SoftmaxSums, grad_output: torch.Tensor, grad_entropies: torch.Tensor | None
) -> _GradientWeights:
    """Compute the factors from two derivatives by a logit x, with p = exp(x) / total: ``-p`` for the
    log-probability of another token, and ``-p (log p + entropy)`` for the entropy."""
    weight = grad_output / temperature
    constant, at_target = -weight / sums.total, weight * (1 - sums.left_out)
    if grad_entropies is None:
        return _GradientWeights(constant, None, at_target)
    assert sums.entropies is not None, "entropies have a gradient and were not computed"
    bonus = grad_entropies / temperature
    # This is the term of a target outside the kept columns, whose log p is the logarithm of its share.
    of_left_out = torch.special.xlogy(sums.left_out, sums.left_out) + sums.left_out * sums.entropies
    constant = constant - bonus / sums.total * (sums.entropies - sums.total.log())
    return _GradientWeights(constant, -bonus / sums.total, at_target - bonus * of_left_out)


class _VocabParallelScores(torch.autograd.Function):
    """Autograd function of log-probabilities, of entropies if requested, and of the log-probabilities of
    further tokens if there are any."""

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
        # Return a copy: an output refers to this node, so that a node that stores its own output would keep
        # itself alive.
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
    """Log-probabilities of tokens, and entropies if requested, of the same shape.

    Attributes:
        logprobs: log-probability of each token.
        entropies: entropy of the distribution from which the token counts as sampled; None if not requested.
        further: log-probabilities of K further tokens under that distribution, in one more dimension; None if
            there are none.
        largest: [..., K] int64, the further tokens if they are the most likely ones
            (``megarl.models.engine.topk``), otherwise None.
    """

    logprobs: torch.Tensor
    entropies: torch.Tensor | None = None
    further: torch.Tensor | None = None
    largest: torch.Tensor | None = None

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> TokenScores:
        """Return the scores with ``change`` applied to each tensor that is not None."""
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
    """Compute the log-probability of each target token, and with ``with_entropies`` the entropy of the
    distribution from which the token counts as sampled.

    Args:
        logits: [..., V] this rank's columns, any floating dtype; computed in float32, or in float64 if they
            are float64, chunk by chunk.
        targets: [...] int64 vocabulary indices below ``shard.size`` (checked on the driver, not here), equal
            on all ranks of the group.
        shard: the vocabulary range of these columns.
        sampling: how the targets were sampled: the temperature by which logits are divided, and the limits
            top-k and top-p. A target that the limits do not keep counts as kept.
        overwrite: let the backward pass write the gradient into the memory of the logits, which nothing may
            read afterwards. Autograd then raises a RuntimeError on a second backward pass.
        with_entropies: compute entropies too, in nats.
        further: [..., K] int64, tokens whose log-probabilities are computed too; ``sampling`` must keep all
            tokens.

    Returns:
        [...] float32 (float64 for float64 logits), equal on all ranks of the group; differentiable with
        respect to ``logits``.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    # The kernels require adjacent columns.
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


def vocab_parallel_logprobs(
    logits: torch.Tensor,
    targets: torch.Tensor,
    shard: VocabularyShard,
    sampling: SamplingSettings = MODEL_ITSELF,
    *,
    overwrite: bool = False,
) -> torch.Tensor:
    """Return only the log-probabilities of ``vocab_parallel_scores``."""
    return vocab_parallel_scores(logits, targets, shard, sampling, overwrite=overwrite).logprobs
