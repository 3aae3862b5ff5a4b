"""The k most likely tokens at each position, from logits that are sharded over the vocabulary.

Each rank finds the k largest logits of its columns. These are all-gathered over the tensor-parallel group,
and the k largest of them are the k largest of the vocabulary. Of equal logits, the one with the lower token
id comes first, so the result depends neither on the layout nor on how a device sorts.

Shapes: T tokens, V vocabulary columns of this rank (the first ``own`` are not padding), R tensor-parallel
ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megarl.models.engine.logprobs import VocabularyShard, scaled_chunks, working_dtype

# Sort key of a missing column, lower than that of any logit.
_NO_COLUMN = -(2**63)
# Mask of the token id, which is stored reversed in the lower half of a sort key.
_IDS = 2**32 - 1


def largest_tokens(logits: torch.Tensor, shard: VocabularyShard, count: int) -> torch.Tensor:
    """Return the vocabulary indices of the largest logits, [T, count] int64, in descending order of the
    logits; of equal logits, the lower index comes first. Collective over the tensor-parallel group.

    Padding columns are never returned. If a position has a NaN logit, all its log-probabilities are NaN and
    its tokens are arbitrary.

    Args:
        logits: [T, V], this rank's columns, any floating dtype.
        shard: the vocabulary range of these columns.
        count: number of tokens, at most ``shard.size``.
    """
    # A float32 and a token id fit into one int64 key, so one topk call sorts by both.
    if working_dtype(logits) == torch.float32:
        keys = _gathered(_largest_keys(logits, shard, count), shard)
        return _IDS - (keys.topk(count, dim=1).values & _IDS)
    values, tokens = _largest_pairs(logits, shard, count)
    return _first_pairs(_gathered(values, shard), _gathered(tokens, shard), count)[1]


def _largest_keys(logits: torch.Tensor, shard: VocabularyShard, count: int) -> torch.Tensor:
    """Return sort keys of the largest logits of this rank's columns, [T, count] int64. A larger logit has a
    larger key; of equal logits, the one with the lower index has the larger key."""
    own = shard.own(logits.shape[1])
    here = min(count, own)
    keys = torch.full((len(logits), count), _NO_COLUMN, dtype=torch.int64, device=logits.device)
    if here == 0:
        return keys
    # Reverse the ids, so that a lower id gives a larger key.
    ids = _IDS - torch.arange(shard.start, shard.start + own, device=logits.device)
    for rows, values in scaled_chunks(logits, own, 1.0):
        # The bits of positive floats sort like integers; those of negative floats sort in reverse. Adding 0.0
        # turns -0.0 into 0.0, which must compare equal.
        bits = (values + 0.0).view(torch.int32).long()
        ordered = torch.where(bits < 0, -(2**31) - 1 - bits, bits)
        keys[rows, :here] = (ordered * 2**32 + ids).topk(here, dim=1).values
    return keys


def _largest_pairs(
    logits: torch.Tensor, shard: VocabularyShard, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and indices of the largest logits of this rank's columns, [T, count] each. For float64
    logits, which leave no bits for the index in an int64 key."""
    own = shard.own(logits.shape[1])
    values = logits.new_full((len(logits), count), -torch.inf)
    tokens = torch.full_like(values, shard.size, dtype=torch.int64)
    ids = torch.arange(shard.start, shard.start + own, device=logits.device).expand(len(logits), own)
    here = min(count, own)
    values[:, :here], tokens[:, :here] = _first_pairs(logits[:, :own], ids, here)
    return values, tokens


def _first_pairs(values: torch.Tensor, tokens: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first ``count`` pairs of each row, sorted by value in descending order and, for equal
    values, by index in ascending order."""
    # topk guarantees no order among equal values. Use two stable sorts, by the minor key first.
    by_token = tokens.argsort(dim=1, stable=True)
    values, tokens = values.gather(1, by_token), tokens.gather(1, by_token)
    by_value = values.argsort(dim=1, descending=True, stable=True)[:, :count]
    return values.gather(1, by_value), tokens.gather(1, by_value)


def _gathered(candidates: torch.Tensor, shard: VocabularyShard) -> torch.Tensor:
    """All-gather the candidates [T, count] of all ranks into [T, R x count]."""
    if shard.ranks == 1 or not candidates.numel():
        return candidates
    found = torch.empty(shard.ranks, *candidates.shape, dtype=candidates.dtype, device=candidates.device)
    dist.all_gather_into_tensor(found.view(-1, candidates.shape[1]), candidates, group=shard.group)
    return found.transpose(0, 1).flatten(1)
