"""Arguments of Megatron-Core's configuration of latent attention, whose rotary embedding is set there and not in the model."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from converters.errors import ConversionError

if TYPE_CHECKING:
    from converters.architecture import Architecture

_OTHER_BACKEND = "use a backend that runs the transformers model itself"


def latent_settings(architecture: Architecture) -> dict[str, Any]:
    """Keyword arguments of ``MLATransformerConfig`` beyond those of ``TransformerConfig``; nothing for ordinary attention.

    Raises:
        ConversionError: Megatron-Core has no setting for the rotary scaling.
    """
    latent = architecture.latent_attention
    if latent is None:
        return {}
    return {
        "multi_latent_attention": True,
        "q_lora_rank": latent.q_lora_rank,
        "kv_lora_rank": latent.kv_lora_rank,
        "qk_head_dim": latent.qk_nope_head_dim,
        "qk_pos_emb_head_dim": latent.qk_rope_head_dim,
        "v_head_dim": latent.v_head_dim,
        # Megatron-Core's own attention takes this for the width of a head's output
        "kv_channels": latent.v_head_dim,
        # the norms between the projections
        "qk_layernorm": True,
        "rotary_base": architecture.rope_theta,
        "rotary_percent": 1.0,
        **_rotary(architecture),
    }


def _rotary(architecture: Architecture) -> dict[str, Any]:
    """Kind and scaling of the rotary embedding. Every field is given: the defaults are those of a scaled model, and the factor goes into
    the scale of the scores of an unscaled one as well."""
    scaling, latent = architecture.rope_scaling, architecture.latent_attention
    assert latent is not None
    if scaling is None:
        return {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
    if scaling["type"] != "yarn":
        raise ConversionError(
            f"rope type {scaling['type']!r}: Megatron-Core's latent attention has the plain rotary embedding and yarn", _OTHER_BACKEND
        )
    if not scaling["truncate"]:
        raise ConversionError("yarn truncate = False: Megatron-Core's latent attention always rounds the range", _OTHER_BACKEND)
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": scaling["factor"],
        "original_max_position_embeddings": scaling["original_max_position_embeddings"],
        "beta_fast": scaling["beta_fast"],
        "beta_slow": scaling["beta_slow"],
        "mscale": _mscale(scaling, latent.mscale_all_dim),
        "mscale_all_dim": latent.mscale_all_dim,
    }


def _mscale(scaling: dict[str, Any], mscale_all_dim: float) -> float:
    """The ``mscale`` with which Megatron-Core multiplies cosine and sine by the attention factor: it divides the scale of ``mscale`` by
    that of ``mscale_all_dim``, always."""
    factor, wanted = scaling["factor"], scaling["attention_factor"]
    logarithm = 0.1 * math.log(factor) if factor > 1 else 0.0
    of_all = mscale_all_dim * logarithm + 1.0
    if scaling["mscale"] is not None and math.isclose((scaling["mscale"] * logarithm + 1.0) / of_all, wanted, rel_tol=1e-9):
        return float(scaling["mscale"])
    if logarithm:
        return float((wanted * of_all - 1.0) / logarithm)
    if not math.isclose(wanted, 1.0, rel_tol=1e-6):
        raise ConversionError(
            f"yarn attention_factor = {wanted!r}: with the factor {factor!r} Megatron-Core's latent attention has none but 1",
            _OTHER_BACKEND,
        )
    return 1.0
