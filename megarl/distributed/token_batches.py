"""Right-padded batches from rows of token ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from megarl.data.datasets import Example
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.parcels import inside


def pad_rows(rows: Sequence[Sequence[int]], pad_value: int) -> tuple[Tensor, Tensor]:
    """Return rows padded on the right, int64 [B, S] with S the longest one, and their lengths, int64 [B]."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return _padded(np.fromiter(chain.from_iterable(rows), np.int64, lengths.sum()), lengths, pad_value)


def pad_arrays(rows: Sequence[np.ndarray], pad_value: int) -> tuple[Tensor, Tensor]:
    """Pad rows that are int64 arrays, without a step in Python for each token; like ``pad_rows``."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    return _padded(np.concatenate(rows) if rows else np.empty(0, np.int64), lengths, pad_value)


def _padded(tokens: np.ndarray, lengths: np.ndarray, pad_value: int) -> tuple[Tensor, Tensor]:
    padded = np.full((len(lengths), lengths.max(initial=0)), pad_value, np.int64)
    padded[inside(0, lengths, padded.shape[1])] = tokens
    return torch.from_numpy(padded), torch.from_numpy(lengths)


class TokenRows(Sequence[list[int]]):
    """Rows of token ids as parts of a batch, each made a list only when it is asked for.

    Args:
        ids: [B, S] int.
        starts, ends: [B] int; row r is ``ids[r, starts[r]:ends[r]]``.
    """

    def __init__(self, ids: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        self._ids, self._starts, self._ends = ids, starts, ends

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> TokenRows:
        """Make it of rows that are lists."""
        ids, lengths = pad_rows(rows, 0)
        return cls(ids.numpy(), np.zeros(len(rows), np.int64), lengths.numpy())

    @classmethod
    def of_arrays(cls, rows: Sequence[np.ndarray]) -> TokenRows:
        """The same of rows that are int64 arrays."""
        if len(rows) == 1:
            return cls(rows[0][None], np.zeros(1, np.int64), np.array([len(rows[0])]))
        ids, lengths = pad_arrays(rows, 0)
        return cls(ids.numpy(), np.zeros(len(rows), np.int64), lengths.numpy())

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, row: int) -> list[int]: ...

    @overload
    def __getitem__(self, row: slice) -> TokenRows: ...

    def __getitem__(self, row: int | slice) -> list[int] | TokenRows:
        if isinstance(row, slice):
            return TokenRows(self._ids[row], self._starts[row], self._ends[row])
        return self._ids[row, self._starts[row] : self._ends[row]].tolist()

    def __iter__(self) -> Iterator[list[int]]:
        for row, start, end in zip(self._ids, self._starts.tolist(), self._ends.tolist(), strict=True):
            yield row[start:end].tolist()

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each row, [B] int64."""
        return self._ends - self._starts

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return int(self.lengths.sum())

    def joined(self) -> np.ndarray:
        """Return all tokens one after another."""
        return self._ids[inside(self._starts, self._ends, self._ids.shape[1])]

    def last(self, without: int) -> np.ndarray:
        """Return the last token of each row, [B]; ``without`` where it has none."""
        if self._ids.shape[1] == 0:
            return np.full(len(self), without)
        found = self._ids[np.arange(len(self)), np.maximum(self._ends - 1, 0)]
        return np.where(self.lengths > 0, found, without)

    def parts(self, tokens: int) -> Iterator[TokenRows]:
        """Yield the rows in order, in parts of at most about that many tokens, and of a row at least."""
        part = (np.cumsum(self.lengths) - 1) // tokens
        for first, last in pairwise(sorted({0, *(np.flatnonzero(np.diff(part)) + 1).tolist(), len(self)})):
            yield self[first:last]


def supervised_batch(
    examples: Sequence[Example], pad_token_id: int, rows: int | None = None
) -> BatchedDataDict[Any]:
    """Return prompts with answers; only the answers' tokens, the end-of-sequence token among them, are
    targets; of a conversation all turns of the assistant.

    Args:
        examples: at least one.
        pad_token_id: fills rows up.
        rows: fill the batch up to this many rows with copies of the first example that have ``sample_mask``
            0.

    Returns:
        ``input_ids`` [B, S] int64, ``input_lengths`` [B] int64, ``token_mask`` [B, S] float, ``sample_mask``
        [B] float.
    """
    filling = max((rows or 0) - len(examples), 0)
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
