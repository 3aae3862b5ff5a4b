"""Rows of token ids, stored in one array."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain, pairwise
from typing import overload

import numpy as np


class TokenRows(Sequence[list[int]]):
    """A sequence of rows of token ids in one array. A row is converted to a list only when it is read.

    Attributes:
        joined: [N] int, the tokens of all rows, concatenated.
        lengths: [B] int64, number of tokens of each row.
    """

    def __init__(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        self.joined, self.lengths = tokens, lengths

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self.lengths)

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> TokenRows:
        """Build from rows that are lists of token ids."""
        return cls(np.fromiter(chain.from_iterable(rows), np.int64), _lengths(rows))

    @classmethod
    def of_arrays(cls, rows: Sequence[np.ndarray]) -> TokenRows:
        """Build from rows that are int64 arrays."""
        if len(rows) == 1:
            # The common case in multi-turn rollouts, where the driver builds one row per turn. It needs no
            # copy.
            return cls(rows[0], np.array([len(rows[0])]))
        return cls(np.concatenate(rows) if len(rows) else np.empty(0, np.int64), _lengths(rows))

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, row: int) -> list[int]: ...

    @overload
    def __getitem__(self, row: slice) -> TokenRows: ...

    def __getitem__(self, row: int | slice) -> list[int] | TokenRows:
        if isinstance(row, slice):
            return TokenRows.of([self[each] for each in range(len(self))[row]])
        end = self._ends[row]
        return self.joined[end - self.lengths[row] : end].tolist()

    def __iter__(self) -> Iterator[list[int]]:
        begun = 0
        for end in self._ends.tolist():
            yield self.joined[begun:end].tolist()
            begun = end

    @property
    def tokens(self) -> int:
        """Total number of tokens."""
        return len(self.joined)

    def parts(self, tokens: int) -> Iterator[TokenRows]:
        """Split the rows, in order, into parts of about ``tokens`` tokens. Each part has at least one row."""
        # Divide all tokens into windows of ``tokens`` tokens. Rows whose last tokens are in the same window
        # form a part.
        part = (self._ends - 1) // tokens
        ends = [0, *self._ends.tolist()]
        for first, last in pairwise(sorted({0, *(np.flatnonzero(np.diff(part)) + 1).tolist(), len(self)})):
            yield TokenRows(self.joined[ends[first] : ends[last]], self.lengths[first:last])


def _lengths(rows: Sequence[Sequence[int]] | Sequence[np.ndarray]) -> np.ndarray:
    return np.fromiter(map(len, rows), np.int64, len(rows))
