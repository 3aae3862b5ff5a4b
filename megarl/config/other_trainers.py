"""Keys and options of other trainers and of earlier versions, each with what to write instead."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import yaml
from omegaconf import OmegaConf

from megarl.config.algorithms import ALGORITHMS, KEY, run_type
from megarl.config.load import parse_hydra_overrides
from megarl.config.models import as_of_policy, model_sections
from megarl.config.nested import at
from megarl.config.schema import ABSENT, INSTEAD, REMOVED, check_section, known_paths, nearest
from megarl.errors import Violation

_MEGATRON, _VLLM, _LOSS = "policy.megatron_cfg", "policy.generation.vllm_cfg", "loss_fn"
_OPTIMIZER, _SCHEDULER = f"{_MEGATRON}.optimizer", f"{_MEGATRON}.scheduler"
_KL, _KL_TYPE = f"{_LOSS}.reference_policy_kl_penalty", f"{_LOSS}.reference_policy_kl_type"
_GLOBAL, _MICRO = "policy.train_global_batch_size", "policy.train_micro_batch_size"
_LONGEST, _PROMPT, _NEW = "policy.max_total_sequence_length", "data.max_input_seq_length", "policy.generation.max_new_tokens"
_ENGINE = "write policy.generation.backend=vllm, or lay a file over the recipe: --with base/vllm (the same GPUs) or base/vllm-apart"
_LORA = "remove it: all weights are trained"
_SHARDED = "remove it: the optimizer's state is sharded over the data-parallel ranks, and other parallel sizes stand in policy.megatron_cfg"
_CLIP = f"write {_LOSS}.ratio_clip_min={{value}} and {_LOSS}.ratio_clip_max={{value}}"
_PRECISION = "write policy.precision=bfloat16, float16 or float32"
_MEAN = f"write {_LOSS}.token_level_loss=true for a mean over all tokens, false for a mean over each response first"
_LOGGER = "write logger.wandb_enabled=true or logger.tensorboard_enabled=true; metrics.jsonl is always written"
_LOGGED = "remove it: every step is logged"
_FILE = "write the file itself, in megarl's keys, or a recipe: megarl train CONFIG key=value"
_WARMUP_SHARE = f"write {_SCHEDULER}.lr_warmup_iters={{value}} x the steps of the run, a number of steps"
_DECAY = f"write {_SCHEDULER}.lr_decay_style=constant, linear or cosine, and {_SCHEDULER}.lr_decay_iters, the steps of the run"
_RECOMPUTE = f"write {_MEGATRON}.activation_checkpointing=true, or false"
_RESUME = "write checkpointing.resume=auto or never; a run resumes in its run_dir by itself"
_REWARD = "write env.reward={value}, or path/to/file.py:function, or several in env.rewards"

TRL: Mapping[str, str] = {
    "model_name_or_path": "policy.model_name",
    "model": "policy.model_name",
    "model_revision": "write policy.model_name with the path of a local directory of that revision",
    "dtype": _PRECISION,
    "torch_dtype": _PRECISION,
    "bf16": _PRECISION,
    "fp16": _PRECISION,
    "trust_remote_code": "policy.trust_remote_code",
    "attn_implementation": "remove it: the backend chooses its kernel",
    "chat_template_path": "write policy.tokenizer.chat_template with the template itself",
    "config": _FILE,
    "dataset_name": "write data.train.name={value}, with data.train.prompt_key and data.train.answer_key",
    "dataset_config": "data.train.subset",
    "dataset_train_split": "data.train.split",
    "dataset_test_split": "write data.validation={name: ..., split: {value}, prompt_key: ..., answer_key: ...}",
    "max_prompt_length": _PROMPT,
    "max_completion_length": f"write {_NEW}={{value}}; {_LONGEST} must hold it and {_PROMPT}",
    "max_length": _LONGEST,
    "max_seq_length": _LONGEST,
    "packing": "policy.sequence_packing.enabled",
    "learning_rate": f"{_OPTIMIZER}.lr",
    "weight_decay": f"{_OPTIMIZER}.weight_decay",
    "adam_beta1": f"{_OPTIMIZER}.adam_beta1",
    "adam_beta2": f"{_OPTIMIZER}.adam_beta2",
    "adam_epsilon": f"{_OPTIMIZER}.adam_eps",
    "optim": f"write {_OPTIMIZER}.optimizer=adam or sgd",
    "max_grad_norm": "policy.max_grad_norm",
    "lr_scheduler_type": _DECAY,
    "warmup_ratio": _WARMUP_SHARE,
    "warmup_steps": f"{_SCHEDULER}.lr_warmup_iters",
    "per_device_train_batch_size": f"write {_MICRO}={{value}}; {_GLOBAL}, over all ranks, is {{value}} x data-parallel ranks x "
    "gradient_accumulation_steps",
    "gradient_accumulation_steps": f"write {_GLOBAL}, over all ranks: per_device_train_batch_size x data-parallel ranks x {{value}}",
    "per_device_eval_batch_size": "write sft.val_micro_batch_size={value} (SFT; likewise dpo, rm); what generates has "
    "policy.generation_batch_size",
    "gradient_checkpointing": _RECOMPUTE,
    "gradient_checkpointing_kwargs": f"write {_MEGATRON}.recompute_granularity=full or selective",
    "deepspeed": _SHARDED,
    "fsdp": _SHARDED,
    "fsdp_config": _SHARDED,
    "num_train_epochs": "write {algorithm}.max_num_epochs={value}; {algorithm}.max_num_steps bounds the run too",
    "max_steps": "{algorithm}.max_num_steps",
    "num_generations": "grpo.num_generations_per_prompt",
    "generation_batch_size": "write grpo.num_prompts_per_step={value} / grpo.num_generations_per_prompt: it counts prompts, not responses",
    "steps_per_generation": f"write {_GLOBAL}: the responses of a step / {{value}}",
    "num_iterations": "remove it: GRPO trains on its responses once; PPO has ppo.ppo_epochs={value}",
    "beta": f"write {_KL}={{value}} for GRPO (with {_LOSS}.reference_policy_kl_gradient=pathwise it is TRL's), or "
    "dpo.reference_policy_kl_penalty={value} for DPO",
    "epsilon": f"write {_LOSS}.ratio_clip_min={{value}}, and {_LOSS}.ratio_clip_max={{value}} unless there is an epsilon_high",
    "epsilon_high": f"{_LOSS}.ratio_clip_max",
    "delta": f"{_LOSS}.ratio_clip_c",
    "loss_type": f"write {_LOSS}.token_level_loss=true for dapo and bnpo, false for grpo; dr_grpo: --with base/dr-grpo; of DPO: "
    "dpo.preference_loss_type=sigmoid or ipo",
    "scale_rewards": "write grpo.normalize_rewards=true, or false",
    "importance_sampling_level": f"write {_LOSS}.sequence_level_importance_ratios=true for sequence, false for token",
    "mask_truncated_completions": "grpo.overlong_filtering",
    "reward_funcs": _REWARD,
    "reward_weights": "write env.rewards.NAME.weight of each reward",
    "reward_model_name_or_path": "reward_model.model_name",
    "temperature": "policy.generation.temperature",
    "top_p": "policy.generation.top_p",
    "top_k": "policy.generation.top_k",
    "use_vllm": _ENGINE,
    "vllm_mode": "write policy.generation.colocated.enabled=true for colocate, false for server",
    "vllm_gpu_memory_utilization": f"{_VLLM}.gpu_memory_utilization",
    "vllm_tensor_parallel_size": f"{_VLLM}.tensor_parallel_size",
    "vllm_max_model_length": f"{_VLLM}.max_model_len",
    "precompute_ref_log_probs": "dpo.cache_reference_logprobs",
    "rpo_alpha": "dpo.sft_loss_weight",
    "use_peft": _LORA,
    "lora_r": _LORA,
    "lora_alpha": _LORA,
    "eval_strategy": "write {algorithm}.val_period, the steps between validations; 0 for none",
    "eval_steps": "{algorithm}.val_period",
    "do_eval": "write {algorithm}.val_period, the steps between validations; 0 for none",
    "logging_steps": _LOGGED,
    "logging_strategy": _LOGGED,
    "log_completions": "logger.samples.enabled",
    "num_completions_to_print": "logger.samples.num_train_samples",
    "logging_dir": "logger.log_dir",
    "report_to": _LOGGER,
    "run_name": "logger.wandb.name",
    "save_steps": "checkpointing.save_period",
    "save_strategy": "write checkpointing.enabled=true, or false, and checkpointing.save_period",
    "save_total_limit": "checkpointing.keep_top_k",
    "resume_from_checkpoint": _RESUME,
    "output_dir": "run_dir",
    "overwrite_output_dir": _RESUME,
    "data_seed": "seed",
    "dataloader_num_workers": "remove it: records are tokenized before the first step",
    "push_to_hub": "write checkpointing.export_hf=true, and upload the directory that it leaves",
}
VERL: Mapping[str, str] = {
    "data.train_files": "write data.train.path={value}, with data.train.prompt_key and data.train.answer_key; for several "
    "files data.train is a list of sources",
    "data.val_files": "write data.validation.path={value}, with data.validation.prompt_key and data.validation.answer_key",
    "data.train_batch_size": "{algorithm}.num_prompts_per_step",
    "data.val_batch_size": "{algorithm}.val_batch_size",
    "data.max_prompt_length": _PROMPT,
    "data.max_response_length": f"write {_NEW}={{value}}; {_LONGEST} must hold it and {_PROMPT}",
    "data.prompt_key": "data.train.prompt_key",
    "data.truncation": "write data.filter_overlong_prompts=true to leave longer prompts out; none is cut",
    "actor_rollout_ref.model.path": "policy.model_name",
    "actor_rollout_ref.model.trust_remote_code": "policy.trust_remote_code",
    "actor_rollout_ref.model.enable_gradient_checkpointing": f"{_MEGATRON}.activation_checkpointing",
    "actor_rollout_ref.model.use_remove_padding": "policy.sequence_packing.enabled",
    "actor_rollout_ref.hybrid_engine": "policy.generation.colocated.enabled",
    "actor_rollout_ref.actor.strategy": "write policy.megatron_cfg.enabled=true, or --with base/dtensor or base/fsdp1",
    "actor_rollout_ref.actor.optim.lr": f"{_OPTIMIZER}.lr",
    "actor_rollout_ref.actor.optim.weight_decay": f"{_OPTIMIZER}.weight_decay",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": f"{_SCHEDULER}.lr_warmup_iters",
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": _WARMUP_SHARE,
    "actor_rollout_ref.actor.ppo_mini_batch_size": f"write {_GLOBAL}={{value}} x responses per prompt: it counts responses, not prompts",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": _MICRO,
    "actor_rollout_ref.actor.ppo_micro_batch_size": f"write {_MICRO}={{value}} / data-parallel ranks: it is per rank",
    "actor_rollout_ref.actor.use_dynamic_bsz": "policy.dynamic_batching.enabled",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "policy.dynamic_batching.train_mb_tokens",
    "actor_rollout_ref.actor.ppo_epochs": "remove it: GRPO trains on its responses once; PPO has ppo.ppo_epochs={value}",
    "actor_rollout_ref.actor.grad_clip": "policy.max_grad_norm",
    "actor_rollout_ref.actor.use_kl_loss": f"write {_KL}, 0 for false, and {_LOSS}.use_kl_in_reward=false",
    "actor_rollout_ref.actor.kl_loss_coef": f"write {_KL}={{value}}; with {_LOSS}.reference_policy_kl_gradient=pathwise it is verl's",
    "actor_rollout_ref.actor.kl_loss_type": f"write {_KL_TYPE}=k1 for kl, k2 for mse, k3 for low_var_kl",
    "actor_rollout_ref.actor.clip_ratio": _CLIP,
    "actor_rollout_ref.actor.clip_ratio_low": f"{_LOSS}.ratio_clip_min",
    "actor_rollout_ref.actor.clip_ratio_high": f"{_LOSS}.ratio_clip_max",
    "actor_rollout_ref.actor.clip_ratio_c": f"{_LOSS}.ratio_clip_c",
    "actor_rollout_ref.actor.entropy_coeff": f"{_LOSS}.entropy_coef",
    "actor_rollout_ref.actor.loss_agg_mode": _MEAN,
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": f"{_MEGATRON}.context_parallel_size",
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": f"{_MEGATRON}.tensor_model_parallel_size",
    "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": f"{_MEGATRON}.pipeline_model_parallel_size",
    "actor_rollout_ref.actor.fsdp_config": "write policy.dtensor_cfg.cpu_offload=true where parameters are to be in host memory",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": "policy.logprob_batch_size",
    "actor_rollout_ref.ref.fsdp_config": "remove it: the reference policy's weights are in host memory while they are not used",
    "actor_rollout_ref.rollout.name": _ENGINE,
    "actor_rollout_ref.rollout.mode": _ENGINE,
    "actor_rollout_ref.rollout.n": "{algorithm}.num_generations_per_prompt",
    "actor_rollout_ref.rollout.temperature": "policy.generation.temperature",
    "actor_rollout_ref.rollout.top_p": "policy.generation.top_p",
    "actor_rollout_ref.rollout.top_k": "write policy.generation.top_k={value} (for -1: null)",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": f"{_VLLM}.tensor_parallel_size",
    "actor_rollout_ref.rollout.gpu_memory_utilization": f"{_VLLM}.gpu_memory_utilization",
    "actor_rollout_ref.rollout.enforce_eager": f"{_VLLM}.enforce_eager",
    "actor_rollout_ref.rollout.max_model_len": f"{_VLLM}.max_model_len",
    "actor_rollout_ref.rollout.response_length": _NEW,
    "actor_rollout_ref.rollout.prompt_length": _PROMPT,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": "policy.logprob_batch_size",
    "actor_rollout_ref.rollout.val_kwargs.n": "{algorithm}.val_num_generations_per_prompt",
    "actor_rollout_ref.rollout.val_kwargs.temperature": "policy.generation.val_temperature",
    "actor_rollout_ref.rollout.val_kwargs.top_p": "policy.generation.val_top_p",
    "algorithm.adv_estimator": "write grpo.adv_estimator.name={value} for grpo, rloo, gdpo and reinforce_plus_plus, or the import path of "
    "a function of one's own; gae is a PPO recipe's (algorithm=ppo)",
    "algorithm.kl_ctrl.kl_coef": f"write {_KL}={{value}}, with {_LOSS}.use_kl_in_reward=true",
    "algorithm.kl_penalty": f"write {_KL_TYPE}=k1 for kl, k2 for mse, k3 for low_var_kl",
    "algorithm.use_kl_in_reward": f"{_LOSS}.use_kl_in_reward",
    "algorithm.norm_adv_by_std_in_grpo": "grpo.normalize_rewards",
    "algorithm.filter_groups.enable": "grpo.use_dynamic_sampling",
    "algorithm.gamma": "ppo.gae_gamma",
    "algorithm.lam": "ppo.gae_lambda",
    "critic.model.path": "critic.model_name",
    "critic.optim.lr": "critic.megatron_cfg.optimizer.lr",
    "critic.ppo_micro_batch_size_per_gpu": "critic.train_micro_batch_size",
    "critic.cliprange_value": "ppo.value_clip",
    "reward_model.enable": "write reward_model.model_name, or remove it: a section reward_model is what turns it on",
    "reward_model.model.path": "reward_model.model_name",
    "reward_model.reward_manager": _REWARD,
    "custom_reward_function.path": "write env.reward={value}:FUNCTION",
    "custom_reward_function.name": "write env.reward=path/to/file.py:{value}",
    "trainer.n_gpus_per_node": "cluster.gpus_per_node",
    "trainer.nnodes": "cluster.num_nodes",
    "trainer.device": "write cluster.device=cuda or cpu",
    "trainer.total_epochs": "write {algorithm}.max_num_epochs={value}; {algorithm}.max_num_steps bounds the run too",
    "trainer.total_training_steps": "{algorithm}.max_num_steps",
    "trainer.save_freq": "write checkpointing.save_period={value} (for -1: checkpointing.enabled=false)",
    "trainer.test_freq": "write {algorithm}.val_period={value} (for -1: 0)",
    "trainer.val_before_train": "{algorithm}.val_at_start",
    "trainer.critic_warmup": "ppo.critic_warmup_steps",
    "trainer.logger": _LOGGER,
    "trainer.project_name": "logger.wandb.project",
    "trainer.experiment_name": "write run_dir=runs/{value}; at Weights & Biases logger.wandb.name={value}",
    "trainer.default_local_dir": "checkpointing.checkpoint_dir",
    "trainer.resume_mode": _RESUME,
    "trainer.max_actor_ckpt_to_keep": "checkpointing.keep_top_k",
    "trainer.log_val_generations": "logger.samples.num_validation_samples",
}
TORCHTITAN: Mapping[str, str] = {
    "job.config_file": _FILE,
    "job.dump_folder": "run_dir",
    "job.description": "remove it: logger.wandb.name names the run",
    "model.name": "write policy.model_name with a Hugging Face id or a local directory",
    "model.flavor": "write policy.model_name with a Hugging Face id or a local directory",
    "model.hf_assets_path": "policy.tokenizer.name",
    "model.tokenizer_path": "policy.tokenizer.name",
    "optimizer.name": f"write {_OPTIMIZER}.optimizer=adam or sgd",
    "optimizer.lr": f"{_OPTIMIZER}.lr",
    "optimizer.beta1": f"{_OPTIMIZER}.adam_beta1",
    "optimizer.beta2": f"{_OPTIMIZER}.adam_beta2",
    "optimizer.eps": f"{_OPTIMIZER}.adam_eps",
    "optimizer.weight_decay": f"{_OPTIMIZER}.weight_decay",
    "lr_scheduler.warmup_steps": f"{_SCHEDULER}.lr_warmup_iters",
    "lr_scheduler.decay_type": _DECAY,
    "lr_scheduler.decay_ratio": _DECAY,
    "lr_scheduler.min_lr_factor": f"write {_OPTIMIZER}.min_lr={{value}} x {_OPTIMIZER}.lr: it is a rate, not a factor",
    "training.local_batch_size": f"write {_MICRO}={{value}}; {_GLOBAL} counts all ranks",
    "training.global_batch_size": _GLOBAL,
    "training.seq_len": _LONGEST,
    "training.max_norm": "policy.max_grad_norm",
    "training.steps": "{algorithm}.max_num_steps",
    "training.dataset": "data.train.name",
    "training.dataset_path": "data.train.path",
    "training.seed": "seed",
    "training.dtype": _PRECISION,
    "training.mixed_precision_param": _PRECISION,
    "training.deterministic": "policy.deterministic",
    "training.enable_cpu_offload": "policy.dtensor_cfg.cpu_offload",
    "debug.seed": "seed",
    "debug.deterministic": "policy.deterministic",
    "parallelism.data_parallel_replicate_degree": "remove it: data parallelism takes the ranks that the other sizes leave",
    "parallelism.data_parallel_shard_degree": "remove it: data parallelism takes the ranks that the other sizes leave",
    "parallelism.tensor_parallel_degree": f"{_MEGATRON}.tensor_model_parallel_size",
    "parallelism.pipeline_parallel_degree": f"{_MEGATRON}.pipeline_model_parallel_size",
    "parallelism.context_parallel_degree": f"{_MEGATRON}.context_parallel_size",
    "parallelism.expert_parallel_degree": f"{_MEGATRON}.expert_model_parallel_size",
    "parallelism.expert_tensor_parallel_degree": f"{_MEGATRON}.expert_tensor_parallel_size",
    "parallelism.pipeline_parallel_schedule": f"write {_MEGATRON}.virtual_pipeline_model_parallel_size for the interleaved one, or null",
    "checkpoint.enable": "checkpointing.enabled",
    "checkpoint.enable_checkpoint": "checkpointing.enabled",
    "checkpoint.interval": "checkpointing.save_period",
    "checkpoint.folder": "checkpointing.checkpoint_dir",
    "checkpoint.keep_latest_k": "checkpointing.keep_top_k",
    "checkpoint.async_mode": "write checkpointing.async_save=true for async, false for disabled",
    "checkpoint.last_save_in_hf": "checkpointing.export_hf",
    "checkpoint.initial_load_path": "policy.model_name",
    "activation_checkpoint.mode": f"{_RECOMPUTE} for none; {_MEGATRON}.recompute_granularity=full or selective",
    "metrics.log_freq": _LOGGED,
    "metrics.enable_tensorboard": "logger.tensorboard_enabled",
    "metrics.enable_wandb": "write logger.wandb_enabled={value} and logger.wandb.project",
    "metrics.save_tb_folder": "logger.tensorboard.log_dir",
    "profiling.enable_profiling": "write profiler.steps=[3, 5] and profiler.torch_ranks=[0]",
    "profiling.profile_freq": "write profiler.steps=[3, 5] and profiler.torch_ranks=[0]",
    "validation.enable": "write {algorithm}.val_period, the steps between validations; 0 for none",
    "validation.freq": "{algorithm}.val_period",
    "validation.steps": "sft.val_batches",
    "comm.init_timeout_seconds": "deadlines.init_s",
    "comm.train_timeout_seconds": "deadlines.step_s",
}
TABLES: Mapping[str, Mapping[str, str]] = {
    "NeMo-RL": INSTEAD,
    "TRL": TRL,
    "verl": VERL,
    "torchtitan": TORCHTITAN,
    "an earlier megarl": REMOVED,
}
"""By trainer: its dotted key to megarl's key, of which the value is the same, or to a sentence."""
SECTIONS = {
    "verl": ("actor_rollout_ref", "algorithm", "trainer", "custom_reward_function", "ray_kwargs", "ray_init", "reward_manager"),
    "torchtitan": (*sorted({key.partition(".")[0] for key in TORCHTITAN} - {"debug"}), "compile", "quantize", "experimental"),
}
"""Sections that megarl has not, whose other keys are named after their trainer too."""
_ON_TORCH = {
    f"{_OPTIMIZER}.lr": "policy.optimizer.kwargs.lr",
    f"{_OPTIMIZER}.weight_decay": "policy.optimizer.kwargs.weight_decay",
    f"{_OPTIMIZER}.adam_eps": "policy.optimizer.kwargs.eps",
    f"{_MEGATRON}.tensor_model_parallel_size": "policy.dtensor_cfg.tensor_parallel_size",
    f"{_MEGATRON}.context_parallel_size": "policy.dtensor_cfg.context_parallel_size",
    f"{_MEGATRON}.activation_checkpointing": "policy.dtensor_cfg.activation_checkpointing",
}
"""Keys of the Megatron backend, as the torch backends have them."""
_ENTRIES = {key: (trainer, text) for trainer, table in TABLES.items() for key, text in table.items()}
_ABOVE = {key[: dot.start()] for key in _ENTRIES for dot in re.finditer(r"\.", key)}
_IS_KEY = re.compile(r"[\w.{}]+")


