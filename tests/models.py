"""Tiny models for tests, every size different: grouped queries, a head dimension unlike hidden/heads, a prime
vocabulary, an odd number of layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megarl import env
from tests.parts import MODEL_CLASS
from tests.tables import read_table

VOCABULARY = 101
LAYERS = 3


DENSE_FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "mistral_window")
SPARSE_FAMILIES = (
    "glm4_moe",
    "glm4_moe_mixed",
    "gpt_oss",
    "mixtral",
    "qwen3_moe",
    "qwen3_moe_mixed",
    "qwen2_moe",
    "qwen2_moe_mixed",
)
WINDOW = 7


def tiny_config(family: str, *, tied: bool, layers: int = LAYERS) -> Any:
    """A transformers config of one of the families above.

    ``mistral_window`` has a sliding window of ``WINDOW`` tokens. The mixtures have 8 experts, of which a
    token goes through 3 (Mixtral) or 5; the middle layer of ``qwen3_moe_mixed`` is dense, and its
    probabilities are not normalised. Those of Qwen2-MoE have a shared expert beside them, and a token goes
    through 3; the first layer of ``qwen2_moe_mixed`` is dense, and its probabilities are normalised. Those of
    GLM-4.5 have 16 experts in 4 groups, of which a token goes to 2; it goes through 4 experts, and in
    ``glm4_moe_mixed``, whose first layer is dense, which has two shared experts and whose scores are not
    normalised, through 3. In ``qwen3_next`` every second layer has attention and the others gated delta nets
    of 2 key and 6 value heads; the first layer is dense, in ``qwen3_next_dense`` all of them are, as in
    ``qwen3_5_text``, and in ``qwen3_5_moe_text`` none is; a token goes through 3 of 8 experts. In ``gpt_oss``
    every second layer has a window of ``WINDOW`` tokens, and a token goes through 3 of 8 experts.
    """
    from transformers import (
        Glm4MoeConfig,
        GptOssConfig,
        LlamaConfig,
        MistralConfig,
        MixtralConfig,
        Qwen2Config,
        Qwen2MoeConfig,
        Qwen3_5MoeTextConfig,
        Qwen3_5TextConfig,
        Qwen3Config,
        Qwen3MoeConfig,
        Qwen3NextConfig,
    )

    sizes = dict(
        vocab_size=VOCABULARY,
        hidden_size=36,
        intermediate_size=52,
        num_hidden_layers=layers,
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
        return LlamaConfig(
            **{**sizes, "max_position_embeddings": 16384}, head_dim=10, rope_parameters=scaling
        )
    if family == "qwen2":
        return Qwen2Config(
            **sizes, head_dim=10, rope_parameters={"rope_type": "default", "rope_theta": 7000.0}
        )
    rope = {"rope_type": "default", "rope_theta": 9000.0}
    if family in {"mistral", "mistral_window"}:
        return MistralConfig(
            **sizes,
            head_dim=10,
            rope_parameters=rope,
            sliding_window=WINDOW if family == "mistral_window" else None,
        )
    if family == "mixtral":
        return MixtralConfig(
            **sizes, head_dim=10, rope_parameters=rope, num_local_experts=8, num_experts_per_tok=3
        )
    if family in {"qwen3_moe", "qwen3_moe_mixed"}:
        mixed = family == "qwen3_moe_mixed"
        experts = {
            "num_experts": 8,
            "num_experts_per_tok": 5,
            "moe_intermediate_size": 28,
            "norm_topk_prob": not mixed,
        }
        return Qwen3MoeConfig(
            **sizes, **experts, head_dim=10, rope_parameters=rope, mlp_only_layers=[1] if mixed else []
        )
    if family == "gpt_oss":
        yarn = {"rope_type": "yarn", "factor": 4.0, "truncate": False, "original_max_position_embeddings": 16}
        experts = {
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "swiglu_limit": 1.5,
            "sliding_window": WINDOW,
        }
        return GptOssConfig(**sizes, **experts, head_dim=10, rope_parameters={**rope, **yarn})
    if family in {"glm4_moe", "glm4_moe_mixed"}:
        mixed = family == "glm4_moe_mixed"
        experts = {
            "n_routed_experts": 16,
            "num_experts_per_tok": 3 if mixed else 4,
            "moe_intermediate_size": 28,
            "n_group": 4,
        }
        experts |= {
            "topk_group": 2,
            "norm_topk_prob": not mixed,
            "n_shared_experts": 1 + mixed,
            "first_k_dense_replace": int(mixed),
        }
        experts |= {"use_qk_norm": mixed, "attention_bias": not mixed, "routed_scaling_factor": 1.7}
        return Glm4MoeConfig(**sizes, **experts, head_dim=10, rope_parameters=rope, partial_rotary_factor=0.4)
    if family in {"qwen2_moe", "qwen2_moe_mixed"}:
        mixed = family == "qwen2_moe_mixed"
        experts = {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 28,
            "norm_topk_prob": mixed,
        }
        experts |= {"shared_expert_intermediate_size": 32, "mlp_only_layers": [0] if mixed else []}
        return Qwen2MoeConfig(**sizes, **experts, head_dim=10, rope_parameters=rope)
    if family in {"qwen3_next", "qwen3_next_dense", "qwen3_5_text", "qwen3_5_moe_text"}:
        nets = {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 7,
            "linear_value_head_dim": 11,
        }
        kinds = ["full_attention" if layer % 2 else "linear_attention" for layer in range(layers)]
        dense = list(range(layers)) if family == "qwen3_next_dense" else [0]
        experts = {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 28,
            "shared_expert_intermediate_size": 32,
        }
        options = {
            **nets,
            **experts,
            "layer_types": kinds,
            "mlp_only_layers": dense,
            "partial_rotary_factor": 0.4,
        }
        # of first tokens, whose query and key are nearly orthogonal, the output norm makes noise large in any
        # float32 implementation
        options["rms_norm_eps"] = 1e-2
        if family.startswith("qwen3_5"):
            text_config = Qwen3_5TextConfig if family == "qwen3_5_text" else Qwen3_5MoeTextConfig
            unread = {"mlp_only_layers", *(experts if family == "qwen3_5_text" else ["intermediate_size"])}
            options = {key: value for key, value in {**sizes, **options}.items() if key not in unread}
            return text_config(**options, head_dim=10, rope_parameters=rope)
        return Qwen3NextConfig(**{**sizes, **options}, head_dim=10, rope_parameters=rope)
    if family.startswith("deepseek_"):
        return _deepseek_config(family, sizes)
    if family == "qwen3":
        return Qwen3Config(**sizes, head_dim=10, rope_parameters=rope)
    raise ValueError(f"no tiny model of family {family!r}")


def _deepseek_config(family: str, sizes: dict[str, Any]) -> Any:
    """Latent attention with every width another one; the first of the layers is dense, in
    ``deepseek_v3_dense`` all of them are.

    Of 8 experts in 4 groups a token goes through 4 of 2 groups. ``deepseek_v2`` has no groups and no rank of
    queries. The rotary embedding is scaled, but for ``deepseek_v2_groups``, and the sequences of tests are
    longer than it was scaled from.
    """
    from transformers import DeepseekV2Config, DeepseekV3Config

    yarn = {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "beta_fast": 4.0,
    }
    latent = {
        "kv_lora_rank": 14,
        "q_lora_rank": 22,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
    }
    experts = {
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 28,
        "n_shared_experts": 2,
    }
    experts |= {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
    options = {**sizes, **latent, **experts, "num_key_value_heads": 6, "routed_scaling_factor": 1.7}
    rope: dict[str, Any] = {"rope_parameters": {**yarn, "mscale": 0.9, "mscale_all_dim": 0.6}}
    if family == "deepseek_v2":
        return DeepseekV2Config(**{**options, "q_lora_rank": None}, **rope)
    if family == "deepseek_v2_groups":
        return DeepseekV2Config(**options, topk_method="group_limited_greedy")
    if family == "deepseek_v3":
        return DeepseekV3Config(**options, **rope)
    if family == "deepseek_v3_dense":
        # no scale on cosine and sine, and another epsilon than that of the norms inside attention
        rope = {"rope_parameters": {**yarn, "mscale_all_dim": 0.6}}
        return DeepseekV3Config(
            **{**options, "first_k_dense_replace": sizes["num_hidden_layers"], "rms_norm_eps": 1e-3}, **rope
        )
    raise ValueError(f"no tiny model of family {family!r}")


def make_tiny(
    directory: Path, family: str, *, tied: bool, seed: int = 0, layers: int = LAYERS, **changes: Any
) -> Path:
    """A randomly initialised model of ``family`` saved in Hugging Face form; norms and biases are random too,
    so that none can be forgotten. ``changes`` are other values of its config."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = tiny_config(family, tied=tied, layers=layers)
    for name, value in changes.items():
        setattr(config, name, value)
    # The grouped matrix product that transformers prefers for experts wants rows of a multiple of 16 bytes,
    # which tiny models lack in bfloat16; who loads a mixture to compute with it passes the same option.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, experts_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            if name.endswith("embed_tokens.weight"):
                parameter.copy_(torch.randn_like(parameter) * 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.rand_like(buffer) - 0.5)
    model.save_pretrained(directory)
    return directory


