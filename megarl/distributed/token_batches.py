"""Right-padded batches from rows of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megarl.data.datasets import Example
from megarl.distributed.batched_data_dict import BatchedDataDict


def pad_rows(rows: Sequence[Sequence[int]], pad_value: int) -> tuple[Tensor, Tensor]:
    """Right-padded int64 [B, S] (S is the longest row) and the int64 [B] lengths."""
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    padded = torch.full((len(rows), max((len(row) for row in rows), default=0)), pad_value, dtype=torch.int64)
    for place, row in enumerate(rows):
        padded[place, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return padded, lengths


def span_mask(starts: Tensor, ends: Tensor, length: int) -> Tensor:
    """Float [B, length]: 1 at positions from ``starts`` [B] up to, not including, ``ends`` [B]."""
    positions = torch.arange(length).unsqueeze(0)
    return ((positions >= starts.unsqueeze(1)) & (positions < ends.unsqueeze(1))).float()


def supervised_batch(examples: Sequence[Example], pad_token_id: int, rows: int | None = None) -> BatchedDataDict[Any]:
    """Prompts with answers; only the answers' tokens, the end-of-sequence token among them, are targets.

    Args:
        examples: at least one.
        pad_token_id: fills rows up.
        rows: fill the batch up to this many rows with copies of the first example that have ``sample_mask`` 0.

    Returns:
        ``input_ids`` [B, S] int64, ``input_lengths`` [B] int64, ``token_mask`` [B, S] float, ``sample_mask`` [B] float.
    """
    filling = max((rows or 0) - len(examples), 0)
    used = [*examples, *([examples[0]] * filling)]
    input_ids, input_lengths = pad_rows([(*example.prompt_ids, *example.answer_ids) for example in used], pad_token_id)
    prompt_lengths = torch.tensor([len(example.prompt_ids) for example in used], dtype=torch.int64)
    return BatchedDataDict(
        {
            "input_ids": input_ids,
            "input_lengths": input_lengths,
            "token_mask": span_mask(prompt_lengths, input_lengths, input_ids.shape[1]),
            "sample_mask": torch.tensor([1.0] * len(examples) + [0.0] * filling),
        }
    )
