"""Complete a plain ``config.json`` as transformers' config class would, without transformers and torch, whose
import takes seconds.

Contains the defaults and accepted types of the built-in families' config classes. Any other config is not
plain, and must be read by transformers. So a family need not be listed here. Tests compare every entry with
transformers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from converters.model_config.inert_keys import INERT_KEYS
from converters.model_config.rope import ROPE_KINDS

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Key:
    """Accepted types and default of a config key. The default is a tuple of one; None means that the file
    must contain the key."""

    kinds: tuple[type, ...]
    default: tuple[Any] | None = None


def _like(value: Any, *more: type) -> _Key:
    """Return a key with a default. It accepts the default's type and the types ``more``."""
    return _Key((type(value), *more), (value,))


_SIZE = _Key((int,))
_NOTHING = type(None)
_OPTIONAL_INT = _like(None, int)
_ANYTHING = _like(None, int, float, str, bool, list)


def _no_change(config: Config) -> None:
    del config


@dataclass(frozen=True, slots=True)
class _ConfigClass:
    """Properties of a transformers config class.

    Attributes:
        keys: keys in addition to ``_COMMON``: a ``_Key``, or a default whose type is accepted.
        theta: default base of the rotary embedding.
        free: keys that are not fields of the class; it keeps any value and has no default.
        complete: derives further values, as the class does after setting its fields.
        divides_width: the class requires ``hidden_size`` to be a multiple of the number of heads.
        scales: the class has its own default for rotary scaling.
    """

    keys: Mapping[str, Any]
    theta: float = 10000.0
    free: frozenset[str] = frozenset()
    complete: Callable[[Config], None] = field(default=_no_change)
    divides_width: bool = False
    scales: bool = False


_COMMON: Mapping[str, Any] = {
    "model_type": _Key((str,)),
    "hidden_size": _SIZE,
    "intermediate_size": _SIZE,
    "num_hidden_layers": _SIZE,
    "num_attention_heads": _SIZE,
    "vocab_size": _SIZE,
    "max_position_embeddings": _SIZE,
    "num_key_value_heads": _SIZE,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "architectures": _like(None, list),
    # No effect on logits or training, but the class rejects values of another type.
    "use_cache": True,
    "is_encoder_decoder": False,
    "output_hidden_states": _like(False, _NOTHING),
    "output_attentions": _like(False, _NOTHING),
    "return_dict": _like(True, _NOTHING),
    "chunk_size_feed_forward": 0,
    "pad_token_id": _OPTIONAL_INT,
    "bos_token_id": _OPTIONAL_INT,
    "eos_token_id": _OPTIONAL_INT,
    "dtype": _like(None, str),
    "torch_dtype": _like(None, str),
    "transformers_version": _like(None, str),
}
_WINDOWS: Mapping[str, Any] = {
    "use_sliding_window": False,
    "sliding_window": _like(4096, _NOTHING),
    "max_window_layers": 28,
    "layer_types": _like(None, list),
}
_ROPE_KEYS = frozenset({"rope_theta", "rope_scaling", "rope_parameters"})
_DTYPES = frozenset({"float64", "float32", "float16", "bfloat16"})
# Keys that decide which class or code runs.
_TELLING = frozenset(
    {"id2label", "label2id", "num_labels", "problem_type", "attn_implementation", "_attn_implementation"}
)
# Keys in published configs that have no effect if they are false.
_HARMLESS_IF_FALSE = frozenset({"use_mrope"})
_LARGEST_SIZE = 2**31 - 1
_MOST_LAYERS = 2**16
_WINDOWED, _FULL = "sliding_attention", "full_attention"


def _head_width(config: Config) -> None:
    if config.get("head_dim") is None:
        config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]


def _windows(config: Config) -> None:
    config["sliding_window"] = config["sliding_window"] if config["use_sliding_window"] else None
    if config["layer_types"] is None:
        count, first = config["num_hidden_layers"], config["max_window_layers"]
        windowed = config["sliding_window"] is not None
        config["layer_types"] = [
            _WINDOWED if windowed and layer >= first else _FULL for layer in range(count)
        ]


def _qwen2_moe(config: Config) -> None:
    config["mlp_only_layers"] = config["mlp_only_layers"] or []
    # This class uses 0 where the others use None.
    config["sliding_window"] = config["sliding_window"] if config["use_sliding_window"] else 0
    if config["layer_types"] is None:
        count, last = config["num_hidden_layers"], config["max_window_layers"]
        windowed = config["use_sliding_window"]
        config["layer_types"] = [
            _WINDOWED if windowed and layer % 2 == 0 and layer < last else _FULL for layer in range(count)
        ]


def _qwen3_moe(config: Config) -> None:
    config["mlp_only_layers"] = config["mlp_only_layers"] or []
    config["sliding_window"] = config["sliding_window"] if config["use_sliding_window"] else None
    # The class stores the number of experts as num_local_experts, whichever name the file uses.
    experts = config.pop("num_experts")
    if config.get("num_local_experts") is None:
        config["num_local_experts"] = experts


