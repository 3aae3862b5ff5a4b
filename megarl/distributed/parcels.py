"""Batch columns packed for transport to another process, and unpacked there, equal to the bit.

A tensor travels as a numpy array, whose bytes pickle passes on without a copy (Ray writes them into its store
in one copy, where every reader sees the same memory). What can be rebuilt at the other end is not sent:
padding, if a column has one value there; 31 of the 32 bits of a mask of zeros and ones; all but one of the
values of a constant row. The unpacked tensor is new, writable memory; numpy arrays in Ray's store are
read-only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

LENGTH_KEYS = ("input_lengths", "unpadded_sequence_lengths")
"""Columns with the lengths of the other columns' rows. Without such a column, rows end where the first column
with positions is zero to the end."""

# Padding is removed only if it makes up at least this share of the positions, because selecting the rest
# costs about as much as copying it.
_LEAST_PADDING = 1 / 8

# Look at this number of values at the front of a column before examining all of it.
_FIRST = 64

_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Form = Literal["whole", "inside", "bits", "row"]


def inside(starts: np.ndarray | int, ends: np.ndarray, width: int) -> np.ndarray:
    """Return bool [B, width]: the positions of each row from ``starts`` [B] up to, but not including,
    ``ends`` [B]."""
    places = np.arange(width)
    return (places >= np.reshape(starts, (-1, 1))) & (places < ends[:, None])


@dataclass(frozen=True, slots=True)
class Parcel:
    """One packed tensor.

    Attributes:
        dtype, shape: of the tensor.
        form: ``whole``: all values; ``inside``: those of the positions before each row's end; ``bits``: the
            same, eight zeros or ones per byte; ``row``: one value per row, which all its positions have.
        values: integers of the tensor's width, or uint8 for ``bits``.
        fill: value after the ends of rows, an integer of the tensor's width.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    form: Form
    values: np.ndarray
    fill: int = 0

    def unpack(self, lengths: np.ndarray | None) -> Tensor:
        """Return the tensor, in new memory; ``lengths`` [B] are the ends of the rows."""
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=self.dtype)
        values = self.values
        if self.form == "row":
            values = np.broadcast_to(values[:, None], self.shape)
        elif self.form != "whole":
            assert lengths is not None, "rows were cut by them"
            if self.form == "bits":
                ones = np.unpackbits(values, count=int(lengths.sum()) * math.prod(self.shape[2:]))
                values = _integers(torch.from_numpy(ones).to(self.dtype)).reshape(-1, *self.shape[2:])
            array = np.full(self.shape, self.fill, values.dtype)
            array[inside(0, lengths, self.shape[1])] = values
            values = array
        # Copy with np.array: Ray returns read-only memory of its store, for which torch warns, and a later
        # write would crash.
        return torch.from_numpy(np.array(values)).view(self.dtype)


@dataclass(frozen=True, slots=True)
class Parcels:
    """The packed columns of a batch.

    Attributes:
        columns: by name, in order; columns that are not plain CPU tensors are unchanged.
        lengths: [B] int32, the ends of the rows; None if all padding is sent.
    """

    columns: Mapping[str, Any]
    lengths: np.ndarray | None

    def unpack(self) -> dict[str, Any]:
        """Return the columns."""
        return {
            name: value.unpack(self.lengths) if isinstance(value, Parcel) else value
            for name, value in self.columns.items()
        }


class Packer:
    """Packs rows of a batch for other processes. It determines once, for all parts of the batch, what can be
    left out of each column, such as padding.

    Args:
        columns: tensors [B, ...], in which dim 1 (if present) is the sequence, and lists of B items.
    """

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self._columns = columns
        self._arrays = {name: _integers(value) for name, value in columns.items() if _is_plain(value)}

    def pack(self, rows: Sequence[int] | None = None) -> Parcels:
        """Return the given rows, packed, in this order; None for all."""
        chosen: Any = slice(None) if rows is None else np.asarray(rows, np.int64)
        packed: dict[str, Any] = {}
        lengths, places = None, np.empty(0, np.int64)
        for name, value in self._columns.items():
            array = self._arrays.get(name)
            if array is None:
                packed[name] = _taken(value, rows)
                continue
            form, fill = self._forms[name]
            if form in ("inside", "bits"):
                assert self._lengths is not None, "rows were found to be cut by them"
                # Compute the positions once, because all columns without padding share them.
                if lengths is None:
                    lengths = self._lengths[chosen]
                    places = _places(np.arange(len(array))[chosen], lengths, array.shape[1])
                values = array.reshape(-1, *array.shape[2:]).take(places, axis=0)
                values = np.packbits(values != 0) if form == "bits" else values
            else:
                values = (array[:, 0] if form == "row" else array)[chosen]
            size = len(array) if rows is None else len(rows)
            # Make the array contiguous, because pickle copies any other array into its own stream.
            packed[name] = Parcel(
                value.dtype, (size, *array.shape[1:]), form, np.ascontiguousarray(values), fill
            )
        return Parcels(packed, None if lengths is None else lengths.astype(np.int32))

    @cached_property
    def _lengths(self) -> np.ndarray | None:
        """The ends of the rows, [B] int64; None if few positions are after an end, or if the lengths do not
        fit."""
        wide = next((array for array in self._arrays.values() if array.ndim > 1), None)
        if wide is None:
            return None
        lengths = next((self._arrays[key] for key in LENGTH_KEYS if key in self._arrays), None)
        if lengths is None:
            lengths = _ends(wide)
        rows, width = wide.shape[:2]
        # A user's column may have that name and contain other numbers. In that case keep all padding.
        fit = lengths.shape == (rows,) and bool(np.all((lengths >= 0) & (lengths <= width)))
        return (
            lengths.astype(np.int64) if fit and lengths.sum() <= (1 - _LEAST_PADDING) * rows * width else None
        )

    @cached_property
    def _forms(self) -> dict[str, tuple[Form, int]]:
        """The form of each column, and the value of its padding."""
        wide = [array.shape[1] for array in self._arrays.values() if array.ndim > 1]
        padding = None if self._lengths is None else ~inside(0, self._lengths, wide[0])
        return {
            name: _form(array, self._columns[name].dtype, padding) for name, array in self._arrays.items()
        }


