"""Parcels: what of a batch's columns travels to another process, and the columns made of it again there, equal to the bit.

A tensor travels as a numpy array, whose bytes pickle hands over as they are (Ray writes them into its store in one copy, where every reader
sees the same memory). What can be made anew at the other end stays behind: padding, if a column has one value there; 31 of the 32 bits of a
mask of zeros and ones; all but one of the values of a row that are the same. What arrives is new memory, which may be written to: numpy
arrays of Ray's store may not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch

LENGTH_KEYS = ("input_lengths", "unpadded_sequence_lengths")
"""Columns that say where the rows of the others end. Without one, the rows end where the first column with positions is zero to the end."""

_LEAST_PADDING = 1 / 8
"""Share of the positions from which on padding stays behind; to pick out what is left costs about as much as copying it."""

_FIRST = 64
"""Values at the front of a column that are looked at before the whole of it."""

_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_DTYPES = {
    str(dtype): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip

Form = Literal["whole", "inside", "bits", "row"]


@dataclass(frozen=True, slots=True)
class Parcel:
    """One tensor on its way.

    Attributes:
        dtype: torch's name of it.
        shape: of the tensor.
        form: ``whole``: all values; ``inside``: those of the positions in front of each row's end; ``bits``: the same, eight zeros or ones
            a byte; ``row``: one value a row, which stands at all its positions.
        values: integers of the tensor's width, or uint8 for ``bits``.
        fill: what stands behind the ends of rows, an integer of the tensor's width.
    """

    dtype: str
    shape: tuple[int, ...]
    form: Form
    values: np.ndarray
    fill: int = 0


@dataclass(frozen=True, slots=True)
class Parcels:
    """The columns of a batch on their way.

    Attributes:
        columns: by name, in order; those that are no plain tensors of the CPU are as they were.
        lengths: [B] int32, where the rows end; None where no padding stayed behind.
    """

    columns: Mapping[str, Any]
    lengths: np.ndarray | None

    def unpack(self) -> dict[str, Any]:
        """The columns."""
        inside: dict[int, np.ndarray] = {}
        return {name: self._unpacked(value, inside) if isinstance(value, Parcel) else value for name, value in self.columns.items()}

    def _unpacked(self, parcel: Parcel, inside: dict[int, np.ndarray]) -> torch.Tensor:
        values, shape = parcel.values, parcel.shape
        if 0 in shape:
            return torch.empty(shape, dtype=_DTYPES[parcel.dtype])
        if parcel.form == "whole":
            array = values.copy()
        elif parcel.form == "row":
            array = np.broadcast_to(values.reshape(shape[0], 1, *shape[2:]), shape).copy()
        else:
            assert self.lengths is not None, "rows were cut by them"
            if shape[1] not in inside:
                inside[shape[1]] = np.arange(shape[1]) < self.lengths[:, None]
            array = _filled(parcel, inside[shape[1]])
        return torch.from_numpy(array).reshape(shape).view(_DTYPES[parcel.dtype])


def _filled(parcel: Parcel, inside: np.ndarray) -> np.ndarray:
    """The values of a column at their positions, and ``fill`` at the others."""
    dtype = _DTYPES[parcel.dtype]
    values = parcel.values
    if parcel.form == "bits":
        ones = np.unpackbits(values, count=int(np.count_nonzero(inside)) * int(np.prod(parcel.shape[2:])))
        values = np.array([0, _one(dtype)], _numpy_integer(dtype))[ones].reshape(-1, *parcel.shape[2:])
    array = np.full(parcel.shape, parcel.fill, values.dtype)
    array[inside] = values
    return array


class Packer:
    """Packs rows of a batch. What each column can leave behind is found out once for all parts of the batch.

    Args:
        columns: tensors [B, ...], whose dim 1 if any is the sequence, and lists of B items.
    """

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self._columns = columns
        self._arrays = {name: _integers(value) for name, value in columns.items() if _is_plain(value)}

    def pack(self, rows: Sequence[int] | None = None) -> Parcels:
        """The given rows in this order; None for all."""
        chosen = None if rows is None else np.asarray(rows, np.int64)
        lengths = self._lengths if chosen is None or self._lengths is None else self._lengths[chosen]
        places: dict[int, np.ndarray] = {}
        columns = {
            name: self._packed(name, chosen, lengths, places) if name in self._arrays else _taken(value, rows)
            for name, value in self._columns.items()
        }
        return Parcels(columns, lengths.astype(np.int32) if places and lengths is not None else None)

    def _packed(self, name: str, rows: np.ndarray | None, lengths: np.ndarray | None, places: dict[int, np.ndarray]) -> Parcel:
        array, dtype = self._arrays[name], self._columns[name].dtype
        form, fill = self._forms[name]
        shape = (array.shape[0] if rows is None else len(rows), *array.shape[1:])
        if form == "row":
            first = array[:, 0] if rows is None else array[rows, 0]
            return Parcel(str(dtype), shape, form, np.ascontiguousarray(first))
        if form == "whole":
            return Parcel(str(dtype), shape, form, np.ascontiguousarray(array) if rows is None else array[rows])
        assert lengths is not None, "rows were found to be cut by them"
        width = shape[1]
        if width not in places:
            places[width] = _places(np.arange(shape[0]) if rows is None else rows, lengths, width)
        values = self._positions[name].take(places[width], axis=0)
        return Parcel(str(dtype), shape, form, np.packbits(values) if form == "bits" else values, fill)

    @cached_property
    def _lengths(self) -> np.ndarray | None:
        """Where the rows end, [B] int64; None without positions, or where the lengths do not fit them."""
        wide = [array for array in self._arrays.values() if array.ndim > 1]
        if not wide:
            return None
        named = next((self._columns[key] for key in LENGTH_KEYS if key in self._arrays), None)
        if named is None:
            return _ends(wide[0])
        if named.ndim != 1 or named.dtype not in (torch.int64, torch.int32):
            return None
        lengths = named.numpy().astype(np.int64)
        return lengths if np.all((lengths >= 0) & (lengths <= wide[0].shape[1])) else None

    @cached_property
    def _padding(self) -> np.ndarray | None:
        """The positions behind the ends of rows, [B, S] bool; None where there are few or no lengths."""
        if self._lengths is None:
            return None
        width = next(array.shape[1] for array in self._arrays.values() if array.ndim > 1)
        if self._lengths.sum() > (1 - _LEAST_PADDING) * len(self._lengths) * width:
            return None
        return np.arange(width) >= self._lengths[:, None]

    @cached_property
    def _forms(self) -> dict[str, tuple[Form, int]]:
        """The form of each column, and what stands in its padding."""
        return {name: self._form(array, self._columns[name].dtype) for name, array in self._arrays.items()}

    @cached_property
    def _positions(self) -> dict[str, np.ndarray]:
        """The columns that are cut, [B * S, ...]; of zeros and ones as bool."""
        return {
            name: np.ascontiguousarray(array != 0 if form == "bits" else array).reshape(-1, *array.shape[2:])
            for name, array in self._arrays.items()
            if (form := self._forms[name][0]) in ("inside", "bits")
        }

    def _form(self, array: np.ndarray, dtype: torch.dtype) -> tuple[Form, int]:
        if array.ndim < 2 or array.size == 0:
            return "whole", 0
        if _same_in_rows(array):
            return "row", 0
        padding = self._padding
        if padding is None or array.shape[:2] != padding.shape:
            return "whole", 0
        fill = array[np.unravel_index(padding.argmax(), padding.shape)].reshape(-1)[0]
        outside = padding.reshape(*padding.shape, *[1] * (array.ndim - 2))
        if np.any((array != fill) & outside):
            return "whole", 0
        return "bits" if _is_binary(array, _one(dtype)) else "inside", int(fill)


def _is_plain(value: Any) -> bool:
    """Whether a column is a tensor that its values, type and shape describe wholly."""
    return (
        type(value) is torch.Tensor
        and value.layout == torch.strided
        and value.device.type == "cpu"
        and value.ndim > 0
        and not value.requires_grad
        and not value.is_neg()
        and str(value.dtype) in _DTYPES
    )


def _integers(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's memory as integers, which are compared bit by bit and which numpy has for each of torch's types."""
    array: np.ndarray = tensor.view(_AS_INTEGERS[tensor.element_size()]).numpy()
    return array


