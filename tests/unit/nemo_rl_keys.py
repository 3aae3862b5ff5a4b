"""The keys of NeMo-RL's ``grpo_math_1B`` configurations, torch and Megatron, with the values they have there."""

from __future__ import annotations

from typing import Any

LONGEST, PRECISION = "${policy.max_total_sequence_length}", "${policy.precision}"


def _budget(rows: str) -> str:
    return f"${{mul:{LONGEST}, ${{policy.{rows}}}}}"


_BATCHING = {"train_mb_tokens": _budget("train_micro_batch_size"), "logprob_mb_tokens": _budget("logprob_batch_size")}
_ENGINE = {"tensor_parallel_size": 1, "gpu_memory_utilization": 0.6, "max_model_len": LONGEST}
_ADAM = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8}
_MEGATRON: dict[str, Any] = {
    "empty_unused_memory_level": 0,
    "activation_checkpointing": False,
    "converter_type": "Qwen2ForCausalLM",
    **dict.fromkeys(
        (
            "tensor_model_parallel_size",
            "expert_tensor_parallel_size",
            "expert_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
        ),
        1,
    ),
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "pipeline_dtype": PRECISION,
    "sequence_parallel": False,
    "freeze_moe_router": True,
    "moe_router_dtype": "fp64",
    "moe_router_load_balancing_type": "none",
    "moe_router_bias_update_rate": 0.0,
    "moe_permute_fusion": False,
    "apply_rope_fusion": True,
    "optimizer": {
        "optimizer": "adam",
        "lr": 5e-6,
        "min_lr": 5e-7,
        "weight_decay": 0.01,
        "bf16": True,
        "fp16": False,
        "params_dtype": "float32",
        **_ADAM,
        "sgd_momentum": 0.9,
        "use_distributed_optimizer": True,
        "use_precision_aware_optimizer": True,
        "clip_grad": "${policy.max_grad_norm}",
    },
    "scheduler": {
        **dict.fromkeys(("start_weight_decay", "end_weight_decay"), "${policy.megatron_cfg.optimizer.weight_decay}"),
        "weight_decay_incr_style": "constant",
        "lr_decay_style": "constant",
        "lr_decay_iters": 1000,
        "lr_warmup_iters": 13,
        "lr_warmup_init": 5e-7,
    },
    "distributed_data_parallel_config": {
        "grad_reduce_in_fp32": False,
        **dict.fromkeys(("overlap_grad_reduce", "overlap_param_gather", "average_in_collective"), True),
        "use_custom_fsdp": False,
        "data_parallel_sharding_strategy": "optim_grads_params",
    },
}


