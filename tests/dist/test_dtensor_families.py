"""A family for which there is no plan of ours: it runs on the plan that transformers gives it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.algorithms.loss_functions import NLLLoss
from megarl.parity.pool import WorkerPool
from tests.dist.test_dtensor_parity import LAYOUTS, check_training
from tests.models import VOCABULARY
from tests.tiers import sampled


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scales its embedding, residuals, attention and logits by factors of its own."""
    from transformers import AutoModelForCausalLM, GraniteConfig

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 36, "intermediate_size": 52, "num_hidden_layers": 3, "num_attention_heads": 6}
    factors = {"embedding_multiplier": 1.5, "residual_multiplier": 0.7, "attention_multiplier": 0.2, "logits_scaling": 1.3}
    tokens = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = GraniteConfig(**sizes, **factors, **tokens, num_key_value_heads=2, initializer_range=0.2, tie_word_embeddings=True)
    directory = tmp_path_factory.mktemp("granite-tied")
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return directory


@sampled(1)
@pytest.mark.parametrize(
    ("layout", "batching"), [("dp2", "fixed"), ("tp2", "fixed"), ("tp2", "packed"), ("cp2", "dynamic"), ("tp2-dp2", "fixed")]
)
def test_three_adam_steps_equal_transformers(pool: WorkerPool, granite: Path, layout: str, batching: str) -> None:
    world, changes = LAYOUTS[layout]
    check_training(pool, world, granite, NLLLoss(), batching, {"mbs": 2, "clip": 0.5}, changes)
