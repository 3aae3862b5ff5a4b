"""The numbers of a model that the rules and the memory estimate need, read from its ``config.json`` without transformers.

For the models of the recipes they are at hand, so that a dry run can size them before anything is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megarl.errors import ConfigError, Violation

_QWEN2_5: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
}
_LLAMA_3_1_70B: dict[str, Any] = {
    "model_type": "llama",
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}

KNOWN_MODELS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "Qwen/Qwen2.5-1.5B": {
            **_QWEN2_5,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_attention_heads": 12,
            "num_hidden_layers": 28,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
        },
        "Qwen/Qwen2.5-7B": {
            **_QWEN2_5,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
            "vocab_size": 152064,
        },
        "Qwen/Qwen3-30B-A3B": {
            "model_type": "qwen3_moe",
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "max_position_embeddings": 40960,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.001,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        "meta-llama/Llama-3.1-70B": _LLAMA_3_1_70B,
        "meta-llama/Llama-3.1-70B-Instruct": _LLAMA_3_1_70B,
    }
)
"""Content of ``config.json`` by Hugging Face id, without what neither the rules, the memory estimate nor the converters read."""


@dataclass(frozen=True, slots=True)
class LatentWidths:
    """Widths of its projections.

    Attributes:
        queries: of the queries between their two projections; 0 where there is one projection only.
        keys_and_values: of what keys and values are projected up from.
        rotated: of the part of a head's query and key that is rotated, which all heads share of a key.
        head: of a head's query and key, the rotated part included.
        value: of a head's value.
    """

    queries: int
    keys_and_values: int
    rotated: int
    head: int
    value: int

    def parameters(self, hidden: int, heads: int, tensor: int) -> int:
        """Parameters of one layer's attention on one tensor-parallel rank, its norms included, without the norm before it.

        Source: the shapes of Megatron-Core's ``MLASelfAttention``; norms are on every rank, all else is divided.
        """
        query = self.queries * (hidden + heads * self.head) if self.queries else hidden * heads * self.head
        down = hidden * (self.keys_and_values + self.rotated)
        up = self.keys_and_values * heads * (self.head - self.rotated + self.value)
        return (query + down + up + heads * self.value * hidden) // tensor + self.queries + self.keys_and_values

    def kept_columns(self, heads: int) -> tuple[int, int]:
        """Columns that one layer's attention keeps of a token for the backward pass: those divided over tensor-parallel ranks (queries,
        keys, values and output of the heads) and those that are not (the latent vectors before and after their norms, the shared part of
        keys)."""
        return 2 * heads * (self.head + self.value), 2 * (self.queries + self.keys_and_values) + self.rotated


def read_latent_widths(content: Mapping[str, Any]) -> LatentWidths | None:
    """The widths in the content of a ``config.json``; None for ordinary attention.

    Raises:
        KeyError: one of them is missing.
    """
    if content.get("kv_lora_rank") is None:
        return None
    rotated = int(content["qk_rope_head_dim"])
    return LatentWidths(
        queries=int(content.get("q_lora_rank") or 0),
        keys_and_values=int(content["kv_lora_rank"]),
        rotated=rotated,
        head=int(content["qk_nope_head_dim"]) + rotated,
        value=int(content["v_head_dim"]),
    )


KEY = "policy.model_name"
_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes of a model.

    Attributes:
        model_type: name of the architecture.
        num_layers: transformer layers.
        hidden_size: width of the residual stream.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads.
        head_dim: width of a head.
        ffn_hidden_size: width of the gated MLP of dense layers.
        vocab_size: rows of the embedding, unpadded.
        tied: the output layer is the embedding.
        max_position: longest sequence the model was made for; None when it does not say.
        num_experts: experts of a layer that has them; 0 for a dense model.
        qkv_bias: query, key and value have biases.
        attention_output_bias: so has the attention's output.
        mlp_bias: so have the MLP and, in a mixture of experts, these and their router.
        attention_sinks: each head has a learnt logit beside those of the keys.
        qk_norm: query and key are normalised by head.
        experts_per_token: experts that each token goes through; 0 for a dense model.
        expert_ffn_hidden_size: width of the gated MLP of one expert; 0 for a dense model.
        dense_layers: of a mixture of experts, the layers without experts, counted from 0.
        shared_expert_ffn_hidden_size: width of the gated MLP of the expert that every token goes through; 0 without one.
        shared_expert_gate: its output is weighed by a gate.
        latent: widths of latent attention; None for ordinary attention.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    tied: bool
    max_position: int | None = None
    num_experts: int = 0
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    attention_sinks: bool = False
    qk_norm: bool = False
    experts_per_token: int = 0
    expert_ffn_hidden_size: int = 0
    dense_layers: frozenset[int] = frozenset()
    shared_expert_ffn_hidden_size: int = 0
    shared_expert_gate: bool = False
    latent: LatentWidths | None = None

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer of that index has experts instead of a dense MLP."""
        return self.num_experts > 0 and layer not in self.dense_layers

    @property
    def has_dense_layers(self) -> bool:
        """Whether some layer has a dense MLP."""
        return self.num_experts == 0 or len(self.dense_layers) > 0


