"""Safetensors files, read in parts and without mapping them into memory: memory in use is what was asked for.

A box is a range on every dimension of a tensor. Of the files that are read again and again only a few stay open, since a checkpoint may
have more files than a process may open. Format: https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from converters.checkpoint.files import require_regular
from converters.errors import ConversionError

Box = tuple[tuple[int, int], ...]
# runs shorter than this are read together with what lies between them
_SHORT_RUN = 4096


def whole(shape: Sequence[int]) -> Box:
    """The box that is all of a tensor."""
    return tuple((0, size) for size in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    """Sizes of a box."""
    return tuple(stop - start for start, stop in box)


def intersection(one: Box, other: Box) -> Box | None:
    """Return what two boxes of one tensor have in common; None when nothing."""
    common = tuple((max(low, start), min(high, stop)) for (low, high), (start, stop) in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def relative(box: Box, origin: Sequence[int]) -> Box:
    """The box counted from ``origin``."""
    return tuple((start - first, stop - first) for (start, stop), first in zip(box, origin, strict=True))


def part(tensor: Tensor, box: Box) -> Tensor:
    """The view of a tensor that a box describes."""
    return tensor[tuple(slice(start, stop) for start, stop in box)]


def read_box(descriptor: int, offset: int, dtype: torch.dtype, shape: Sequence[int], box: Box, what: str) -> Tensor:
    """A box of a tensor that lies contiguous in a file.

    Args:
        descriptor: of the file, open for reading; its position is neither used nor moved.
        offset: of the tensor's first byte.
        dtype, shape: of the tensor.
        box: inside it.
        what: to call the tensor by in errors.

    Returns:
        A fresh contiguous CPU tensor.

    Raises:
        ConversionError: the file ends too early, or cannot be read.
    """
    out = torch.empty(shape_of(box), dtype=dtype)
    if out.numel() == 0:
        return out
    # the dimensions behind this one are whole, so that a range of it is one run of bytes
    inner = max((axis for axis, ((start, stop), size) in enumerate(zip(box, shape, strict=True)) if stop - start < size), default=0)
    tail = math.prod(shape[inner + 1 :]) * dtype.itemsize
    first, last = box[inner] if box else (0, 1)
    run = (last - first) * tail
    flat = _bytes_of(out)
    if run < _SHORT_RUN and run < flat.numel() and inner > 0:
        rows = read_box(descriptor, offset, dtype, shape, (*box[:inner], *whole(shape[inner:])), what)
        return part(rows, (*whole(rows.shape[:inner]), *box[inner:])).contiguous()
    strides = [math.prod(shape[axis + 1 :]) * dtype.itemsize for axis in range(inner)]
    position = 0
    for place in itertools.product(*(range(*limits) for limits in box[:inner])):
        begin = offset + sum(index * stride for index, stride in zip(place, strides, strict=True)) + first * tail
        read_bytes(descriptor, begin, flat[position : position + run], what)
        position += run
    return out


def read_bytes(descriptor: int, offset: int, out: Tensor, what: str) -> None:
    """Fill ``out``, a uint8 tensor of one dimension, from a position of a file.

    Raises:
        ConversionError: the file ends too early, or cannot be read.
    """
    view, done = _view(out), 0
    while done < len(view):
        try:
            count = os.preadv(descriptor, [view[done:]], offset + done)
        except OSError as error:
            raise ConversionError(f"{what} cannot be read ({error})", "check the disk, or fetch the checkpoint again") from error
        if count == 0:
            raise ConversionError(
                f"{what}: the file ends {len(view) - done} bytes too early", "the file is truncated; fetch or write the checkpoint again"
            )
        done += count


def write_bytes(descriptor: int, offset: int, data: Tensor) -> None:
    """Write a contiguous tensor at a position of a file."""
    view, done = bytes_of(data), 0
    while done < len(view):
        done += os.pwritev(descriptor, [view[done:]], offset + done)


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied."""
    return _view(_bytes_of(tensor))


def _view(flat: Tensor) -> memoryview:
    buffer: Any = flat.numpy()
    return memoryview(buffer)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


_MOST = 16


@dataclass(slots=True)
class _Open:
    descriptor: int
    users: int = 0