def _form(array: np.ndarray, dtype: torch.dtype, padding: np.ndarray | None) -> tuple[Form, int]:
    """Return the form of a column, and the value in its ``padding``, [B, S] bool."""
    if array.ndim < 2 or array.size == 0:
        return "whole", 0
    if _same_in_rows(array):
        return "row", 0
    if padding is None or array.shape[:2] != padding.shape:
        return "whole", 0
    # This is the first value in the padding. The next line checks whether all others are the same.
    fill = array[np.unravel_index(padding.argmax(), padding.shape)].reshape(-1)[0]
    if np.any((array != fill) & padding.reshape(*padding.shape, *[1] * (array.ndim - 2))):
        return "whole", 0
    return "bits" if _is_binary(array, _one(dtype)) else "inside", int(fill)


def _is_plain(value: Any) -> bool:
    """Return whether a column is a tensor that its values, type and shape describe completely."""
    # Exclude subclasses, whose type would be lost, and lazily negated tensors, whose memory does not hold
    # their values.
    return (
        type(value) is Tensor
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and value.ndim > 0
        and not (value.requires_grad or value.is_neg() or value.is_complex() or value.is_quantized)
    )


def _integers(tensor: Tensor) -> np.ndarray:
    """Return a tensor's memory as integers, which can be compared bit by bit, and which numpy has for each of
    torch's types."""
    array: np.ndarray = tensor.view(_AS_INTEGERS[tensor.element_size()]).numpy()
    return array


def _one(dtype: torch.dtype) -> int:
    """Return the integer that has the bits of a one."""
    return int(torch.ones(1).to(dtype).view(_AS_INTEGERS[dtype.itemsize]))


def _taken(value: Any, rows: Sequence[int] | None) -> Any:
    if rows is None:
        return value
    return value[torch.as_tensor(rows)] if isinstance(value, Tensor) else [value[row] for row in rows]


def _ends(array: np.ndarray) -> np.ndarray:
    """Return the position after the last nonzero value of each row, [B]."""
    written = array != 0 if array.ndim == 2 else np.any(array.reshape(*array.shape[:2], -1) != 0, axis=2)
    ends = (
        written.shape[1] - np.argmax(written[:, ::-1], axis=1)
        if written.shape[1]
        else np.zeros(len(array), np.int64)
    )
    return np.where(written.any(axis=1), ends, 0)


def _same_in_rows(array: np.ndarray) -> bool:
    """Return whether every row has one value at all its positions."""
    # An expanded tensor is recognised by its stride, without reading a value.
    if array.strides[1] == 0:
        return True
    first = array[:, :1]
    # Do two cheap comparisons before the complete one, because most columns already differ there.
    return bool(np.all(array[:, -1:] == first) and np.all(array[:, :2] == first) and np.all(array == first))


def _is_binary(array: np.ndarray, one: int) -> bool:
    """Return whether all values are zeros or ones."""

    def binary(values: np.ndarray) -> bool:
        return int(np.count_nonzero(values == 0)) + int(np.count_nonzero(values == one)) == values.size

    # The first values decide for almost every column that does not consist of zeros and ones.
    return binary(array[0, :_FIRST]) and binary(array)


def _places(rows: np.ndarray, lengths: np.ndarray, width: int) -> np.ndarray:
    """Return the numbers of the positions inside the given rows, counted through the whole batch."""
    # Avoid a loop over the rows: add the running number to each row's start minus the positions counted
    # before that row.
    places = np.repeat(rows * width - (np.cumsum(lengths) - lengths), lengths)
    places += np.arange(len(places))
    return places
