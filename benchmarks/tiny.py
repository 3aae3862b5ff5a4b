"""The model and the policy configuration that the step cases share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megarl.config.validate import validate_policy_config

VOCABULARY = 2048
HIDDEN = 256
LAYERS = 4
LENGTH = 64
ROWS = 8
LEARNING_RATE = 1e-4
WEIGHT_DECAY = 0.01
BETAS = (0.9, 0.95)
EPSILON = 1e-6
CLIP = 1.0


def save_model(directory: Path, longest: int = LENGTH) -> Path:
    """A random Qwen2 of 256 x 4 in Hugging Face form, for sequences of at most ``longest`` tokens."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=688,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=longest,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)
    return directory


def policy_config(model: Path, *, micro_batch: int, tensor_parallel: int, **changes: Any) -> dict[str, Any]:
    """A whole policy configuration: float32, Adam, constant learning rate. ``changes`` replace top-level keys."""
    megatron = {
        "enabled": True,
        "tensor_model_parallel_size": tensor_parallel,
        "optimizer": {
            "lr": LEARNING_RATE,
            "min_lr": LEARNING_RATE,
            "weight_decay": WEIGHT_DECAY,
            "adam_beta1": BETAS[0],
            "adam_beta2": BETAS[1],
            "adam_eps": EPSILON,
            "clip_grad": CLIP,
        },
    }
    policy = {
        "model_name": str(model),
        "tokenizer": {"name": str(model)},
        "train_global_batch_size": ROWS,
        "train_micro_batch_size": micro_batch,
        "max_total_sequence_length": LENGTH,
        "max_grad_norm": CLIP,
        "precision": "float32",
        "megatron_cfg": megatron,
        **changes,
    }
    return dict(validate_policy_config(policy, world_size=tensor_parallel))


def make_batch(seed: int) -> dict[str, torch.Tensor]:
    """``ROWS`` sequences of uneven length, every token after the first a target."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (ROWS,), generator=generator)
    lengths[0] = LENGTH
    inside = torch.arange(LENGTH)[None] < lengths[:, None]
    ids = torch.randint(2, VOCABULARY, (ROWS, LENGTH), generator=generator) * inside
    return {"input_ids": ids, "input_lengths": lengths, "token_mask": inside.float(), "sample_mask": torch.ones(ROWS)}
