"""Tiny checkpoints with the layers that transformers leaves out when it saves a model: those that predict
further tokens."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def add_prediction_layers(directory: Path, count: int = 1, copies: bool = True) -> dict[str, torch.Tensor]:
    """Put ``count`` prediction layers of random weights behind the layers of a checkpoint of one file, in the
    form of DeepSeek-V3's.

    Args:
        directory: with config.json, where they are counted then.
        count: layers.
        copies: they repeat embedding and output layer.

    Returns:
        The tensors that were added.
    """
    path, file = directory / "config.json", directory / "model.safetensors"
    config, tensors = json.loads(path.read_text()), load_file(file)
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    generator = torch.Generator().manual_seed(5)
    norm = tensors["model.norm.weight"]
    added = {}
    for layer in range(layers, layers + count):
        last = f"model.layers.{layers - 1}."
        like = {name.removeprefix(last): tensor for name, tensor in tensors.items() if name.startswith(last)}
        like |= {f"{name}.weight": norm for name in ("enorm", "hnorm", "shared_head.norm")}
        like["eh_proj.weight"] = norm.new_zeros(hidden, 2 * hidden)
        for name, tensor in like.items():
            added[f"model.layers.{layer}.{name}"] = torch.randn(tensor.shape, generator=generator).to(
                tensor.dtype
            )
        if copies:
            embedding = tensors["model.embed_tokens.weight"]
            added[f"model.layers.{layer}.embed_tokens.weight"] = embedding.clone()
            added[f"model.layers.{layer}.shared_head.head.weight"] = tensors.get(
                "lm_head.weight", embedding
            ).clone()
    save_file(tensors | added, file, metadata={"format": "pt"})
    path.write_text(json.dumps({**config, "num_nextn_predict_layers": count}))
    return added


def add_mtp_layer(directory: Path) -> dict[str, torch.Tensor]:
    """Put the prediction layer of Qwen3-Next and Qwen3.5, of random weights, beside a checkpoint of one file,
    whose config need not say it.

    Returns:
        The tensors that were added.
    """
    file = directory / "model.safetensors"
    tensors = load_file(file)
    [text] = (
        name.removesuffix("norm.weight")
        for name in tensors
        if name in ("model.norm.weight", "model.language_model.norm.weight")
    )
    norm = tensors[f"{text}norm.weight"]
    last = max(int(name.removeprefix(text).split(".")[1]) for name in tensors if ".self_attn." in name)
    of_layer = f"{text}layers.{last}."
    like = {
        f"layers.0.{name.removeprefix(of_layer)}": tensor
        for name, tensor in tensors.items()
        if name.startswith(of_layer)
    }
    like |= {f"{name}.weight": norm for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    like["fc.weight"] = norm.new_zeros(len(norm), 2 * len(norm))
    generator = torch.Generator().manual_seed(6)
    added = {
        f"mtp.{name}": torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        for name, tensor in like.items()
    }
    save_file(tensors | added, file, metadata={"format": "pt"})
    return added
