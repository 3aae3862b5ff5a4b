"""Portable attention: one function that every backend calls when it has no fused kernel of its own.

Shapes: B batch, S query length, K key length, H query heads, G key-value heads, D head dimension.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def causal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None = None) -> torch.Tensor:
    """Causal attention in which the queries are the *last* S of K positions (all of them when training, a few when decoding with a cache).

    Args:
        query: [B, H, S, D].
        key: [B, G, K, D], K >= S; G divides H (grouped-query attention).
        value: [B, G, K, D].
        scale: factor of the scores; ``1/sqrt(D)`` when None.

    Returns:
        [B, H, S, D] in the dtype of ``query``.
    """
    queries, keys = query.shape[2], key.shape[2]
    grouped = query.shape[1] != key.shape[1]
    if queries == keys:
        return scaled_dot_product_attention(query, key, value, is_causal=queries > 1, scale=scale, enable_gqa=grouped)
    mask = None
    if queries > 1:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(diagonal=keys - queries)
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)