def make_scoring(directory: Path, family: str, layers: int = LAYERS) -> Path:
    """A model of ``family`` that scores (transformers' sequence classification, one label), as ``make_tiny``
    makes language models. Its config says that embedding and output layer are tied, which means nothing for
    it."""
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(len(family) + layers)
    config = tiny_config(family, tied=True, layers=layers)
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(
        config, dtype=torch.float32, experts_implementation="eager"
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        embedding = model.get_input_embeddings().weight
        embedding.copy_(torch.randn_like(embedding) * 0.3)
    model.save_pretrained(directory)
    return directory


def policy_config(model: Path | str, **changes: Any) -> dict[str, Any]:
    """A complete policy configuration for a tiny model on Megatron.

    Args:
        model: Hugging Face directory.
        changes: ``tp``, ``pp``, ``sp``, ``cp``, ``comm`` (of CP), ``vpp``, ``first``, ``last`` (uneven
            pipeline), ``pipeline_layout``, ``batching`` (fixed, dynamic, packed), ``precision``, ``gbs``,
            ``mbs``, ``clip``, ``overlap``, ``distributed_optimizer``, ``recompute`` (True, or a list of
            parts), ``temperature``, ``lr``, ``weight_decay``, ``optimizer``, ``master``, ``exp_avg``,
            ``exp_avg_sq``; a ``generation`` dict is merged; of mixtures of experts ``ep``, ``etp``,
            ``dispatcher``, ``grouped``, ``freeze_router``, ``router_dtype``, ``balancing``, ``aux``, ``z``.
    """
    base = read_table("policy.yaml")
    config, generation = base["policy"], changes.pop("generation", {})
    config |= {"model_name": str(model), "tokenizer": {"name": str(model)}}
    megatron = config["megatron_cfg"]
    megatron["model_class"] = env.text(MODEL_CLASS) or None
    if "precision" in changes:
        megatron["optimizer"] |= {
            "bf16": changes["precision"] == "bfloat16",
            "fp16": changes["precision"] == "float16",
        }
    recompute = changes.pop("recompute", False)
    megatron["activation_checkpointing"] = bool(recompute)
    if isinstance(recompute, list):
        megatron |= {"recompute_granularity": "selective", "recompute_modules": recompute}
    budgets = {"enabled": True, "train_mb_tokens": 30, "logprob_mb_tokens": 37}
    batching, round_to = changes.pop("batching", "fixed"), changes.pop("round", 3)
    if batching == "dynamic":
        config["dynamic_batching"] = {**budgets, "sequence_length_round": round_to}
    elif batching == "packed":
        config["sequence_packing"] = budgets
    for name, value in changes.items():
        for path in base["changes"][name]:
            *sections, key = path.split(".")
            section = config
            for each in sections:
                section = section[each]
            section[key] = value
    optimizer = megatron["optimizer"]
    megatron["scheduler"]["lr_warmup_init"] = optimizer["lr"] / 4
    overlap = megatron["distributed_data_parallel_config"]
    overlap["overlap_param_gather"] = (
        overlap["overlap_grad_reduce"] and optimizer["use_distributed_optimizer"]
    )
    config["generation"] |= generation
    return config  # type: ignore[no-any-return]
