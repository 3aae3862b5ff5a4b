"""Requests to a model's output layer to compute less than the logits of all positions.

A ``Request`` names the positions to score. Hidden states are selected before the output layer, so its matmul
and the softmax skip all other positions. With a chunk size, the output layer returns log-probabilities
instead of logits, so the logits of only one chunk exist at a time. Without a request the output layer is
unchanged; generation makes none.

Shapes: n rows of t positions enter the model, k of these n x t are scored, h hidden size, V vocabulary
columns of this rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megarl.models.engine.logprobs import (
    SoftmaxSums,
    TokenScores,
    VocabularyShard,
    gradient_of_logits,
    score,
    score_further,
    vocab_parallel_scores,
    working_dtype,
)
from megarl.models.engine.topk import largest_tokens
from megarl.models.generation.sampling import SamplingSettings


@dataclass(slots=True)
class Request:
    """A request to the output layer for one micro-batch.

    Attributes:
        index: [k] int64, ascending, the positions to score, as indices into the flattened [n, t]; None for
            all.
        targets: [k] int64, the token to score at each of these positions.
        shard: the part of the vocabulary whose logits this rank computes.
        sampling: sampling settings that determine the scored distribution.
        chunk_size: number of positions whose logits exist at a time. None for all positions; the output layer
            then returns logits.
        with_entropies: compute entropies with the log-probabilities.
        further: [k, K] int64, more tokens to score at each position; None for none.
        largest: number K of most likely tokens to find and score as ``further``, only in a pass without
            gradients; 0 if ``further`` is given or None.
    """

    index: torch.Tensor | None
    targets: torch.Tensor
    shard: VocabularyShard
    sampling: SamplingSettings
    chunk_size: int | None
    with_entropies: bool = False
    further: torch.Tensor | None = None
    largest: int = 0
    _answer: tuple[int, torch.Size] | None = None

    def rows(self, hidden: torch.Tensor, *, sequence_first: bool = False) -> torch.Tensor:
        """Select the hidden states [k, h] of the positions to score from ``hidden`` [n, t, h], or [t, n, h]
        with ``sequence_first``. Differentiable."""
        if self.index is None:
            return (hidden.transpose(0, 1) if sequence_first else hidden).flatten(0, 1)
        index = self.index
        if sequence_first:
            length, count = hidden.shape[:2]
            # Megatron's hidden states are [t, n, h], so convert the indices into the flattened [n, t].
            index = index % length * count + index // length
        return hidden.flatten(0, 1).index_select(0, index)

    def output(
        self,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        low_rank: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Compute the output of the output layer from ``rows`` [k, h]. Differentiable.

        Args:
            rows: hidden states, equal on all tensor-parallel ranks. The caller must sum their gradient over
                these ranks.
            weight: [V, h], this rank's shard.
            bias: [V], or None.
            low_rank: with an adapter, the product [k, r] of ``rows`` and A, and this rank's shard [V, r] of
                B.

        Returns:
            Without a chunk size, logits [1, k, V]. With a chunk size, float32 log-probabilities [1, k, 1];
            one more column has the entropies and K more columns the further tokens, if requested.
        """
        if self.chunk_size is None:
            logits = F.linear(rows, weight, bias)
            return (logits if low_rank is None else logits + F.linear(*low_rank))[None]
        if self.largest:
            # of_chunk fills this tensor: the most likely tokens are known only after a chunk's logits.
            self.further = self.targets.new_empty(len(rows), self.largest)
        factors = low_rank or (None, None)
        answer: torch.Tensor = _ChunkedScores.apply(  # type: ignore[no-untyped-call]
            rows, weight, bias, self, *factors
        )[None]
        # Remember the result's address, to detect later changes: Megatron may scale or gather what it
        # believes to be logits.
        self._answer = answer.data_ptr(), answer.shape
        return answer

    def is_answer(self, output: torch.Tensor) -> bool:
        """Return whether ``output`` is what ``scores`` expects. With a chunk size, it must be the very result
        of ``output()``. Logits may have been processed further."""
        return self.chunk_size is None or (output.data_ptr(), output.shape) == self._answer

    def scores(self, output: torch.Tensor) -> TokenScores:
        """Compute the scores of the targets, [k] float32, and of further tokens, [k, K], from the result of
        ``output()``."""
        if self.chunk_size is None:
            if self.largest:
                self.further = largest_tokens(output[0].detach(), self.shard, self.largest)
            given = output[0], self.targets, self.shard, self.sampling
            # The gradient may overwrite these logits, because nothing else refers to them.
            scores = vocab_parallel_scores(
                *given, overwrite=True, with_entropies=self.with_entropies, further=self.further
            )
        else:
            first, others = 1 + self.with_entropies, output[0]
            scores = TokenScores(
                others[:, 0],
                others[:, 1] if self.with_entropies else None,
                None if self.further is None else others[:, first:],
            )
        return replace(scores, largest=self.further) if self.largest else scores

    def of_chunk(self, chunk: slice, logits: torch.Tensor) -> tuple[torch.Tensor, SoftmaxSums]:
        """Compute the scores [c, 1 or more] of one chunk of positions from their logits [c, V]. Also return
        the sums that the gradient needs. Finds the most likely tokens if requested."""
        scored = (logits, self.targets[chunk], self.shard, self.sampling)
        values, sums = score(*scored, with_entropies=self.with_entropies)
        columns = [values[:, None], *([] if sums.entropies is None else [sums.entropies[:, None]])]
        if self.further is not None:
            if self.largest:
                self.further[chunk] = largest_tokens(logits, self.shard, self.largest)
            columns.append(
                score_further(logits, self.further[chunk], self.shard, self.sampling.temperature, sums)
            )
        return torch.cat(columns, dim=1), sums

    def gradient_of_chunk(
        self, chunk: slice, logits: torch.Tensor, sums: SoftmaxSums, grad_output: torch.Tensor
    ) -> torch.Tensor:
        """Compute the gradient [c, V] with respect to a chunk's logits from the gradient of its scores.
        Overwrites the logits."""
        grad_entropies = grad_output[:, 1] if self.with_entropies else None
        further = (
            None if self.further is None else (self.further[chunk], grad_output[:, 1 + self.with_entropies :])
        )
        given = (
            self.targets[chunk],
            self.shard,
            self.sampling.temperature,
            sums,
            grad_output[:, 0],
            grad_entropies,
            further,
        )
        return gradient_of_logits(logits, *given, overwrite=True)