def without_foreign_keys(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Violation]]:
    """Split a configuration into what is megarl's, or nobody's, and violations of the keys of other trainers."""
    found: list[Violation] = []
    known = frozenset(known_paths(run_type(config.get(KEY))))

    def kept_of(section: Mapping[str, Any], above: str = "") -> dict[str, Any]:
        kept = {}
        for name, value in section.items():
            path = f"{above}{name}"
            fault = None if path in known else foreign_fault(path, value, config)
            if isinstance(value, Mapping) and value and (path not in _ENTRIES or path in _ABOVE):
                inner = kept_of(value, f"{path}.")
                if inner or (path in known and path != KEY):
                    kept[name] = inner
            elif fault is not None:
                found.append(fault)
            else:
                kept[name] = value
        return kept

    return kept_of(config), found


def foreign_fault(path: str, value: object, config: Mapping[str, Any]) -> Violation | None:
    """Return the violation of a key of another trainer, with what to write instead; None for any other key.

    Args:
        path: dotted key, which megarl has not.
        value: what stands there.
        config: of the run, as far as it is known: its algorithm and its backend decide on some keys.
    """
    entry = _ENTRIES.get(path) or _ENTRIES.get(as_of_policy(path, model_sections(config)))
    if entry is not None:
        trainer, text = entry
        return Violation(path, value, f"{trainer} has this key, megarl has not", _fix(text, value, config))
    for trainer, sections in SECTIONS.items():
        if path.partition(".")[0] in sections:
            word = path.rpartition(".")[2].split("_")[-1]
            fix = f"remove it; megarl keys {word} looks for a counterpart"
            return Violation(path, value, f"{trainer} has this section, megarl has not", fix)
    return None


