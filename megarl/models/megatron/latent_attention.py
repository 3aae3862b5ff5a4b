"""Megatron-Core's multi-head latent attention (MLA), with corrections to positions, gradients and norms."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules

from megarl.models.engine.groups import summed_gradients
from megarl.models.megatron.cached_attention import CachesRows

# Release 0.16 sets this flag to True even if Transformer Engine is missing, and then compares layers with its
# classes, which are mocks.
multi_latent_attention.HAVE_TE = HAVE_TE

WITHOUT_LENGTHS = dict.fromkeys(
    ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
)


class LatentSelfAttention(CachesRows, MLASelfAttention):
    """Multi-head latent attention with correct positions in packed sequences and correct gradients of the
    rotary key under tensor parallelism.

    Positions: for packed sequences Megatron-Core reads their lengths from the device and rotates one sequence
    after another. Without lengths it rotates them like ordinary rows, by the angles that it is given. This
    class removes the lengths and supplies the angles of each token's own position.

    Gradients: all heads share the rotary part of the key. Each rank uses it for its own heads, so its
    gradient must be summed over the tensor-parallel ranks. Megatron-Core (0.16 to 0.19) omits this sum if the
    down-projection that computes the rotary part is sharded (as without Transformer Engine), or replicated
    without sequence parallelism. It raises no error: the projection learns from only some of the heads.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # Use a hook, because Megatron-Core calls the projection in the middle of a long method that we do not
        # want to copy.
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
        """Run ``MLASelfAttention``'s method with angles at the tokens' positions in their own sequences.

        ``packed_seq_params`` must be ``PackedSequences`` or None.
        """
        given = (hidden_states, key_value_states, position_ids)
        if packed_seq_params is None or self.config.apply_rope_fusion:
            return super().get_query_key_value_tensors(*given, packed_seq_params, **options)
        self.rotary_pos_emb.positions = packed_seq_params.positions
        try:
            return super().get_query_key_value_tensors(
                *given, dataclasses.replace(packed_seq_params, **WITHOUT_LENGTHS), **options
            )
        finally:
            # Clear the positions after an error too, because all layers share this rotary embedding.
            self.rotary_pos_emb.positions = None

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, object]:
        """Return the projections and norms of the layer spec unchanged.

        From 0.19 on, Megatron-Core selects them by ``qk_layernorm``. If it is False, norms of the latents
        raise an error. If it is True, queries that have no latent get a norm too, and the gradient reduction
        treats the norms as per-head norms (see ``transformer_config``).
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
        """Return the output of the key-value down-projection in full width, [s, B, L], with correct
        gradients.

        L is the width of the latent and the rotary part together; s is S / ranks under sequence parallelism,
        else S. The input is [S, B, L / ranks] from a sharded projection and [s, B, L] from a replicated one.
        """
        combined, bias = output
        width = self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim
        # Detect sharding by the width: whether the output is sharded depends on the layer spec and on the
        # release.
        cut = combined.shape[-1] != width
        if cut:
            combined = gather_from_tensor_model_parallel_region(combined)
        if self.config.sequence_parallel:
            # Megatron-Core gathers the rotary part over the ranks later, and the backward pass of that gather
            # sums its gradients.
            return (scatter_to_sequence_parallel_region(combined) if cut else combined), bias
        latent, rotated = combined.split([self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], dim=-1)
        return torch.cat([latent, summed_gradients(rotated, self.pg_collection.tp)], dim=-1), bias


def _of_positions(module: Any, inputs: Any, output: Any) -> Any:
    """Replace the rotary angles by those of the packed tokens' positions.

    Select rows [t, 1, r] from the table [positions, 1, 1, r]; pass on the scaling factor that may follow the
    table. Without positions the output is unchanged.
    """
    if module.positions is None:
        return output
    angles, *others = output if isinstance(output, tuple) else (output,)
    of_tokens = angles[module.positions].squeeze(1)
    return (of_tokens, *others) if others else of_tokens


def share_rotary_tables(model: torch.nn.Module) -> None:
    """Make all latent-attention layers use the rotary embedding of the first layer.

    The embeddings of the layers are equal and have no weights. Megatron-Core caches only the last 32 tables
    of angles in the whole process, so a model with more layers would compute the table again in each layer of
    each pass.
    """
    layers = [module for module in model.modules() if isinstance(module, LatentSelfAttention)]
    for layer in layers[1:]:
        layer.rotary_pos_emb = layers[0].rotary_pos_emb


def set_latent_norm_epsilon(model: torch.nn.Module, epsilon: float | None) -> None:
    """Set the epsilon of the norms inside latent attention; None keeps it equal to the other norms'
    epsilon."""
    if epsilon is None:
        return
    for module in model.modules():
        if isinstance(module, MLASelfAttention):
            # With Transformer Engine, a norm is fused into the projection that follows it.
            for name in ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj"):
                norm = getattr(module, name, None)
                if norm is not None and hasattr(norm, "eps"):
                    norm.eps = epsilon