class OpenFiles:
    """A pool of open files. Safe to be used from several threads.

    Args:
        writing: open the files for reading and writing; they have to exist.
        most: as many stay open when nobody uses them. A file in use is never closed.
    """

    def __init__(self, writing: bool = False, most: int = _MOST) -> None:
        self._flags, self._most = (os.O_RDWR if writing else os.O_RDONLY) | os.O_CLOEXEC, most
        # the one used last is the last
        self._open: OrderedDict[Path, _Open] = OrderedDict()
        self._identities: dict[Path, tuple[int, int]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def use(self, path: Path) -> Iterator[int]:
        """The descriptor of a file, open as long as the ``with`` block lasts; its position belongs to nobody.

        Raises:
            ConversionError: it cannot be opened, or is another file than it was at its first use.
        """
        with self._lock:
            entry = self._open.get(path) or self._opened(path)
            entry.users += 1
            self._open.move_to_end(path)
            self._close_down_to(self._most)
        try:
            yield entry.descriptor
        finally:
            with self._lock:
                entry.users -= 1
                self._close_down_to(self._most)

    def close(self) -> None:
        """Close every file that is not in use; a later use opens it again."""
        with self._lock:
            self._close_down_to(0)

    def __del__(self) -> None:
        for entry in getattr(self, "_open", {}).values():
            with suppress(OSError):
                os.close(entry.descriptor)

    def _opened(self, path: Path) -> _Open:
        try:
            descriptor = os.open(require_regular(path), self._flags)
        except OSError as error:
            raise ConversionError(f"{path} cannot be read ({error})", "check the file and its permissions, or fetch it again") from error
        status = os.fstat(descriptor)
        identity = (status.st_dev, status.st_ino)
        if self._identities.setdefault(path, identity) != identity:
            os.close(descriptor)
            raise ConversionError(f"{path} has changed while it was in use", "run it again, and leave the checkpoint alone meanwhile")
        self._open[path] = _Open(descriptor)
        return self._open[path]

    def _close_down_to(self, most: int) -> None:
        """Close what was not used for longest, and is not in use, until no more than ``most`` are open."""
        for path in list(self._open):
            if len(self._open) <= most:
                return
            if self._open[path].users == 0:
                os.close(self._open.pop(path).descriptor)


DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class _Entry:
    stored: str
    shape: tuple[int, ...]
    offset: int


class SafetensorsFile:
    """A file whose header was read. Safe to be read from several threads; memory in use is what is asked for.

    Args:
        path: of the file.
        files: that opens it, for this and for others.

    Raises:
        ConversionError: it is no readable safetensors file.
    """

    def __init__(self, path: Path, files: OpenFiles | None = None) -> None:
        self.path = require_regular(path)
        self._files = files or OpenFiles()
        try:
            # the library judges the header: sizes, overlaps, holes, the length of the file
            with safe_open(path, framework="pt", device="cpu") as judged:
                names = set(judged.keys())
        except (SafetensorError, OSError) as error:
            raise ConversionError(f"{path} is not a readable safetensors file ({error})", "fetch or write the file again") from error
        with self._files.use(path) as descriptor:
            self._entries = _read_header(descriptor)
        assert names == set(self._entries)

    def keys(self) -> list[str]:
        """Names of all tensors."""
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._entries[name].shape

    def stored_dtype(self, name: str) -> str:
        """Return what the file calls the dtype of a tensor."""
        return self._entries[name].stored

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor.

        Raises:
            ConversionError: torch has no such dtype, or it is not supported here.
        """
        stored = self._entries[name].stored
        if stored not in DTYPES:
            raise ConversionError(f"{name} is stored as {stored}, which is not supported", f"store it as one of {', '.join(DTYPES)}")
        return DTYPES[stored]

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A tensor, or a box of it, as a fresh contiguous CPU tensor.

        Raises:
            ConversionError: the file has become shorter, or cannot be read.
        """
        entry = self._entries[name]
        box = whole(entry.shape) if box is None else box
        with self._files.use(self.path) as descriptor:
            return read_box(descriptor, entry.offset, self.dtype(name), entry.shape, box, f"{name} in {self.path}")


def _read_header(descriptor: int) -> dict[str, _Entry]:
    (length,) = struct.unpack("<Q", os.pread(descriptor, 8, 0))
    header: dict[str, Any] = json.loads(os.pread(descriptor, length, 8))
    return {
        name: _Entry(entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
        if name != "__metadata__"
    }