def read_model_facts(model_name: str) -> ModelFacts | None:
    """The facts of a model on this disk (a directory, or a Hugging Face id whose ``config.json`` has been downloaded before), or of one
    whose sizes are known.

    Returns:
        None for another id, which is no fault; the network is never asked.

    Raises:
        ConfigError: ``model_name`` is a path without a usable model.
    """
    path = Path(model_name).expanduser()
    if path.is_dir():
        file = path / "config.json"
        if not file.is_file():
            raise ConfigError(
                [Violation(KEY, model_name, "the directory holds no config.json", "give a directory of a Hugging Face model")]
            )
        return _facts_of_file(file, model_name)
    if looks_like_path(model_name):
        kind = "is a file" if path.exists() else "does not exist"
        raise ConfigError([Violation(KEY, model_name, f"this directory {kind}", "give a directory of a Hugging Face model, or its id")])
    cached = _cached_config(model_name)
    if cached is not None:
        return _facts_of_file(cached, model_name)
    return facts_of(KNOWN_MODELS[model_name]) if model_name in KNOWN_MODELS else None


def published_config(model_name: str) -> dict[str, Any] | None:
    """The known content of ``config.json`` of a model that is not on this disk itself; None for one that is, or that is not known.

    Raises:
        ConfigError: ``model_name`` is no Hugging Face id.
    """
    if Path(model_name).expanduser().is_dir() or looks_like_path(model_name) or _cached_config(model_name) is not None:
        return None
    return KNOWN_MODELS.get(model_name)


def looks_like_path(model_name: str) -> bool:
    """Whether a name cannot be a Hugging Face id (``name`` or ``owner/name``)."""
    return model_name.startswith(("/", ".", "~")) or model_name.endswith("/") or model_name.count("/") > 1


def _cached_config(model_name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model_name, "config.json")
    except HFValidationError:
        raise ConfigError(
            [Violation(KEY, model_name, "this is no Hugging Face id", "write owner/name, or the path of a directory")]
        ) from None
    return Path(cached) if isinstance(cached, str) else None


