"""Tiny models whose config.json is the text of a published model, with nothing cut but its sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.prediction_layers import add_mtp_layer, add_prediction_layers
from tests.seeing import VISION
from tests.unit.converters_tiny import stored_tensors

TEXTS = Path(__file__).parents[1] / "data" / "published_configs"
LAYERS, HEADS = 4, 4
SIZES: dict[str, int] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "vocab_size": 131,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_experts": 16,
    "num_local_experts": 16,
    "n_routed_experts": 16,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 14,
    "linear_value_head_dim": 10,
}
# what transformers knows under another name
CLASS_OF = {"kimi_k2": "deepseek_v3"}
Tensors = dict[str, Tensor]


def published(name: str) -> dict[str, Any]:
    """Return a published config as its text has it."""
    content: dict[str, Any] = json.loads((TEXTS / f"{name}.json").read_text(encoding="utf-8"))
    return content


def cut(content: dict[str, Any]) -> dict[str, Any]:
    """Return a published config with smaller sizes; every key stays, and zero and null stay what they are."""
    if "text_config" in content:
        vision = {
            **content["vision_config"],
            **{key: size for key, size in VISION.items() if key in content["vision_config"]},
        }
        return {
            **content,
            "text_config": cut(content["text_config"]),
            "vision_config": vision | {"out_hidden_size": SIZES["hidden_size"]},
        }
    small = {key: SIZES[key] if key in SIZES and value else value for key, value in content.items()}
    heads, groups = content["num_attention_heads"], content.get("num_key_value_heads")
    if groups is not None:
        small["num_key_value_heads"] = HEADS if groups == heads else 2
    for key in ("num_experts_per_tok", "experts_per_token"):
        if key in content:
            small[key] = min(content[key], 4)
    if "linear_key_head_dim" in content:
        small["head_dim"] = 16  # of which a quarter is rotated
    if content.get("topk_group", 1) > 1:  # of eight groups of two experts
        small["num_experts_per_tok"] = 4
    if "first_k_dense_replace" in content:
        small["first_k_dense_replace"] = min(content["first_k_dense_replace"], LAYERS - 1)
    for key in ("layer_types", "mlp_layer_types"):
        if content.get(key):
            small[key] = content[key][:LAYERS]
    return small


def save_published(directory: Path, name: str, **changes: Any) -> dict[str, Tensor]:
    """Save a tiny model of a published config in the form in which such models are published.

    transformers makes and saves the model, so that the names and shapes are its own; where the text says so,
    matrices are quantised and a prediction layer is added. The file config.json holds the cut text.

    Returns:
        The tensors that are expected after dequantisation, by name.
    """
    text = {**cut(published(name)), **changes}
    _save_plain(directory, text)
    if text.get("num_nextn_predict_layers"):
        add_prediction_layers(directory, text["num_nextn_predict_layers"])
    if text["model_type"].startswith(("qwen3_next", "qwen3_5")):
        add_mtp_layer(directory)
    tensors = stored_tensors(directory)
    expected = tensors
    method = (text.get("quantization_config") or {}).get("quant_method")
    if method == "fp8":
        tensors, expected = _in_fp8(tensors, text["quantization_config"]["weight_block_size"])
    elif method == "mxfp4":
        tensors, expected = _in_mxfp4(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(text, indent=2), encoding="utf-8")
    return expected


def _save_plain(directory: Path, text: dict[str, Any]) -> None:
    torch.manual_seed(3)
    # token ids of the published vocabulary would not be in the small one's embedding
    made = {
        key: value
        for key, value in text.items()
        if key not in ("quantization_config", "auto_map") and "token_id" not in key
    }
    config = AutoConfig.for_model(
        CLASS_OF.get(made.pop("model_type"), text["model_type"]), **json.loads(json.dumps(made))
    )
    scores = text["architectures"][0].endswith("ForSequenceClassification")
    sees = "text_config" in text
    loader = (
        AutoModelForSequenceClassification
        if scores
        else AutoModelForImageTextToText
        if sees
        else AutoModelForCausalLM
    )
    said = text["text_config"] if sees else text
    dtype = getattr(torch, said.get("torch_dtype") or said.get("dtype") or "bfloat16")
    model = loader.from_config(config, dtype=dtype, **({} if scores else {"experts_implementation": "eager"}))
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape) * 0.2
            parameter.copy_(1.0 + noise if parameter.dim() == 1 else noise)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.rand(buffer.shape) - 0.5)
    model.save_pretrained(directory)


def _in_fp8(tensors: Tensors, block: list[int]) -> tuple[Tensors, Tensors]:
    stored: Tensors = {}
    expected: Tensors = {}
    for name, tensor in tensors.items():
        whole = tensor.dim() != 2 or any(
            word in name for word in ("embed", "head", "gate.weight", "score", "eh_proj")
        )
        if whole:
            stored[name] = expected[name] = tensor
            continue
        rows, columns = (
            torch.arange(size) // length for size, length in zip(tensor.shape, block, strict=True)
        )
        scales = torch.rand(int(rows[-1]) + 1, int(columns[-1]) + 1) + 0.01
        wide = scales[rows][:, columns]
        stored[name], stored[f"{name}_scale_inv"] = (tensor.float() / wide).to(torch.float8_e4m3fn), scales
        expected[name] = (stored[name].float() * wide).to(torch.bfloat16)
    return stored, expected


def _in_mxfp4(tensors: Tensors) -> tuple[Tensors, Tensors]:
    stored, expected = dict(tensors), dict(tensors)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, inner, outer = stored.pop(name).shape
        blocks = torch.randint(0, 256, (count, outer, inner // 32, 16), dtype=torch.uint8)
        scales = torch.randint(110, 130, (count, outer, inner // 32), dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        expected[name] = convert_moe_packed_tensors(blocks, scales)
    return stored, expected