_ANSWERS = "answers_requests"
# A context variable rather than an argument, because the output layer is called inside the forward method of
# Megatron or transformers, whose signature is fixed.
_REQUEST: ContextVar[Request | None] = ContextVar("request", default=None)


@contextlib.contextmanager
def asking(request: Request | None) -> Iterator[None]:
    """Set the request that patched output layers of this process compute inside the context; None for the
    logits of all positions."""
    token = _REQUEST.set(request)
    try:
        yield
    finally:
        _REQUEST.reset(token)


def asked() -> Request | None:
    """Return the current request; None for the logits of all positions."""
    return _REQUEST.get()


def answer_requests(
    layer: nn.Module,
    *,
    whole: Callable[[torch.Tensor], torch.Tensor] = lambda hidden: hidden,
    local: Callable[[Any], Any] = lambda parameter: parameter,
    low_rank: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor] | None] | None = None,
) -> None:
    """Patch an output layer to compute the current request, if there is one. A layer that is not a plain
    linear layer is patched only if ``low_rank`` is given.

    Args:
        layer: output layer of a transformers model.
        whole: gathers all positions of the layer's input on every tensor-parallel rank; its backward pass
            sums the gradient.
        local: returns this rank's shard of a weight or bias.
        low_rank: for a layer with an adapter, computes the ``low_rank`` argument of ``Request.output`` from
            rows.
    """
    is_plain = isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward
    # A custom forward method may scale or cap the logits. Do not replace it; all logits are then computed.
    if not is_plain and low_rank is None:
        return
    before: Callable[[torch.Tensor], torch.Tensor] = layer.forward

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        request = asked()
        if request is None:
            return before(hidden)
        rows = request.rows(whole(hidden))
        factors = None if low_rank is None else low_rank(rows)
        return request.output(rows, local(layer.weight), local(layer.bias), factors)

    # setattr, because mypy rejects an assignment to a method.
    setattr(layer, "forward", forward)  # noqa: B010
    setattr(layer, _ANSWERS, True)


