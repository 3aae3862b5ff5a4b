"""A number that changes when bytes change or change places, computed where the bytes are."""

from __future__ import annotations

import torch

_CHUNK = 1 << 22
# odd, so that multiplying by it loses nothing modulo 2^64 (Knuth's multiplicative hashing, the 64-bit constant of the golden ratio)
_FACTOR = -7046029254386353131


def checksum(data: torch.Tensor) -> int:
    """Sum over int32 words of (word times an odd number that depends on its place), modulo 2^64, as a signed number.

    Args:
        data: uint8, a multiple of 4 long, on any device.
    """
    words = data.view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    places = torch.arange(min(_CHUNK, max(words.numel(), 1)), dtype=torch.int64, device=data.device)
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK].to(torch.int64)
        weights = (places[: part.numel()] + start).mul_(2).add_(1).mul_(_FACTOR)
        total += (part * (weights ^ (weights >> 29) | 1)).sum()
    return int(total)
