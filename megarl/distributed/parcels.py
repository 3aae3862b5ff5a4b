"""Packing of batch columns for transport to another process. The unpacked columns are bitwise equal.

Tensors are sent as numpy arrays, whose buffers pickle passes on without a copy: Ray copies them once, into
its object store, which all readers map. Values that can be reconstructed are not sent: padding that has the
same value in a whole column, 31 of the 32 bits of a mask of zeros and ones, and all but one value of a
constant row. Unpacked tensors are in new, writable memory, because arrays in Ray's store are read-only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

Columns: TypeAlias = Mapping[str, Any]
"""Columns of a batch by name: tensors [B, ...], whose dim 1, if any, is the sequence; and lists of B items.
Any algorithm, environment or loss may add a column of its own, so names are not fixed."""
LENGTH_KEYS = ("input_lengths", "unpadded_sequence_lengths")
"""Columns that contain the row lengths of the other columns. Without such a column, a row ends after its last
nonzero value in the first column that has positions."""

# Minimum fraction of padding for which it is worth removing: selecting the other positions takes about as
# long as copying all of them.
_LEAST_PADDING = 1 / 8

# Number of values at the start of a column that are tested before all values are.
_FIRST = 64

# By bytes per element, the integer dtype of the same width.
_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Form = Literal["whole", "inside", "bits", "row"]


def inside(starts: np.ndarray | int, ends: np.ndarray, width: int) -> np.ndarray:
    """Return a mask, bool [B, width], of the positions from ``starts`` [B] to ``ends`` [B] (exclusive) of
    each row."""
    places = np.arange(width)
    return (places >= np.reshape(starts, (-1, 1))) & (places < ends[:, None])


@dataclass(frozen=True, slots=True)
class Parcel:
    """One packed tensor.

    Attributes:
        dtype, shape: dtype and shape of the tensor.
        form: ``whole``: all values. ``inside``: the values before each row's end. ``bits``: the same, with
            eight zeros or ones per byte. ``row``: one value per row, for all its positions.
        values: integers of the dtype's width, or uint8 for ``bits``.
        fill: value after the end of each row, as an integer of the dtype's width.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    form: Form
    values: np.ndarray
    fill: int = 0

    def unpack(self, lengths: np.ndarray | None) -> Tensor:
        """Return the tensor, in new memory. ``lengths`` [B] are the ends of the rows."""
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
        # Copy with np.array, because Ray's store returns read-only memory: torch warns about it, and writing
        # to it would crash.
        return torch.from_numpy(np.array(values)).view(self.dtype)


@dataclass(frozen=True, slots=True)
class Parcels:
    """The packed columns of a batch.

    Attributes:
        columns: packed columns by name, in order. A column that is not a plain CPU tensor is unchanged.
        lengths: [B] int32, the ends of the rows; None if all padding is sent.
    """

    columns: Columns
    lengths: np.ndarray | None

    def unpack(self) -> Columns:
        """Return the unpacked columns by name."""
        return {
            name: value.unpack(self.lengths) if isinstance(value, Parcel) else value
            for name, value in self.columns.items()
        }


class Packer:
    """Packs rows of a batch for other processes. What can be omitted from each column, such as padding, is
    determined once for all calls.

    """

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._arrays = {name: _integers(value) for name, value in columns.items() if _is_plain(value)}

    def pack(self, rows: Sequence[int] | None = None) -> Parcels:
        """Pack the given rows, in this order; None for all rows."""
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
                # Compute the indices once for all columns whose padding is removed.
                if lengths is None:
                    lengths = self._lengths[chosen]
                    places = _places(np.arange(len(array))[chosen], lengths, array.shape[1])
                values = array.reshape(-1, *array.shape[2:]).take(places, axis=0)
                values = np.packbits(values != 0) if form == "bits" else values
            else:
                values = (array[:, 0] if form == "row" else array)[chosen]
            size = len(array) if rows is None else len(rows)
            # pickle passes on the buffer of a contiguous array; any other array it copies into its own
            # stream.
            packed[name] = Parcel(
                value.dtype, (size, *array.shape[1:]), form, np.ascontiguousarray(values), fill
            )
        return Parcels(packed, None if lengths is None else lengths.astype(np.int32))

    @cached_property
    def _lengths(self) -> np.ndarray | None:
        """The ends of the rows, [B] int64. None if padding is a small part of the positions, or if the
        lengths column is invalid."""
        wide = next((array for array in self._arrays.values() if array.ndim > 1), None)
        if wide is None:
            return None
        lengths = next((self._arrays[key] for key in LENGTH_KEYS if key in self._arrays), None)
        if lengths is None:
            lengths = _ends(wide)
        rows, width = wide.shape[:2]
        # A user's column may have one of these names but contain other numbers. Then keep all padding.
        fit = lengths.shape == (rows,) and bool(np.all((lengths >= 0) & (lengths <= width)))
        return (
            lengths.astype(np.int64) if fit and lengths.sum() <= (1 - _LEAST_PADDING) * rows * width else None
        )

    @cached_property
    def _forms(self) -> dict[str, tuple[Form, int]]:
        """For each column, its ``Parcel.form`` and ``Parcel.fill``."""
        wide = [array.shape[1] for array in self._arrays.values() if array.ndim > 1]
        padding = None if self._lengths is None else ~inside(0, self._lengths, wide[0])
        return {
            name: _form(array, self._columns[name].dtype, padding) for name, array in self._arrays.items()
        }