def _numpy_integer(dtype: torch.dtype) -> np.dtype[Any]:
    return torch.empty(0, dtype=_AS_INTEGERS[dtype.itemsize]).numpy().dtype


def _one(dtype: torch.dtype) -> int:
    """The integer that has the bits of a one."""
    return int(torch.ones(1).to(dtype).view(_AS_INTEGERS[dtype.itemsize]))


def _taken(value: Any, rows: Sequence[int] | None) -> Any:
    if rows is None:
        return value
    return value[torch.as_tensor(rows)] if isinstance(value, torch.Tensor) else [value[row] for row in rows]


def _ends(array: np.ndarray) -> np.ndarray:
    """The place behind the last value of each row that is not zero, [B]."""
    written = array != 0 if array.ndim == 2 else np.any(array.reshape(*array.shape[:2], -1) != 0, axis=2)
    ends = written.shape[1] - np.argmax(written[:, ::-1], axis=1) if written.shape[1] else np.zeros(len(array), np.int64)
    return np.where(written.any(axis=1), ends, 0)


def _same_in_rows(array: np.ndarray) -> bool:
    """Whether all positions of a row have one value, in every row."""
    if array.strides[1] == 0:
        return True
    first = array[:, :1]
    return bool(np.all(array[:, -1:] == first) and np.all(array[:, :2] == first) and np.all(array == first))


def _is_binary(array: np.ndarray, one: int) -> bool:
    """Whether there are zeros and ones alone."""

    def binary(values: np.ndarray) -> bool:
        return int(np.count_nonzero(values == 0)) + int(np.count_nonzero(values == one)) == values.size

    return binary(array[0, :_FIRST]) and binary(array)


def _places(rows: np.ndarray, lengths: np.ndarray, width: int) -> np.ndarray:
    """Numbers of the positions inside the given rows, counted through the whole batch."""
    places = np.repeat(rows * width - (np.cumsum(lengths) - lengths), lengths)
    places += np.arange(len(places))
    return places
