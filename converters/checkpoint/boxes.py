"""Read and write boxes of tensors in files. A box has a (start, stop) range for each dimension.

Files are not memory-mapped, so only the requested bytes use memory.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from converters.errors import ConversionError

Box = tuple[tuple[int, int], ...]
# Runs of fewer bytes are not read one by one: whole rows are read, and the box is cut out in memory.
_SHORT_RUN = 4096


def whole(shape: Sequence[int]) -> Box:
    """Return the box that covers a tensor."""
    return tuple((0, size) for size in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple(stop - start for start, stop in box)


def intersection(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes, or None if it is empty."""
    common = tuple(
        (max(low, start), min(high, stop)) for (low, high), (start, stop) in zip(one, other, strict=True)
    )
    return common if all(start < stop for start, stop in common) else None


def single(index: Sequence[int]) -> Box:
    """Return the box that contains only the element at ``index``."""
    return tuple((position, position + 1) for position in index)


def relative(box: Box, outer: Box) -> Box:
    """Return a box relative to an origin."""
    return tuple((start - first, stop - first) for (start, stop), (first, _) in zip(box, outer, strict=True))


def part(tensor: Tensor, box: Box) -> Tensor:
    """Return the view of a tensor that a box selects."""
    return tensor[tuple(itertools.starmap(slice, box))]


def read_box(
    descriptor: int, offset: int, dtype: torch.dtype, shape: Sequence[int], box: Box, what: str
) -> Tensor:
    """Read a box of a tensor that is stored contiguously in a file.

    Args:
        descriptor: file descriptor; its position is not used.
        offset: offset of the tensor in the file, in bytes.
        dtype, shape: dtype and shape of the tensor.
        box: the box.
        what: name of the tensor, for error messages.

    Returns:
        A new contiguous CPU tensor.

    Raises:
        ConversionError: the file is too short or cannot be read.
    """
    out = torch.empty(shape_of(box), dtype=dtype)
    if out.numel() == 0:
        return out
    # The dimensions behind this one are whole, so that a range of this dimension is one run of bytes.
    inner = 0
    for axis, size in enumerate(out.shape):
        if size < shape[axis]:
            inner = axis
    tail = math.prod(shape[inner + 1 :]) * dtype.itemsize
    first, last = box[inner] if box else (0, 1)
    run = (last - first) * tail
    flat = bytes_of(out)
    # Many short reads are slower than reading complete rows and selecting columns in memory.
    if run < _SHORT_RUN and run < len(flat) and inner > 0:
        rows = read_box(descriptor, offset, dtype, shape, (*box[:inner], *whole(shape[inner:])), what)
        return part(rows, (*whole(rows.shape[:inner]), *box[inner:])).contiguous()
    strides = [math.prod(shape[axis + 1 :]) * dtype.itemsize for axis in range(inner)]
    position = 0
    for place in itertools.product(*itertools.starmap(range, box[:inner])):
        begin = (
            offset + sum(index * stride for index, stride in zip(place, strides, strict=True)) + first * tail
        )
        # ``flat`` is a view of ``out``, so this reads in place.
        read_bytes(descriptor, begin, flat[position : position + run], what)
        position += run
    return out


def read_bytes(descriptor: int, offset: int, view: memoryview, what: str) -> None:
    """Fill a buffer with bytes from a file.

    Args:
        descriptor: file descriptor.
        offset: offset in the file.
        view: buffer to fill.
        what: name for error messages.

    Raises:
        ConversionError: the file is too short or cannot be read.
    """
    done = 0
    while done < len(view):
        try:
            # Read at an offset, so that threads share one descriptor. On Linux one call reads at most 2 GiB.
            count = os.preadv(descriptor, [view[done:]], offset + done)
        except OSError as error:
            raise ConversionError(
                f"{what} cannot be read ({error})", "check the disk, or fetch the checkpoint again"
            ) from error
        if count == 0:
            raise ConversionError(
                f"{what}: the file ends {len(view) - done} bytes too early",
                "the file is truncated; fetch or write the checkpoint again",
            )
        done += count


def write_bytes(descriptor: int, offset: int, data: Tensor) -> None:
    """Write a contiguous tensor to a file at an offset."""
    view, done = bytes_of(data), 0
    while done < len(view):
        # One call may write less than it is given. On Linux it writes at most 2 GiB.
        done += os.pwritev(descriptor, [view[done:]], offset + done)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor without copying."""
    # View the tensor as uint8, because numpy has no bfloat16.
    buffer: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(buffer)
