"""Autograd collectives at the boundaries between replicated computation (identical on all tensor-parallel
ranks) and split computation (each rank computes a part).

Each boundary changes the layout of an activation: ``Replicate()`` (full on every rank), ``Shard(dimension)``
(equal parts along a dimension, in rank order), or partial sums. The backward pass changes the gradient's
layout the other way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Placement, Shard

from megarl.models.engine.groups import summed_gradients

_Change = Callable[[torch.Tensor, int, dist.ProcessGroup], torch.Tensor]


def for_parts(activation: torch.Tensor, layout: Placement, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the full activation on every rank as input of a split computation. The backward pass sums the
    gradients over the ranks.

    Args:
        activation: activation in layout ``layout``.
        layout: ``Replicate()`` or ``Shard(dimension)``.
        group: the tensor-parallel group.
    """
    if isinstance(layout, Shard):
        return _applied(_AlongDimension, activation, _gather, _scatter_sum, layout.dim, group)
    return summed_gradients(activation, group)


def sum_of_parts(parts: torch.Tensor, layout: Placement, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum of ``parts`` over the ranks in layout ``layout``: ``Replicate()`` or
    ``Shard(dimension)``. The memory of ``parts`` may be overwritten."""
    if isinstance(layout, Shard):
        return _applied(_AlongDimension, parts, _scatter_sum, _gather, layout.dim, group)
    return _applied(_Sum, parts, group)


def own_run(activation: torch.Tensor, dimension: int, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's part, along ``dimension``, of a replicated activation. The backward pass all-gathers
    the gradient."""
    return _applied(_AlongDimension, activation, _run_of, _gather, dimension, group)


def from_runs(run: torch.Tensor, dimension: int, group: dist.ProcessGroup) -> torch.Tensor:
    """All-gather the ranks' parts of an activation along ``dimension``, as input of a replicated computation.
    The backward pass keeps this rank's part of the gradient."""
    return _applied(_AlongDimension, run, _gather, _run_of, dimension, group)


def _applied(border: Any, *arguments: Any) -> torch.Tensor:
    result: torch.Tensor = border.apply(*arguments)
    return result


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        whole = parts.contiguous()
        if whole is parts:
            # Tell autograd that the all-reduce writes into the argument.
            ctx.mark_dirty(parts)
        return _add_up(whole, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        # The computation after the sum is replicated, so each rank already has the full gradient.
        return gradient, None


class _AlongDimension(torch.autograd.Function):
    """A layout change along one dimension, whose backward pass is the adjoint change."""

    @staticmethod
    def forward(
        ctx: Any,
        activation: torch.Tensor,
        change: _Change,
        adjoint: _Change,
        dimension: int,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.adjoint, ctx.dimension, ctx.group = adjoint, dimension, group
        return change(activation, dimension, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        return ctx.adjoint(gradient, ctx.dimension, ctx.group), None, None, None, None


def _add_up(parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All-reduce ``parts`` in place and return it."""
    dist.all_reduce(parts, group=group)
    return parts


def _gather(run: torch.Tensor, dimension: int, group: dist.ProcessGroup) -> torch.Tensor:
    ranks = group.size()
    whole = run.new_empty(ranks * run.shape[0], *run.shape[1:])
    dist.all_gather_into_tensor(whole, run.contiguous(), group=group)
    # The collective concatenates along the first dimension; reorder for others.
    return whole if dimension == 0 else torch.cat(whole.chunk(ranks), dim=dimension)


def _scatter_sum(parts: torch.Tensor, dimension: int, group: dist.ProcessGroup) -> torch.Tensor:
    ranks = group.size()
    _require_runs(parts, dimension, ranks)
    by_rank = parts.contiguous() if dimension == 0 else torch.cat(parts.chunk(ranks, dim=dimension))
    run = parts.new_empty(by_rank.shape[0] // ranks, *by_rank.shape[1:])
    dist.reduce_scatter_tensor(run, by_rank, group=group)
    return run


def _run_of(whole: torch.Tensor, dimension: int, group: dist.ProcessGroup) -> torch.Tensor:
    _require_runs(whole, dimension, group.size())
    return whole.chunk(group.size(), dim=dimension)[group.rank()].contiguous()


def _require_runs(whole: torch.Tensor, dimension: int, ranks: int) -> None:
    if whole.shape[dimension] % ranks:
        raise ValueError(
            f"an activation of shape {list(whole.shape)} has no {ranks} equal runs along dimension "
            f"{dimension}: "
            f"pad it to a multiple of {ranks}"
        )