def _fix(text: str, value: object, config: Mapping[str, Any]) -> str:
    algorithm = config.get(KEY)
    section = algorithm if isinstance(algorithm, str) and algorithm in ALGORITHMS else "grpo"
    text = text.replace("{algorithm}", section)
    if _IS_KEY.fullmatch(text):
        text = f"write {text}={{value}}"
    if at(config, "policy.learning_rate") is not None:
        text = text.replace(f"write {_OPTIMIZER}.lr=", "write policy.learning_rate=")
    if at(config, "policy.megatron_cfg.enabled") is False or at(config, "policy.optimizer") is not None:
        for megatron, torch in _ON_TORCH.items():
            text = re.sub(rf"{re.escape(megatron)}\b", torch, text)
    return text.replace("{value}", _as_word(value))


def _as_word(value: object) -> str:
    """A value as it is written after ``key=``."""
    return value if isinstance(value, str) else json.dumps(value)


def split_overrides(overrides: Sequence[str]) -> tuple[list[str], list[tuple[str, object]]]:
    """Split overrides of a command line into megarl's and pairs of key and value of other trainers."""
    own, foreign = [], []
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.lstrip("+").strip()
        if equals and key in _ENTRIES:
            foreign.append((key, _value(text)))
        else:
            own.append(override)
    return own, foreign


