"""Casts that keep the sign and the payload of NaN, which ``Tensor.to`` does not guarantee."""

from __future__ import annotations

import torch
from torch import Tensor

# Floating-point dtype -> (integer dtype of the same width, bits of the mantissa).
_FORMATS = {
    torch.float16: (torch.int16, 10),
    torch.bfloat16: (torch.int16, 7),
    torch.float32: (torch.int32, 23),
    torch.float64: (torch.int64, 52),
}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a tensor to a dtype; returns the tensor itself if it has that dtype.

    A NaN keeps the leading bits of its payload. Widening and narrowing back restores the original bits. If
    none of the set payload bits fits into a narrower dtype, the NaN becomes the default NaN with its sign.
    """
    if tensor.dtype == dtype:
        return tensor
    result = tensor.to(dtype)
    # The sum is NaN if an element is, and needs no memory. It is also NaN for infinities of both signs, which
    # only costs time.
    if tensor.dtype in _FORMATS and dtype in _FORMATS and bool(tensor.sum().isnan()):
        places = tensor.isnan()
        result[places] = _same_nans(tensor[places], dtype)
    return result


def unequal(one: Tensor, other: Tensor) -> Tensor:
    """Return a mask of the elements of two equal-dtype tensors whose bits differ; -0 differs from 0, and NaN
    payloads count."""
    integers = _INTEGERS[one.element_size()]
    return one.view(integers) != other.view(integers)


def _same_nans(nans: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a tensor in which all elements are NaN."""
    (integers, mantissa), (wanted, wanted_mantissa) = _FORMATS[nans.dtype], _FORMATS[dtype]
    bits = nans.view(integers).to(torch.int64)
    payload, shift = bits & (2**mantissa - 1), wanted_mantissa - mantissa
    payload = payload << shift if shift > 0 else payload >> -shift
    # A value with an empty payload would be infinity.
    payload = torch.where(payload == 0, 2 ** (wanted_mantissa - 1), payload)
    width = 8 * dtype.itemsize
    # All exponent bits are set, as for every NaN.
    exponent = 2 ** (width - 1) - 2**wanted_mantissa
    # Use the sign bit's negative weight in two's complement, because its positive weight exceeds int64 for
    # float64.
    return (payload + exponent + (bits < 0).to(torch.int64) * -(2 ** (width - 1))).to(wanted).view(dtype)
