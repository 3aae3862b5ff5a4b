"""Boxes of tensors, read from files without memory mapping, so that memory use is only what was asked for.

A box is a range in every dimension of a tensor.
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
# Shorter runs of bytes are read together with the bytes between them.
_SHORT_RUN = 4096


def whole(shape: Sequence[int]) -> Box:
    """Return the box that covers a whole tensor."""
    return tuple((0, size) for size in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple(stop - start for start, stop in box)


def intersection(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes of a tensor, or None if it is empty."""
    common = tuple(
        (max(low, start), min(high, stop)) for (low, high), (start, stop) in zip(one, other, strict=True)
    )
    return common if all(start < stop for start, stop in common) else None


def single(index: Sequence[int]) -> Box:
    """Return the box that contains only the element at ``index``."""
    return tuple((position, position + 1) for position in index)


def relative(box: Box, outer: Box) -> Box:
    """Return the box relative to the beginning of ``outer``."""
    return tuple((start - first, stop - first) for (start, stop), (first, _) in zip(box, outer, strict=True))


def part(tensor: Tensor, box: Box) -> Tensor:
    """Return the view of a tensor that a box describes."""
    return tensor[tuple(itertools.starmap(slice, box))]


def read_box(
    descriptor: int, offset: int, dtype: torch.dtype, shape: Sequence[int], box: Box, what: str
) -> Tensor:
    """Read a box of a tensor that is contiguous in a file.

    Args:
        descriptor: descriptor of the file, open for reading; its position is neither used nor moved.
        offset: offset of the tensor's first byte.
        dtype, shape: dtype and shape of the tensor.
        box: box inside the tensor.
        what: name of the tensor in errors.

    Returns:
        A fresh contiguous CPU tensor.

    Raises:
        ConversionError: the file ends too early, or cannot be read.
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
    if run < _SHORT_RUN and run < len(flat) and inner > 0:
        rows = read_box(descriptor, offset, dtype, shape, (*box[:inner], *whole(shape[inner:])), what)
        return part(rows, (*whole(rows.shape[:inner]), *box[inner:])).contiguous()
    strides = [math.prod(shape[axis + 1 :]) * dtype.itemsize for axis in range(inner)]
    position = 0
    for place in itertools.product(*itertools.starmap(range, box[:inner])):
        begin = (
            offset + sum(index * stride for index, stride in zip(place, strides, strict=True)) + first * tail
        )
        # ``flat`` is a view of ``out``, so that the bytes are read in place.
        read_bytes(descriptor, begin, flat[position : position + run], what)
        position += run
    return out


def read_bytes(descriptor: int, offset: int, view: memoryview, what: str) -> None:
    """Fill ``view`` with bytes from an offset of a file.

    Raises:
        ConversionError: the file ends too early, or cannot be read.
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
    """Write a contiguous tensor at an offset of a file."""
    view, done = bytes_of(data), 0
    while done < len(view):
        # One call may write less than it is given. On Linux it writes at most 2 GiB.
        done += os.pwritev(descriptor, [view[done:]], offset + done)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor without copying them."""
    # View the tensor as uint8, because numpy has no bfloat16.
    buffer: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(buffer)
