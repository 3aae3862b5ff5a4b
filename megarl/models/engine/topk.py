"""The k most likely tokens of each position, from logits that are sharded over the vocabulary.

Each rank finds the k largest logits of its own columns. These are gathered over the tensor-parallel group,
and the k largest of them are the k largest of the vocabulary. Among equal logits the lower token id comes
first, so that the choice depends neither on the layout nor on how a device sorts.

Legend: T tokens, V vocabulary columns of this rank, of which the first ``own`` are not padding, R
tensor-parallel ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megarl.models.engine.logprobs import VocabularyShard, scaled_chunks, working_dtype

# The key of a missing column is less than that of any logit.
_NO_COLUMN = -(2**63)
_IDS = 2**32 - 1


def largest_tokens(logits: torch.Tensor, shard: VocabularyShard, count: int) -> torch.Tensor:
    """Return the vocabulary indices of the largest logits, [T, count] int64, the largest first; among equal
    logits the lower index comes first.

    Padding columns are never returned. If a position has a NaN logit, all its log-probabilities are NaN and
    its tokens are arbitrary.

    Args:
        logits: [T, V] this rank's columns, any floating dtype.
        shard: the vocabulary range of these columns.
        count: at most ``shard.size``.
    """
    # A float32 and a token id fit into one int64, so that one topk sorts by both.
    if working_dtype(logits) == torch.float32:
        keys = _gathered(_largest_keys(logits, shard, count), shard)
        return _IDS - (keys.topk(count, dim=1).values & _IDS)
    values, tokens = _largest_pairs(logits, shard, count)
    return _first_pairs(_gathered(values, shard), _gathered(tokens, shard), count)[1]


def _largest_keys(logits: torch.Tensor, shard: VocabularyShard, count: int) -> torch.Tensor:
    """Return keys of the largest of the rank's own columns, [T, count] int64. A larger logit has a larger
    key; among equal logits, a lower index does."""
    own = shard.own(logits.shape[1])
    here = min(count, own)
    keys = torch.full((len(logits), count), _NO_COLUMN, dtype=torch.int64, device=logits.device)
    if here == 0:
        return keys
    # Reverse the ids, so that of two equal logits the one with the lower id has the larger key.
    ids = _IDS - torch.arange(shard.start, shard.start + own, device=logits.device)
    for rows, values in scaled_chunks(logits, own, 1.0):
        # Adding 0.0 turns minus zero into zero. The bits of floats sort like integers, but those of negative
        # floats in reverse.
        bits = (values + 0.0).view(torch.int32).long()
        ordered = torch.where(bits < 0, -(2**31) - 1 - bits, bits)
        keys[rows, :here] = (ordered * 2**32 + ids).topk(here, dim=1).values
    return keys


def _largest_pairs(
    logits: torch.Tensor, shard: VocabularyShard, count: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and indices of the largest of the rank's own columns, [T, count] each, for float64
    logits, whose bits leave no room for the index in a key."""
    own = shard.own(logits.shape[1])
    values = logits.new_full((len(logits), count), -torch.inf)
    tokens = torch.full_like(values, shard.size, dtype=torch.int64)
    ids = torch.arange(shard.start, shard.start + own, device=logits.device).expand(len(logits), own)
    here = min(count, own)
    values[:, :here], tokens[:, :here] = _first_pairs(logits[:, :own], ids, here)
    return values, tokens


def _first_pairs(values: torch.Tensor, tokens: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first ``count`` pairs of each row, sorted by falling values and, among equal values, by
    rising indices."""
    # Sort twice, stably and by the minor key first, because torch's topk promises no order among equal
    # values.
    by_token = tokens.argsort(dim=1, stable=True)
    values, tokens = values.gather(1, by_token), tokens.gather(1, by_token)
    by_value = values.argsort(dim=1, descending=True, stable=True)[:, :count]
    return values.gather(1, by_value), tokens.gather(1, by_value)


def _gathered(candidates: torch.Tensor, shard: VocabularyShard) -> torch.Tensor:
    """Gather the candidates [T, count] of all ranks into [T, R x count]."""
    if shard.ranks == 1 or not candidates.numel():
        return candidates
    found = torch.empty(shard.ranks, *candidates.shape, dtype=candidates.dtype, device=candidates.device)
    dist.all_gather_into_tensor(found.view(-1, candidates.shape[1]), candidates, group=shard.group)
    return found.transpose(0, 1).flatten(1)
