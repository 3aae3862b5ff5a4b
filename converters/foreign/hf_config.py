"""Derive a Hugging Face config from a trainer's settings: choose the family that computes the same function,
and translate all sizes.

A wrong choice of the family is detected by ``converters.foreign.agreement``.
"""

from __future__ import annotations

from typing import Any

from converters.errors import ConversionError
from converters.families import family_of
from converters.foreign.agreement import sparse_layers
from converters.foreign.settings import ForeignSettings

_FIX = "pass --hf-config DIRECTORY of a model of the same kind"


def derived_config(settings: ForeignSettings, vocab_size: int, tokens: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of ``config.json`` for a model.

    Args:
        settings: the trainer's settings.
        vocab_size: number of embedding rows without padding.
        tokens: config entries of special tokens.

    Raises:
        ConversionError: no supported family computes this model.
    """
    values = settings.values
    family, own = _family(settings)
    # In a Mixtral config, intermediate_size is the width of an expert.
    width = values.get("moe_ffn_hidden_size") if family == "mixtral" else values["ffn_hidden_size"]
    return {
        "architectures": [family_of(family).architecture_class],
        "model_type": family,
        "attention_dropout": 0.0,
        "head_dim": values["kv_channels"],
        "hidden_act": "silu",
        "hidden_size": values["hidden_size"],
        # Megatron-Core's default, if the trainer has recorded none; also for rotary_base.
        "initializer_range": values.get("init_method_std") or 0.02,
        "intermediate_size": width,
        "max_position_embeddings": values.get("max_sequence_length"),
        "num_attention_heads": values["num_attention_heads"],
        "num_hidden_layers": values["num_layers"],
        "num_key_value_heads": values["num_query_groups"],
        "rms_norm_eps": values.get("layernorm_epsilon"),
        "rope_theta": float(values.get("rotary_base") or 10_000),
        **_rope_scaling(settings),
        "tie_word_embeddings": bool(values.get("share_embeddings_and_output_weights")),
        "vocab_size": vocab_size,
        **own,
        **tokens,
    }


def _family(settings: ForeignSettings) -> tuple[str, dict[str, Any]]:
    """Return the ``model_type`` and the config entries specific to this family."""
    values = settings.values
    if values.get("multi_latent_attention"):
        raise ConversionError(f"{settings.origin}: no config can be made for latent attention", _FIX)
    # These flags identify the family: Qwen3 normalises heads, Qwen2 has query-key-value biases only, Llama
    # has all biases or none.
    every_bias, norms = bool(values.get("add_bias_linear")), bool(values.get("qk_layernorm"))
    query_bias = bool(values.get("add_qkv_bias"))
    if values.get("num_moe_experts"):
        return _mixture_family(settings, norms, query_bias)
    if norms:
        return "qwen3", {"attention_bias": False}
    if every_bias:
        return "llama", {"attention_bias": True, "mlp_bias": True}
    if query_bias:
        return "qwen2", {}
    window = _window(values.get("window_size"))
    return ("llama", {}) if window is None else ("mistral", {"sliding_window": window})


def _mixture_family(settings: ForeignSettings, norms: bool, query_bias: bool) -> tuple[str, dict[str, Any]]:
    values, layers = settings.values, sparse_layers(settings)
    # Megatron-LM may have a coefficient per kind of loss, but a config has only one.
    coefficient = values.get("moe_aux_loss_coeff")
    # By default Megatron-Core applies softmax to the logits of the selected experts, which normalises them.
    normalized = not values.get("moe_router_pre_softmax")
    own: dict[str, Any] = {
        "num_experts_per_tok": values.get("moe_router_topk"),
        "router_aux_loss_coef": coefficient if isinstance(coefficient, float) else 0.0,
    }
    experts = {
        "num_experts": values["num_moe_experts"],
        "moe_intermediate_size": values["moe_ffn_hidden_size"],
        "norm_topk_prob": normalized,
    }
    experts |= {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, sparse in enumerate(layers) if not sparse],
    }
    if values.get("moe_shared_expert_gate"):
        shared = {
            "shared_expert_intermediate_size": values.get("moe_shared_expert_intermediate_size"),
            "qkv_bias": query_bias,
        }
        return "qwen2_moe", own | experts | shared
    if norms:
        return "qwen3_moe", own | experts | {"attention_bias": False}
    if not normalized or not all(layers) or query_bias:
        raise ConversionError(
            f"{settings.origin}: no known family has experts without norms on queries and keys, unless in "
            "every layer, with normalized "
            "weights and without biases (Mixtral)",
            _FIX,
        )
    return "mixtral", own | {
        "num_local_experts": values["num_moe_experts"],
        "sliding_window": _window(values.get("window_size")),
    }


def _window(size: Any) -> int | None:
    """Return the window as transformers counts it, including the token itself; None without a window."""
    return (
        # Megatron-Core's window does not count the token itself, transformers' window does.
        size[0] + 1
        if isinstance(size, tuple) and len(size) == 2 and isinstance(size[0], int) and size[0] >= 0
        else None
    )


def _rope_scaling(settings: ForeignSettings) -> dict[str, Any]:
    values = settings.values
    if values.get("position_embedding_type") == "yarn":
        names = {
            "factor": "rotary_scaling_factor",
            "beta_fast": "beta_fast",
            "beta_slow": "beta_slow",
            "mscale": "mscale",
        }
        names |= {"mscale_all_dim": "mscale_all_dim", "truncate": "correction_range_round_to_int"}
        names["original_max_position_embeddings"] = "original_max_position_embeddings"
        scaling: dict[str, Any] = {"rope_type": "yarn"}
        for key, name in names.items():
            if values.get(f"yarn_{name}") is not None:
                scaling[key] = values[f"yarn_{name}"]
        return {"rope_scaling": scaling}
    if values.get("rope_scaling"):
        # The other three numbers are constants in Megatron-Core's code.
        original = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        factor = values.get("rope_scaling_factor")
        return {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0 if factor is None else float(factor),
                **original,
            }
        }
    if values.get("seq_len_interpolation_factor") not in (None, 1, 1.0):
        return {
            "rope_scaling": {"rope_type": "linear", "factor": float(values["seq_len_interpolation_factor"])}
        }
    return {}
