"""Memory that one bucket after another is gathered into: pages that the kernel handed out, and cleared, once and not for every bucket."""

from __future__ import annotations

import torch


class SpareMemory:
    """Pieces that nobody uses at present."""

    def __init__(self) -> None:
        self._pieces: list[torch.Tensor] = []

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """[count], undefined: a spare piece that is large enough, or new memory in place of one that is not."""
        nbytes = count * dtype.itemsize
        for index, piece in enumerate(self._pieces):
            if piece.numel() >= nbytes and piece.device == device:
                return self._pieces.pop(index)[:nbytes].view(dtype)
        del self._pieces[:1]
        return torch.empty(count, dtype=dtype, device=device)

    def give(self, tensor: torch.Tensor) -> None:
        """Make the whole memory of ``tensor`` a spare piece; nobody may look at any part of it from now on."""
        if tensor.numel() and not tensor.is_meta:
            self._pieces.append(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()))
