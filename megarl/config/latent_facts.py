"""The widths of multi-head latent attention (DeepSeek-V2), and what follows from them for sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class LatentWidths:
    """Widths of its projections.

    Attributes:
        queries: of the queries between their two projections; 0 where there is one projection only.
        keys_and_values: of what keys and values are projected up from.
        rotated: of the part of a head's query and key that is rotated, which all heads share of a key.
        head: of a head's query and key, the rotated part included.
        value: of a head's value.
    """

    queries: int
    keys_and_values: int
    rotated: int
    head: int
    value: int

    def parameters(self, hidden: int, heads: int, tensor: int) -> int:
        """Parameters of one layer's attention on one tensor-parallel rank, its norms included, without the norm before it.

        Source: the shapes of Megatron-Core's ``MLASelfAttention``; norms are on every rank, all else is divided.
        """
        query = self.queries * (hidden + heads * self.head) if self.queries else hidden * heads * self.head
        down = hidden * (self.keys_and_values + self.rotated)
        up = self.keys_and_values * heads * (self.head - self.rotated + self.value)
        return (query + down + up + heads * self.value * hidden) // tensor + self.queries + self.keys_and_values

    def kept_columns(self, heads: int) -> tuple[int, int]:
        """Columns that one layer's attention keeps of a token for the backward pass: those divided over tensor-parallel ranks (queries,
        keys, values and output of the heads) and those that are not (the latent vectors before and after their norms, the shared part of
        keys)."""
        return 2 * heads * (self.head + self.value), 2 * (self.queries + self.keys_and_values) + self.rotated


def read_latent_widths(content: Mapping[str, Any]) -> LatentWidths | None:
    """The widths in the content of a ``config.json``; None for ordinary attention.

    Raises:
        KeyError: one of them is missing.
    """
    if content.get("kv_lora_rank") is None:
        return None
    rotated = int(content["qk_rope_head_dim"])
    return LatentWidths(
        queries=int(content.get("q_lora_rank") or 0),
        keys_and_values=int(content["kv_lora_rank"]),
        rotated=rotated,
        head=int(content["qk_nope_head_dim"]) + rotated,
        value=int(content["v_head_dim"]),
    )