def _form(array: np.ndarray, dtype: torch.dtype, padding: np.ndarray | None) -> tuple[Form, int]:
    """Return ``Parcel.form`` and ``Parcel.fill`` of a column. ``padding`` is a mask [B, S] bool."""
    if array.ndim < 2 or array.size == 0:
        return "whole", 0
    if _same_in_rows(array):
        return "row", 0
    if padding is None or array.shape[:2] != padding.shape:
        return "whole", 0
    # The first value in the padding; the next line checks that all others are equal.
    fill = array[np.unravel_index(padding.argmax(), padding.shape)].reshape(-1)[0]
    if np.any((array != fill) & padding.reshape(*padding.shape, *[1] * (array.ndim - 2))):
        return "whole", 0
    return "bits" if _is_binary(array, _one(dtype)) else "inside", int(fill)


def _is_plain(value: Any) -> bool:
    """Return whether a column is a CPU tensor that is completely described by values, dtype and shape."""
    # Exclude subclasses, whose type would be lost, and lazily negated tensors, whose memory has other values.
    return (
        type(value) is Tensor
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and value.ndim > 0
        and not (value.requires_grad or value.is_neg() or value.is_complex() or value.is_quantized)
    )


def _integers(tensor: Tensor) -> np.ndarray:
    """Return a tensor's memory as an array of integers. They can be compared bit by bit, and numpy lacks some
    of torch's dtypes."""
    array: np.ndarray = tensor.view(_AS_INTEGERS[tensor.element_size()]).numpy()
    return array


def _one(dtype: torch.dtype) -> int:
    """Return the integer with the bits of 1 in ``dtype``."""
    return int(torch.ones(1).to(dtype).view(_AS_INTEGERS[dtype.itemsize]))


def _taken(value: Any, rows: Sequence[int] | None) -> Any:
    if rows is None:
        return value
    return value[torch.as_tensor(rows)] if isinstance(value, Tensor) else [value[row] for row in rows]


def _ends(array: np.ndarray) -> np.ndarray:
    """Return the position after each row's last nonzero value, [B]."""
    written = array != 0 if array.ndim == 2 else np.any(array.reshape(*array.shape[:2], -1) != 0, axis=2)
    ends = (
        written.shape[1] - np.argmax(written[:, ::-1], axis=1)
        if written.shape[1]
        else np.zeros(len(array), np.int64)
    )
    return np.where(written.any(axis=1), ends, 0)


def _same_in_rows(array: np.ndarray) -> bool:
    """Return whether each row has the same value at all its positions."""
    # A stride of 0 means an expanded tensor, so no value need be read.
    if array.strides[1] == 0:
        return True
    first = array[:, :1]
    # Most columns already differ in one of the first two, cheap comparisons.
    return bool(np.all(array[:, -1:] == first) and np.all(array[:, :2] == first) and np.all(array == first))


def _is_binary(array: np.ndarray, one: int) -> bool:
    """Return whether all values are 0 or 1."""

    def binary(values: np.ndarray) -> bool:
        return int(np.count_nonzero(values == 0)) + int(np.count_nonzero(values == one)) == values.size

    # For almost every column with other values, the first values are enough to decide.
    return binary(array[0, :_FIRST]) and binary(array)


def _places(rows: np.ndarray, lengths: np.ndarray, width: int) -> np.ndarray:
    """Return the indices, in the flattened batch, of the positions before the end of the given rows."""
    # Vectorized over the rows: a position's index is its row's start in the batch, minus the number of
    # positions counted before this row, plus a running number.
    places = np.repeat(rows * width - (np.cumsum(lengths) - lengths), lengths)
    places += np.arange(len(places))
    return places
