"""Translate an architecture to keyword arguments of Megatron-Core's TransformerConfig and GPTModel, without
importing Megatron-Core."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from converters.errors import ConversionError
from converters.model_config.architecture import Architecture
from converters.model_config.latent_attention import NORM_EPSILON
from converters.model_config.mixture import MixtureOfExperts, Routing
from converters.model_config.rope import yarn_attention_factor


def latent_settings(architecture: Architecture) -> dict[str, Any]:
    """Return the keyword arguments that ``MLATransformerConfig`` has in addition to ``TransformerConfig``;
    empty for ordinary attention.

    Raises:
        ConversionError: Megatron-Core does not support the rotary scaling.
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
        # Megatron-Core uses this as the output width of a head.
        "kv_channels": latent.v_head_dim,
        # Enables the norms between the projections.
        "qk_layernorm": True,
        "rotary_base": architecture.rope_theta,
        "rotary_percent": 1.0,
        **_latent_rotary(architecture),
    }


def _latent_rotary(architecture: Architecture) -> dict[str, Any]:
    """Return type and scaling of the rotary embedding. All fields are set: the defaults describe a scaled
    model, and the factor changes the scale of the scores even of an unscaled one."""
    scaling, latent = architecture.rope_scaling, architecture.latent_attention
    assert latent is not None
    if scaling is None:
        return {"rope_type": "rope", "rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
    if scaling["type"] != "yarn":
        raise ConversionError(
            f"rope type {scaling['type']!r}: Megatron-Core's latent attention has the plain rotary "
            "embedding and yarn",
            _OTHER_BACKEND,
        )
    if not scaling["truncate"]:
        raise ConversionError(
            "yarn truncate = False: Megatron-Core's latent attention always rounds the range", _OTHER_BACKEND
        )
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
    """Return the ``mscale`` for which Megatron-Core multiplies cosine and sine by the config's attention
    factor. Megatron-Core always divides the scale of ``mscale`` by that of ``mscale_all_dim``."""
    factor, wanted = scaling["factor"], scaling["attention_factor"]
    logarithm = 0.1 * math.log(factor) if factor > 1 else 0.0
    of_all = mscale_all_dim * logarithm + 1.0
    # Prefer the config's own number, because a computed one may differ in the last bit.
    if scaling["mscale"] is not None and math.isclose(
        (scaling["mscale"] * logarithm + 1.0) / of_all, wanted, rel_tol=1e-9
    ):
        return float(scaling["mscale"])
    if logarithm:
        return float((wanted * of_all - 1.0) / logarithm)
    if not math.isclose(wanted, 1.0, rel_tol=1e-6):
        raise ConversionError(
            f"yarn attention_factor = {wanted!r}: with the factor {factor!r} Megatron-Core's "
            "latent attention supports only 1",
            _OTHER_BACKEND,
        )
    return 1.0


# Constants in Megatron-Core; only the factor is an argument.
_MEGATRON_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_OTHER_BACKEND = "use a backend that runs the transformers model itself"


@dataclass(frozen=True, slots=True)
class MegatronSettings:
    """Settings for Megatron-Core.

    Attributes:
        transformer: keyword arguments of ``TransformerConfig`` (``MLATransformerConfig`` with latent
            attention). The caller adds the activation function (``torch.nn.functional.silu``, or
            ``megatron.core.fusions.fused_bias_geglu.quick_gelu`` for ``clamped_swiglu``) and all settings of
            training and layout. For experts these are ``expert_*_parallel_size``,
            ``moe_token_dispatcher_type``, ``moe_grouped_gemm``, ``moe_router_dtype`` and the load-balancing
            loss, which is off by default.
        model: keyword arguments of ``GPTModel``, with the unpadded ``vocab_size``.
        attributes: attributes to set on the config object after construction: YaRN's, which ``GPTModel``
            reads with ``getattr`` without a declared field, and values that the constructor would reject.
        llama3: keyword arguments of ``RotaryEmbedding._apply_scaling`` for the unscaled ``inv_freq`` of the
            built model; None if ``GPTModel`` has arguments for the scaling.
        routing: routing that Megatron-Core's routers do not support; None if they do. The arguments above
            then only serve to build Megatron-Core's router.
        latent_norm_epsilon: epsilon to set in the norms of latent attention after building, because
            Megatron-Core gives them that of the other norms; None if not needed.
    """

    transformer: dict[str, Any]
    model: dict[str, Any]
    attributes: dict[str, Any]
    llama3: dict[str, Any] | None = None
    routing: Routing | None = None
    latent_norm_epsilon: float | None = None


def megatron_settings(architecture: Architecture) -> MegatronSettings:
    """Return settings with which Megatron-Core computes the same function as transformers.

    Raises:
        ConversionError: Megatron-Core does not support the combination of biases or the rotary scaling, or
            the model has a score layer.
    """
    if architecture.head is not None:
        raise ConversionError(
            f"a {architecture.family} model that scores ({architecture.head.labels} labels) is no language "
            "model, and has no GPTModel",
            "convert it with megarl convert, or give a language model",
        )
    add_bias_linear, add_qkv_bias = _bias_flags(architecture)
    transformer = {
        "num_layers": architecture.num_layers,
        "hidden_size": architecture.hidden_size,
        "ffn_hidden_size": architecture.ffn_hidden_size,
        "num_attention_heads": architecture.num_attention_heads,
        "num_query_groups": architecture.num_key_value_heads,
        "kv_channels": architecture.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": architecture.norm_epsilon,
        "gated_linear_unit": True,
        "add_bias_linear": add_bias_linear,
        "add_qkv_bias": add_qkv_bias,
        "qk_layernorm": architecture.qk_norm,
        "init_method_std": architecture.initializer_range,
        # The defaults of TransformerConfig are 0.1.
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    if architecture.sliding_window is not None:
        # Megatron-Core's window does not include the token itself, but transformers' does.
        transformer["window_size"] = (architecture.sliding_window - 1, 0)
    if architecture.window_layers is not None:
        transformer["window_attn_skip_freq"] = list(map(int, architecture.window_layers))
    if architecture.sinks:
        transformer["softmax_type"] = "learnable"
    if architecture.output_gate:
        transformer["attention_output_gate"] = True
    if architecture.zero_centered_norms:
        transformer["layernorm_zero_centered_gamma"] = True
    if architecture.gate_limit is not None:
        transformer |= {"activation_func_clamp_value": architecture.gate_limit, "glu_linear_offset": 1.0}
    transformer |= latent_settings(architecture)
    model, attributes = _rotary(architecture)
    if architecture.gated_delta is not None:
        # With these in the constructor, Megatron-Core would use its own gated delta net, which does not
        # support packed sequences.
        attributes |= {
            "gated_delta": architecture.gated_delta,
            "linear_attention_freq": list(map(int, architecture.gated_delta.layers)),
        }
    if architecture.mixture is not None:
        transformer |= _mixture(architecture.mixture)
        if _has_constant_weight(architecture.mixture):
            # Megatron-Core computes this case, but its constructor rejects it, because the router then gets
            # gradients only from a load-balancing loss.
            attributes["moe_router_pre_softmax"] = False
    model |= {
        "vocab_size": architecture.vocab_size,
        "max_sequence_length": architecture.max_position,
        "share_embeddings_and_output_weights": architecture.tied_embeddings,
    }
    own_routing = (
        None
        if architecture.mixture is None or _routes_like_megatron(architecture.mixture)
        else architecture.mixture.routing
    )
    return MegatronSettings(
        transformer,
        model,
        attributes,
        llama3=_own_llama3(architecture),
        routing=own_routing,
        latent_norm_epsilon=NORM_EPSILON
        if architecture.latent_attention and architecture.norm_epsilon != NORM_EPSILON
        else None,
    )


def _bias_flags(architecture: Architecture) -> tuple[bool, bool]:
    """Return ``add_bias_linear`` (all biases of attention and MLP) and ``add_qkv_bias``."""
    biases = (architecture.qkv_bias, architecture.attention_output_bias, architecture.mlp_bias)
    if biases == (True, True, True):
        return True, True
    if biases in {(True, False, False), (False, False, False)}:
        return False, architecture.qkv_bias
    raise ConversionError(
        f"biases on query-key-value = {biases[0]}, attention output = {biases[1]}, MLP = {biases[2]} "
        "(attention_bias, mlp_bias): "
        "Megatron-Core has them all, none, or on query-key-value alone",
        _OTHER_BACKEND,
    )


def _mixture(mixture: MixtureOfExperts) -> dict[str, Any]:
    """Return the arguments for experts and router.

    Softmax over all logits, with the selected probabilities normalised, equals softmax over the selected
    logits. Megatron-Core computes the latter by default. With ``moe_router_pre_softmax`` it applies softmax
    to all logits and does not normalise.
    """
    routing = mixture.routing
    shared = {
        "moe_shared_expert_intermediate_size": mixture.shared_ffn_hidden_size,
        "moe_shared_expert_gate": mixture.shared_gate,
    }
    groups = {"moe_router_num_groups": routing.groups, "moe_router_group_topk": routing.groups_per_token}
    return {
        "num_moe_experts": mixture.num_experts,
        "moe_router_topk": mixture.experts_per_token,
        "moe_ffn_hidden_size": mixture.ffn_hidden_size,
        # With a list, even of ones, Megatron-Core stores each layer of a checkpoint separately, so use 1 if
        # all layers have experts.
        "moe_layer_freq": 1 if all(mixture.sparse_layers) else list(map(int, mixture.sparse_layers)),
        "moe_router_score_function": routing.score,
        "moe_router_pre_softmax": routing.score == "softmax"
        and (not mixture.normalized or _has_constant_weight(mixture)),
        "moe_router_topk_scaling_factor": None if routing.scaling_factor == 1 else routing.scaling_factor,
        "moe_router_enable_expert_bias": routing.has_correction_bias,
        # Keep the correction bias constant. Otherwise Megatron-Core adds this rate times the signs of the
        # loads after each step.
        "moe_router_bias_update_rate": 0.0,
        **(groups if routing.is_grouped else {}),
        **(shared if mixture.shared_ffn_hidden_size else {}),
    }


def _routes_like_megatron(mixture: MixtureOfExperts) -> bool:
    """Return whether Megatron-Core's router gives the same routing as the model's own.

    Megatron-Core always normalises sigmoid scores to sum 1, except for top-1. It ranks a group by the sum of
    its ``top_k / topk_group`` best scores; for normalised softmax these scores are the logits.
    """
    routing, chosen = mixture.routing, mixture.experts_per_token
    # Megatron-Core divides sigmoid scores by their sum if and only if a token has several experts.
    if routing.score == "sigmoid" and mixture.normalized != (chosen > 1):
        return False
    if not routing.is_grouped:
        return True
    # Megatron-Core ranks a group by the sum of its best (topk / groups per token) scores.
    ranked_by = chosen // routing.groups_per_token
    return ranked_by == routing.best_of_group and (
        routing.score == "sigmoid" or not mixture.normalized or ranked_by == 1
    )


def _has_constant_weight(mixture: MixtureOfExperts) -> bool:
    """Return whether a token's only expert always has weight 1, because it is a softmax over a single
    logit."""
    return mixture.routing.score == "softmax" and mixture.normalized and mixture.experts_per_token == 1


def _rotary(architecture: Architecture) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the model's rotary arguments, and the YaRN attributes of its config."""
    theta = architecture.rope_theta
    model: dict[str, Any] = {
        "position_embedding_type": "rope",
        # Megatron-Core declares an int, but a float works.
        "rotary_base": int(theta) if theta.is_integer() else theta,
        "rotary_percent": architecture.rotary_fraction,
        "rope_scaling": False,
    }
    scaling = architecture.rope_scaling
    if scaling is None or architecture.latent_attention is not None:
        return model, {}
    if scaling["type"] == "linear":
        return model | {"seq_len_interpolation_factor": scaling["factor"]}, {}
    if scaling["type"] == "llama3":
        if _own_llama3(architecture) is not None:
            return model, {}
        return model | {"rope_scaling": True, "rope_scaling_factor": scaling["factor"]}, {}
    assert scaling["type"] == "yarn", scaling
    if architecture.rotary_fraction != 1:
        raise ConversionError(
            f"yarn and partial_rotary_factor = {architecture.rotary_fraction!r}: Megatron-Core's YaRN "
            "always rotates whole heads",
            _OTHER_BACKEND,
        )
    return model | {"position_embedding_type": "yarn"}, _yarn_attributes(scaling)


def _own_llama3(architecture: Architecture) -> dict[str, Any] | None:
    """Return ``MegatronSettings.llama3``."""
    scaling = architecture.rope_scaling
    if (
        scaling is None
        or scaling["type"] != "llama3"
        or all(scaling[key] == value for key, value in _MEGATRON_LLAMA3.items())
    ):
        return None
    return {"factor": scaling["factor"], **{key: scaling[key] for key in _MEGATRON_LLAMA3}}


def _yarn_attributes(scaling: dict[str, Any]) -> dict[str, Any]:
    computed = yarn_attention_factor(scaling["factor"], scaling["mscale"], scaling["mscale_all_dim"])
    if not math.isclose(computed, scaling["attention_factor"], rel_tol=1e-6):
        raise ConversionError(
            f"yarn attention_factor = {scaling['attention_factor']!r}: Megatron-Core computes it from "
            f"factor and mscale, here {computed!r}",
            _OTHER_BACKEND,
        )
    return {
        "yarn_rotary_scaling_factor": scaling["factor"],
        "yarn_original_max_position_embeddings": scaling["original_max_position_embeddings"],
        "yarn_beta_fast": scaling["beta_fast"],
        "yarn_beta_slow": scaling["beta_slow"],
        "yarn_mscale": scaling["mscale"],
        "yarn_mscale_all_dim": scaling["mscale_all_dim"],
        "yarn_correction_range_round_to_int": scaling["truncate"],
    }
