"""Cutting one rank's share of a batch into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from megarl.errors import BatchError


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows that go through the model together.

    Attributes:
        data: the batch's keys, cut to these rows; tensors of two or more dimensions have the (padded) sequence length in dimension 1.
        first: index of the first row in the batch it was cut from.
    """

    data: Mapping[str, Any]
    first: int

    @property
    def input_ids(self) -> torch.Tensor:
        """[b, S] int64."""
        return self.data["input_ids"]

    @property
    def size(self) -> int:
        return self.input_ids.shape[0]

    @property
    def sequence_length(self) -> int:
        return self.input_ids.shape[1]


def batch_size(data: Mapping[str, Any]) -> int:
    """Rows of a batch."""
    return data["input_ids"].shape[0]


def chosen_size(given: int | None, configured: int, what: str) -> int:
    """The batch or micro-batch size of one call: ``given``, or ``configured`` when it is None.

    Raises:
        BatchError: it is less than 1.
    """
    value = configured if given is None else given
    if value < 1:
        raise BatchError(f"{what} = {value}: must be at least 1; leave it out for the configured {configured}")
    return value


def slice_rows(data: Mapping[str, Any], first: int, last: int) -> dict[str, Any]:
    """Rows ``first`` to ``last`` (exclusive) of every key; tensors become views."""
    return {key: value[first:last] for key, value in data.items()}


def move_to(data: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The batch with its tensors on ``device``."""
    return {key: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value for key, value in data.items()}


def pad_sequences(data: Mapping[str, Any], multiple: int) -> dict[str, Any]:
    """Zero-pad dimension 1 of every tensor that has one on the right, to a multiple of ``multiple``."""
    length = data["input_ids"].shape[1]
    missing = -length % multiple
    if missing == 0:
        return dict(data)

    def pad(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.ndim < 2:
            return value
        return F.pad(value, [0, 0] * (value.ndim - 2) + [0, missing])

    return {key: pad(value) for key, value in data.items()}


def split_rows(data: Mapping[str, Any], micro_batch_size: int) -> list[MicroBatch]:
    """Micro-batches of ``micro_batch_size`` rows in order; the last one holds what remains."""
    total = batch_size(data)
    return [MicroBatch(slice_rows(data, first, min(first + micro_batch_size, total)), first) for first in range(0, total, micro_batch_size)]


def runs_of_equal_shape(micro_batches: Sequence[MicroBatch]) -> Iterator[list[MicroBatch]]:
    """Consecutive micro-batches of one shape together: a pipeline schedule exchanges activations of one shape."""
    run: list[MicroBatch] = []
    for micro_batch in micro_batches:
        if run and run[0].input_ids.shape != micro_batch.input_ids.shape:
            yield run
            run = []
        run.append(micro_batch)
    if run:
        yield run