def _gpt_oss(config: Config) -> None:
    if config["layer_types"] is None:
        config["layer_types"] = [
            _FULL if layer % 2 else _WINDOWED for layer in range(config["num_hidden_layers"])
        ]


def _latent_widths(config: Config) -> dict[str, int]:
    rotated: int = config["qk_rope_head_dim"]
    return {"head_dim": rotated, "qk_head_dim": config["qk_nope_head_dim"] + rotated}


def _latent(config: Config) -> None:
    config.update(_latent_widths(config))


_SPARSE_QWEN: Mapping[str, Any] = {
    "decoder_sparse_step": 1,
    "moe_intermediate_size": _SIZE,
    "num_experts_per_tok": _SIZE,
    "norm_topk_prob": False,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "mlp_only_layers": _like(None, list),
}
_DEEPSEEK: Mapping[str, Any] = {
    "attention_bias": False,
    "pretraining_tp": _like(1, _NOTHING),
    "first_k_dense_replace": _Key((int,)),
    "kv_lora_rank": _SIZE,
    "q_lora_rank": _Key((int, _NOTHING)),
    "n_routed_experts": _SIZE,
    "n_shared_experts": _Key((int,)),
    "num_experts_per_tok": _SIZE,
    "moe_intermediate_size": _SIZE,
    "output_router_logits": False,
    "qk_nope_head_dim": _SIZE,
    "qk_rope_head_dim": _SIZE,
    "v_head_dim": _SIZE,
    # Derived from other sizes by the class.
    "head_dim": _Key((int,), (None,)),
    "qk_head_dim": _Key((int,), (None,)),
}
_DEEPSEEK_FREE = frozenset({"aux_loss_alpha", "ep_size", "moe_layer_freq", "scoring_func", "seq_aux"})

PLAIN_FAMILIES: Mapping[str, _ConfigClass] = {
    "llama": _ConfigClass(
        {
            "num_key_value_heads": _OPTIONAL_INT,
            "head_dim": _OPTIONAL_INT,
            "attention_bias": False,
            "mlp_bias": False,
            "pretraining_tp": _like(1, _NOTHING),
        },
        complete=_head_width,
        divides_width=True,
    ),
    "mistral": _ConfigClass(
        {"head_dim": _OPTIONAL_INT, "sliding_window": _like(4096, _NOTHING)}, complete=_head_width
    ),
    "qwen2": _ConfigClass({**_WINDOWS, "head_dim": _OPTIONAL_INT}, complete=_windows),
    "qwen3": _ConfigClass({**_WINDOWS, "head_dim": 128, "attention_bias": False}, complete=_windows),
    "mixtral": _ConfigClass(
        {
            "rms_norm_eps": 1e-5,
            "head_dim": _OPTIONAL_INT,
            "sliding_window": _OPTIONAL_INT,
            "num_experts_per_tok": _SIZE,
            "num_local_experts": _SIZE,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
            "router_jitter_noise": 0.0,
        },
        theta=1000000.0,
    ),
    "qwen2_moe": _ConfigClass(
        {
            **_WINDOWS,
            **_SPARSE_QWEN,
            "head_dim": _OPTIONAL_INT,
            "num_experts": _SIZE,
            "shared_expert_intermediate_size": _SIZE,
            "qkv_bias": True,
        },
        complete=_qwen2_moe,
    ),
    "qwen3_moe": _ConfigClass(
        {
            **_SPARSE_QWEN,
            "head_dim": _OPTIONAL_INT,
            "num_experts": 128,
            "attention_bias": False,
            "use_sliding_window": False,
            "sliding_window": _like(4096, _NOTHING),
            "num_local_experts": _Key((int,), (None,)),
        },
        free=frozenset({"max_window_layers"}),
        complete=_qwen3_moe,
    ),
    "glm4_moe": _ConfigClass(
        {
            "rms_norm_eps": 1e-5,
            "head_dim": _OPTIONAL_INT,
            "attention_bias": False,
            "moe_intermediate_size": _SIZE,
            "num_experts_per_tok": _SIZE,
            "output_router_logits": False,
            "n_shared_experts": _Key((int,)),
            "n_routed_experts": _SIZE,
            "routed_scaling_factor": 1.0,
            "n_group": _SIZE,
            "topk_group": _SIZE,
            "first_k_dense_replace": _Key((int,)),
            "norm_topk_prob": True,
            "use_qk_norm": False,
            "num_nextn_predict_layers": 1,
            "partial_rotary_factor": 0.5,
        },
    ),
    "gpt_oss": _ConfigClass(
        {
            "rms_norm_eps": 1e-5,
            "head_dim": 64,
            "num_local_experts": _SIZE,
            "num_experts_per_tok": _SIZE,
            "sliding_window": _like(128, _NOTHING),
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "router_aux_loss_coef": 0.001,
            "output_router_logits": False,
            "layer_types": _like(None, list),
            "attention_bias": True,
        },
        theta=150000.0,
        scales=True,
        free=frozenset({"experts_per_token", "initial_context_length"}),
        complete=_gpt_oss,
    ),
    "deepseek_v2": _ConfigClass(
        {
            **_DEEPSEEK,
            "num_key_value_heads": _OPTIONAL_INT,
            "mlp_bias": False,
            "n_group": _OPTIONAL_INT,
            "topk_group": _OPTIONAL_INT,
            "topk_method": _like("greedy", _NOTHING),
            "norm_topk_prob": _like(False, _NOTHING),
            "routed_scaling_factor": 1.0,
        },
        free=_DEEPSEEK_FREE | {"rope_interleave"},
        complete=_latent,
        divides_width=True,
    ),
    "deepseek_v3": _ConfigClass(
        {
            **_DEEPSEEK,
            "n_group": _Key((int,)),
            "topk_group": _Key((int,)),
            "norm_topk_prob": _like(True, _NOTHING),
            "routed_scaling_factor": 2.5,
            "rope_interleave": _like(True, _NOTHING),
            "num_nextn_predict_layers": 1,
        },
        free=_DEEPSEEK_FREE | {"topk_method"},
        complete=_latent,
    ),
}


