"""One weight as both sides of a refit know it, and the bytes that it takes on its way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# what the kernels of CUDA want of a tensor's beginning, and more than any dtype wants
ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One weight: its Hugging Face name, its full shape and the dtype it is sent in."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes without padding."""
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorInfo:
        """What would announce this weight."""
        return cls(name, tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Of a contiguous tensor: elements from one index to the next, a dimension each."""
    return torch.empty(tuple(shape), device="meta").stride()


def padded_bytes(nbytes: int) -> int:
    """Bytes that a weight takes in a buffer."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
