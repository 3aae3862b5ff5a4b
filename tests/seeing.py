"""Tiny models that also see, as they are published: with a nested config, a tower, a prediction layer and the
files of a processor."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.models import VOCABULARY, tiny_config
from tests.prediction_layers import add_mtp_layer

VISION = {
    "depth": 2,
    "hidden_size": 24,
    "intermediate_size": 26,
    "num_heads": 3,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 16,
}
TOKENS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
FILES = ("preprocessor_config.json", "video_preprocessor_config.json")


def make_seeing(
    directory: Path,
    family: str,
    *,
    tied: bool,
    seed: int = 0,
    stacked_experts: bool = False,
    vocab_size: int = VOCABULARY,
    tokens: Sequence[int] = tuple(TOKENS.values()),
    **sizes: Any,
) -> Path:
    """Save a model of ``family`` (``qwen3_5``, ``qwen3_5_moe``) as transformers' own class does, with what
    that leaves out. ``tokens`` stand for pictures, in the order of ``TOKENS``; ``sizes`` are other values of
    its text's config."""
    text = tiny_config(f"{family}_text", tied=tied).to_dict() | {"vocab_size": vocab_size} | sizes
    pairs = int(text["head_dim"] * text["rope_parameters"]["partial_rotary_factor"]) // 2
    # rotated pairs of positions in time, height and width
    sections = [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3]
    text["rope_parameters"] |= {"mrope_section": sections, "mrope_interleaved": True}
    vision = {**VISION, "out_hidden_size": text["hidden_size"]}
    names = dict(zip(TOKENS, tokens, strict=True))
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        family, text_config=text, vision_config=vision, tie_word_embeddings=tied, **names
    )
    model = AutoModelForImageTextToText.from_config(
        config, dtype=torch.float32, experts_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory, save_original_format=not stacked_experts)
    add_mtp_layer(directory)
    for name in FILES:
        (directory / name).write_text(json.dumps({"image_mean": [0.5, 0.25, 0.125], "of": name}))
    return directory


def save_text_part(model: Path, directory: Path) -> Path:
    """Save what transformers takes for the language model of a model that also sees."""
    options: dict[str, Any] = {"dtype": torch.float32, "experts_implementation": "eager"}
    AutoModelForCausalLM.from_pretrained(model, **options).save_pretrained(directory)
    return directory
