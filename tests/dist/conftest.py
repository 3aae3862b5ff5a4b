"""The pool of gloo workers and the tiny models that all distributed tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.parity.pool import WorkerPool
from tests.models import VOCABULARY, make_tiny


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    workers = WorkerPool()
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny Hugging Face models by name; ``-tied`` ones share embedding and output layer."""
    root = tmp_path_factory.mktemp("models")
    names = ["llama", "qwen2", "qwen2-tied", "qwen3", "qwen3-tied"]
    models = {
        name: make_tiny(root / name, name.split("-")[0], tied=name.endswith("-tied"), seed=seed)
        for seed, name in enumerate(names)
    }
    models["qwen3-tied-four"] = make_tiny(root / "qwen3-tied-four", "qwen3", tied=True, seed=7, layers=4)
    return models


@pytest.fixture(scope="session")
def model_of(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny model by its name, ``family-tied-four``."""
    root = tmp_path_factory.mktemp("trained")

    @cache
    def made(name: str) -> Path:
        if name in tiny_models:
            return tiny_models[name]
        if name == "granite-tied":
            return make_granite(root / name)
        family, *words = name.split("-")
        return make_tiny(
            root / name, family, tied="tied" in words, seed=41 + len(family), layers=3 + ("four" in words)
        )

    return made


def make_granite(directory: Path) -> Path:
    """Scales its embedding, residuals, attention and logits by factors of its own."""
    from transformers import AutoModelForCausalLM, GraniteConfig

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 36,
        "intermediate_size": 52,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
    }
    factors = {
        "embedding_multiplier": 1.5,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.2,
        "logits_scaling": 1.3,
    }
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = GraniteConfig(
        **sizes, **factors, **tokens, num_key_value_heads=2, initializer_range=0.2, tie_word_embeddings=True
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory
