"""Attention over a part of the keys, with the log-sum-exp of the scores, by which results of several parts
are combined.

The combination is exact. With outputs o1, o2 and log-sum-exps l1, l2 of two parts, both together have l =
log(exp l1 + exp l2) and o = exp(l1 - l) o1 + exp(l2 - l) o2 (Dao et al. 2022, arXiv:2205.14135, section 3.1).

Shapes: B batch, S query length, K key length, H query heads, G key-value heads, D head dimension.
"""

from __future__ import annotations

import torch

# Number of queries computed at a time without a kernel, which limits the scores to [B, H, BLOCK, K].
BLOCK = 512


def partial_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    *,
    causal: bool = False,
    seen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention over the given keys only. Saves nothing for autograd.

    Args:
        query: [B, H, S, D].
        key, value: [B, G, K, D]; G divides H.
        scale: factor of the scores.
        causal: query i sees the keys up to i (requires S = K).
        seen: [S, K] bool, the keys that each query sees, instead of ``causal``; None for all.

    Returns:
        The output [B, H, S, D] in the dtype of ``query``, and the log-sum-exp of the scores [B, H, S] in
        float32 or wider. A query that sees no key has output 0 and log-sum-exp -inf.
    """
    if seen is None and takes_flash(query):
        # Call the underlying operator, because scaled_dot_product_attention does not return the log-sum-exp.
        output, logsumexp, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, False, scale=scale
        )
        return output, logsumexp
    if query.device.type != "cpu":
        return _in_blocks(query, key, value, scale, causal, seen)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, logsumexp = kernel(
        query, key, value, 0.0, causal, attn_mask=_bias(seen, query.dtype), scale=scale
    )
    if seen is not None:  # the kernel writes 0 for a query without keys
        logsumexp = logsumexp.masked_fill(~seen.any(dim=1), float("-inf"))
    return output, logsumexp


def partial_gradients(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    scale: float,
    *,
    causal: bool = False,
    seen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of attention over all keys with respect to the given keys, and the contribution
    of these keys to the gradient of the queries.

    Args:
        gradient: [B, H, S, D], gradient of the combined output of all parts.
        query, key, value, scale, causal, seen: as in ``partial_attention``.
        output: [B, H, S, D], the combined output.
        logsumexp: [B, H, S], the combined log-sum-exp; finite.

    Returns:
        Gradients of ``query``, [B, H, S, D], and of ``key`` and ``value``, [B, G, K, D]. Sum the gradient of
        ``query`` over the parts.
    """
    if seen is None and takes_flash(query):
        return _gradients_by_flash(gradient, query, key, value, output, logsumexp, scale, causal)
    if query.device.type != "cpu":
        return _gradients_in_blocks(gradient, query, key, value, output, logsumexp, scale, causal, seen)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    bias = _bias(seen, query.dtype)
    of_query, of_key, of_value = kernel(
        gradient, query, key, value, output, logsumexp, 0.0, causal, attn_mask=bias, scale=scale
    )
    return of_query, of_key, of_value


def takes_flash(query: torch.Tensor) -> bool:
    """Return whether torch's FlashAttention kernels accept tensors of this device, dtype and head
    dimension."""
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= 256
    )


def _gradients_by_flash(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute ``partial_gradients`` with FlashAttention's backward kernel. The kernel recomputes
    probabilities from the log-sum-exp, so the combined log-sum-exp of all keys gives correct results."""
    # The operator requires a dropout seed and offset, even without dropout.
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
    of_query, of_key, of_value = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        *(
            gradient,
            query,
            key,
            value,
            output,
            logsumexp.contiguous(),
            None,
            None,
            query.shape[2],
            key.shape[2],
            0.0,
            causal,
        ),
        *(no_dropout, no_dropout.new_empty(0)),
        scale=scale,
    )
    return of_query, of_key, of_value


def _bias(seen: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    if seen is None:
        return None
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, float("-inf"))[
        None, None
    ]


def _in_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    causal: bool,
    seen: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``partial_attention`` with plain operations, for devices whose kernels do not return the
    log-sum-exp for every mask and dtype."""
    outputs, sums = [], []
    for first in range(0, query.shape[2], BLOCK):
        scores = _scores(query, key, scale, causal, seen, first)
        logsumexp = scores.logsumexp(dim=-1)
        weights = _weights(scores, logsumexp)
        # Round the weights to the values' dtype before the matmul, as the kernels do.
        mixed = weights.to(value.dtype) @ value[:, :, None]
        outputs.append(mixed.flatten(1, 2))
        sums.append(logsumexp.flatten(1, 2))
    return torch.cat(outputs, dim=2), torch.cat(sums, dim=2)


def _gradients_in_blocks(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    scale: float,
    causal: bool,
    seen: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute ``partial_gradients`` with plain operations, by algorithm 4 of Dao et al. 2022, in blocks of
    queries."""
    groups = key.shape[1]
    sums = torch.promote_types(query.dtype, torch.float32)
    of_key, of_value = torch.zeros_like(key, dtype=sums), torch.zeros_like(value, dtype=sums)
    of_query = []
    for first in range(0, query.shape[2], BLOCK):
        here = slice(first, first + BLOCK)
        asked, pulled, made = (
            tensor[:, :, here].unflatten(1, (groups, -1)) for tensor in (query, gradient, output)
        )
        weights = _weights(
            _scores(query, key, scale, causal, seen, first), logsumexp[:, :, here].unflatten(1, (groups, -1))
        )
        of_value += (weights.to(value.dtype).mT @ pulled).sum(dim=2)
        of_weights = (pulled @ value[:, :, None].mT).to(sums)
        # Compute this sum from the combined output, so that it covers all keys and not only those of this
        # part.
        inner = (pulled.to(sums) * made.to(sums)).sum(dim=-1, keepdim=True)
        of_scores = (weights * (of_weights - inner) * scale).to(query.dtype)
        of_query.append((of_scores @ key[:, :, None]).flatten(1, 2))
        of_key += (of_scores.mT @ asked).sum(dim=2)
    return torch.cat(of_query, dim=2), of_key.to(key.dtype), of_value.to(value.dtype)


def _scores(
    query: torch.Tensor, key: torch.Tensor, scale: float, causal: bool, seen: torch.Tensor | None, first: int
) -> torch.Tensor:
    """Compute the scores [B, G, H/G, block, K] of the block of queries that starts at ``first``, in float32
    or wider. A key that is not seen has score -inf."""
    asked = query[:, :, first : first + BLOCK].unflatten(1, (key.shape[1], -1))
    scores = (asked @ key[:, :, None].mT).to(torch.promote_types(query.dtype, torch.float32)) * scale
    if seen is not None:
        return scores.masked_fill(~seen[first : first + BLOCK], float("-inf"))
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(
            diagonal=first + 1
        )
        return scores.masked_fill(hidden, float("-inf"))
    return scores


def _weights(scores: torch.Tensor, logsumexp: torch.Tensor) -> torch.Tensor:
    """Return exp(scores - logsumexp). For a query that sees no key, where both are -inf, it is 0."""
    return (scores - logsumexp.masked_fill(logsumexp == float("-inf"), 0.0)[..., None]).exp()
