"""Tiny models for tests, every size different: grouped queries, a head dimension unlike hidden/heads, a prime vocabulary, an odd number
of layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 101
LAYERS = 3


def tiny_config(family: str, *, tied: bool) -> Any:
    """A transformers config of ``family`` (``llama``, ``qwen2``, ``qwen3``)."""
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config

    sizes = dict(
        vocab_size=VOCABULARY,
        hidden_size=36,
        intermediate_size=52,
        num_hidden_layers=LAYERS,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        rms_norm_eps=1e-6,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    if family == "llama":
        scaling = {
            "rope_type": "llama3",
            "rope_theta": 5000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        return LlamaConfig(**{**sizes, "max_position_embeddings": 16384}, head_dim=10, rope_parameters=scaling)
    if family == "qwen2":
        return Qwen2Config(**sizes, head_dim=10, rope_parameters={"rope_type": "default", "rope_theta": 7000.0})
    return Qwen3Config(**sizes, head_dim=10, rope_parameters={"rope_type": "default", "rope_theta": 9000.0})


def make_tiny(directory: Path, family: str, *, tied: bool, seed: int = 0) -> Path:
    """A randomly initialised model of ``family`` saved in Hugging Face form; norms and biases are random too, so that none can be
    forgotten."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(family, tied=tied), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            if name.endswith("embed_tokens.weight"):
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(directory)
    return directory


def policy_config(model: Path | str, **changes: Any) -> dict[str, Any]:
    """A complete policy configuration for a tiny model on Megatron.

    Args:
        model: Hugging Face directory.
        changes: ``tp``, ``pp``, ``sp``, ``first``, ``last`` (uneven pipeline), ``precision``, ``gbs``, ``mbs``, ``clip``, ``overlap``,
        ``distributed_optimizer``,
            ``recompute``, ``temperature``, ``lr``, ``weight_decay``, ``optimizer``; a ``generation`` dict is merged.
    """
    take = changes.pop
    precision = take("precision", "float32")
    tp, clip, lr = take("tp", 1), take("clip", 1.0), take("lr", 1e-3)
    decay, overlap = take("weight_decay", 0.1), take("overlap", False)
    distributed_optimizer = take("distributed_optimizer", True)
    config = {
        "model_name": str(model),
        "tokenizer": {"name": str(model)},
        "train_global_batch_size": take("gbs", 8),
        "train_micro_batch_size": take("mbs", 2),
        "logprob_batch_size": take("logprob_batch_size", 3),
        "generation_batch_size": 4,
        "precision": precision,
        "fsdp_offload_enabled": False,
        "activation_checkpointing_enabled": False,
        "make_sequence_length_divisible_by": take("multiple", 1),
        "max_total_sequence_length": 64,
        "max_grad_norm": clip,
        "dtensor_cfg": {"enabled": False},
        "dynamic_batching": {"enabled": False},
        "sequence_packing": {"enabled": False},
        "megatron_cfg": {
            "enabled": True,
            "empty_unused_memory_level": 0,
            "activation_checkpointing": take("recompute", False),
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": take("pp", 1),
            "num_layers_in_first_pipeline_stage": take("first", None),
            "num_layers_in_last_pipeline_stage": take("last", None),
            "context_parallel_size": 1,
            "pipeline_dtype": precision,
            "sequence_parallel": take("sp", False),
            "optimizer": {
                "optimizer": take("optimizer", "adam"),
                "lr": lr,
                "min_lr": 0.0,
                "weight_decay": decay,
                "bf16": precision == "bfloat16",
                "fp16": precision == "float16",
                "params_dtype": "float32",
                "adam_beta1": 0.9,
                "adam_beta2": 0.95,
                "adam_eps": take("eps", 1e-6),
                "sgd_momentum": 0.9,
                "use_distributed_optimizer": distributed_optimizer,
                "use_precision_aware_optimizer": False,
                "clip_grad": clip,
            },
            "scheduler": {
                "start_weight_decay": decay,
                "end_weight_decay": decay,
                "weight_decay_incr_style": "constant",
                "lr_decay_style": "constant",
                "lr_decay_iters": None,
                "lr_warmup_iters": 2,
                "lr_warmup_init": lr / 4,
            },
            "distributed_data_parallel_config": {
                "grad_reduce_in_fp32": False,
                "overlap_grad_reduce": overlap,
                "overlap_param_gather": overlap and distributed_optimizer,
                "average_in_collective": False,
                "bucket_size": take("bucket_size", None),
                "use_custom_fsdp": False,
                "data_parallel_sharding_strategy": "optim_grads_params",
            },
        },
        "generation": {
            "backend": "megatron",
            "max_new_tokens": 8,
            "temperature": take("temperature", 1.0),
            "top_p": 1.0,
            "top_k": None,
            "stop_token_ids": [2],
            "stop_strings": None,
            "pad_token_id": 0,
            **take("generation", {}),
        },
    }
    assert not changes, f"unknown changes {changes}"
    return config
