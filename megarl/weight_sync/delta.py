"""What changed in a group of weights since it was sent last, bit by bit: positions and values of the words that differ, and nothing lost.

Words are compared as integers, so that a NaN keeps its payload and -0.0 is another number than 0.0. What lies between the weights has to
be the same on both sides, which zeros are.
"""

from __future__ import annotations

import torch

from megarl.weight_sync.tensor_info import padded_bytes

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_POSITION = torch.int32


def changed(base: torch.Tensor, new: torch.Tensor, word: int, most: int) -> torch.Tensor | None:
    """Positions of the words that differ, int32, ascending; None where their delta would take more than ``most`` bytes.

    Args:
        base, new: uint8, as long as one another, a multiple of ``word``.
        word: bytes of a word: 1, 2, 4 or 8.
        most: bytes.
    """
    kind = _INTEGERS[word]
    differ = base.view(kind) != new.view(kind)
    if delta_bytes(int(differ.sum()), word) > most or differ.numel() > torch.iinfo(_POSITION).max:
        return None
    return torch.nonzero(differ).flatten().to(_POSITION)


def delta_bytes(count: int, word: int) -> int:
    """Bytes that ``count`` changed words take on their way: their positions, and from the next place that suits every type their values."""
    return padded_bytes(count * _POSITION.itemsize) + count * word


def write_delta(positions: torch.Tensor, new: torch.Tensor, word: int, into: torch.Tensor) -> None:
    """Lay what changed into a buffer.

    Args:
        positions: from ``changed``.
        new: uint8, the present bytes.
        word: bytes of a word.
        into: uint8, at least ``delta_bytes`` long.
    """
    where, values = _parts(into, positions.numel(), word)
    where.copy_(positions)
    values.copy_(new.view(_INTEGERS[word]).index_select(0, positions))


def apply_delta(base: torch.Tensor, delta: torch.Tensor, count: int, word: int) -> None:
    """Bring ``base`` to where the sender's bytes are.

    Args:
        base: uint8, what was sent last; changed in place.
        delta: from ``write_delta``.
        count: of the changed words.
        word: bytes of a word.
    """
    where, values = _parts(delta, count, word)
    base.view(_INTEGERS[word]).index_copy_(0, where.to(torch.int64), values)


def _parts(buffer: torch.Tensor, count: int, word: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and values of ``count`` words in a buffer."""
    start = padded_bytes(count * _POSITION.itemsize)
    return buffer[: count * _POSITION.itemsize].view(_POSITION), buffer[start : start + count * word].view(_INTEGERS[word])
