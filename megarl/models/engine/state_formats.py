"""Storage formats of optimizer state: float32, bfloat16, and 8 bits in blocks, with unbiased rounding.

Adam's moments are running means. A step changes the second moment by about a thousandth. That is less than
half the spacing of bfloat16 or 8-bit numbers, so a mean that is rounded to nearest would stop changing.
Stochastic rounding rounds up or down at random, so that the expected result is exact (Gupta et al.,
arXiv:1502.02551), and the mean follows. The random bits are a hash of seed, step, parameter and position. So
a resumed run gets the same bits, and so do all ranks with a copy of the same parameter.

The 8-bit formats store numbers relative to the largest of their block (Dettmers et al., arXiv:2110.02861),
with one float32 scale per block of 256. Adam divides one moment by the root of the other, so small numbers
matter as much as large ones: both formats are floating-point, with three bits of mantissa. The first moment
has a sign and 16 powers of two; a smaller number becomes 0 or the smallest number, without bias. The second
moment has 32 powers of two, because it is a square. If it is above 0 it never becomes 0, since a step with a
second moment of 0 would be m / eps (the "zero point" of Li et al., arXiv:2309.01507). It is rounded up
instead, which makes steps smaller.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from typing import Protocol

import torch

BLOCK = 256
_SCALE_BYTES = 4
# Number of float32's 23 mantissa bits that are dropped to leave three.
_ROUNDED_OFF = 20
# The bits of the float32 number 1 without the dropped mantissa bits.
_ONE = 127 << 3
# Minimum scale of a block. It keeps all numbers of the block out of float32's subnormal range, where dividing
# by the scale does not undo the multiplication.
_LEAST_SCALE = 2.0**-90


class StateFormat(Protocol):
    """A storage format of one state of a shard. Positions are elements of the shard; ``first`` must be a
    multiple of ``BLOCK``."""

    def zeros(self, count: int, device: torch.device) -> torch.Tensor:
        """Allocate storage for ``count`` zeros."""

    def read(self, stored: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Return the values ``first`` to ``last`` (exclusive) in float32. In the format float32 the result is
        a view."""

    def write(
        self, stored: torch.Tensor, first: int, values: torch.Tensor, bits: torch.Tensor | None
    ) -> None:
        """Store float32 values from position ``first`` on, up to the end of a block or of the shard.

        Args:
            bits: 16 random bits per value, int32. None rounds to nearest, which restores values that were
                read from this format exactly.
        """


class Float32:
    """The format float32, which does not round."""

    def zeros(self, count: int, device: torch.device) -> torch.Tensor:
        return torch.zeros(count, device=device)

    def read(self, stored: torch.Tensor, first: int, last: int) -> torch.Tensor:
        return stored[first:last]

    def write(
        self, stored: torch.Tensor, first: int, values: torch.Tensor, bits: torch.Tensor | None
    ) -> None:
        target = stored[first : first + values.numel()]
        # ``read`` returned a view, so the step may already have written in place.
        if target.data_ptr() != values.data_ptr():
            target.copy_(values)


class BFloat16:
    """The format bfloat16, which is the upper half of a float32 number."""

    def zeros(self, count: int, device: torch.device) -> torch.Tensor:
        return torch.zeros(count, dtype=torch.bfloat16, device=device)

    def read(self, stored: torch.Tensor, first: int, last: int) -> torch.Tensor:
        return stored[first:last].float()

    def write(
        self, stored: torch.Tensor, first: int, values: torch.Tensor, bits: torch.Tensor | None
    ) -> None:
        if bits is not None:
            # Adding 16 random bits carries into the upper half with a probability equal to the fraction in
            # the lower half. Floats store sign and magnitude, so negative numbers need no special case.
            values = values.view(torch.int32).add(bits).bitwise_and_(-0x10000).view(torch.float32)
        stored[first : first + values.numel()].copy_(values)


class Blockwise:
    """Eight bits per number. Codes from 1 up are floating-point numbers of at most 1, multiplied by the scale
    of their block; code 0 is 0.

    Storage is one uint8 tensor, with the scales first.

    Args:
        signed: the highest bit is a sign.
    """

    def __init__(self, *, signed: bool) -> None:
        self.signed = signed
        self._largest = 127 if signed else 255
        magnitudes = torch.arange(256) & self._largest
        # A code is the upper bits of a float32 number, shifted so that the largest code represents 1. So the
        # conversion needs no logarithm.
        table = ((magnitudes - self._largest + _ONE) << _ROUNDED_OFF).int().view(torch.float32)
        table = torch.where(torch.arange(256) > self._largest, -table, table)
        table[magnitudes == 0] = 0.0
        self._table = table

    @property
    def least(self) -> float:
        """The smallest positive number, relative to the scale."""
        return float(self._table[1])

    def zeros(self, count: int, device: torch.device) -> torch.Tensor:
        return torch.zeros(_SCALE_BYTES * -(-count // BLOCK) + count, dtype=torch.uint8, device=device)

    def read(self, stored: torch.Tensor, first: int, last: int) -> torch.Tensor:
        scales, codes = _parts(stored)
        # Convert to int32, because torch treats a uint8 index as a mask.
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
        # Stochastic rounding of the low 20 bits: add random bits to the upper 16 of them. The lower four get
        # their midpoint (8), so that the rounding is unbiased.
        rounding = (bits << 4 | 8) if bits is not None else 1 << _ROUNDED_OFF - 1
        found = (
            (sizes.view(torch.int32) + rounding).bitwise_right_shift_(_ROUNDED_OFF).add_(self._largest - _ONE)
        )
        if self.signed:
            chance = bits / 2**16 if bits is not None else 0.5
            # Below the smallest number there is no mantissa: round to 0 or to that number, without bias.
            found = torch.where(sizes < self.least, (sizes > chance * self.least).int(), found)
            found.add_((values < 0).int(), alpha=128)
        else:
            # Store at least code 1 for values above 0, because with a second moment of 0 the step would be m
            # / eps.
            found = found.clamp_(min=1).mul_(sizes > 0)
        codes[first : first + count].copy_(found)
        scales[first // BLOCK :][: largest.numel()].copy_(largest)


def _parts(stored: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split a stored tensor into its scales, as float32, and its codes."""
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
"""Formats of each state, by the names that the configuration uses."""


def random_bits(key: str, first: int, count: int, device: torch.device) -> torch.Tensor:
    """Return 32 random bits for each of ``count`` positions, [count] int32. They are a hash of ``key`` and
    position, equal on every device.

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
