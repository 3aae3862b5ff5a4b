"""Megatron's multi-head latent attention, with what it lacks to be the model's."""

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

# Without Transformer Engine release 0.16 has mocks in the place of its classes, takes it for installed here,
# and asks whether a layer is one of them.
multi_latent_attention.HAVE_TE = HAVE_TE

WITHOUT_LENGTHS = dict.fromkeys(
    ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
)


class LatentSelfAttention(CachesRows, MLASelfAttention):
    """Latent attention that rotates packed sequences by the positions of their tokens, and whose shared key
    gets the gradients of the heads of all tensor-parallel ranks.

    Megatron-Core rotates packed sequences one after another, by lengths that it reads from the device.
    Without lengths it rotates them as rows, by the angles that it is given: those of the tokens' own
    positions.

    The rotated part of a key is one for all heads. Each rank turns to it with its own heads, so that the
    gradients have to be added up over the ranks. Where the projection that gives it is cut over the ranks
    (without Transformer Engine), or whole on each of them without sequence parallelism, Megatron-Core does
    not (0.16 to 0.19): nothing fails, and the projection learns from a part of the heads.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # A hook, because the projection is called in the middle of a long method of Megatron-Core.
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
        """See ``MLASelfAttention``; ``packed_seq_params`` are ``PackedSequences``."""
        given = (hidden_states, key_value_states, position_ids)
        if packed_seq_params is None or self.config.apply_rope_fusion:
            return super().get_query_key_value_tensors(*given, packed_seq_params, **options)
        self.rotary_pos_emb.positions = packed_seq_params.positions
        try:
            return super().get_query_key_value_tensors(
                *given, dataclasses.replace(packed_seq_params, **WITHOUT_LENGTHS), **options
            )
        finally:
            # Also after an error: all layers share this embedding.
            self.rotary_pos_emb.positions = None

    def _resolve_qk_norm_config(self, submodules: MLASelfAttentionSubmodules) -> dict[str, Any]:
        """The projections and norms of the specification as they are.

        From 0.19 on Megatron-Core decides by ``qk_layernorm``. Without it norms of latents are an error, with
        it queries that come from no latent get one as well, and while gradients are added up it is taken for
        norms of heads (see ``transformer_config``).
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
        """[S, B, L / ranks] or, of a projection that is whole on every rank, [s, B, L], to [s, B, L] with s =
        S / ranks under sequence parallelism, otherwise S; L is the width of latent and rotated part
        together."""
        combined, bias = output
        width = self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim
        # By its width: which of the two it is depends on the layer spec and the release.
        cut = combined.shape[-1] != width
        if cut:
            combined = gather_from_tensor_model_parallel_region(combined)
        if self.config.sequence_parallel:
            # Megatron-Core gathers the rotated part of this again, and adds up its gradients there
            return (scatter_to_sequence_parallel_region(combined) if cut else combined), bias
        latent, rotated = combined.split([self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], dim=-1)
        shared: torch.Tensor = _SummedGradients.apply(  # type: ignore[no-untyped-call]
            rotated, self.pg_collection.tp
        )
        return torch.cat([latent, shared], dim=-1), bias


def _of_positions(module: Any, inputs: Any, output: Any) -> Any:
    """Angles [positions, 1, 1, r] from 0 on, alone or with a factor, to those of the tokens, [t, 1, r], where
    sequences are packed."""
    if module.positions is None:
        return output
    angles, *others = output if isinstance(output, tuple) else (output,)
    of_tokens = angles[module.positions].squeeze(1)
    return (of_tokens, *others) if others else of_tokens


def share_rotary_tables(model: torch.nn.Module) -> None:
    """Give all layers of latent attention the rotary embedding of the first one.

    Each has its own, which are equal and have no weights. Megatron-Core keeps the last 32 tables of angles of
    all of them together, so that models of more layers made the table again in each layer of each pass.
    """
    layers = [module for module in model.modules() if isinstance(module, LatentSelfAttention)]
    for layer in layers[1:]:
        layer.rotary_pos_emb = layers[0].rotary_pos_emb


class _SummedGradients(torch.autograd.Function):
    """Identity whose gradients are added up over the ranks. Megatron-Core's own leaves those alone that are
    not contiguous (0.16)."""

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
    """Give the norms inside latent attention their own epsilon, where it is not that of the other norms; None
    leaves them alone."""
    if epsilon is None:
        return
    for module in model.modules():
        if isinstance(module, MLASelfAttention):
            # with Transformer Engine a norm is part of the projection behind it
            for name in ("q_layernorm", "kv_layernorm", "linear_q_up_proj", "linear_kv_up_proj"):
                norm = getattr(module, name, None)
                if norm is not None and hasattr(norm, "eps"):
                    norm.eps = epsilon