def override_faults(overrides: Sequence[str]) -> list[Violation]:
    """Return what is wrong with overrides whatever the configuration that they are for.

    Raises:
        OverridesError: one cannot be read.
    """
    added = [override for override in overrides if not override.startswith("~")]
    written = OmegaConf.to_container(parse_hydra_overrides(OmegaConf.create(), added), resolve=False)
    config, found = without_foreign_keys(cast(dict[str, Any], written))
    return [*found, *(fault for fault in check_section(config, run_type(config.get(KEY))) if fault.value is not ABSENT)]


def _value(text: str) -> object:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def option_faults(options: Iterable[tuple[str, object]], config: Mapping[str, Any], own: Sequence[str]) -> Iterator[Violation]:
    """Yield the violations of options that a command does not have, and of keys of other trainers, with what to write instead.

    Args:
        options: with their values; ``True`` for one without.
        config: of the run, as far as it is known.
        own: the options that the command has.
    """
    known = known_paths(run_type(config.get(KEY)))
    for option, value in options:
        path = option.lstrip("-").replace("-", "_")
        similar = next((each for each in own if each.strip("-").replace("-", "") == path.replace("_", "")), None)
        fault = None if path in known else foreign_fault(path, value, config)
        near = path if path in known else nearest(path, (*known, *_ENTRIES))
        if fault is not None:
            bound = fault.bound.replace("this key", "this option") if option.startswith("-") else fault.bound
            yield Violation(option, value, bound, fault.fix)
        elif similar is not None:
            yield Violation(option, value, "there is no such option", f"write {similar}")
        elif near in known:
            bound = "settings of a run are words of the form key=value, without dashes"
            yield Violation(option, value, bound, f"{'write' if near == path else 'did you mean'} {near}={_as_word(value)}")
        elif near is not None:
            trainer, text = _ENTRIES[near]
            yield Violation(option, value, f"there is no such option; {trainer} has {near}", _fix(text, value, config))
        else:
            word = path.rpartition(".")[2].rpartition("_")[2]
            yield Violation(option, value, "there is no such option", f"megarl keys {word} looks for a key, which is set by key=value")
