"""Log-probabilities of given tokens, and entropies of the distributions they are from, by logits that are
split over the vocabulary.

Legend: T tokens, V vocabulary columns of this rank, R tensor-parallel ranks.

For one token with target y the result is ``x_y / t - logsumexp_v(x_v / t)`` over the true vocabulary (t:
temperature). Each rank reduces its own columns to three numbers a token (maximum, sum of exponentials, target
logit); one all-gather a micro-batch brings them together. The backward pass needs no communication: the
gradient of a column depends on that column, the maximum and the sum alone. The maximum is always subtracted
first, and never added to the logarithm of the sum, which large logits would round away.

The entropy of the same distribution p, ``-sum_v p_v log p_v``, takes one number more of each rank in the same
pass, the sum of exponentials times logits, both relative to the maximum: it is ``log(sum) - E[logit]``. Its
derivative by a scaled logit is ``-p_v (log p_v + entropy)``, which is written together with that of the
log-probability.

On a CUDA device with Triton one kernel reads the logits once forward, another reads and writes them once
backward (``megarl.models.engine.logprob_kernels``). The PyTorch code here runs elsewhere, and is their
reference; the environment variable ``MEGARL_LOGPROB_KERNEL`` (0 or 1) chooses one of them by hand.

Further tokens may be scored at each position, by the same maximum and sum: a gather of their columns and an
all-reduce of their logits, no second pass. The derivative of each is that of a target.

Where tokens are sampled with top-k or top-p, the sum goes over the columns that these keep, and over y, which
was sampled and therefore was kept: rounding, or a step of the optimizer, may since have moved it over the
edge, and a probability of zero would have no gradient that leads back.
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

# float32 working memory: on a CPU what stays in its caches, on a device what keeps its kernels busy
CHUNK_BYTES = {"cpu": 1024 * 1024, "cuda": 64 * 1024 * 1024}
NEGLIGIBLE = -1000.0
"""The exponential of anything below is 0, also in float64: a product with it may take this in the place of
minus infinity."""


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


def working_dtype(logits: torch.Tensor) -> torch.dtype:
    """Return the dtype to compute in: float32, but for logits in float64."""
    return torch.promote_types(logits.dtype, torch.float32)


def scaled_chunks(logits: torch.Tensor, own: int, temperature: float) -> Iterator[tuple[slice, torch.Tensor]]:
    """Rows and their first ``own`` columns, divided by the temperature: one buffer, overwritten by each next
    chunk."""
    tokens, dtype = logits.shape[0], working_dtype(logits)
    # At least one row, and no buffer larger than the rows that there are.
    step = min(max(1, CHUNK_BYTES[logits.device.type] // (dtype.itemsize * own)), max(tokens, 1))
    buffer = torch.empty(step, own, dtype=dtype, device=logits.device)
    for first in range(0, tokens, step):
        rows = slice(first, min(first + step, tokens))
        scaled = buffer[: rows.stop - first].copy_(logits[rows, :own])
        yield rows, scaled if temperature == 1.0 else _divided(scaled, temperature)


def _divided(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Divide logits in place, each quotient rounded once on every device, so that logits compare with bounds
    made elsewhere."""
    # by a number of Python's, torch multiplies with its reciprocal on a CUDA device
    return logits.div_(torch.full((), temperature, dtype=logits.dtype, device=logits.device))


