"""Which modules Megatron's GPT layers are made of: chosen once, here, and logged.

With Transformer Engine on a CUDA device its fused layers are used. Otherwise the *portable spec*: Megatron's own parallel linear layers
with our attention (:mod:`megarl.models.engine.attention`) and with norms that also work under sequence parallelism, which Megatron-Core
offers only with Transformer Engine.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megarl.models.engine.attention import causal_attention

logger = logging.getLogger(__name__)


class PortableAttention(MegatronModule):
    """Megatron's ``core_attention`` on torch's scaled dot-product attention. Causal; no context parallelism and no packing here."""

    def __init__(self, config: TransformerConfig, layer_number: int, softmax_scale: float | None = None, **unused: Any) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *unused: Any, **ignored: Any) -> torch.Tensor:
        """[S, B, H, D], [K, B, G, D], [K, B, G, D] -> [S, B, H * D].

        Masks are not needed: sequences are padded on the right only, so that a causal mask already hides the padding from every real token.
        """
        length, batch = query.shape[:2]
        mixed = causal_attention(query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3), scale=self.softmax_scale)
        return mixed.permute(2, 0, 1, 3).reshape(length, batch, -1)

    def sharded_state_dict(self, *unused: Any, **ignored: Any) -> dict[str, Any]:
        """Nothing to save: no parameters."""
        return {}


class PortableRMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm whose weight takes part in the sequence-parallel gradient reduction."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel


def _portable_layer(config: TransformerConfig) -> ModuleSpec:
    head_norm = PortableRMSNorm if config.qk_layernorm else IdentityOp
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=PortableRMSNorm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,
                    core_attention=PortableAttention,
                    linear_proj=RowParallelLinear,
                    q_layernorm=head_norm,
                    k_layernorm=head_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=PortableRMSNorm,
            mlp=ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)),
            mlp_bda=get_bias_dropout_add,
            # checkpoints name these norms as Transformer Engine's fused layers do, so that both specs read each other's
            sharded_state_dict_keys_map={
                "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
                "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
            },
        ),
    )


def transformer_engine_available() -> bool:
    """True when Transformer Engine can serve: a CUDA device and the package."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def decoder_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage."""
    if transformer_engine_available():
        logger.info("layer spec: Transformer Engine")
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    reason = "no CUDA device" if not torch.cuda.is_available() else "Transformer Engine is not installed: attention and norms are unfused"
    logger.info("layer spec: portable (%s)", reason)
    layers = [_portable_layer(config)] * get_num_layers_to_build(config)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=PortableRMSNorm)
