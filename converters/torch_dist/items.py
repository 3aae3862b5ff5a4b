"""Locate and read single tensors in the ``*.distcp`` files of a distributed checkpoint.

Each tensor is a zip archive of ``torch.save`` inside the file: a small pickle with dtype, shape and strides,
and the raw bytes. Reading the bytes in place touches only the requested rows, and runs no code.
"""

from __future__ import annotations

import io
import os
import struct
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from converters.checkpoint.boxes import Box, part, read_box, whole
from converters.errors import ConversionError
from converters.files.restricted import DAMAGED, unpickle

# Bytes of an entry's header in a ZIP archive, without name and extra field.
_LOCAL_HEADER = 30
_LARGEST_DESCRIPTION = 2**16
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


@dataclass(frozen=True, slots=True)
class RawTensor:
    """Location and layout of a tensor's elements in a file.

    Attributes:
        offset: byte offset of the first element.
        dtype, shape: dtype and shape.
        strides: strides in elements.
    """

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def contiguous(self) -> bool:
        """True if the elements are stored in order without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            # The stride of a dimension of size 1 is arbitrary.
            if size > 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def span(self) -> int:
        """Number of storage elements from the tensor's first to its last element; gaps between them count."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))


def find_tensor(descriptor: int, offset: int, length: int, what: str) -> RawTensor:
    """Locate the bytes of a serialised tensor.

    Args:
        descriptor: file descriptor; its position is not used.
        offset, length: byte range of the archive in the file.
        what: name of the tensor for error messages.

    Raises:
        ConversionError: there is no such archive, or it does not contain exactly one plain tensor.
    """
    window = _Window(descriptor, offset, length, what)
    try:
        archive = zipfile.ZipFile(window)
        entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        for name in ("data.pkl", "byteorder"):
            # Check the sizes first, because a huge description would be read into memory.
            if name in entries and (
                entries[name].file_size > _LARGEST_DESCRIPTION
                or entries[name].compress_type != zipfile.ZIP_STORED
            ):
                raise ValueError(f"a description of {entries[name].file_size} bytes")
        described = unpickle(io.BytesIO(archive.read(entries["data.pkl"])), _known, what, _storage)
        # Older releases of torch do not record the byte order.
        order = archive.read(entries["byteorder"]).decode() if "byteorder" in entries else "little"
        if not isinstance(described, _Described):
            raise TypeError(f"a {type(described).__name__} where a tensor should be")
        storage = entries[f"data/{described.key}"]
        start = _start_of(window, storage)
    # Re-raise it: a ConversionError is a ValueError, which DAMAGED includes.
    except ConversionError:
        raise
    except (zipfile.BadZipFile, OSError, struct.error, *DAMAGED) as error:
        size = os.fstat(descriptor).st_size
        fault = f"no serialised tensor at byte {offset} ({type(error).__name__}: {error})"
        if size < offset + length:
            fault = f"the file is truncated: it has {size} bytes, its index needs at least {offset + length}"
        raise ConversionError(f"{what}: {fault}", "fetch or write the checkpoint again") from error
    first = described.first * described.dtype.itemsize
    raw = RawTensor(offset + start + first, described.dtype, described.shape, described.strides)
    # torch never writes these, but another writer might, and the values would be read wrong.
    if storage.compress_type != zipfile.ZIP_STORED or order != sys.byteorder:
        raise ConversionError(
            f"{what} is stored compressed or in another byte order", "save the checkpoint again"
        )
    needed = first + raw.span * raw.dtype.itemsize
    if storage.file_size < needed:
        raise ConversionError(
            f"{what}: {storage.file_size} bytes are stored, {needed} needed",
            "fetch or write the checkpoint again",
        )
    return raw


def read_item(path: Path, offset: int, length: int, what: str) -> Tensor:
    """Read a full serialised tensor.

    Raises:
        ConversionError: the tensor is missing or damaged.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise ConversionError(
            f"{path} cannot be read ({error})", "fetch or write the checkpoint again"
        ) from error
    try:
        return read_raw(descriptor, find_tensor(descriptor, offset, length, what), None, what)
    finally:
        os.close(descriptor)


def read_raw(descriptor: int, raw: RawTensor, box: Box | None, what: str) -> Tensor:
    """Read a tensor in a file, or a box of it, to a new contiguous tensor."""
    box = whole(raw.shape) if box is None else box
    if raw.contiguous:
        return read_box(descriptor, raw.offset, raw.dtype, raw.shape, box, what)
    # A transposed tensor was saved, which is rare: read the whole span and take a view.
    everything = read_box(descriptor, raw.offset, raw.dtype, (raw.span,), whole((raw.span,)), what)
    return part(everything.as_strided(raw.shape, raw.strides), box).contiguous()


def _start_of(window: _Window, entry: zipfile.ZipInfo) -> int:
    """Return the offset of an entry's contents. It follows the entry's own header, whose padding is not in
    the archive's directory."""
    window.seek(entry.header_offset)
    header = window.read(_LOCAL_HEADER)
    name, extra = struct.unpack("<HH", header[26:30])
    return entry.header_offset + _LOCAL_HEADER + name + extra


@dataclass(frozen=True, slots=True)
class _Described:
    """Description of a tensor in an archive's pickle."""

    key: str
    dtype: torch.dtype
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def _describe(
    storage: tuple[str, torch.dtype], first: int, shape: tuple[int, ...], strides: tuple[int, ...], *more: Any
) -> _Described:
    """Return the description, from the arguments with which torch rebuilds a tensor. A dtype without a
    storage class of its own is in ``more``."""
    dtype = next((value for value in more if isinstance(value, torch.dtype)), storage[1])
    return _Described(storage[0], dtype, first, tuple(shape), tuple(strides))


def _known(module: str, name: str) -> Any:
    """Return the object for a name in the pickle of a plain tensor; None if it is not allowed."""
    special = {
        ("torch._utils", "_rebuild_tensor_v2"): _describe,
        ("torch._utils", "_rebuild_tensor_v3"): _describe,
        # Newer releases of torch pass the dtype as an additional argument.
        ("torch.storage", "UntypedStorage"): torch.uint8,
        ("collections", "OrderedDict"): dict,
    }
    if module == "torch":
        dtype = getattr(torch, name, None)
        return _STORAGES.get(name, dtype if isinstance(dtype, torch.dtype) else None)
    return special.get((module, name))


def _storage(identifier: Any) -> tuple[str, torch.dtype]:
    kind, dtype, key, *_ = identifier
    if kind != "storage" or not isinstance(dtype, torch.dtype):
        raise TypeError(f"{kind!r} is no storage")
    return str(key), dtype


class _Window(io.RawIOBase):
    """A section of a file that behaves like a file."""

    def __init__(self, descriptor: int, offset: int, length: int, what: str) -> None:
        self._descriptor, self._offset, self._length, self._position, self._what = (
            descriptor,
            offset,
            length,
            0,
            what,
        )

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        self._position = max(0, base + offset)
        return self._position

    def read(self, size: int = -1) -> bytes:
        rest = max(0, self._length - self._position)
        try:
            data = os.pread(
                self._descriptor, rest if size < 0 else min(size, rest), self._offset + self._position
            )
        # zipfile would report an OSError as "not an archive".
        except (OSError, OverflowError) as error:
            raise ConversionError(
                f"{self._what} cannot be read ({error})", "check the disk, or fetch the checkpoint again"
            ) from error
        self._position += len(data)
        return data