def _kept_bounds(
    logits: torch.Tensor, shard: VocabularyShard, sampling: SamplingSettings
) -> torch.Tensor | None:
    """[T], the same on all ranks: columns with at least this scaled logit can be sampled; None where all can.

    Where top-p alone decides, every rank sees all columns of some tokens at a time; with top-k, the k largest
    ones of each rank.
    """
    if sampling.keeps_all(shard.size):
        return None
    (tokens, columns), dtype = logits.shape, working_dtype(logits)
    own, ranks = shard.own(columns), shard.ranks
    # the last rank of a vocabulary that does not divide may hold fewer columns than the others
    width = max(columns, -(-shard.size // ranks))
    candidates = min(width, sampling.top_k or width)
    step = max(1, CHUNK_BYTES[logits.device.type] // (dtype.itemsize * candidates * ranks))
    bounds = torch.empty(tokens, dtype=dtype, device=logits.device)
    for first in range(0, tokens, step):
        rows = slice(first, min(first + step, tokens))
        # Full width with minus infinity: all ranks gather equal shapes, and padding is never kept.
        scaled = logits.new_full((rows.stop - first, width), -torch.inf, dtype=dtype)
        scaled[:, :own] = logits[rows, :own]
        # Divided before top-k, as generation does it: rounding may make two logits equal, and ties are then
        # kept on both sides.
        largest = _divided(scaled, sampling.temperature)
        # With top-k the k largest of each rank hold the k largest of all: few columns travel.
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
    logits: torch.Tensor,
    targets: torch.Tensor,
    shard: VocabularyShard,
    temperature: float,
    bounds: torch.Tensor | None,
    with_entropies: bool = False,
) -> torch.Tensor:
    """[3, T]: maximum, sum of exponentials relative to it, and target logit (0 where the target lives on
    another rank); for entropies [4, T], with the sum of exponentials times logits, both relative to the
    maximum."""
    (tokens, columns), dtype = logits.shape, working_dtype(logits)
    own = shard.own(columns)
    statistics = torch.zeros(3 + with_entropies, tokens, dtype=dtype, device=logits.device)
    if own == 0:
        # A rank with padding alone: its maximum must not win, and its sum of 0 adds nothing.
        statistics[0] = -torch.inf
        return statistics
    if (kernels := _kernels_for(logits)) is not None:
        return kernels.statistics(logits, targets, shard.start, own, temperature, bounds, with_entropies)
    local_targets = targets - shard.start
    mine = (local_targets >= 0) & (local_targets < own)
    safe_targets = local_targets.clamp(0, own - 1)
    for rows, scaled in scaled_chunks(logits, own, temperature):
        # finite even where all columns are minus infinity, so that their exponentials are 0 and not undefined
        maximum = scaled.amax(dim=-1).clamp(min=torch.finfo(dtype).min)
        statistics[0, rows] = maximum
        target_logits = scaled.gather(1, safe_targets[rows, None]).squeeze(1)
        statistics[2, rows] = target_logits.where(mine[rows], torch.zeros_like(target_logits))
        if bounds is not None:
            scaled.masked_fill_(scaled < bounds[rows, None], -torch.inf)
        relative = scaled.sub_(maximum[:, None])
        # In place where the logits are not needed once more for the entropy.
        shares = relative.exp() if with_entropies else relative.exp_()
        statistics[1, rows] = shares.sum(dim=-1)
        if with_entropies:
            statistics[3, rows] = shares.mul_(relative.clamp_(min=NEGLIGIBLE)).sum(dim=-1)
    return statistics


def _combine(statistics: torch.Tensor, shard: VocabularyShard) -> tuple[torch.Tensor, ...]:
    """Combine the statistics of all ranks: target logit, maximum, sum of exponentials relative to it, and for
    entropies that of them times logits; [T] each."""
    if shard.ranks == 1 or not statistics.shape[1]:
        return statistics[2], statistics[0], statistics[1], *statistics[3:]
    gathered = torch.empty(shard.ranks, *statistics.shape, dtype=statistics.dtype, device=statistics.device)
    # One gather of three numbers a token, instead of a MAX and a SUM all-reduce, the second of which has to
    # wait for the first.
    dist.all_gather_into_tensor(
        gathered.view(shard.ranks * len(statistics), -1), statistics, group=shard.group
    )
    maximum = gathered[:, 0].amax(dim=0)
    below = gathered[:, 0] - maximum
    total = (gathered[:, 1] * below.exp()).sum(dim=0)
    # relative to the largest maximum of all ranks, every logit of a rank is as much less as its maximum is
    moved = (
        [(gathered[:, 3] + gathered[:, 1] * below.clamp(min=NEGLIGIBLE)) * below.exp()]
        if len(statistics) > 3
        else []
    )
    return gathered[:, 2].sum(dim=0), maximum, total, *(values.sum(dim=0) for values in moved)


def _kernels_for(logits: torch.Tensor) -> ModuleType | None:
    """The Triton kernels, where they are to compute; they do so in float32."""
    if working_dtype(logits) != torch.float32:
        return None
    return kernels("logprob_kernels", "MEGARL_LOGPROB_KERNEL", logits.device.type)


@dataclass(frozen=True, slots=True)
class SoftmaxSums:
    """Sums over the vocabulary that gradients of log-probabilities and entropies need besides the logits; [T]
    each, the same on all ranks.

    Attributes:
        maximum: of the scaled logits over the vocabulary.
        total: sum of exponentials relative to it, over the columns kept and the target.
        left_out: share of the target in it, where the target is not among the columns kept, else 0.
        bounds: columns with a smaller scaled logit are not kept; None where all are.
        entropies: of the distribution over the columns kept and the target; None where nobody wants them.
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
    """Log-probabilities [T] of ``targets`` [T] by ``logits`` [T, V], which autograd does not see; see
    ``vocab_parallel_logprobs``."""
    bounds = _kept_bounds(logits, shard, sampling)
    statistics = _local_statistics(logits, targets, shard, sampling.temperature, bounds, with_entropies)
    target_logits, maximum, total, *moment = _combine(statistics, shard)
    relative = target_logits - maximum
    # A target that top-k or top-p would not keep now counts as kept: see the module's docstring.
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
    """Log-probabilities [T, K] of ``tokens`` [T, K] by ``logits`` [T, V], which autograd does not see.

    Args:
        logits, shard, temperature: as given to ``score``; sampling has to keep all tokens.
        tokens: int64 vocabulary indices below ``shard.size``, the same on all ranks of the group.
        sums: what ``score`` returned.
    """
    assert sums.bounds is None, "of tokens that sampling leaves out there is no log-probability"
    dtype, own = working_dtype(logits), shard.own(logits.shape[1])
    found = torch.zeros(tokens.shape, dtype=dtype, device=logits.device)
    if own > 0:
        places, mine = _own_places(tokens, shard, own)
        picked = logits.gather(1, places).to(dtype)
        found = (picked if temperature == 1.0 else _divided(picked, temperature)).where(mine, found)
    # Where another rank has the token, this one has 0: a sum finds it.
    if shard.ranks > 1 and found.numel():
        dist.all_reduce(found, group=shard.group)
    return found - sums.maximum[:, None] - sums.total.log()[:, None]


def _own_places(tokens: torch.Tensor, shard: VocabularyShard, own: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns of this rank for vocabulary indices, any where another rank has them; and where this one has,
    bool."""
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
    """[T, V] in the dtype of ``logits``: the gradient of a sum of log-probabilities weighted by
    ``grad_output`` [T], and of entropies weighted by ``grad_entropies`` [T].

    Args:
        logits, targets, shard, temperature: as given to ``score``.
        sums: what it returned.
        grad_output, grad_entropies: float32; the latter None where there are no entropies.
        further: the tokens [T, K] of ``score_further``, and the weights [T, K] float32 of their
            log-probabilities; None for none.
        overwrite: write the gradient over the logits, and return these.
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
            # autograd sees torch's own writes alone; with this it refuses
            # a second backward pass over what is no longer logits
            torch.autograd.graph.increment_version(logits)
        return gradient
    # Columns of padding are in no softmax, and their weights must not move.
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
        # a target that is not among the columns kept has its own share of the sum
        part.scatter_add_(1, safe_targets[rows, None], (weights.at_target * mine)[rows, None])
        if further is not None:
            places, here = _own_places(further[0][rows], shard, own)
            part.scatter_add_(1, places, further[1][rows] / temperature * here)
        gradient[rows, :own] = part
    return gradient


@dataclass(frozen=True, slots=True)
class _GradientWeights:
    """Factors of a gradient by logits, [T] each: the derivative by a scaled logit x of a row is ``exp(x)
    (constant + slope x)``, x relative to the maximum, and for the target ``at_target`` more. ``slope`` is
    None for 0."""

    constant: torch.Tensor
    slope: torch.Tensor | None
    at_target: torch.Tensor


def _weights_of_gradient(
    temperature: float, sums: SoftmaxSums, grad_output: torch.Tensor, grad_entropies: torch.Tensor | None
) -> _GradientWeights:
    """With p = exp(x) / total, ``-p`` by the log-probability of another token, ``-p (log p + entropy)`` by
    the entropy."""
    weight = grad_output / temperature
    constant, at_target = -weight / sums.total, weight * (1 - sums.left_out)
    if grad_entropies is None:
        return _GradientWeights(constant, None, at_target)
    assert sums.entropies is not None, "entropies have a gradient and were not computed"
    bonus = grad_entropies / temperature
    # of a target that is not among the columns kept, with log p = log of its share
    of_left_out = torch.special.xlogy(sums.left_out, sums.left_out) + sums.left_out * sums.entropies
    constant = constant - bonus / sums.total * (sums.entropies - sums.total.log())
    return _GradientWeights(constant, -bonus / sums.total, at_target - bonus * of_left_out)


class _VocabParallelScores(torch.autograd.Function):
    """Log-probabilities, entropies where they are wanted, and those of further tokens where there are
    some."""

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
        # a copy: what is returned knows this node, which would keep itself alive
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
    """Log-probabilities, and entropies where asked for, of tokens; of one shape.

    Attributes:
        logprobs: of the token.
        entropies: of the distribution that it counts as sampled from; None where nobody wants them.
        further: log-probabilities, by that distribution, of K further tokens, in one more dimension; None
            where there are none.
        largest: [..., K] int64, those tokens where they are the most likely ones
            (``megarl.models.engine.topk``), else None.
    """

    logprobs: torch.Tensor
    entropies: torch.Tensor | None = None
    further: torch.Tensor | None = None
    largest: torch.Tensor | None = None

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> TokenScores:
        """The scores with ``change`` made to each tensor that is there."""
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
    """Log-probability of each target token, and with ``with_entropies`` the entropy of the distribution that
    it counts as sampled from.

    Args:
        logits: [..., V] this rank's columns, any floating dtype; computed in float32, of float64 in float64,
            chunk by chunk.
        targets: [...] int64 vocabulary indices below ``shard.size`` (checked on the driver, not here), the
            same on all ranks of the group.
        shard: which columns these are.
        sampling: how the targets were sampled: the temperature that logits are divided by, and what top-k and
            top-p keep. A target that they do not keep counts as kept.
        overwrite: nobody reads the logits after the backward pass, which may write their gradient into their
            memory. A second backward pass is then a RuntimeError of autograd.
        with_entropies: entropies are asked for, in nats.
        further: [..., K] int64, tokens whose log-probabilities are asked for too; ``sampling`` has to keep
            all tokens.

    Returns:
        [...] float32 (of float64 float64), the same on all ranks of the group; differentiable with respect to
        ``logits``.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    # The kernels walk along adjacent columns.
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
    """The log-probabilities alone of ``vocab_parallel_scores``."""
    return vocab_parallel_scores(logits, targets, shard, sampling, overwrite=overwrite).logprobs
