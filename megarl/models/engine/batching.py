"""Division of one rank's rows into global batches and micro-batches, either by a fixed number of rows or by a
plan that comes with the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from megarl.errors import BatchError
from megarl.models.engine.microbatches import (
    MicroBatch,
    Shapes,
    batch_size,
    follow_plan,
    repeat_last_row,
    slice_rows,
    split_rows,
)


class Chunk(Protocol):
    """This data-parallel rank's part of one global batch."""

    @property
    def data(self) -> Mapping[str, Any]:
        """The chunk's rows."""

    @property
    def rows(self) -> int:
        """Number of rows of the chunk."""

    def micro_batches(self, shapes: Shapes) -> list[MicroBatch]:
        """Split the chunk's rows into micro-batches, in order."""

    def without_ragged_end(self) -> Chunk:
        """Return a chunk whose last row is repeated until all micro-batches have the same shape. The first
        ``rows`` rows are the real ones."""


class Batching(Protocol):
    """A division of a rank's rows into chunks."""

    def chunks(self, data: Mapping[str, Any]) -> Sequence[Chunk]:
        """Return this rank's parts of the global batches, in order."""


@dataclass(frozen=True, slots=True)
class _FixedChunk:
    data: Mapping[str, Any]
    micro_batch_size: int

    @property
    def rows(self) -> int:
        return batch_size(self.data)

    def micro_batches(self, shapes: Shapes) -> list[MicroBatch]:
        return split_rows(self.data, self.micro_batch_size, shapes)

    def without_ragged_end(self) -> _FixedChunk:
        # If there are fewer rows than a micro-batch holds, use micro-batches of that size, which need no
        # copies as padding.
        size = min(self.micro_batch_size, self.rows)
        return replace(self, data=repeat_last_row(self.data, -self.rows % size), micro_batch_size=size)


@dataclass(frozen=True, slots=True)
class FixedRows:
    """Micro-batches of a fixed number of rows.

    Attributes:
        micro_batch_size: rows of a micro-batch; the last one of a chunk may be smaller.
        chunk_size: rows of one global batch on this rank; None takes all rows as one.
    """

    micro_batch_size: int
    chunk_size: int | None = None

    def chunks(self, data: Mapping[str, Any]) -> Sequence[Chunk]:
        """Split the rows into chunks of ``chunk_size`` rows."""
        total = batch_size(data)
        size = self.chunk_size or total
        return [
            _FixedChunk(slice_rows(data, first, first + size), self.micro_batch_size)
            for first in range(0, total, size)
        ]


@dataclass(frozen=True, slots=True)
class _PlannedChunk:
    data: Mapping[str, Any]
    indices: Sequence[Sequence[int]]
    lengths: Sequence[int]
    packed: bool

    @property
    def rows(self) -> int:
        return batch_size(self.data)

    def micro_batches(self, shapes: Shapes) -> list[MicroBatch]:
        return follow_plan(self.data, self.indices, self.lengths, shapes, packed=self.packed)

    def without_ragged_end(self) -> _PlannedChunk:
        # A plan of the driver already has equal shapes; see follow_plan.
        return self


@dataclass(frozen=True, slots=True)
class Planned:
    """Micro-batches as the driver planned them from lengths (``SlicedDataDict``'s plan).

    Attributes:
        indices: for each chunk, ``[start, end]`` of each micro-batch, counted from the chunk's first row.
        lengths: for each chunk, the planned row length (dynamic) or total length (packed) of each
            micro-batch.
        counts: rows of each chunk.
        packed: the rows of a micro-batch go through the model as one row.
    """

    indices: Sequence[Sequence[Sequence[int]]]
    lengths: Sequence[Sequence[int]]
    counts: Sequence[int]
    packed: bool

    def chunks(self, data: Mapping[str, Any]) -> Sequence[Chunk]:
        """Split the rows into the planned chunks.

        Raises:
            BatchError: the plan is for another number of rows.
        """
        if sum(self.counts) != batch_size(data):
            raise BatchError(
                f"the micro-batch plan holds {sum(self.counts)} rows, the batch {batch_size(data)}; shard "
                "the batch again"
            )
        chunks: list[Chunk] = []
        first = 0
        for indices, lengths, count in zip(self.indices, self.lengths, self.counts, strict=True):
            chunks.append(
                _PlannedChunk(slice_rows(data, first, first + count), indices, lengths, self.packed)
            )
            first += count
        return chunks
