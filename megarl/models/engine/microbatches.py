"""Split one rank's rows into micro-batches, either by a fixed number of rows or by a plan from the driver.

A plan (for dynamic batching or sequence packing) comes with the batch, as ``micro_batch_indices`` and
``micro_batch_lengths`` of a ``SlicedDataDict``. ``BatchedDataDict.shard_by_batch_size`` computes it from
sequence lengths alone, with the same number of micro-batches for every data-parallel rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from megarl.distributed.batched_data_dict import take_rows
from megarl.distributed.device import sent_to
from megarl.distributed.parcels import Columns
from megarl.errors import BatchError

HOST_LENGTHS = "input_lengths_on_host"
"""Key under which a batch on a device also has its ``input_lengths`` as a list [B] on the host."""
WANTED = "wanted_on_host"
"""Key under which a batch on a device has a bool mask [B, S] on the host: the tokens whose log-probabilities
are needed. Without the key, all are."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows that go through the model in one forward pass.

    Attributes:
        data: the batch's columns, reduced to these rows. Dimension 1 of tensors with two or more dimensions
            is the sequence.
        packed: the rows are concatenated to one row for the model.
        length: sequence length that enters the model, over all context-parallel ranks: of each row, or of the
            packed row.
    """

    data: Columns
    packed: bool
    length: int

    @property
    def input_ids(self) -> torch.Tensor:
        """The token ids, [b, S] int64."""
        return self.data["input_ids"]

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each row, from the copy that ``move_to`` keeps on the host. Reading it does not
        wait for the device."""
        return _lengths(self.data)

    @property
    def wanted(self) -> np.ndarray | None:
        """Mask [b, S] bool of the tokens whose log-probabilities are needed; None for all."""
        known = self.data.get(WANTED)
        return None if known is None else known.numpy()

    @property
    def size(self) -> int:
        """Number of rows, b."""
        return self.input_ids.shape[0]

    @property
    def positions(self) -> int:
        """Number of positions that enter the model, including padding, over all context-parallel ranks."""
        return self.length * (1 if self.packed else self.size)


@dataclass(frozen=True, slots=True)
class Shapes:
    """A backend's requirements on the shapes of micro-batches.

    Attributes:
        row_multiple: row lengths are padded to a multiple of this number.
        packed_multiple: the length of each packed sequence is padded to a multiple of this number.
        equal: all micro-batches of a pass must have the same shape, because pipeline stages exchange tensors
            of one shape.
    """

    row_multiple: int = 1
    packed_multiple: int = 1
    equal: bool = False


def batch_size(data: Columns) -> int:
    """Return the number of rows of a batch."""
    return data["input_ids"].shape[0]


def chosen_size(given: int | None, configured: int, what: str) -> int:
    """Return the batch or micro-batch size of one call: ``given``, or ``configured`` if ``given`` is None.

    Raises:
        BatchError: the size is less than 1.
    """
    value = configured if given is None else given
    if value < 1:
        raise BatchError(
            f"{what} = {value}: must be at least 1; leave it out for the configured {configured}"
        )
    return value


def slice_rows(data: Columns, first: int, last: int) -> Columns:
    """Return rows ``first`` to ``last`` (exclusive) of every column. Tensors become views."""
    return {key: value[first:last] for key, value in data.items()}


def move_to(data: Columns, device: torch.device, *, wanted: torch.Tensor | None = None) -> Columns:
    """Copy a batch's tensors from the host to ``device``, and keep on the host what the host needs later.

    Args:
        data: the batch. Its ``input_lengths`` are also kept as a list, under ``HOST_LENGTHS``.
        device: the target device.
        wanted: [B, S] bool, kept on the host under ``WANTED``.
    """
    moved = {
        key: sent_to(value, device) if isinstance(value, torch.Tensor) else value
        for key, value in data.items()
    }
    moved[HOST_LENGTHS] = data["input_lengths"].tolist()
    if wanted is not None:
        moved[WANTED] = wanted
    return moved