def filled_config(content: Mapping[str, Any]) -> Config | None:
    """Return a ``config.json`` with the values that transformers' config class would add; None if it is not
    plain. It is plain if transformers would accept it without a warning, and every value has the usual
    type."""
    kind = PLAIN_FAMILIES.get(content["model_type"]) if isinstance(content.get("model_type"), str) else None
    if kind is None:
        return None
    table = {**_COMMON, **kind.keys}
    keys = {name: key if isinstance(key, _Key) else _like(key) for name, key in table.items()}
    given = {key: value for key, value in content.items() if key not in _ROPE_KEYS}
    if not all(_is_plain(key, value, keys, kind.free) for key, value in given.items()):
        return None
    config = {}
    for name, key in keys.items():
        if key.default is not None:
            config[name] = key.default[0]
        elif name not in given:
            return None
    config |= given
    rope = _rope(content, config, kind)
    # For None the caller uses transformers itself, whose checks also explain what is wrong.
    if rope is None or not _fits(config, kind):
        return None
    kind.complete(config)
    return {**config, "rope_parameters": rope, "rope_scaling": rope}


def _is_plain(name: str, value: object, keys: Mapping[str, _Key], free: frozenset[str]) -> bool:
    """Return whether the config class has a key and accepts the type of its value."""
    if isinstance(value, float) and not math.isfinite(value):
        return False
    if name in _HARMLESS_IF_FALSE:
        return value is False
    if name in {"dtype", "torch_dtype"}:
        return value is None or value in _DTYPES
    if name == "eos_token_id" and isinstance(value, list):
        return set(map(type, value)) <= {int}
    key = keys.get(name)
    if key is None:
        known = name in free or (name in INERT_KEYS and name not in _TELLING)
        return known and type(value) in _ANYTHING.kinds
    # By identity, because another ``_Key((int,))`` is equal but accepts 0.
    if key is _SIZE and type(value) is int:
        return 1 <= value <= _LARGEST_SIZE
    # Compare types, because True is an instance of int.
    return type(value) in key.kinds


def _fits(config: Config, kind: _ConfigClass) -> bool:
    """Return whether a config passes the class's checks of lists and of combinations of values."""
    layers, heads, width = config["num_hidden_layers"], config["num_attention_heads"], config["hidden_size"]
    latent = _latent_widths(config) if kind.complete is _latent else {}
    if any(config[key] not in (None, size) for key, size in latent.items()):
        return False
    types = config.get("layer_types")
    if (
        layers > _MOST_LAYERS
        or not 0 <= config["initializer_range"] <= 1
        or config["output_attentions"]
        or config["is_encoder_decoder"]
    ):
        return False
    if types is not None and (len(types) != layers or not all(each in (_WINDOWED, _FULL) for each in types)):
        return False
    if not set(map(type, config.get("mlp_only_layers") or ())) <= {int}:
        return False
    return width % heads == 0 or not (kind.divides_width or (config.get("head_dim") is None and not latent))


def _rope(content: Mapping[str, Any], config: Config, config_class: _ConfigClass) -> Config | None:
    """Return the rotary parameters in the format of current transformers; None if they are not plain."""
    found = list(map(content.get, ("rope_scaling", "rope_parameters")))
    theta = content.get("rope_theta", config_class.theta)
    if not all(each is None or isinstance(each, Mapping) for each in found) or type(theta) not in (
        int,
        float,
    ):
        return None
    parameters = dict(found[0] or found[1] or {})
    if config_class.scales and not parameters:
        return None
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE_KINDS or parameters.get("type", kind) != kind:
        return None
    needed, possible = ROPE_KINDS[kind]
    numbers = set(parameters) - {"rope_type", "type"}
    if needed - numbers or numbers - needed - possible - {"rope_theta", "partial_rotary_factor"}:
        return None
    if not all(type(parameters[key]) in ((bool,) if key == "truncate" else (int, float)) for key in numbers):
        return None
    if not all(map(math.isfinite, (theta, *(parameters[key] for key in numbers)))):
        return None
    filled = {"rope_type": kind, "rope_theta": theta, **parameters}
    if config.get("partial_rotary_factor") is not None:
        filled.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    return filled
