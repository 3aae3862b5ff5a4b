"""The model and the policy configuration that the step cases share."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
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
BACKENDS = ("megatron", "dtensor", "fsdp1")
CLIPPED_LOSS = {
    "reference_policy_kl_penalty": 0.0,
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.2,
    "ratio_clip_c": None,
    "use_on_policy_kl_approximation": False,
    "use_importance_sampling_correction": False,
    "token_level_loss": True,
}
"""The clipped policy gradient of GRPO and PPO, without a divergence penalty: a ``ClippedPGLossConfig``."""

SAMPLED = {"temperature": 1.0, "top_p": 1.0, "top_k": None, "stop_token_ids": [], "pad_token_id": 0}
"""Generation settings that sample from the model's own distribution; only the number of tokens ends a
response."""


def save_model(directory: Path, longest: int = LENGTH, **changes: int) -> Path:
    """Save a random Qwen2 of hidden size 256 and 4 layers, or of other sizes, for sequences of at most
    ``longest`` tokens. Return its Hugging Face directory."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    # Use equal weights in every run, so that results of two commits can be compared.
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 688,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    config = Qwen2Config(
        **{**sizes, **changes},
        max_position_embeddings=longest,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)
    return directory


def policy_config(
    model: Path,
    *,
    micro_batch: int,
    backend: str = "megatron",
    tensor_parallel: int = 1,
    ranks: int | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """Return a complete policy configuration: float32, Adam, constant learning rate.

    Args:
        model: Hugging Face directory.
        micro_batch: rows of a micro-batch.
        backend: one of ``BACKENDS``.
        tensor_parallel: tensor-parallel ranks; FSDP1 has no tensor parallelism.
        ranks: ranks of the whole job; ``tensor_parallel`` if None.
        changes: replacements of policy keys; dictionaries such as ``megatron_cfg`` are merged.
    """
    policy: dict[str, Any] = {
        "model_name": str(model),
        "tokenizer": {"name": str(model)},
        "train_global_batch_size": ROWS,
        "train_micro_batch_size": micro_batch,
        "max_total_sequence_length": LENGTH,
        "max_grad_norm": CLIP,
        "precision": "float32",
        **_section_of(backend, tensor_parallel),
    }
    for key, value in changes.items():
        policy[key] = {**policy.get(key, {}), **value} if isinstance(value, dict) else value
    return dict(validate_policy_config(policy, world_size=ranks or tensor_parallel))


def _section_of(backend: str, tensor_parallel: int) -> dict[str, Any]:
    """Return the section that enables a backend, with the same optimizer settings for each backend."""
    if backend == "megatron":
        # Set the smallest learning rate to the largest, because Megatron-Core's schedule would otherwise
        # decay it.
        optimizer = {
            "lr": LEARNING_RATE,
            "min_lr": LEARNING_RATE,
            "weight_decay": WEIGHT_DECAY,
            "adam_beta1": BETAS[0],
            "adam_beta2": BETAS[1],
            "adam_eps": EPSILON,
            "clip_grad": CLIP,
        }
        return {
            "megatron_cfg": {
                "enabled": True,
                "tensor_model_parallel_size": tensor_parallel,
                "optimizer": optimizer,
            }
        }
    adam = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "betas": list(BETAS), "eps": EPSILON}
    # Megatron-Core does not decay biases and norms; AdamW decays all parameters unless it is configured.
    section: dict[str, Any] = {
        "optimizer": {"name": "torch.optim.AdamW", "kwargs": adam, "weight_decay_on_vectors": False}
    }
    if backend == "dtensor":
        section["dtensor_cfg"] = {"enabled": True, "tensor_parallel_size": tensor_parallel}
    elif backend != "fsdp1" or tensor_parallel > 1:
        raise ValueError(
            f"backend {backend!r} with tensor parallel {tensor_parallel}: choose from "
            f"{', '.join(BACKENDS)}, fsdp1 with 1"
        )
    return section


def worker_of(config: Mapping[str, Any]) -> Any:
    """Build the worker of a configuration's backend on this rank, with an optimizer and without a reference
    policy."""
    from megarl.parity.jobs import WORKERS

    backend = next((name for name in BACKENDS if (config.get(f"{name}_cfg") or {}).get("enabled")), "fsdp1")
    module, name = WORKERS[backend].rsplit(".", 1)
    return getattr(importlib.import_module(module), name)(config, None, init_reference_model=False)
