"""Tiny models for the self-test: configs in which all sizes differ, and weights in which all elements
differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from converters.checkpoint.artifacts import write_config
from converters.errors import ConversionError
from converters.families.base import Family
from converters.families.hf_config import config_class_name, make_hf_config, renamed_class
from converters.mapping.rules import hf_tensors
from converters.model_config.architecture import Architecture

_SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 42,
    "intermediate_size": 52,
    # Enough layers for models that treat every second to fourth layer differently.
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    # Some models rotate a quarter of the head, which must be an even number of dimensions.
    "head_dim": 24,
    "max_position_embeddings": 64,
}
# Sizes that are set if the config class has them.
_FURTHER_SIZES: dict[str, Any] = {
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 22,
    "shared_expert_intermediate_size": 32,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 14,
    "kv_lora_rank": 18,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 14,
    "linear_value_head_dim": 20,
    "sliding_window": 9,
    "num_nextn_predict_layers": 0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SCALE = 0.2
_FIX = "pass --config FILE, the config.json of a tiny model of the family"


def tiny_config(family: Family) -> dict[str, Any]:
    """Return the ``config.json`` of a tiny model, from the defaults of the family's transformers config
    class.

    Raises:
        ConversionError: transformers has no such class, or it rejects the sizes.
    """
    from transformers import AutoConfig

    if family.sees:
        raise ConversionError(
            f"no tiny config of {family.model_type} is made: its text is a config of its own",
            f"write --family {family.model_type}_text, which has the same layers, or {_FIX}",
        )
    like = config_class_name(family)
    if like is None:
        raise ConversionError(
            f"model_type = {family.model_type!r} has no config class in transformers to make a tiny model of",
            _FIX,
        )
    try:
        defaults = AutoConfig.for_model(like).to_dict()
        further = {key: value for key, value in _FURTHER_SIZES.items() if key in defaults}
        described = AutoConfig.for_model(like, **_sizes(defaults), **further).to_dict()
    # Config classes raise exceptions of any type for invalid values.
    except Exception as error:
        raise ConversionError(
            f"no tiny {like} config can be made ({type(error).__name__}: {error})", _FIX
        ) from error
    # transformers neither builds nor saves such a layer, while a config without this key has one.
    without_mtp = dict.fromkeys(family.config_keys & {"mtp_num_hidden_layers"}, 0)
    return {
        **described,
        **without_mtp,
        "model_type": family.model_type,
        "architectures": [family.architecture_class],
        "dtype": "float32",
    }


def _sizes(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tiny sizes. With latent attention every head has its own key and value, and ``head_dim`` is
    omitted because it is derived."""
    if "kv_lora_rank" not in defaults:
        return _SIZES
    others = {key: value for key, value in _SIZES.items() if key != "head_dim"}
    return {**others, "num_key_value_heads": others["num_attention_heads"]}


def variants(config: Mapping[str, Any], family: Family) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, config): the unchanged config, and variants that flip one boolean of the family or use a
    single key-value head."""
    yield "as it is", dict(config)
    for key in ["tie_word_embeddings", *sorted(family.config_keys)]:
        value = config.get(key, False if key == "tie_word_embeddings" else None)
        if isinstance(value, bool):
            yield f"{key} = {json.dumps(not value)}", {**config, key: not value}
    if config.get("num_key_value_heads", 1) != 1:
        yield "num_key_value_heads = 1", {**config, "num_key_value_heads": 1}


def is_known_to_transformers(family: Family) -> bool:
    """Return whether transformers itself can build and run models of a family."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return (renamed_class(family.model_type) or family.model_type) in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def save_random(
    directory: Path, config: Mapping[str, Any], family: Family, architecture: Architecture
) -> None:
    """Save a model with random weights, built by transformers if it knows the family, else with the
    tensors that the family's mapping rules name."""
    torch.manual_seed(0)
    directory.mkdir()
    if is_known_to_transformers(family):
        from transformers import AutoModelForCausalLM

        # transformers' grouped matmul for experts needs rows of a multiple of 16 bytes.
        model = AutoModelForCausalLM.from_config(
            make_hf_config(config), dtype=torch.float32, experts_implementation="eager"
        )
        # A recurrence amplifies rounding errors: at the usual scale, transformers' float32 result is 3e-4
        # from its float64 result.
        scale = 0.05 if "linear_key_head_dim" in config else _SCALE
        # New norms are equal and new biases are 0, so without noise a conversion could swap two of them
        # unnoticed.
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape) * scale
                parameter.copy_(parameter + noise if parameter.dim() == 1 else noise)
        model.save_pretrained(directory)
    else:
        save_tensors(
            directory,
            {tensor.name: _random(torch.empty(tensor.shape)) for tensor in hf_tensors(architecture)},
        )
    (directory / "config.json").write_text(json.dumps(dict(config), indent=1), encoding="utf-8")


def save_unique(directory: Path, model: Path, architecture: Architecture, dtype: torch.dtype) -> None:
    """Save the tensors of ``model`` with other values: all elements distinct in float32, random in narrower
    dtypes."""
    directory.mkdir()
    (directory / "config.json").write_bytes((model / "config.json").read_bytes())
    write_config(directory, dtype)
    stay = {tensor.name for tensor in hf_tensors(architecture) if tensor.stays_float32}
    tensors, count = {}, 0
    for name, tensor in sorted(stored_tensors(model).items()):
        wanted = torch.float32 if name in stay else dtype
        if wanted is torch.float32:
            # Multiples of 2^-12 below 2^11 are exact and distinct in float32.
            tensors[name] = (
                torch.arange(count, count + tensor.numel(), dtype=torch.float32) / 4096 - 1024
            ).reshape(tensor.shape)
            count += tensor.numel()
        else:
            tensors[name] = _random(tensor).to(dtype)
    save_tensors(directory, tensors)


def stored_tensors(directory: Path) -> dict[str, Tensor]:
    """Return all tensors in the safetensors files of a directory."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def save_tensors(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to a single safetensors file."""
    save_file(dict(tensors), directory / "model.safetensors", metadata={"format": "pt"})


def _random(like: Tensor) -> Tensor:
    noise = torch.randn(like.shape) * _SCALE
    # Vectors are mostly norms; values around 1 keep activations in range.
    return 1.0 + noise if like.dim() == 1 else noise
