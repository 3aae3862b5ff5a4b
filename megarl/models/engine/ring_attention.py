"""Ring attention: keys and values are passed around the context-parallel ranks, and each rank attends to one
rank's shard at a time.

A rank has at most two ranks' keys and values at a time; a gather would need all. The next shard is
transferred during attention to the current one. In the backward pass keys and values go around again,
together with their gradients (Liu et al. 2023, arXiv:2310.01889). Sequences are split into the load-balanced
chunks of ``megarl.models.engine.context``, so that all ranks have the same work in every step.

Shapes: s = S / size positions on this rank. Of each sequence, a rank has two chunks, which are the first and
the second half of its positions.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megarl.models.engine.context import ContextShare
from megarl.models.engine.partial_attention import partial_attention, partial_gradients


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: tuple[int, ...],
    context: ContextShare,
    scale: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Compute causal attention inside every sequence, over the keys and values of all context-parallel ranks.
    Collective over ``context``; so is the backward pass.

    Args:
        query: [B, H, s, D], this rank's shard.
        key, value: [B, G, s, D].
        starts: first position of each sequence, counted over all ranks; the last entry is the end. Lengths
            are multiples of 2 * context size.
        context: at least two ranks.
        scale: factor of the scores; ``1/sqrt(D)`` when None.
        window: a query sees itself and the ``window - 1`` positions before it; None for all before it.

    Returns:
        [B, H, s, D].
    """
    scale = query.shape[3] ** -0.5 if scale is None else scale
    return _RingAttention.apply(query, key, value, starts, context, scale, window)


@dataclass(frozen=True, slots=True)
class _Piece:
    """A slice of this rank's queries and the slice of another rank's keys that they see: all of these keys,
    the keys up to the query itself (``causal``), or the keys marked in ``seen``."""

    queries: slice
    keys: slice
    causal: bool = False
    seen: torch.Tensor | None = None


def _pieces(
    starts: tuple[int, ...], context: ContextShare, source: int, window: int | None, device: torch.device
) -> Iterator[_Piece]:
    """Yield this rank's queries of each sequence with the keys of rank ``source`` that they see."""
    for start, end in itertools.pairwise(starts):
        here, length = start // context.size, (end - start) // context.size
        if length == 0:
            continue
        first, middle, last = here, here + length // 2, here + length
        asked, held = context.chunks(start, end), ContextShare(source, context.size).chunks(start, end)
        if source == context.rank:
            piece = _Piece(slice(first, last), slice(first, last), causal=True)
        elif source < context.rank:
            # The source's first chunk precedes both chunks of this rank. Its second chunk follows both, so no
            # query sees it.
            piece, held = _Piece(slice(first, last), slice(first, middle)), held[:1]
        else:
            # Both chunks of the source are between this rank's two chunks, so only the queries of the second
            # chunk see them.
            piece, asked = _Piece(slice(middle, last), slice(first, last)), asked[1:]
        # A window at least as long as the sequence needs no mask. A mask would rule out the fast kernels.
        if window is None or window >= end - start:
            yield piece
        elif _within_reach(asked, held, window):
            yield _inside_window(piece, starts, context, source, window, device)


def _within_reach(asked: Sequence[tuple[int, int]], held: Sequence[tuple[int, int]], window: int) -> bool:
    """Return whether any position of the ranges ``asked`` sees a position of the ranges ``held``: the same
    one, or one less than ``window`` before it."""
    # The distances between positions of two ranges are all numbers from the smallest to the largest one.
    for (first, last), (first_held, last_held) in itertools.product(asked, held):
        if max(first - last_held + 1, 0) <= min(last - 1 - first_held, window - 1):
            return True
    return False


def _inside_window(
    piece: _Piece,
    starts: tuple[int, ...],
    context: ContextShare,
    source: int,
    window: int,
    device: torch.device,
) -> _Piece:
    """Add a mask to a piece that limits each query to its window."""
    asking = context.index(starts, device)[piece.queries]
    held = ContextShare(source, context.size).index(starts, device)[piece.keys]
    distance = asking[:, None] - held[None]
    return _Piece(piece.queries, piece.keys, seen=(distance >= 0) & (distance < window))


