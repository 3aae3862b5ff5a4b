"""The pool of gloo workers that all distributed tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megarl.parity.pool import WorkerPool
from tests.models import make_tiny


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
    models = {name: make_tiny(root / name, name.split("-")[0], tied=name.endswith("-tied"), seed=seed) for seed, name in enumerate(names)}
    models["qwen3-tied-four"] = make_tiny(root / "qwen3-tied-four", "qwen3", tied=True, seed=7, layers=4)
    return models
