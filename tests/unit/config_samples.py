"""Valid configurations and model sizes that the configuration tests start from. All sizes differ."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from converters.model_config.architecture import ModelFacts
from converters.model_config.gated_delta import GatedDeltaNet
from converters.model_config.mixture import MixtureOfExperts
from megarl.config import complete_run

FACTS = ModelFacts(
    family="qwen2",
    num_layers=10,
    hidden_size=96,
    num_attention_heads=12,
    num_key_value_heads=4,
    head_dim=8,
    ffn_hidden_size=180,
    vocab_size=1003,
    tied_embeddings=False,
    max_position=700,
    qkv_bias=True,
    attention_output_bias=False,
    mlp_bias=False,
    qk_norm=False,
)


def _shared() -> dict[str, Any]:
    return {
        "seed": 7,
        "policy": {
            "model_name": "owner/a-model-that-is-on-no-disk",
            "tokenizer": {"name": "owner/a-model-that-is-on-no-disk"},
            "train_global_batch_size": 30,
            "train_micro_batch_size": 5,
            "precision": "bfloat16",
            "max_total_sequence_length": 610,
            "megatron_cfg": {
                "enabled": True,
                "tensor_model_parallel_size": 2,
                "pipeline_model_parallel_size": 2,
                "optimizer": {"lr": 1e-4},
            },
        },
        "data": {
            "train": {"path": "train.jsonl", "prompt_key": "question", "answer_key": "answer"},
            "validation": {
                "name": "owner/records",
                "split": "test",
                "prompt_key": "question",
                "answer_key": "answer",
            },
            "max_input_seq_length": 110,
        },
        "cluster": {"gpus_per_node": 6, "num_nodes": 2, "device": "cpu"},
    }


def raw_grpo() -> dict[str, Any]:
    """A GRPO run as a user writes it: required keys and a few others. 12 ranks: pipeline 2, data 3, tensor
    2."""
    run = _shared()
    run["policy"]["generation"] = {"backend": "megatron", "max_new_tokens": 500}
    return {
        "algorithm": "grpo",
        **run,
        "grpo": {"num_prompts_per_step": 15, "num_generations_per_prompt": 4, "max_num_steps": 9},
        "loss_fn": {
            "reference_policy_kl_penalty": 0.01,
            "ratio_clip_min": 0.2,
            "ratio_clip_max": 0.28,
            "ratio_clip_c": None,
            "use_on_policy_kl_approximation": False,
            "use_importance_sampling_correction": True,
            "token_level_loss": True,
        },
        "env": {"reward": "exact_match"},
    }


def raw_ppo() -> dict[str, Any]:
    """A PPO run on the same ranks; the critic has another learning rate and smaller micro-batches."""
    run = raw_grpo()
    del run["grpo"]
    ppo = {"num_prompts_per_step": 60, "max_num_steps": 9}
    critic = {"train_micro_batch_size": 2, "megatron_cfg": {"optimizer": {"lr": 3e-4}}}
    return {**run, "algorithm": "ppo", "ppo": ppo, "critic": critic}


def raw_distillation() -> dict[str, Any]:
    """On-policy distillation on the same ranks, from a teacher with other ranks to a layer."""
    run = raw_grpo()
    del run["grpo"], run["loss_fn"]
    distillation = {"num_prompts_per_step": 60, "max_num_steps": 9, "topk_logits_k": 16}
    teacher = {
        "model_name": "owner/a-larger-model",
        "megatron_cfg": {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1},
    }
    return {**run, "algorithm": "distillation", "distillation": distillation, "teacher": teacher}


def raw_sft() -> dict[str, Any]:
    """An SFT run on the same ranks."""
    run = _shared()
    return {"algorithm": "sft", **run, "sft": {"max_num_steps": 11, "val_period": 3}}


def raw_dpo() -> dict[str, Any]:
    """A DPO run on the same ranks; its batch sizes count pairs."""
    run = _shared()
    pairs = {"prompt_key": "prompt", "chosen_key": "chosen", "rejected_key": "rejected"}
    sources = {key: {"path": f"{key}.jsonl", **pairs} for key in ("train", "validation")}
    return {
        "algorithm": "dpo",
        **run,
        "data": {**run["data"], **sources},
        "dpo": {"max_num_steps": 11, "val_period": 3},
    }


def raw_rm() -> dict[str, Any]:
    """A reward model on the same ranks."""
    run = _shared()
    run["policy"]["reward_model_cfg"] = {"enabled": True}
    for source in (run["data"]["train"], run["data"]["validation"]):
        del source["answer_key"]
        source |= {"chosen_key": "better", "rejected_key": "worse"}
    return {"algorithm": "rm", **run, "rm": {"max_num_steps": 11, "val_period": 3}}


def changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``config`` with the values at dotted paths replaced; ``...`` removes the key."""
    for path, value in changes.items():
        *parents, name = path.split(".")
        section = config
        for parent in parents:
            section = section.setdefault(parent, {})
        if value is ...:
            section.pop(name, None)
        else:
            section[name] = value
    return config


def complete(raw: dict[str, Any], changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """A changed run with its defaults."""
    return complete_run(changed(raw, changes or {}))


def gated_delta(*, num_layers: int = 10, **changes: Any) -> GatedDeltaNet:
    """Gated delta nets of 4 key and 8 value heads in three layers of four."""
    sizes = {"key_heads": 4, "value_heads": 8, "key_width": 24, "value_width": 20, "convolution": 4}
    return GatedDeltaNet(
        **{"layers": tuple(bool((layer + 1) % 4) for layer in range(num_layers)), **sizes, **changes}
    )


def mixture(*, num_layers: int = 10, dense_layers: Collection[int] = (), **changes: Any) -> MixtureOfExperts:
    """Three of eight experts of width 84 in all layers but those named."""
    sizes = {
        "num_experts": 8,
        "experts_per_token": 3,
        "ffn_hidden_size": 84,
        "normalized": True,
        "auxiliary_loss_coefficient": 0.0,
    }
    return MixtureOfExperts(
        **{
            "sparse_layers": tuple(layer not in dense_layers for layer in range(num_layers)),
            **sizes,
            **changes,
        }
    )
