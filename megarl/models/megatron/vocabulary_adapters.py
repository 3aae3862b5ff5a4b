"""Low-rank adapter of an embedding whose rows are divided over the tensor-parallel ranks.

A rank holds the columns of A for its own tokens, and all of B. A token's column of A is reduced over the
ranks like its row of the embedding, then multiplied by B.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding, set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import nn

from converters.mapping.rule import Rule
from megarl.models.engine.adapters import AdapterSettings, AdapterSwitch, FirstFactors, merged
from megarl.models.megatron.hf_state import ADAPTER


class EmbeddingAdapter(nn.Module):
    """Adapter of an embedding, without dropout, as in PEFT.

    Its parameters are ``lora_A`` [rows of the embedding, r], which is A transposed, and ``lora_B`` [H, r].

    Args:
        embedding: this tensor-parallel rank's shard of the embedding.
        rule: mapping rule of the embedding's weight.
        settings, switch: adapter settings and on-off switch of the model.
    """

    def __init__(self, embedding: Any, rule: Rule, settings: AdapterSettings, switch: AdapterSwitch) -> None:
        super().__init__()
        self._settings, self.switch, self._group = settings, switch, embedding.tp_group
        self._module, self._shape = rule.parts[0].name.removesuffix(".weight"), rule.parts[0].shape
        self._start, self._scatters = embedding.vocab_start_index, embedding.reduce_scatter_embeddings
        rows, width = embedding.weight.shape
        self.lora_A = self._new(embedding.weight, rows, is_cut=True)
        self.lora_B = self._new(embedding.weight, width, is_cut=False)

    def _new(self, weight: torch.Tensor, rows: int, *, is_cut: bool) -> nn.Parameter:
        parameter: Any = nn.Parameter(weight.new_zeros(rows, self._settings.rank))
        set_tensor_model_parallel_attributes(parameter, is_parallel=is_cut, dim=0, stride=1)
        # B is replicated, but each rank sees only a part of the sequence, so Megatron-Core must sum its
        # gradients.
        parameter.sequence_parallel = self._scatters and not is_cut
        return parameter

    @torch.no_grad()
    def fill(self, first: FirstFactors) -> None:
        """Set the factors to their initial values; padding rows of the vocabulary stay zero."""
        own = first.read(self._module, "A", self._shape[0]).T[self._start : self._start + len(self.lora_A)]
        self.lora_A[: len(own)].copy_(own)
        self.lora_B.copy_(first.read(self._module, "B", self._shape[1]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the term that is added to the embedding's output for tokens [B, s]: [B, s, H], or [s of this
        rank, B, H] under sequence parallelism."""
        local = tokens - self._start
        elsewhere = (local < 0) | (local >= len(self.lora_A))
        # For tokens of other ranks look up row 0 and zero the result, as Megatron-Core's embedding does; the
        # sum over the ranks fills them in.
        columns = F.embedding(local.masked_fill(elsewhere, 0), self.lora_A).masked_fill(
            elsewhere[..., None], 0
        )
        if self._scatters:
            hidden = reduce_scatter_to_sequence_parallel_region(
                columns.transpose(0, 1).contiguous(), group=self._group
            )
        else:
            hidden = reduce_from_tensor_model_parallel_region(columns, group=self._group)
        return F.linear(hidden * self._settings.scaling, self.lora_B)

    def merged(self, weight: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of the embedding with the adapter merged into them."""
        return merged(weight.detach(), self.lora_A, self.lora_B.T, self._settings.scaling)

    def factors(self) -> Iterator[tuple[str, str, torch.Tensor, int | None]]:
        """Yield the factors as ``Adapter.factors`` does; A is transposed."""
        yield self._module, "A", self.lora_A.detach(), 0
        yield self._module, "B", self.lora_B.detach(), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> ShardedStateDict:
        """Return the sharded state dict of A and B. The shape of A may differ from the checkpoint's, because
        layouts pad the vocabulary to different sizes."""
        state = make_sharded_tensors_for_checkpoint(
            {"linear_in.weight": self.lora_A, "linear_out.weight": self.lora_B},
            prefix,
            {"linear_in.weight": 0},
            sharded_offsets,
            tp_group=self._group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        state[f"{prefix}linear_in.weight"].allow_shape_mismatch = True
        return {
            f"{prefix}lora_A": state[f"{prefix}linear_in.weight"],
            f"{prefix}lora_B": state[f"{prefix}linear_out.weight"],
        }


class AdaptedEmbedding(VocabParallelEmbedding):
    """Megatron-Core's embedding with an adapter. Its sharded state dict contains only the adapter."""

    adapter: EmbeddingAdapter

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Return the embedding of tokens [B, s] as [B, s, H], or as [s of this rank, B, H] under sequence
        parallelism."""
        output: torch.Tensor = super().forward(input_)
        return output + self.adapter(input_) if self.adapter.switch.is_on else output

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> ShardedStateDict:
        """Return the adapter's sharded state dict; see ``EmbeddingAdapter``."""
        return self.adapter.sharded_state_dict(f"{prefix}{ADAPTER}.", sharded_offsets, metadata)
