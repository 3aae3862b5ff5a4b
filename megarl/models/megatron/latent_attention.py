"""Megatron's multi-head latent attention, with corrections that make it match the model's."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules

from megarl.models.megatron.cached_attention import CachesRows

# Without Transformer Engine, release 0.16 considers it installed here and asks whether a layer is one of its
# classes, which are mocks.
multi_latent_attention.HAVE_TE = HAVE_TE

WITHOUT_LENGTHS = dict.fromkeys(
    ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
)


class LatentSelfAttention(CachesRows, MLASelfAttention):
    """Latent attention that rotates packed sequences by the positions of their tokens, and whose shared key
    gets the gradients of the heads of all tensor-parallel ranks.

    Megatron-Core rotates packed sequences one after another, by lengths that it reads from the device.
    Without lengths it rotates them as rows, by the angles that it is given: here those of the tokens' own
    positions.

    The rotated part of a key is shared by all heads. Each rank uses it with its own heads, so its gradients
    have to be summed over the ranks. Megatron-Core (0.16 to 0.19) does not sum them if the projection that
    computes this part is sharded over the ranks (without Transformer Engine), or is whole on each rank
    without sequence parallelism: no error is raised, and the projection learns from only some of the heads.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # Use a hook, because Megatron-Core calls the projection in the middle of a long method.
        self.linear_kv_down_proj.register_forward_hook(self._whole)
        self.rotary_pos_emb.positions = None
        self.rotary_pos_emb.register_forward_hook(_of_positions)

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: Any = None,
        position_ids: Any = None,
        packed_seq_params: Any = None,
        **options: Any,
    ) -> Any:
        """Return what ``MLASelfAttention`` returns, rotated by the tokens' positions; ``packed_seq_params``
        are ``PackedSequences``."""
        given = (hidden_states, key_value_states, position_ids)
        if packed_seq_params is None or self.config.apply_rope_fusion:
            return super().get_query_key_value_tensors(*given, packed_seq_params, **options)
        self.rotary_pos_emb.positions = packed_seq_params.positions
        try:
            return super().get_query_key_value_tensors(
                *given, dataclasses.replace(packed_seq_params, **WITHOUT_LENGTHS), **options
            )
        finally:
            # Clear the positions after an error too, because all layers share this embedding.
            self.rotary_pos_emb.positions = None

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        """Return the projections and norms of the specification unchanged.

        From 0.19 on, Megatron-Core chooses them by ``qk_layernorm``. If it is off, norms of latents are an
        error. If it is on, queries that are not computed from a latent get a norm too, and when gradients are
        summed over ranks, Megatron-Core assumes norms of heads (see ``transformer_config``).
        """
        return {
            "linear_q_proj": submodules.linear_q_proj,
            "linear_q_up_proj": submodules.linear_q_up_proj,
            "linear_kv_up_proj": submodules.linear_kv_up_proj,
            "q_layernorm": submodules.q_layernorm or IdentityOp,
            "kv_layernorm": submodules.kv_layernorm or IdentityOp,
        }

    def _whole(
        self, module: torch.nn.Module, inputs: Any, output: tuple[torch.Tensor, Any]
    ) -> tuple[torch.Tensor, Any]:
        """Return the projection's output as [s, B, L], given [S, B, L / ranks], or [s, B, L] from a
        projection that is whole on every rank. s is S / ranks under sequence parallelism, otherwise S; L is
        the width of latent and rotated part together."""
        combined, bias = output
        width = self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim
        # Decide by the width, because the layer spec and the release determine whether the output is sharded.
        cut = combined.shape[-1] != width
        if cut:
            combined = gather_from_tensor_model_parallel_region(combined)
        if self.config.sequence_parallel:
            # Megatron-Core gathers the rotated part again, and sums its gradients there.
            return (scatter_to_sequence_parallel_region(combined) if cut else combined), bias
        latent, rotated = combined.split([self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], dim=-1)
        shared: torch.Tensor = _SummedGradients.apply(  # type: ignore[no-untyped-call]
            rotated, self.pg_collection.tp
        )
        return torch.cat([latent, shared], dim=-1), bias


def _of_positions(module: Any, inputs: Any, output: Any) -> Any:
    """Return the angles of the tokens, [t, 1, r], of packed sequences, selected from angles [positions, 1, 1,
    r] that start at 0; a factor next to them is kept. Other angles are returned unchanged."""
    if module.positions is None:
        return output
    angles, *others = output if isinstance(output, tuple) else (output,)
    of_tokens = angles[module.positions].squeeze(1)
    return (of_tokens, *others) if others else of_tokens


def share_rotary_tables(model: torch.nn.Module) -> None:
    """Make all layers of latent attention share the rotary embedding of the first layer.

    Each layer has its own embedding; they are equal and have no weights. Megatron-Core caches the last 32
    tables of angles for all embeddings together, so models of more layers computed the table again in each
    layer of each pass.
    """
    layers = [module for module in model.modules() if isinstance(module, LatentSelfAttention)]
    for layer in layers[1:]:
        layer.rotary_pos_emb = layers[0].rotary_pos_emb


class _SummedGradients(torch.autograd.Function):
    """An identity whose gradients are summed over the ranks. Megatron-Core's own function does not sum
    gradients that are not contiguous (0.16)."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


def set_latent_norm_epsilon(model: torch.nn.Module, epsilon: float | None) -> None:
    """Set the epsilon of the norms inside latent attention if it differs from that of the other norms; None
    leaves it alone."""
    if epsilon is None:
        return
    for module in model.modules():
        if isinstance(module, MLASelfAttention):
            # With Transformer Engine a norm is part of the projection behind it.
            for name in ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj"):
                norm = getattr(module, name, None)
                if norm is not None and hasattr(norm, "eps"):
                    norm.eps = epsilon
