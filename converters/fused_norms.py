"""Where Transformer Engine keeps the norms of a layer: inside the linear layer that follows. Checkpoints of Megatron-Core name them so,
whichever layer spec the model was built of."""

from __future__ import annotations

_BEFORE_ATTENTION = {"input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight"}
_BEFORE_MLP = {"pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight"}
_INSIDE_LATENT_ATTENTION = {
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}
FUSED_NORMS = _BEFORE_ATTENTION | _BEFORE_MLP | _INSIDE_LATENT_ATTENTION
"""Names behind the prefix of a layer: those of the portable layer spec, with those of Transformer Engine."""


def fused_norms(*, latent: bool, sparse: bool) -> dict[str, str]:
    """The part of ``FUSED_NORMS`` that holds for a layer: nothing is fused with the norm before the first projections of latent attention,
    nor with that before experts.

    Args:
        latent: the attention is latent attention.
        sparse: the layer has experts in place of the MLP.
    """
    return (_INSIDE_LATENT_ATTENTION if latent else _BEFORE_ATTENTION) | ({} if sparse else _BEFORE_MLP)