def grpo_math() -> dict[str, Any]:
    """``grpo_math_1B``: the DTensor worker, and vLLM beside it."""
    schedule = "torch.optim.lr_scheduler."
    return {
        "grpo": {
            "num_prompts_per_step": 32,
            "num_generations_per_prompt": 16,
            "max_rollout_turns": 1,
            "max_num_epochs": 1,
            "max_num_steps": 1_000_000,
            "normalize_rewards": True,
            "use_leave_one_out_baseline": True,
            "val_period": 10,
            "val_at_start": False,
            "overlong_filtering": False,
            "max_val_samples": 256,
            "val_batch_size": 256,
            "seed": 42,
            "async_grpo": {"enabled": False, "max_trajectory_age_steps": 1},
        },
        "loss_fn": {
            "reference_policy_kl_penalty": 0.01,
            "ratio_clip_min": 0.2,
            "ratio_clip_max": 0.2,
            "ratio_clip_c": None,
            **dict.fromkeys(
                ("use_on_policy_kl_approximation", "use_importance_sampling_correction", "sequence_level_importance_ratios"), False
            ),
            "token_level_loss": True,
        },
        "checkpointing": {
            "enabled": True,
            "checkpoint_dir": "results/grpo",
            "metric_name": "val_reward",
            "higher_is_better": True,
            "keep_top_k": 3,
            "save_period": 10,
            "checkpoint_must_save_by": None,
            "model_save_format": "safetensors",
            "save_consolidated": False,
        },
        "policy": {
            "model_name": "Qwen/Qwen2.5-1.5B",
            "tokenizer": {"name": "${policy.model_name}"},
            "train_global_batch_size": 512,
            "train_micro_batch_size": 4,
            "generation_batch_size": 32,
            "logprob_batch_size": 4,
            "max_total_sequence_length": 512,
            "precision": "bfloat16",
            "logprob_chunk_size": None,
            "dtensor_cfg": {
                "_v2": True,
                "enabled": True,
                **dict.fromkeys(("cpu_offload", "sequence_parallel", "activation_checkpointing"), False),
                "tensor_parallel_size": 1,
                "context_parallel_size": 1,
                "custom_parallel_plan": None,
            },
            "megatron_cfg": {"enabled": False, **_MEGATRON, "defer_fp32_logits": None, "fp8_cfg": None, "env_vars": None},
            "dynamic_batching": {"enabled": False, **_BATCHING, "sequence_length_round": 64},
            "sequence_packing": {
                "enabled": True,
                **_BATCHING,
                "algorithm": "modified_first_fit_decreasing",
                "sequence_length_round": 64,
            },
            "make_sequence_length_divisible_by": "${policy.dtensor_cfg.tensor_parallel_size}",
            "max_grad_norm": 1.0,
            "optimizer": {
                "name": "torch.optim.AdamW",
                "kwargs": {"lr": 5e-6, "weight_decay": 0.01, "betas": [0.9, 0.999], "eps": 1e-8, "foreach": False, "fused": False},
            },
            "scheduler": [
                {"name": f"{schedule}LinearLR", "kwargs": {"start_factor": 0.1, "end_factor": 1.0, "total_iters": 50}},
                {"name": f"{schedule}ConstantLR", "kwargs": {"factor": 1.0, "total_iters": 10**10}},
                {"milestones": [50]},
            ],
            "generation": {
                "backend": "vllm",
                "max_new_tokens": LONGEST,
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": None,
                "stop_token_ids": None,
                "stop_strings": None,
                "vllm_cfg": {
                    **_ENGINE,
                    "async_engine": False,
                    "precision": PRECISION,
                    "pipeline_parallel_size": 1,
                    "expert_parallel_size": 1,
                    "enforce_eager": False,
                    "use_deep_gemm": False,
                    "num_last_layers_in_bf16": 0,
                    "num_first_layers_in_bf16": 0,
                },
                "vllm_kwargs": {},
                "colocated": {"enabled": True, "resources": {"gpus_per_node": None, "num_nodes": None}},
            },
        },
        "data": {
            "max_input_seq_length": LONGEST,
            "prompt_file": "examples/prompts/cot.txt",
            "system_prompt_file": None,
            "shuffle": True,
            "dataset_name": "OpenMathInstruct-2",
        },
        "env": {"math": {"num_workers": 8, "math_verify_impl": "hf_math_verify"}},
        "logger": {
            "log_dir": "logs",
            "num_val_samples_to_print": 0,
            **dict.fromkeys(("wandb_enabled", "tensorboard_enabled", "mlflow_enabled", "swanlab_enabled"), False),
            "monitor_gpus": True,
            "wandb": {"project": "a-project", "name": "a-run"},
            "tensorboard": {},
            "mlflow": {"experiment_name": "an-experiment", "run_name": "a-run"},
            "gpu_monitoring": {"collection_interval": 10, "flush_interval": 10},
        },
        "cluster": {"gpus_per_node": 1, "num_nodes": 1},
    }


def grpo_math_megatron() -> dict[str, Any]:
    """``grpo_math_1B_megatron``: what it changes of the other, laid over it."""
    config = grpo_math()
    policy = config["policy"]
    config["checkpointing"] |= {"enabled": False, "checkpoint_dir": "results/grpo_megatron"}
    config["logger"]["monitor_gpus"] = False
    policy |= {"generation_batch_size": 64, "logprob_batch_size": 8, "optimizer": None}
    policy["make_sequence_length_divisible_by"] = "${policy.megatron_cfg.tensor_model_parallel_size}"
    policy["dtensor_cfg"]["enabled"], policy["megatron_cfg"]["enabled"] = False, True
    return config
