"""Casts that keep a NaN: against the bits themselves, worked out by Python's integers."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from converters.checkpoint.exact import cast, unequal

# width and mantissa, from the definitions of IEEE 754 and of bfloat16
FORMATS = {torch.float16: (16, 10), torch.bfloat16: (16, 7), torch.float32: (32, 23), torch.float64: (64, 52)}
INTEGERS = {16: torch.int16, 32: torch.int32, 64: torch.int64}


def of_bits(bits: list[int], dtype: torch.dtype) -> Tensor:
    width = FORMATS[dtype][0]
    signed = [value - 2**width if value >= 2 ** (width - 1) else value for value in bits]
    return torch.tensor(signed, dtype=INTEGERS[width]).view(dtype)


def bits_of(tensor: Tensor) -> list[int]:
    width = FORMATS[tensor.dtype][0]
    return [value % 2**width for value in tensor.view(INTEGERS[width]).tolist()]


def nan(sign: int, payload: int, dtype: torch.dtype) -> int:
    width, mantissa = FORMATS[dtype]
    return (sign << (width - 1)) | ((2 ** (width - 1 - mantissa) - 1) << mantissa) | payload


PAIRS = [
    (narrow, wide)
    for narrow, wide in itertools.permutations(FORMATS, 2)
    if FORMATS[narrow][1] < FORMATS[wide][1]
]


@pytest.mark.parametrize(("narrow", "wide"), PAIRS)
def test_every_nan_survives_the_way_there_and_back(narrow: torch.dtype, wide: torch.dtype) -> None:
    mantissa = FORMATS[narrow][1]
    pairs = [(sign, payload) for sign in (0, 1) for payload in range(1, 2 ** min(mantissa, 10))]
    before = of_bits([nan(*pair, narrow) for pair in pairs], narrow)
    widened = cast(before, wide)
    shift = FORMATS[wide][1] - mantissa
    assert bits_of(widened) == [nan(sign, payload << shift, wide) for sign, payload in pairs]
    assert bits_of(cast(widened, narrow)) == bits_of(before)


def test_what_a_narrow_nan_cannot_hold_stays_nan() -> None:
    before = of_bits(
        [nan(0, 1, torch.float32), nan(1, 1, torch.float32), nan(1, 2**16 + 5, torch.float32)], torch.float32
    )
    expected = [nan(0, 2**6, torch.bfloat16), nan(1, 2**6, torch.bfloat16), nan(1, 1, torch.bfloat16)]
    assert bits_of(cast(before, torch.bfloat16)) == expected


def test_numbers_are_cast_as_torch_casts_them() -> None:
    values = torch.tensor([1.5, -0.0, 3e38, float("inf"), -float("inf"), 1e-45, float("nan")])
    for dtype in FORMATS:
        assert not unequal(cast(values, dtype)[:-1], values.to(dtype)[:-1]).any()
    assert cast(values, torch.float32) is values


def test_bits_are_compared_and_not_values() -> None:
    nans = of_bits([nan(0, 1, torch.bfloat16), nan(0, 1, torch.bfloat16)], torch.bfloat16)
    others = of_bits([nan(0, 1, torch.bfloat16), nan(0, 2, torch.bfloat16)], torch.bfloat16)
    assert unequal(nans, others).tolist() == [False, True]
    assert unequal(torch.tensor([0.0]), torch.tensor([-0.0])).all()