class _Round:
    """A transfer of a tensor to the next rank, while the previous rank's tensor arrives."""

    def __init__(self, tensor: torch.Tensor, context: ContextShare) -> None:
        assert context.group is not None
        after, before = (
            dist.get_global_rank(context.group, (context.rank + step) % context.size) for step in (1, -1)
        )
        self._arriving = torch.empty_like(tensor)
        operations = [
            # Start both in one batch: separate sends and receives could deadlock around the ring.
            dist.P2POp(dist.isend, tensor, after, context.group),
            dist.P2POp(dist.irecv, self._arriving, before, context.group),
        ]
        self._sent = tensor  # must live until the send has completed
        self._requests = dist.batch_isend_irecv(operations)

    def wait(self) -> torch.Tensor:
        for request in self._requests:
            request.wait()
        return self._arriving


def _go_round(both: torch.Tensor, context: ContextShare) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield each rank with its keys and values, starting with this rank. The next shard is transferred
    meanwhile."""
    for step in range(context.size):
        following = _Round(both, context) if step + 1 < context.size else None
        yield (context.rank - step) % context.size, both
        if following is not None:
            both = following.wait()


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        starts: tuple[int, ...],
        context: ContextShare,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        # Stack keys and values, so that one send per step is enough.
        both = torch.stack([key, value])
        # Accumulate in float32: in bfloat16, the addition of each rank's part would round the output again.
        sums = torch.promote_types(query.dtype, torch.float32)
        output = torch.zeros(query.shape, dtype=sums, device=query.device)
        logsumexp = torch.full(query.shape[:3], float("-inf"), dtype=sums, device=query.device)
        for source, held in _go_round(both, context):
            for piece in _pieces(starts, context, source, window, query.device):
                asked, keys, values = (
                    query[:, :, piece.queries],
                    held[0][:, :, piece.keys],
                    held[1][:, :, piece.keys],
                )
                part, part_sum = partial_attention(
                    asked, keys, values, scale, causal=piece.causal, seen=piece.seen
                )
                _join(output[:, :, piece.queries], logsumexp[:, :, piece.queries], part, part_sum)
        output = output.to(query.dtype)
        # Save only this rank's keys and values. Those of other ranks go around the ring again in the backward
        # pass.
        ctx.save_for_backward(query, both, output, logsumexp)
        ctx.described = (starts, context, scale, window)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        query, both, output, logsumexp = ctx.saved_tensors
        starts, context, scale, window = ctx.described
        of_query = torch.zeros_like(query, dtype=logsumexp.dtype)
        # These gradients travel one step behind their keys and values. So a last transfer brings them back to
        # their own rank.
        of_both = torch.zeros_like(both, dtype=logsumexp.dtype)
        on_its_way: _Round | None = None
        for source, held in _go_round(both, context):
            # Accumulate into a new tensor, because the gradients that other ranks computed for these keys are
            # still arriving.
            added = torch.zeros_like(of_both)
            for piece in _pieces(starts, context, source, window, query.device):
                asked, pulled, made = (tensor[:, :, piece.queries] for tensor in (query, gradient, output))
                keys, values = held[0][:, :, piece.keys], held[1][:, :, piece.keys]
                parts = partial_gradients(
                    pulled,
                    asked,
                    keys,
                    values,
                    made,
                    logsumexp[:, :, piece.queries],
                    scale,
                    causal=piece.causal,
                    seen=piece.seen,
                )
                of_query[:, :, piece.queries] += parts[0]
                added[0][:, :, piece.keys] += parts[1]
                added[1][:, :, piece.keys] += parts[2]
            of_both = added if on_its_way is None else on_its_way.wait().add_(added)
            on_its_way = _Round(of_both, context)
        assert on_its_way is not None
        home = on_its_way.wait().to(both.dtype)
        return of_query.to(query.dtype), home[0], home[1], None, None, None, None


def _join(output: torch.Tensor, logsumexp: torch.Tensor, part: torch.Tensor, part_sum: torch.Tensor) -> None:
    """Add the result of a part to the output and log-sum-exp so far, in place. If a query has seen no key
    yet, its output stays 0."""
    joint = torch.logaddexp(logsumexp, part_sum)
    # -inf minus -inf would be NaN, so replace -inf by 0.
    finite = joint.masked_fill(joint == float("-inf"), 0.0)
    output.mul_((logsumexp - finite).exp()[..., None]).add_(part * (part_sum - finite).exp()[..., None])
    logsumexp.copy_(joint)
