"""Formats in which an optimizer stores its states: float32, bfloat16, and 8 bits in blocks, with unbiased
rounding.

Adam's moments are running means. A step changes the second moment by about a thousandth, less than half the
spacing of bfloat16 or 8-bit numbers, so that a mean rounded to nearest would stop changing. Stochastic
rounding, which rounds up with the probability that makes the result right on average (Gupta et al.,
arXiv:1502.02551), lets the mean follow. The random bits are a hash of seed, step, parameter and position: a
resumed run has the same bits, and so have ranks that hold copies of a parameter.

The 8-bit formats store numbers relative to the largest of their block (Dettmers et al., arXiv:2110.02861).
Adam divides one moment by the root of the other, so that small numbers matter as much as large ones: both
formats are floating-point, with three bits of mantissa. The first moment has a sign and 16 powers of two;
smaller numbers become 0 or the smallest number, with the same mean. The second moment has 32 powers of two,
because it is a square. A second moment that is not 0 never becomes 0, which would make the step m / eps (the
"zero point" of Li et al., arXiv:2309.01507): smaller numbers are rounded up, which makes steps smaller. A
block of 256 has one float32 scale.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from typing import Protocol

import torch

BLOCK = 256
_SCALE_BYTES = 4
# Number of bits that a float32 mantissa (23) has more than a mantissa of three bits.
_ROUNDED_OFF = 20
# This is the float32 number 1 without the bits that are rounded off.
_ONE = 127 << 3
# This bound keeps all numbers of a block out of float32's subnormal range, where multiplication by the scale
# cannot be undone.
_LEAST_SCALE = 2.0**-90


class StateFormat(Protocol):
    """A format that stores one state of a shard. Positions are elements of the shard; each method begins at a
    multiple of ``BLOCK``."""

    def zeros(self, count: int, device: torch.device) -> torch.Tensor:
        """Allocate the storage of ``count`` zeros."""

    def read(self, stored: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Return the values from ``first`` to ``last`` in float32; a view if they are stored in float32."""

    def write(
        self, stored: torch.Tensor, first: int, values: torch.Tensor, bits: torch.Tensor | None
    ) -> None:
        """Store float32 values from ``first`` on, up to the end of a block or of the shard.

        Args:
            bits: 16 random bits per value, int32; None rounds to nearest, which restores values read from
                this format exactly.
        """


class Float32:
    """Float32 numbers, stored without rounding."""

    def zeros(self, count: int, device: torch.device) -> torch.Tensor:
        return torch.zeros(count, device=device)

    def read(self, stored: torch.Tensor, first: int, last: int) -> torch.Tensor:
        return stored[first:last]

    def write(
        self, stored: torch.Tensor, first: int, values: torch.Tensor, bits: torch.Tensor | None
    ) -> None:
        target = stored[first : first + values.numel()]
        # If read returned a view, the step has already written in place.
        if target.data_ptr() != values.data_ptr():
            target.copy_(values)


class BFloat16:
    """Bfloat16 numbers, the upper half of float32 numbers."""

    def zeros(self, count: int, device: torch.device) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.bfloat16, device=device)

    def read(self, stored: torch.Tensor, first: int, last: int) -> torch.Tensor:
        return stored[first:last].float()

    def write(
        self, stored: torch.Tensor, first: int, values: torch.Tensor, bits: torch.Tensor | None
    ) -> None:
        if bits is not None:
            # Adding random bits carries into the upper half with the probability given by the lower half.
            # Sign and magnitude are stored apart, so that negative numbers need nothing else.
            values = values.view(torch.int32).add(bits).bitwise_and_(-0x10000).view(torch.float32)
        stored[first : first + values.numel()].copy_(values)