def _facts_of_file(file: Path, model_name: str) -> ModelFacts:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return facts_of(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        problem = f"{file} lacks the key {error}" if isinstance(error, KeyError) else f"{file} cannot be used: {error}"
        raise ConfigError([Violation(KEY, model_name, problem, "give a directory of a Hugging Face language model")]) from error


def facts_of(content: dict[str, Any]) -> ModelFacts:
    """The facts in the content of a ``config.json``.

    Raises:
        KeyError: a size is missing.
        ValueError: one is no number of at least 1.
    """
    text = content.get("text_config") or content
    for key in _SIZES:
        if text.get(key) is not None and int(text[key]) < 1:
            raise ValueError(f"{key} = {text[key]}, at least 1 is needed")
    heads = int(text["num_attention_heads"])
    model_type = str(text.get("model_type") or content["model_type"])
    attention_bias = bool(text.get("attention_bias", model_type == "gpt_oss"))
    dense_layers = _dense_layers(text)
    num_experts = _num_experts(text, model_type) if len(dense_layers) < int(text["num_hidden_layers"]) else 0
    return ModelFacts(
        model_type=model_type,
        num_layers=int(text["num_hidden_layers"]),
        hidden_size=int(text["hidden_size"]),
        num_attention_heads=heads,
        num_key_value_heads=int(text.get("num_key_value_heads") or heads),
        head_dim=int(text.get("head_dim") or int(text["hidden_size"]) // heads),
        ffn_hidden_size=int(text["intermediate_size"]),
        vocab_size=int(text["vocab_size"]),
        tied=bool(text.get("tie_word_embeddings", content.get("tie_word_embeddings", False))),
        max_position=_max_position(text),
        num_experts=num_experts,
        qkv_bias=attention_bias or model_type == "qwen2" or (model_type == "qwen2_moe" and bool(text.get("qkv_bias", True))),
        attention_output_bias=attention_bias and model_type not in {"qwen2", "qwen2_moe", "glm4_moe"},
        mlp_bias=bool(text.get("mlp_bias", False)) or model_type == "gpt_oss",
        attention_sinks=model_type == "gpt_oss",
        qk_norm=model_type in {"qwen3", "qwen3_moe", "gemma3_text", "gemma3"} or bool(text.get("use_qk_norm")),
        experts_per_token=int(text.get("num_experts_per_tok") or 0) if num_experts else 0,
        expert_ffn_hidden_size=int(text.get("moe_intermediate_size") or text["intermediate_size"]) if num_experts else 0,
        dense_layers=dense_layers if num_experts else frozenset(),
        shared_expert_ffn_hidden_size=_shared_expert_width(text, model_type) if num_experts else 0,
        shared_expert_gate=num_experts > 0 and model_type == "qwen2_moe",
        latent=read_latent_widths(text),
    )


def _num_experts(text: dict[str, Any], model_type: str) -> int:
    for key in ("num_experts", "num_local_experts", "n_routed_experts"):
        if text.get(key) is not None:
            return int(text[key])
    if model_type in {"mixtral", "qwen2_moe", "qwen3_moe"}:
        raise KeyError("num_local_experts" if model_type == "mixtral" else "num_experts")
    return 0


def _shared_expert_width(text: dict[str, Any], model_type: str) -> int:
    """DeepSeek's shared experts, and those of the models that follow it, are one of their width together."""
    if model_type == "qwen2_moe":
        return int(text["shared_expert_intermediate_size"])
    return int(text.get("n_shared_experts") or 0) * int(text.get("moe_intermediate_size") or 0)


def _dense_layers(text: dict[str, Any]) -> frozenset[int]:
    """Layers that mixtures leave dense: the first ``first_k_dense_replace`` (DeepSeek), those named, and all but every
    ``decoder_sparse_step``-th, counted from one (Qwen)."""
    first, named, step = (
        int(text.get("first_k_dense_replace") or 0),
        set(text.get("mlp_only_layers") or ()),
        int(text.get("decoder_sparse_step") or 1),
    )
    return frozenset(layer for layer in range(int(text["num_hidden_layers"])) if layer < first or layer in named or (layer + 1) % step)


def _max_position(text: dict[str, Any]) -> int | None:
    """Longest sequence: the model's own bound, or what its rope scaling stretches it to."""
    own = text.get("max_position_embeddings")
    scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
    factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
    bounds = [int(own)] if own else []
    if factor and original:
        bounds.append(int(float(factor) * int(original)))
    return max(bounds, default=None)