def under_mask(data: Columns) -> torch.Tensor:
    """Return a mask [B, S] bool of the tokens whose ``token_mask`` and ``sample_mask`` (if present) are not
    0.

    Raises:
        BatchError: there is no ``token_mask``.
    """
    if "token_mask" not in data:
        raise BatchError(
            "skip_masked: the batch has no token_mask [B, S]. Fix: add it, or leave skip_masked out"
        )
    tokens: torch.Tensor = data["token_mask"] != 0
    return tokens & (data["sample_mask"] != 0)[:, None] if "sample_mask" in data else tokens


def round_up(length: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``length``."""
    return -(-length // multiple) * multiple


def fit_sequences(data: Columns, length: int) -> Columns:
    """Truncate or zero-pad dimension 1 of every tensor to ``length``, on the right. Tensors with one
    dimension are unchanged."""

    def fit(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.ndim < 2 or value.shape[1] == length:
            return value
        if value.shape[1] > length:
            return value[:, :length]
        return F.pad(value, [0, 0] * (value.ndim - 2) + [0, length - value.shape[1]])

    return {key: fit(value) for key, value in data.items()}


def split_rows(data: Columns, micro_batch_size: int, shapes: Shapes) -> list[MicroBatch]:
    """Split a batch into micro-batches of ``micro_batch_size`` rows, in order. The last one has the remaining
    rows."""
    total, length = batch_size(data), round_up(data["input_ids"].shape[1], shapes.row_multiple)
    # Pad once; the micro-batches are then views.
    padded = fit_sequences(data, length)
    limits = [(first, min(first + micro_batch_size, total)) for first in range(0, total, micro_batch_size)]
    return [MicroBatch(slice_rows(padded, first, last), False, length) for first, last in limits]


def repeat_last_row(data: Columns, missing: int) -> Columns:
    """Append ``missing`` copies of a batch's last row."""
    # A copy of a real row has valid values in every column. Its results are dropped.
    rows = [*range(batch_size(data)), *[batch_size(data) - 1] * missing]
    return {key: take_rows(value, rows) for key, value in data.items()}


def follow_plan(
    data: Columns,
    indices: Sequence[Sequence[int]],
    lengths: Sequence[int],
    shapes: Shapes,
    *,
    packed: bool,
) -> list[MicroBatch]:
    """Split one chunk into its planned micro-batches.

    Args:
        data: the rows of the chunk.
        indices: row range ``[start, end]`` of each micro-batch.
        lengths: planned row length of each micro-batch (dynamic batching), or planned total length (packing).
        shapes: the backend's requirements.
        packed: concatenate the rows of a micro-batch to one row.
    """
    parts = [slice_rows(data, first, last) for first, last in indices]
    if packed:
        # Truncate each micro-batch to its longest row: the rows of the batch are padded to the longest of
        # all.
        parts = [fit_sequences(part, max(_lengths(part))) for part in parts]
        totals = [packed_length(part, shapes) for part in parts]
        if shapes.equal:
            # Pipeline stages agree on the shape of the tensors that they exchange before the first
            # micro-batch.
            totals = [max(totals)] * len(totals)
        return [MicroBatch(part, True, total) for part, total in zip(parts, totals, strict=True)]
    fitted = [
        fit_sequences(part, round_up(length, shapes.row_multiple))
        for part, length in zip(parts, lengths, strict=True)
    ]
    if shapes.equal and len({part["input_ids"].shape for part in fitted}) > 1:
        # Micro-batches of different shapes become packed rows, which are padded to one length. Packing first
        # removes the padding of their own rows.
        total = max(packed_length(part, shapes) for part in fitted)
        return [MicroBatch(part, True, total) for part in fitted]
    return [MicroBatch(part, False, part["input_ids"].shape[1]) for part in fitted]


def packed_length(part: Columns, shapes: Shapes) -> int:
    """Return the number of positions of a micro-batch's rows when packed. Each row is padded to
    ``Shapes.packed_multiple``."""
    return sum(round_up(length, shapes.packed_multiple) for length in _lengths(part))


def _lengths(part: Columns) -> list[int]:
    """Return the number of tokens of each row. Uses the host's copy if there is one, and otherwise waits for
    the device."""
    known = part.get(HOST_LENGTHS)
    return part["input_lengths"].tolist() if known is None else known
