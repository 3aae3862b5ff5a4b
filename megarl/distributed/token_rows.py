"""Rows of token ids in one array."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain, pairwise
from typing import overload

import numpy as np


class TokenRows(Sequence[list[int]]):
    """Rows of token ids; a row becomes a list only when it is read.

    Attributes:
        joined: [N] int, the tokens of all rows one after another.
        lengths: [B] int64, tokens of each row.
    """

    def __init__(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        self.joined, self.lengths = tokens, lengths

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self.lengths)

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> TokenRows:
        """Build it from rows that are lists."""
        return cls(np.fromiter(chain.from_iterable(rows), np.int64), _lengths(rows))

    @classmethod
    def of_arrays(cls, rows: Sequence[np.ndarray]) -> TokenRows:
        """Build it from rows that are int64 arrays."""
        if len(rows) == 1:
            # A turn of a conversation has a single row, because the driver builds turns one by one.
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
        """Number of tokens of all rows."""
        return len(self.joined)

    def parts(self, tokens: int) -> Iterator[TokenRows]:
        """Yield the rows in order, in parts of at most about that many tokens, and of at least one row."""
        # Divide the tokens into windows of that size: rows whose last tokens are in the same window form a
        # part.
        part = (self._ends - 1) // tokens
        ends = [0, *self._ends.tolist()]
        for first, last in pairwise(sorted({0, *(np.flatnonzero(np.diff(part)) + 1).tolist(), len(self)})):
            yield TokenRows(self.joined[ends[first] : ends[last]], self.lengths[first:last])


def _lengths(rows: Sequence[Sequence[int]] | Sequence[np.ndarray]) -> np.ndarray:
    return np.fromiter(map(len, rows), np.int64, len(rows))