class Blockwise:
    """Eight bits per number: codes from 1 on are floating-point numbers up to 1, times the scale of their
    block; code 0 is 0.

    Storage is one uint8 tensor, scales first.

    Args:
        signed: the highest bit is a sign.
    """

    def __init__(self, *, signed: bool) -> None:
        self.signed = signed
        self._largest = 127 if signed else 255
        magnitudes = torch.arange(256) & self._largest
        # A code is the upper bits of a float32 number, shifted so that the largest code is 1: conversion
        # needs no logarithm.
        table = ((magnitudes - self._largest + _ONE) << _ROUNDED_OFF).int().view(torch.float32)
        table = torch.where(torch.arange(256) > self._largest, -table, table)
        table[magnitudes == 0] = 0.0
        self._table = table

    @property
    def least(self) -> float:
        """The smallest number above 0, relative to the scale."""
        return float(self._table[1])

    def zeros(self, count: int, device: torch.device) -> torch.Tensor:
        return torch.zeros(_SCALE_BYTES * -(-count // BLOCK) + count, dtype=torch.uint8, device=device)

    def read(self, stored: torch.Tensor, first: int, last: int) -> torch.Tensor:
        scales, codes = _parts(stored)
        # Convert to int32, because torch takes a uint8 index for a mask.
        values = _on(self, stored.device)[codes[first:last].int()]
        return values.mul_(
            scales[first // BLOCK : -(-last // BLOCK)].repeat_interleave(BLOCK)[: last - first]
        )

    def write(
        self, stored: torch.Tensor, first: int, values: torch.Tensor, bits: torch.Tensor | None
    ) -> None:
        scales, codes = _parts(stored)
        count = values.numel()
        missing = -count % BLOCK
        sizes = torch.nn.functional.pad(values, (0, missing)).view(-1, BLOCK).abs()
        largest = sizes.amax(1).clamp_(min=_LEAST_SCALE)
        sizes = sizes.div_(largest[:, None]).view(-1)[:count]
        # Stochastic rounding drops the low 20 bits. Random bits are added to the upper 16 of them, and the
        # midpoint (8) to the lower four, so that the rounding is unbiased.
        rounding = (bits << 4 | 8) if bits is not None else 1 << _ROUNDED_OFF - 1
        found = (
            (sizes.view(torch.int32) + rounding).bitwise_right_shift_(_ROUNDED_OFF).add_(self._largest - _ONE)
        )
        if self.signed:
            chance = bits / 2**16 if bits is not None else 0.5
            # Below the smallest number the mantissa means nothing: round to 0 or to that number, unbiased.
            found = torch.where(sizes < self.least, (sizes > chance * self.least).int(), found)
            found.add_((values < 0).int(), alpha=128)
        else:
            # Store at least code 1 for values above 0: with a second moment of 0 the step would be m / eps.
            found = found.clamp_(min=1).mul_(sizes > 0)
        codes[first : first + count].copy_(found)
        scales[first // BLOCK :][: largest.numel()].copy_(largest)


def _parts(stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales, float32, and the codes of a stored tensor."""
    scales = _SCALE_BYTES * -(-stored.numel() // (BLOCK + _SCALE_BYTES))
    return stored[:scales].view(torch.float32), stored[scales:]


@functools.cache
def _on(form: Blockwise, device: torch.device) -> torch.Tensor:
    return form._table.to(device)


FORMATS: Mapping[str, Mapping[str, StateFormat]] = {
    "exp_avg": {"float32": Float32(), "bfloat16": BFloat16(), "8bit": Blockwise(signed=True)},
    "exp_avg_sq": {"float32": Float32(), "bfloat16": BFloat16(), "8bit": Blockwise(signed=False)},
    "master": {"float32": Float32(), "bfloat16": BFloat16()},
}
"""Formats of each state, by their names in the configuration."""


def random_bits(key: str, first: int, count: int, device: torch.device) -> torch.Tensor:
    """Return 32 random bits for each position from ``first`` on, [count] int32: a hash of key and position,
    equal on every device.

    The mixing steps are those of Wellons' ``lowbias32`` (Prospecting for Hash Functions, 2018).
    """
    start, mask = (int.from_bytes(part, "little", signed=True) for part in _halves(key))
    found = torch.arange(first, first + count, dtype=torch.int64, device=device).add_(start).to(torch.int32)
    found.bitwise_xor_((found >> 16).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    found.bitwise_xor_((found >> 15).bitwise_and_(0x1FFFF)).mul_(0x846CA68B - 2**32)
    return found.bitwise_xor_((found >> 16).bitwise_and_(0xFFFF)).bitwise_xor_(mask)


def _halves(key: str) -> tuple[bytes, bytes]:
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return digest[:4], digest[4:]
