"""The value of every optional key that is absent. A key that is there, even with null, is left alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.config.arithmetic import sequence_share
from megarl.config.sections import Config
from megarl.errors import ConfigError
from megarl.models.generation.engines import engine_kind, is_engine

ORDER = (
    "algorithm",
    "seed",
    "run_dir",
    "cluster",
    "policy",
    "grpo",
    "sft",
    "loss_fn",
    "env",
    "data",
    "checkpointing",
    "logger",
    "profiler",
    "deadlines",
)
GRPO = {
    "max_num_epochs": None,
    "normalize_rewards": True,
    "use_leave_one_out_baseline": True,
    "val_period": 0,
    "val_at_start": False,
    "val_at_end": False,
    "max_val_samples": None,
    "max_rollout_turns": 1,
    "max_token_mult_prob_error": None,
    "std": "population",
}
LOSS: Config = {
    "disable_ppo_ratio": False,
    "reference_policy_kl_gradient": "exact",
    "log_ratio_clamp_value": 20.0,
    "kl_input_clamp_value": 20.0,
    "kl_output_clamp_value": 10.0,
}
ENV: Config = {
    "environment": "single_turn",
    "reward": None,
    "strip": True,
    "processes": None,
    "timeout_s": 5.0,
    "on_error": "raise",
    "on_timeout": "zero",
    "options": {},
}
SFT = {"max_num_epochs": None, "val_period": 0, "val_batches": None, "val_at_start": False, "val_at_end": False}
CHECKPOINTING = {
    "enabled": False,
    "metric_name": None,
    "higher_is_better": True,
    "save_period": 10,
    "keep_top_k": None,
    "resume": "auto",
    "accept_changes": False,
    "export_hf": False,
}
LOGGER = {"wandb_enabled": False, "tensorboard_enabled": False}
PROFILER: Config = {"steps": None, "nsys_workers": None, "torch_ranks": []}
DEADLINES = {"init_s": 1800.0, "step_s": 3600.0, "save_s": 1800.0}
GENERATION = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": None,
    "stop_token_ids": None,
    "stop_strings": None,
    "colocated": {"enabled": True},
}
DATA = {"validation": None, "shuffle": True, "system_prompt": None, "prompt_template": None}
MEGATRON: Config = {
    "empty_unused_memory_level": 0,
    "activation_checkpointing": False,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "pipeline_model_parallel_layout": None,
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "context_parallel_size": 1,
    "context_parallel_comm_type": None,
    "sequence_parallel": False,
    "expert_tensor_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "moe_token_dispatcher_type": "alltoall",
    "freeze_moe_router": False,
    "moe_router_dtype": None,
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": None,
    "moe_z_loss_coeff": None,
    "moe_router_bias_update_rate": 0.0,
    "env_vars": {},
}
MEGATRON_OPTIMIZER = {
    "optimizer": "adam",
    "min_lr": 0.0,
    "weight_decay": 0.01,
    "params_dtype": "float32",
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_eps": 1e-8,
    "sgd_momentum": 0.9,
    "use_distributed_optimizer": True,
    "use_precision_aware_optimizer": False,
}
MEGATRON_SCHEDULER = {
    "weight_decay_incr_style": "constant",
    "lr_decay_style": "constant",
    "lr_decay_iters": None,
    "lr_warmup_iters": 0,
    "lr_warmup_init": 0.0,
}
MEGATRON_DATA_PARALLEL = {
    "grad_reduce_in_fp32": False,
    "bucket_size": None,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "average_in_collective": False,
    "use_custom_fsdp": False,
    "data_parallel_sharding_strategy": "no_shard",
}
DTENSOR: Config = {
    "cpu_offload": False,
    "sequence_parallel": False,
    "activation_checkpointing": False,
    "tensor_parallel_size": 1,
    "context_parallel_size": 1,
    "context_parallel_comm_type": None,
    "custom_parallel_plan": None,
    "env_vars": {},
}
POLICY = {
    "trust_remote_code": False,
    "generation": None,
    "dtensor_cfg": {"enabled": False},
    "megatron_cfg": {"enabled": False},
    "dynamic_batching": {"enabled": False},
    "sequence_packing": {"enabled": False},
    "make_sequence_length_divisible_by": 1,
    "max_grad_norm": 1.0,
    "on_nonfinite": "skip",
    "max_consecutive_skips": 3,
    "refit_buffer_size_gb": None,
    "refit_checksum": False,
    "fsdp_offload_enabled": False,
    "activation_checkpointing_enabled": False,
    "optimizer": None,
    "scheduler": None,
}


def complete_run(config: Mapping[str, Any], name: str = "run") -> Config:
    """A copy of a run's configuration with every absent optional key filled in.

    Args:
        config: plain containers; need not be valid.
        name: what the run's directory is called when the configuration does not say.
    """
    run = copy.deepcopy(dict(config))
    run.setdefault("run_dir", str(Path("runs") / name))
    run["deadlines"] = fill(_section(run, "deadlines"), DEADLINES)
    run["policy"] = complete_policy(_section(run, "policy"))
    for key, defaults in (("grpo", GRPO), ("loss_fn", LOSS), ("sft", SFT), ("env", ENV), ("data", DATA)):
        if isinstance(run.get(key), dict):
            run[key] = fill(run[key], defaults)
    _fill_sizes_of_validation(run)
    run["checkpointing"] = fill(_section(run, "checkpointing"), CHECKPOINTING)
    run["logger"] = fill(_section(run, "logger"), LOGGER)
    run["profiler"] = fill(_section(run, "profiler"), PROFILER)
    if isinstance(run["run_dir"], str):
        run["checkpointing"].setdefault("checkpoint_dir", str(Path(run["run_dir"]) / "checkpoints"))
    if isinstance(run.get("cluster"), dict):
        run["cluster"] = fill(run["cluster"], {"device": "auto", "device_memory_gib": 80.0})
    return {key: run[key] for key in (*ORDER, *run) if key in run}


def complete_policy(policy: Mapping[str, Any]) -> Config:
    """A copy of a ``policy`` section with every absent optional key filled in."""
    filled = copy.deepcopy(dict(policy))
    if "make_sequence_length_divisible_by" not in filled:
        filled["make_sequence_length_divisible_by"] = _padding_of(filled)
    optimizer = _section(_section(filled, "megatron_cfg"), "optimizer")
    if "max_grad_norm" not in filled and "clip_grad" in optimizer:
        filled["max_grad_norm"] = optimizer["clip_grad"] or None
    filled = fill(filled, POLICY)
    if "logprob_batch_size" not in filled and "train_micro_batch_size" in filled:
        filled["logprob_batch_size"] = filled["train_micro_batch_size"]
    if isinstance(filled["generation"], dict):
        itself = "megatron" if _section(filled, "megatron_cfg").get("enabled") is True else "hf"
        filled["generation"] = fill(filled["generation"], {"backend": itself, **GENERATION})
        if is_engine(filled["generation"]["backend"]):
            filled["generation"] = _complete_engine(filled["generation"], filled)
        if "generation_batch_size" not in filled and "logprob_batch_size" in filled:
            filled["generation_batch_size"] = filled["logprob_batch_size"]
    if _section(filled, "megatron_cfg").get("enabled") is True:
        filled["megatron_cfg"] = _complete_megatron(filled["megatron_cfg"], filled)
    if isinstance(filled["optimizer"], dict):
        filled["optimizer"] = fill(filled["optimizer"], {"weight_decay_on_vectors": True})
    if _section(filled, "dtensor_cfg").get("enabled") is True:
        filled["dtensor_cfg"] = fill(filled["dtensor_cfg"], DTENSOR)
    return filled


def _complete_megatron(megatron: Config, policy: Config) -> Config:
    filled = fill(megatron, MEGATRON)
    precision = policy.get("precision")
    filled.setdefault("pipeline_dtype", precision)
    data_parallel = "distributed_data_parallel_config"
    filled[data_parallel] = fill(_section(filled, data_parallel), MEGATRON_DATA_PARALLEL)
    if isinstance(filled.get("optimizer"), dict):
        derived = {"bf16": precision == "bfloat16", "fp16": precision == "float16", "clip_grad": policy["max_grad_norm"] or 0.0}
        filled["optimizer"] = fill(filled["optimizer"], {**MEGATRON_OPTIMIZER, **derived})
        decay = filled["optimizer"]["weight_decay"]
        decays = {"start_weight_decay": decay, "end_weight_decay": decay}
        filled["scheduler"] = fill(_section(filled, "scheduler"), {**MEGATRON_SCHEDULER, **decays})
    return filled


def _complete_engine(generation: Config, policy: Config) -> Config:
    """The section with what its engine fills in; as it is where there is no such engine, which a rule says."""
    filled = fill(generation, {"model_name": policy.get("model_name")})
    try:
        return engine_kind(filled["backend"]).complete(filled, policy)
    except ConfigError:
        return filled


def _padding_of(policy: Config) -> int:
    """What lets all ranks of a sequence have equal parts, with sequence parallelism or without."""
    for section, tensor in (("megatron_cfg", "tensor_model_parallel_size"), ("dtensor_cfg", "tensor_parallel_size")):
        chosen = _section(policy, section)
        sizes = [chosen.get(key, 1) for key in (tensor, "context_parallel_size")]
        if chosen.get("enabled") is True and all(isinstance(size, int) and size > 0 for size in sizes):
            return sequence_share(sizes[0], sizes[1], sequence_parallel=True)
    return 1


def _fill_sizes_of_validation(run: Config) -> None:
    if isinstance(run.get("grpo"), dict) and "num_prompts_per_step" in run["grpo"]:
        run["grpo"].setdefault("val_batch_size", run["grpo"]["num_prompts_per_step"])
    if isinstance(run.get("sft"), dict):
        for key in ("global_batch_size", "micro_batch_size"):
            if f"train_{key}" in run["policy"]:
                run["sft"].setdefault(f"val_{key}", run["policy"][f"train_{key}"])


def fill(section: Mapping[str, Any], defaults: Mapping[str, Any]) -> Config:
    """The section, followed by the defaults of the keys it lacks."""
    return {**section, **{key: copy.deepcopy(value) for key, value in defaults.items() if key not in section}}


def _section(config: Mapping[str, Any], key: str) -> Config:
    """A section as a dictionary; empty when it is absent or not a section."""
    section = config.get(key)
    return dict(section) if isinstance(section, Mapping) else {}
