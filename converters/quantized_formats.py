"""How quantised tensors become numbers: boxes of them, in float32, in pieces that fit a processor's cache.

* FP8 with block scales, as DeepSeek-V3 is stored: value times the scale of its block. Blocks at the lower and right edge may be cut off.
* MXFP4, as GPT-OSS is stored: two numbers a byte, the lower half first, each times two to the power of the scale of its group of 32.
  (The matrices of transformers' models are these transposed; which is which is a matter of the family's rules.)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from converters.boxes import Box, shape_of
from converters.errors import ConversionError

Read = Callable[[Box], Tensor]
"""Reads a box of a stored tensor."""
GROUP = 32
"""Numbers of an MXFP4 tensor that share a scale."""
# of the Open Compute Project's Microscaling formats: sign, two bits of exponent, one of mantissa
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS, _NO_NUMBER = 127, 255
_PIECE_ELEMENTS = 2**18


class Format(Protocol):
    """A quantised tensor.

    Attributes:
        shape: of the numbers.
    """

    shape: tuple[int, ...]

    def read(self, box: Box, dtype: torch.dtype) -> Tensor:
        """The numbers in a box, each computed in float32 and rounded once to ``dtype``."""
        ...


class BlockScaled:
    """FP8 with block scales.

    Args:
        name: for messages.
        shape: of the weight, at least two dimensions; the last two are cut into blocks.
        block: rows and columns of a block.
        read_weight, read_scale: of the stored tensors.
    """

    def __init__(self, name: str, shape: tuple[int, ...], block: tuple[int, int], read_weight: Read, read_scale: Read) -> None:
        self.name, self.shape, self._block = name, shape, block
        self._read_weight, self._read_scale = read_weight, read_scale

    def read(self, box: Box, dtype: torch.dtype) -> Tensor:
        """See :class:`Format`."""
        leading, (rows, columns) = box[:-2], box[-2:]
        scales = self._read_scale((*leading, _blocks(rows, self._block[0]), _blocks(columns, self._block[1]))).float()
        of_column = torch.arange(*columns) // self._block[1] - columns[0] // self._block[1]
        weight = self._read_weight(box)
        result = torch.empty(shape_of(box), dtype=dtype)
        for index in _indices(leading):
            for number, (start, stop) in enumerate(_cuts(rows, self._block[0])):
                piece = slice(start - rows[0], stop - rows[0])
                result[index][piece] = weight[index][piece].float() * scales[index][number][of_column]
        return result


class Microscaled:
    """MXFP4.

    Args:
        name: for messages.
        stored_shape: of the stored scales: [..., groups], a group being ``GROUP`` numbers along the last dimension.
        read_blocks, read_scales: of the stored tensors, both uint8; that of the blocks has one dimension more, of the bytes of a group.
    """

    def __init__(self, name: str, stored_shape: tuple[int, ...], read_blocks: Read, read_scales: Read) -> None:
        self.name, self.shape = name, (*stored_shape[:-1], stored_shape[-1] * GROUP)
        self._read_blocks, self._read_scales = read_blocks, read_scales

    def read(self, box: Box, dtype: torch.dtype) -> Tensor:
        """See :class:`Format`."""
        leading, (start, stop) = box[:-1], box[-1]
        groups = _blocks((start, stop), GROUP)
        blocks = self._read_blocks((*leading, groups, (0, GROUP // 2))).flatten(0, -3)
        scales = self._read_scales((*leading, groups)).flatten(0, -2)
        if bool((scales == _NO_NUMBER).any()):
            raise ConversionError(f"{self.name} has a scale of {_NO_NUMBER}, which stands for no number", "fetch the checkpoint again")
        table = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
        inside = slice(start - groups[0] * GROUP, stop - groups[0] * GROUP)
        result = torch.empty(blocks.shape[0], stop - start, dtype=dtype)
        step = max(1, _PIECE_ELEMENTS // max(1, blocks[0].numel() * 2 if blocks.shape[0] else 1))
        for first in range(0, blocks.shape[0], step):
            rows = slice(first, first + step)
            values = table[torch.stack((blocks[rows] & 15, blocks[rows] >> 4), dim=-1).int()].flatten(-2)
            values = torch.ldexp(values, (scales[rows].int() - _EXPONENT_BIAS).unsqueeze(-1))
            result[rows] = values.flatten(-2)[:, inside]
        return result.reshape(shape_of(box))


def _blocks(span: tuple[int, int], size: int) -> tuple[int, int]:
    """The blocks that a range touches."""
    start, stop = span
    return start // size, max(start // size, -(-stop // size))


def _cuts(span: tuple[int, int], size: int) -> Iterator[tuple[int, int]]:
    """A range cut where blocks begin."""
    start, stop = span
    while start < stop:
        end = min(stop, (start // size + 1) * size)
        yield start, end
        start = end


def _indices(leading: Box) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(stop - start) for start, stop in leading))
