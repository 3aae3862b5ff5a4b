"""Construction of right-padded batches from rows of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megarl.data.datasets import Example
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.parcels import inside
from megarl.distributed.token_rows import TokenRows


def pad_rows(rows: Sequence[Sequence[int]], pad_value: int) -> tuple[Tensor, Tensor]:
    """Pad rows on the right. Return them as int64 [B, S], with S the length of the longest row, and their
    lengths, int64 [B]."""
    return padded(TokenRows.of(rows), pad_value)


def pad_arrays(rows: Sequence[np.ndarray], pad_value: int) -> tuple[Tensor, Tensor]:
    """Pad rows that are int64 arrays, as ``pad_rows`` does but faster."""
    return padded(TokenRows.of_arrays(rows), pad_value)


def padded(rows: TokenRows, pad_value: int) -> tuple[Tensor, Tensor]:
    """Pad rows, as ``pad_rows`` does."""
    ids = np.full((len(rows), rows.lengths.max(initial=0)), pad_value, np.int64)
    ids[inside(0, rows.lengths, ids.shape[1])] = rows.joined
    return torch.from_numpy(ids), torch.from_numpy(rows.lengths)


def supervised_batch(
    examples: Sequence[Example], pad_token_id: int, rows: int | None = None
) -> BatchedDataDict[Any]:
    """Build a batch of prompts with reference answers. Only tokens of answers are targets, including the
    end-of-sequence token; in a conversation, those of all assistant turns.

    Args:
        examples: at least one.
        pad_token_id: token that pads rows.
        rows: pad the batch to this number of rows, with copies of the first example whose ``sample_mask`` is
            0.

    Returns:
        ``input_ids`` [B, S] int64, ``input_lengths`` [B] int64, ``token_mask`` [B, S] float, ``sample_mask``
        [B] float.
    """
    filling = max((rows or 0) - len(examples), 0)
    # Fill up with copies of an example, because a row of padding has no valid length. A sample_mask of 0
    # excludes the copies from all sums.
    used = [*examples, *([examples[0]] * filling)]
    input_ids, input_lengths = pad_rows(
        [(*example.prompt_ids, *example.answer_ids) for example in used], pad_token_id
    )
    token_mask = torch.zeros(input_ids.shape)
    for row, example in enumerate(used):
        for start, end in example.targets or [
            (len(example.prompt_ids), len(example.prompt_ids) + len(example.answer_ids))
        ]:
            token_mask[row, start:end] = 1
    return BatchedDataDict(
        {
            "input_ids": input_ids,
            "input_lengths": input_lengths,
            "token_mask": token_mask,
            "sample_mask": torch.tensor([1.0] * len(examples) + [0.0] * filling),
        }
    )