def answers_requests(layer: nn.Module) -> bool:
    """Return whether ``answer_requests`` has patched an output layer."""
    return getattr(layer, _ANSWERS, False)


class _ChunkedScores(torch.autograd.Function):
    """Scores of tokens from hidden states [k, h] and the output layer's weight, computed one chunk of
    positions at a time.

    Columns of the result: the log-probability of the target, the entropy if requested, and K further tokens.

    The backward pass recomputes the logits of each chunk, and overwrites them with their gradient. The
    weight's gradient is accumulated in float32, so the sum over many chunks is as precise as one matmul over
    all positions.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        request: Request,
        inner: torch.Tensor | None,
        up: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, bias, inner, up)
        ctx.request = request
        # Save only the sums of each token, because the backward pass recomputes the logits.
        ctx.sums = []
        columns = 1 + request.with_entropies + (0 if request.further is None else request.further.shape[1])
        values = torch.empty(len(hidden), columns, dtype=working_dtype(hidden), device=hidden.device)
        for chunk in _chunks(len(hidden), request):
            values[chunk], sums = request.of_chunk(chunk, _logits(hidden, weight, bias, inner, up, chunk))
            ctx.sums.append(sums)
        return values

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, inner, up = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        of_hidden = torch.empty_like(hidden) if wants_hidden else None
        of_weight = torch.zeros_like(weight, dtype=_sum_dtype(weight)) if wants_weight else None
        of_bias = torch.zeros_like(bias, dtype=_sum_dtype(bias)) if wants_bias else None
        of_inner = None if inner is None else torch.empty_like(inner)
        of_up = None if up is None else torch.zeros_like(up, dtype=_sum_dtype(up))
        for chunk, sums in zip(_chunks(len(hidden), ctx.request), ctx.sums, strict=True):
            gradient = ctx.request.gradient_of_chunk(
                chunk, _logits(hidden, weight, bias, inner, up, chunk), sums, grad_output[chunk]
            )
            if of_inner is not None and of_up is not None:
                torch.mm(gradient, up, out=of_inner[chunk])
                _add_product(of_up, gradient.t(), inner[chunk])
            if of_hidden is not None:
                torch.mm(gradient, weight, out=of_hidden[chunk])
            if of_weight is not None:
                _add_product(of_weight, gradient.t(), hidden[chunk])
            if of_bias is not None:
                of_bias += gradient.sum(0, dtype=of_bias.dtype)
        return (
            of_hidden,
            None if of_weight is None else of_weight.to(weight.dtype),
            None if of_bias is None else of_bias.to(bias.dtype),
            None,
            of_inner,
            None if of_up is None else of_up.to(up.dtype),
        )


def _logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    inner: torch.Tensor | None,
    up: torch.Tensor | None,
    chunk: slice,
) -> torch.Tensor:
    """Compute the logits [c, V] of a chunk of positions."""
    logits = F.linear(hidden[chunk], weight, bias)
    return logits if inner is None or up is None else logits + F.linear(inner[chunk], up)


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add ``left @ right`` to ``total``, which may have a wider dtype."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        # addmm requires equal dtypes. Here the product is rounded to 16 bits, but the sum over chunks is not.
        total += left @ right


def _sum_dtype(parameter: torch.Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)


def _chunks(count: int, request: Request) -> Iterator[slice]:
    assert request.chunk_size is not None, "logits are not cut into chunks"
    for first in range(0, count, request.chunk_size):
        yield slice(first, min(first + request.chunk_size, count))
