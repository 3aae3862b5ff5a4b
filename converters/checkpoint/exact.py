"""Casts in which a NaN keeps its sign and its payload, which ``Tensor.to`` does not guarantee."""

from __future__ import annotations

import torch
from torch import Tensor

# The table gives the integer dtype of the same width, and the number of bits of the mantissa.
_FORMATS = {
    torch.float16: (torch.int16, 10),
    torch.bfloat16: (torch.int16, 7),
    torch.float32: (torch.int32, 23),
    torch.float64: (torch.int64, 52),
}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor in ``dtype``, or the tensor itself if it has that dtype.

    A NaN keeps the leading bits of its payload. A cast to a wider dtype keeps all of them, and so does the
    cast back. If a narrower dtype holds none of the payload's set bits, the NaN becomes the default NaN of
    its sign.
    """
    if tensor.dtype == dtype:
        return tensor
    result = tensor.to(dtype)
    # The sum is NaN if an element is, and needs no memory. Infinities of both signs also make it NaN, which
    # only costs time.
    if tensor.dtype in _FORMATS and dtype in _FORMATS and bool(tensor.sum().isnan()):
        places = tensor.isnan()
        result[places] = _same_nans(tensor[places], dtype)
    return result


def unequal(one: Tensor, other: Tensor) -> Tensor:
    """Return a mask of the elements whose bits differ, for two tensors of the same dtype. The sign of zero
    and the payload of a NaN count."""
    integers = _INTEGERS[one.element_size()]
    return one.view(integers) != other.view(integers)


def _same_nans(nans: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast elements that are all NaN to another dtype."""
    (integers, mantissa), (wanted, wanted_mantissa) = _FORMATS[nans.dtype], _FORMATS[dtype]
    bits = nans.view(integers).to(torch.int64)
    payload, shift = bits & (2**mantissa - 1), wanted_mantissa - mantissa
    payload = payload << shift if shift > 0 else payload >> -shift
    # With an empty payload the value would be an infinity.
    payload = torch.where(payload == 0, 2 ** (wanted_mantissa - 1), payload)
    width = 8 * dtype.itemsize
    # Set all bits of the exponent, which makes a NaN of any payload.
    exponent = 2 ** (width - 1) - 2**wanted_mantissa
    # Give the sign bit its negative weight in two's complement, so that float64 stays within int64.
    return (payload + exponent + (bits < 0).to(torch.int64) * -(2 ** (width - 1))).to(wanted).view(dtype)
