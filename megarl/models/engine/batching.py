"""Split one rank's rows into global batches and micro-batches, either by a fixed number of rows or by a plan
that comes with the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from megarl.distributed.parcels import Columns
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
    """This data-parallel rank's rows of one global batch."""

    @property
    def data(self) -> Columns:
        """The columns of the chunk."""

    @property
    def rows(self) -> int:
        """Number of rows of the chunk."""

    def micro_batches(self, shapes: Shapes) -> list[MicroBatch]:
        """Split the chunk into micro-batches, in row order."""

    def without_ragged_end(self) -> Chunk:
        """Return a chunk in which all micro-batches have the same shape, padded with copies of the last row.
        The first ``rows`` rows are the original ones."""


class Batching(Protocol):
    """A way to split a rank's rows into global batches and micro-batches."""

    def chunks(self, data: Columns) -> Sequence[Chunk]:
        """Return this rank's chunk of each global batch, in order."""


@dataclass(frozen=True, slots=True)
class _FixedChunk:
    data: Columns
    micro_batch_size: int

    @property
    def rows(self) -> int:
        return batch_size(self.data)

    def micro_batches(self, shapes: Shapes) -> list[MicroBatch]:
        return split_rows(self.data, self.micro_batch_size, shapes)

    def without_ragged_end(self) -> _FixedChunk:
        # If the chunk is smaller than a micro-batch, one micro-batch of the chunk's size needs no padding.
        size = min(self.micro_batch_size, self.rows)
        return replace(self, data=repeat_last_row(self.data, -self.rows % size), micro_batch_size=size)


@dataclass(frozen=True, slots=True)
class FixedRows:
    """Micro-batches of a fixed number of rows.

    Attributes:
        micro_batch_size: rows of a micro-batch; the last one of a chunk may have fewer.
        chunk_size: rows of one global batch on this rank; None treats all rows as one global batch.
    """

    micro_batch_size: int
    chunk_size: int | None = None

    def chunks(self, data: Columns) -> Sequence[Chunk]:
        """Split the rows into chunks of ``chunk_size`` rows."""
        total = batch_size(data)
        size = self.chunk_size or total
        return [
            _FixedChunk(slice_rows(data, first, first + size), self.micro_batch_size)
            for first in range(0, total, size)
        ]


@dataclass(frozen=True, slots=True)
class _PlannedChunk:
    data: Columns
    indices: Sequence[Sequence[int]]
    lengths: Sequence[int]
    packed: bool

    @property
    def rows(self) -> int:
        return batch_size(self.data)

    def micro_batches(self, shapes: Shapes) -> list[MicroBatch]:
        return follow_plan(self.data, self.indices, self.lengths, shapes, packed=self.packed)

    def without_ragged_end(self) -> _PlannedChunk:
        # follow_plan already gives all micro-batches of a plan equal shapes where that is needed.
        return self


@dataclass(frozen=True, slots=True)
class Planned:
    """Micro-batches that the driver planned from sequence lengths; see ``SlicedDataDict``.

    Attributes:
        indices: for each chunk, the row range ``[start, end]`` of each micro-batch, counted from the chunk's
            first row.
        lengths: for each chunk, the length of each micro-batch: of its rows (dynamic batching) or of all its
            rows together (packing).
        counts: number of rows of each chunk.
        packed: the rows of a micro-batch are concatenated to one row for the model.
    """

    indices: Sequence[Sequence[Sequence[int]]]
    lengths: Sequence[Sequence[int]]
    counts: Sequence[int]
    packed: bool

    def chunks(self, data: Columns) -> Sequence[Chunk]:
        """Split the rows into the planned chunks.

        Raises:
            BatchError: the batch has another number of rows than the plan.
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
