"""Every rule between keys: a valid run passes, and each rule is seen to fire on the key it is about."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from converters.families import FAMILIES
from megarl.config import check, complete_run
from megarl.config.algorithms import run_type
from megarl.config.rules import RULES, bounded_keys
from megarl.config.rules.not_yet import NOT_YET_RULES
from megarl.config.rules.view import NotApplicableError, View
from megarl.models.generation.vllm.configuration import RULES as VLLM_RULES
from tests.tiers import sampled
from tests.unit.config_samples import FACTS, complete, mixture, raw_distillation, raw_dpo, raw_grpo, raw_ppo, raw_rm, raw_sft

MEGATRON = "policy.megatron_cfg"
DTENSOR = "policy.dtensor_cfg"
OPTIMIZER = f"{MEGATRON}.optimizer"
SCHEDULER = f"{MEGATRON}.scheduler"
DATA_PARALLEL = f"{MEGATRON}.distributed_data_parallel_config"
GENERATION = "policy.generation"
SHORT = {"m": MEGATRON, "d": DTENSOR, "o": OPTIMIZER, "s": SCHEDULER, "ddp": DATA_PARALLEL, "g": GENERATION}
ON_DTENSOR = {"m.enabled": False, "d.enabled": True, "d.tensor_parallel_size": 2, "o": ...}
ON_FSDP1 = {"m.enabled": False}
ON_VLLM = {"g.backend": "vllm"}
OWN = {"algorithm": f"{Path(__file__).parents[1]}/toys/reinforce.py:Reinforce"}
SELECTIVE = {"m.activation_checkpointing": True, "m.recompute_granularity": "selective"}
KEYS = {"prompt_key": "question", "answer_key": "answer"}
A = {"path": "a.jsonl", **KEYS}
B = {"path": "b.jsonl", **KEYS}
MIXTURE = {"mixture": mixture()}
SEQUENCES = {"loss_fn.sequence_level_importance_ratios": True, "loss_fn.token_level_loss": False}
TOKENS = {"loss_fn.sequence_level_ratio_gradient": "token"}
OWN_ENGINE = {"g.backend": "tests/toys/transformers_engine.py:KIND"}
ONCE = {"loss_fn.force_on_policy_ratio": True, "policy.train_global_batch_size": 60}
IN_REWARD = {"loss_fn.use_kl_in_reward": True, "loss_fn.reference_policy_kl_type": "k1"}
FLEX = {"m.moe_token_dispatcher_type": "flex"}
ON_GPUS = {"cluster.device": "cuda"}
ROUTER_OPTIONS = {
    "m.moe_token_dispatcher_type": "allgather",
    "m.moe_permute_fusion": True,
    "m.freeze_moe_router": True,
    "m.moe_router_dtype": "fp64",
    "m.moe_router_load_balancing_type": "aux_loss",
    "m.moe_aux_loss_coeff": 0.01,
    "m.moe_z_loss_coeff": 0.001,
    "m.moe_router_bias_update_rate": 0.001,
}


def long(path: str) -> str:
    """A dotted path with its section written out."""
    section, dot, rest = path.partition(".")
    return SHORT.get(section, section) + dot + rest


# (rule, changes to the GRPO run, changes to the model's sizes, keys the rule must name); SHORT names sections by one letter.
CASES: list[tuple[str, dict[str, Any], dict[str, Any], set[str]]] = [
    ("one_backend", {"d.enabled": True}, {}, {"d.enabled"}),
    ("torch_optimizer_unused", {"policy.optimizer": {"name": "torch.optim.AdamW", "kwargs": {}}}, {}, {"policy.optimizer"}),
    ("torch_optimizer_given", ON_DTENSOR, {}, {"policy.optimizer"}),
    (
        "switches_of_fsdp1",
        {"policy.activation_checkpointing_enabled": True, "policy.fsdp_offload_enabled": True},
        {},
        {"policy.activation_checkpointing_enabled", "policy.fsdp_offload_enabled"},
    ),
    ("converter_is_the_model_s", {"m.converter_type": "LlamaForCausalLM"}, {}, {"m.converter_type"}),
    ("converter_is_the_model_s", {"m.converter_type": "Qwen2MoeForCausalLM"}, {}, {"m.converter_type"}),
    ("recomputed_parts", {"m.recompute_granularity": "selective"}, {}, {"m.recompute_granularity"}),
    ("recomputed_parts", {"m.activation_checkpointing": True, "m.recompute_modules": ["mlp"]}, {}, {"m.recompute_modules"}),
    ("recomputed_parts", {**SELECTIVE, "m.recompute_modules": []}, {}, {"m.recompute_modules"}),
    ("recomputed_parts", {**SELECTIVE, "m.recompute_modules": ["core_attn", "moe"]}, {}, {"m.recompute_modules"}),
    ("recomputed_parts", {**SELECTIVE, "m.recompute_modules": ["mlp"]}, MIXTURE, {"m.recompute_modules"}),
    ("transformer_engine_needs_a_gpu", {"m.transformer_engine": True, "cluster.device": "cpu"}, {}, {"m.transformer_engine"}),
    ("dtensor_context_parallel", {**ON_DTENSOR, "d.context_parallel_size": 3}, {"family": "gemma3_text"}, {"d.context_parallel_size"}),
    ("dtensor_plan", {**ON_DTENSOR, "d.sequence_parallel": True}, {"family": "phi3"}, {"d.sequence_parallel"}),
    ("dtensor_plan", {**ON_DTENSOR, "d.sequence_parallel": True, "d.tensor_parallel_size": 1}, {}, {"d.sequence_parallel"}),
    ("fsdp1_limits", {**ON_FSDP1, "policy.precision": "float16"}, {}, {"policy.precision"}),
    ("ranks_divide", {"cluster.gpus_per_node": 5}, {}, {"cluster.gpus_per_node"}),
    ("ranks_divide", {"cluster.gpus_per_node": 1}, {}, {"cluster.gpus_per_node"}),
    # 12 ranks divide, the 5 that generation leaves of one node do not
    (
        "ranks_divide",
        {
            "g.colocated": {"enabled": False, "resources": {"gpus_per_node": 7}},
            "cluster.num_nodes": 1,
            "cluster.gpus_per_node": 12,
            **ON_VLLM,
        },
        {},
        {"cluster.gpus_per_node"},
    ),
    (
        "tensor_stays_inside_nodes",
        {"m.tensor_model_parallel_size": 2, "cluster.gpus_per_node": 3, "cluster.num_nodes": 4},
        {},
        {"m.tensor_model_parallel_size"},
    ),
    # of five nodes one generates, and the 12 ranks of the others divide
    (
        "tensor_stays_inside_nodes",
        {"g.colocated": {"enabled": False, "resources": {"num_nodes": 1}}, "cluster.gpus_per_node": 3, "cluster.num_nodes": 5, **ON_VLLM},
        {},
        {"m.tensor_model_parallel_size"},
    ),
    ("sequence_parallel_needs_tensor", {"m.sequence_parallel": True, "m.tensor_model_parallel_size": 1}, {}, {"m.sequence_parallel"}),
    (
        "sequence_length_divides",
        {"m.sequence_parallel": True, "policy.make_sequence_length_divisible_by": 3},
        {},
        {"policy.make_sequence_length_divisible_by"},
    ),
    (
        "sequence_length_divides",
        {"m.context_parallel_size": 3, "policy.make_sequence_length_divisible_by": 4},
        {},
        {"policy.make_sequence_length_divisible_by"},
    ),
    (
        "sinks_are_gathered",
        {"m.context_parallel_size": 2, "m.context_parallel_comm_type": "p2p"},
        {"family": "gpt_oss"},
        {"m.context_parallel_comm_type"},
    ),
    ("layers_divide", {}, {"num_layers": 11}, {"m.pipeline_model_parallel_size"}),
    (
        "layers_divide",
        {"m.num_layers_in_first_pipeline_stage": 4, "m.num_layers_in_last_pipeline_stage": 5},
        {},
        {"m.num_layers_in_first_pipeline_stage"},
    ),
    (
        "layers_divide",
        {"m.num_layers_in_last_pipeline_stage": 5, "m.pipeline_model_parallel_size": 1},
        {},
        {"m.num_layers_in_last_pipeline_stage"},
    ),
    ("widths_divide", {"m.tensor_model_parallel_size": 8}, {"num_key_value_heads": 3}, {"m.tensor_model_parallel_size"}),
    ("widths_divide", {"m.sequence_parallel": True}, {"mixture": mixture(shared_ffn_hidden_size=33)}, {"m.tensor_model_parallel_size"}),
    ("widths_divide", {**ON_DTENSOR, "d.tensor_parallel_size": 8}, {}, {"d.tensor_parallel_size"}),
    ("hidden_divides", {}, {"num_key_value_heads": 5}, {"policy.model_name"}),
    ("experts_divide", {"m.expert_model_parallel_size": 3}, MIXTURE, {"m.expert_model_parallel_size", "m.sequence_parallel"}),
    (
        "expert_widths_divide",
        {"m.expert_tensor_parallel_size": 3},
        {"mixture": mixture(ffn_hidden_size=20)},
        {"m.expert_tensor_parallel_size"},
    ),
    ("expert_ranks_divide", {"m.expert_model_parallel_size": 4}, MIXTURE, {"m.expert_model_parallel_size"}),
    ("expert_ranks_divide", {"m.expert_tensor_parallel_size": 4}, MIXTURE, {"m.expert_tensor_parallel_size"}),
    (
        "experts_are_there",
        {"m.expert_model_parallel_size": 2, "m.expert_tensor_parallel_size": 3},
        {},
        {"m.expert_model_parallel_size", "m.expert_tensor_parallel_size"},
    ),
    (
        "tokens_get_to_their_experts",
        {**FLEX, "m.moe_permute_fusion": True, "m.expert_model_parallel_size": 2},
        MIXTURE,
        {"m.moe_token_dispatcher_type", "m.moe_permute_fusion"},
    ),
    ("tokens_get_to_their_experts", {**FLEX, **ON_GPUS}, MIXTURE, {"m.moe_token_dispatcher_type"}),
    ("tokens_get_to_their_experts", {**FLEX, **ON_GPUS, "m.expert_tensor_parallel_size": 3}, MIXTURE, {"m.moe_token_dispatcher_type"}),
    (
        "tokens_get_to_their_experts",
        {**FLEX, **ON_GPUS, "m.expert_model_parallel_size": 2, "policy.precision": "float16"},
        MIXTURE,
        {"m.moe_token_dispatcher_type"},
    ),
    ("experts_are_there", FLEX, {}, {"m.moe_token_dispatcher_type"}),
    ("experts_are_there", ROUTER_OPTIONS, {}, set(ROUTER_OPTIONS)),
    (
        "router_options_fit",
        {"m.moe_router_bias_update_rate": 0.001, "m.moe_aux_loss_coeff": 0.01},
        MIXTURE,
        {"m.moe_router_bias_update_rate", "m.moe_aux_loss_coeff"},
    ),
    ("layers_divide", {"m.virtual_pipeline_model_parallel_size": 4}, {}, {"m.virtual_pipeline_model_parallel_size"}),
    (
        "written_layout_fits",
        {"m.pipeline_model_parallel_layout": "Et*3|tL", "m.num_layers_in_last_pipeline_stage": 2},
        {},
        {"m.pipeline_model_parallel_layout", "m.num_layers_in_last_pipeline_stage"},
    ),
    ("written_layout_fits", {"m.pipeline_model_parallel_layout": "Et|x*9|L"}, {}, {"m.pipeline_model_parallel_layout"}),
    ("written_layout_fits", {"m.pipeline_model_parallel_layout": "Et*9|(t|)*1|EL"}, {}, {"m.pipeline_model_parallel_layout"}),
    (
        "written_layout_fits",
        {
            "m.pipeline_model_parallel_layout": "Et*4|t*4|t|tL",
            "m.virtual_pipeline_model_parallel_size": 3,
            "m.pipeline_model_parallel_size": 2,
        },
        {},
        {"m.virtual_pipeline_model_parallel_size"},
    ),
    (
        "chunks_need_stages",
        {"m.virtual_pipeline_model_parallel_size": 2, "m.pipeline_model_parallel_size": 1},
        {},
        {"m.virtual_pipeline_model_parallel_size"},
    ),
    ("samples_fill_global_batches", {"policy.train_global_batch_size": 45}, {}, {"policy.train_global_batch_size"}),
    (
        "on_policy_batch_is_trained_on_once",
        {"loss_fn.force_on_policy_ratio": True, "policy.train_global_batch_size": 24},
        {},
        {"loss_fn.force_on_policy_ratio"},
    ),
    ("dynamic_sampling_is_told_what_it_reads", {"grpo.batch_multiplier": 2.0}, {}, {"grpo.batch_multiplier"}),
    (
        "dynamic_sampling_is_told_what_it_reads",
        {"grpo.dynamic_sampling_max_gen_batches": 3},
        {},
        {"grpo.dynamic_sampling_max_gen_batches"},
    ),
    (
        "dynamic_sampling_is_told_what_it_reads",
        {"grpo.use_dynamic_sampling": True, "grpo.num_generations_per_prompt": 1},
        {},
        {"grpo.num_generations_per_prompt"},
    ),
    (
        "dynamic_sampling_is_told_what_it_reads",
        {"grpo.use_dynamic_sampling": True, "grpo.adv_estimator.name": "reinforce_plus_plus"},
        {},
        {"grpo.use_dynamic_sampling"},
    ),
    (
        "dynamic_sampling_is_told_what_it_reads",
        {"grpo.use_dynamic_sampling": True, "grpo.batch_multiplier": 1.01},
        {},
        {"grpo.batch_multiplier"},
    ),
    (
        "dynamic_sampling_is_told_what_it_reads",
        {"grpo.use_dynamic_sampling": True, "grpo.max_num_epochs": 2},
        {},
        {"grpo.max_num_epochs"},
    ),
    ("entropy_can_be_raised", {"loss_fn.entropy_coef": 0.01, "g.top_k": 1}, {}, {"loss_fn.entropy_coef"}),
    ("engine_takes_its_section", {"g.engine_cfg": {"threads": 2}}, {}, {"g.engine_cfg"}),
    ("engine_takes_its_section", {**OWN_ENGINE, "g.engine_cfg": {"thread": 2}}, {}, {"g.engine_cfg.thread"}),
    ("engine_takes_its_section", {**OWN_ENGINE, "g.engine_cfg": {"threads": 0}}, {}, {"g.engine_cfg.threads"}),
    ("estimator_is_known", {"grpo.adv_estimator.name": "rlo"}, {}, {"grpo.adv_estimator.name"}),
    ("estimator_is_known", {"grpo.adv_estimator.name": "nowhere.py:name"}, {}, {"grpo.adv_estimator.name"}),
    ("estimator_is_known", {"grpo.adv_estimator.name": "math:pi"}, {}, {"grpo.adv_estimator.name"}),
    ("estimator_is_known", {"grpo.adv_estimator": {"name": "grpo", "options": {"scale": 2.0}}}, {}, {"grpo.adv_estimator.options"}),
    ("loss_is_known", {"loss_fn.function": "dapo"}, {}, {"loss_fn.function"}),
    ("loss_is_known", {"loss_fn.options": {"scale": 2.0}}, {}, {"loss_fn.options"}),
    ("estimator_is_told_what_it_reads", {"grpo.num_generations_per_prompt": 1}, {}, {"grpo.num_generations_per_prompt"}),
    (
        "estimator_is_told_what_it_reads",
        {"grpo.adv_estimator": {"name": "grpo", "minus_baseline": True}},
        {},
        {"grpo.adv_estimator.minus_baseline"},
    ),
    (
        "estimator_is_told_what_it_reads",
        {"grpo.adv_estimator.name": "rloo", "grpo.std": "sample", "grpo.use_leave_one_out_baseline": False},
        {},
        {"grpo.std", "grpo.use_leave_one_out_baseline"},
    ),
    (
        "estimator_is_told_what_it_reads",
        {"grpo.adv_estimator.name": "reinforce_plus_plus", "grpo.normalize_rewards": False},
        {},
        {"grpo.normalize_rewards"},
    ),
    (
        "estimator_is_told_what_it_reads",
        {"grpo.advantage_clip_low": 0.0, "grpo.advantage_clip_high": 0.0},
        {},
        {"grpo.advantage_clip_low"},
    ),
    ("estimator_is_told_what_it_reads", {"grpo.std": "sample", "grpo.normalize_rewards": False}, {}, {"grpo.std"}),
    *(
        ("ratios_of_sequences_meet_advantages_of_tokens", {**SEQUENCES, **change}, {}, {f"loss_fn.{key}"})
        for change, key in (
            ({**TOKENS}, "sequence_level_ratio_gradient"),
            ({**TOKENS, "grpo.adv_estimator.name": "rloo"}, "sequence_level_ratio_gradient"),
            ({**TOKENS, "grpo.adv_estimator.name": "reinforce_plus_plus"}, "sequence_level_ratio_gradient"),
            ({**ONCE, "loss_fn.use_importance_sampling_correction": False}, "sequence_level_importance_ratios"),
        )
    ),
    ("scores_of_answers_count", {"grpo.env_reward_weight": 0.0}, {}, {"grpo.env_reward_weight"}),
    (
        "scores_of_answers_count",
        {"reward_model": {"train_micro_batch_size": 1}, "grpo.reward_model_weight": 0.0},
        {},
        {"grpo.reward_model_weight"},
    ),
    ("several_rewards_are_compared", {"grpo.adv_estimator.name": "gdpo"}, {}, {"grpo.adv_estimator.name"}),
    ("loss_goes_together", {"loss_fn.sequence_level_ratio_gradient": "token"}, {}, {"loss_fn.sequence_level_ratio_gradient"}),
    ("global_batch_divides", {"policy.train_global_batch_size": 20}, {}, {"policy.train_global_batch_size"}),
    ("global_batch_divides", {"policy.train_micro_batch_size": 4}, {}, {"policy.train_micro_batch_size"}),
    (
        "one_way_of_batching",
        {"policy.dynamic_batching.enabled": True, "policy.sequence_packing.enabled": True},
        {},
        {"policy.dynamic_batching.enabled"},
    ),
    (
        "token_budgets_given",
        {"policy.sequence_packing.enabled": True, "m.context_parallel_size": 3, "policy.sequence_packing.train_mb_tokens": 611},
        {},
        {"policy.sequence_packing.train_mb_tokens", "policy.sequence_packing.logprob_mb_tokens"},
    ),
    (
        "token_budgets_given",
        {"policy.dynamic_batching.enabled": True, "policy.dynamic_batching.train_mb_tokens": 609},
        {},
        {"policy.dynamic_batching.train_mb_tokens", "policy.dynamic_batching.logprob_mb_tokens"},
    ),
    ("distributed_optimizer_is_adam", {"o.optimizer": "sgd", "o.use_distributed_optimizer": True}, {}, {"o.optimizer"}),
    ("optimizer_follows_precision", {"o.bf16": False, "o.fp16": True}, {}, {"o.bf16", "o.fp16"}),
    ("parameter_type", {"o.params_dtype": "float16"}, {}, {"o.params_dtype"}),
    ("pipeline_type", {"m.pipeline_dtype": "float32"}, {}, {"m.pipeline_dtype"}),
    (
        "milestones",
        {**ON_FSDP1, "policy.scheduler": [{"name": "a.B", "kwargs": {}}, {"name": "a.C", "kwargs": {}}, {"milestones": [5, 3]}]},
        {},
        {"policy.scheduler[2].milestones"},
    ),
    ("profiled_steps", {"profiler": {"steps": [5, 3], "torch_ranks": [0], "nsys_workers": None}}, {}, {"profiler.steps"}),
    ("profiled_steps", {"profiler": {"steps": [3], "torch_ranks": [0], "nsys_workers": None}}, {}, {"profiler.steps"}),
    ("profiled_steps", {"profiler": {"steps": [1000000, 1000001], "torch_ranks": [0], "nsys_workers": None}}, {}, {"profiler.steps"}),
    ("profiled_steps", {"profiler": {"steps": [3, 5], "torch_ranks": [], "nsys_workers": None}}, {}, {"profiler.steps"}),
    ("profiled_steps", {"profiler": {"steps": None, "torch_ranks": [0], "nsys_workers": None}}, {}, {"profiler.torch_ranks"}),
    ("profiled_steps", {"profiler": {"steps": None, "torch_ranks": [], "nsys_workers": "*policy*"}}, {}, {"profiler.nsys_workers"}),
    ("profiled_workers", {"profiler": {"steps": [3, 5], "torch_ranks": [-1, 4096], "nsys_workers": None}}, {}, {"profiler.torch_ranks"}),
    ("profiled_workers", {"profiler": {"steps": [3, 5], "torch_ranks": [], "nsys_workers": "vllm*"}}, {}, {"profiler.nsys_workers"}),
    ("learning_rates", {"o.min_lr": 2e-4, "s.lr_warmup_init": 3e-4}, {}, {"o.min_lr", "s.lr_warmup_init"}),
    ("learning_rate_is_used", {"policy.learning_rate": 2e-4}, {}, {"policy.learning_rate"}),
    (
        "learning_rate_is_used",
        {**ON_FSDP1, "policy.learning_rate": 2e-4, "policy.optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-4}}},
        {},
        {"policy.learning_rate"},
    ),
    ("decay_of_learning_rate", {"s.lr_decay_style": "cosine"}, {}, {"s.lr_decay_iters"}),
    ("decay_of_learning_rate", {"s.lr_decay_iters": 5, "s.lr_warmup_iters": 5}, {}, {"s.lr_warmup_iters"}),
    ("weight_decay_schedule", {"s.end_weight_decay": 0.02}, {}, {"s.end_weight_decay"}),
    ("weight_decay_schedule", {"s.start_weight_decay": 0.02, "s.end_weight_decay": 0.02}, {}, {"s.start_weight_decay"}),
    (
        "weight_decay_schedule",
        {"s.end_weight_decay": 0.001, "s.weight_decay_incr_style": "linear", "s.lr_decay_iters": 99},
        {},
        {"s.end_weight_decay"},
    ),
    ("weight_decay_schedule", {"s.weight_decay_incr_style": "cosine", "s.lr_decay_iters": None}, {}, {"s.lr_decay_iters"}),
    ("clipping_agrees", {"o.clip_grad": 0.5, "policy.max_grad_norm": None}, {}, {"o.clip_grad"}),
    (
        "precision_aware_optimizer",
        {"o.use_precision_aware_optimizer": True, "o.use_distributed_optimizer": False},
        {},
        {"o.use_precision_aware_optimizer"},
    ),
    ("precision_aware_optimizer", {"o.use_precision_aware_optimizer": True, "o.optimizer": "sgd"}, {}, {"o.use_precision_aware_optimizer"}),
    ("gradients_are_summed", {"ddp.average_in_collective": True}, {}, {"ddp.average_in_collective"}),
    (
        "overlap_of_parameter_gather",
        {"ddp.overlap_param_gather": True, "ddp.overlap_grad_reduce": False},
        {},
        {"ddp.overlap_param_gather"},
    ),
    ("sharding_strategy_is_used", {"ddp.data_parallel_sharding_strategy": "optim"}, {}, {"ddp.data_parallel_sharding_strategy"}),
    ("generation_fits_backend", ON_DTENSOR, {}, {"g.backend"}),
    ("generation_fits_backend", {"g.backend": "hf"}, {}, {"g.backend"}),
    ("megatron_generates_in_place", {"g.colocated.enabled": False}, {}, {"g.colocated.enabled"}),
    (
        "resources_of_generation",
        {"g.colocated": {"enabled": False, "resources": {"gpus_per_node": 4, "num_nodes": 2}}},
        {},
        {"g.colocated.resources.num_nodes", "g.colocated.resources.gpus_per_node"},
    ),
    (
        "resources_of_generation",
        {"g.colocated": {"enabled": False, "resources": {"gpus_per_node": 6, "num_nodes": 2}}, "cluster.num_nodes": 1},
        {},
        {"g.colocated.resources.num_nodes", "g.colocated.resources.gpus_per_node"},
    ),
    ("engine_has_the_policy_model", {"g.model_name": "owner/another-model"}, {}, {"g.model_name"}),
    ("engine_has_the_policy_model", {"g.model_name": "owner/another-model", **ON_VLLM}, {}, {"g.model_name"}),
    ("engine_is_known", {"g.backend": "sglang"}, {}, {"g.backend"}),
    ("engine_takes_its_section", {"g.vllm_cfg.max_model_len": 609, **ON_VLLM}, {}, {"g.vllm_cfg.max_model_len"}),
    ("engines_are_whole", {"g.vllm_cfg.tensor_parallel_size": 4, **ON_VLLM}, {}, {"g.vllm_cfg.tensor_parallel_size"}),
    (
        "engines_are_whole",
        {
            "g.vllm_cfg.tensor_parallel_size": 2,
            "g.colocated": {"enabled": False, "resources": {"gpus_per_node": 3}},
            "cluster.num_nodes": 1,
            "m.tensor_model_parallel_size": 1,
            "m.pipeline_model_parallel_size": 3,
            **ON_VLLM,
        },
        {},
        {"g.vllm_cfg.tensor_parallel_size"},
    ),
    (
        "engines_are_whole",
        {"g.vllm_cfg.tensor_parallel_size": 2, "g.vllm_cfg.pipeline_parallel_size": 2, "cluster.device": "cuda", **ON_VLLM},
        {},
        {"g.vllm_cfg.tensor_parallel_size"},
    ),
    ("engines_are_whole", {"g.vllm_cfg.tensor_parallel_size": 24, **ON_VLLM}, {}, {"g.vllm_cfg.tensor_parallel_size"}),
    (
        "engines_on_a_cpu_are_divided_by_tensors",
        {"g.vllm_cfg.pipeline_parallel_size": 2, **ON_VLLM},
        {},
        {"g.vllm_cfg.pipeline_parallel_size"},
    ),
    (
        "engines_on_a_cpu_are_divided_by_tensors",
        {"g.vllm_cfg.tensor_parallel_size": 2, "g.vllm_cfg.expert_parallel_size": 2, **ON_VLLM},
        MIXTURE,
        {"g.vllm_cfg.expert_parallel_size"},
    ),
    ("experts_divide_over_an_engine", {"g.vllm_cfg.expert_parallel_size": 2, **ON_VLLM}, MIXTURE, {"g.vllm_cfg.expert_parallel_size"}),
    (
        "experts_divide_over_an_engine",
        {"g.vllm_cfg.tensor_parallel_size": 2, "g.vllm_cfg.expert_parallel_size": 2, **ON_VLLM},
        {},
        {"g.vllm_cfg.expert_parallel_size"},
    ),
    ("heads_divide_over_an_engine", {"g.vllm_cfg.tensor_parallel_size": 5, **ON_VLLM}, {}, {"g.vllm_cfg.tensor_parallel_size"}),
    (
        "engine_weights_fit",
        {"cluster.device": "cuda", "cluster.device_memory_gib": 1e-4, **ON_VLLM},
        {},
        {"g.vllm_cfg.tensor_parallel_size"},
    ),
    (
        "engine_arguments_are_free",
        {"g.vllm_kwargs": {"logprobs_mode": "raw_logprobs", "seed": 3, "dtype": "float16", "max_num_seqs": 4}, **ON_VLLM},
        {},
        {"g.vllm_kwargs.logprobs_mode", "g.vllm_kwargs.seed", "g.vllm_kwargs.dtype"},
    ),
    ("engine_arguments_are_free", {"g.vllm_kwargs": {"enable_lora": True}, **ON_VLLM}, {}, {"g.vllm_kwargs.enable_lora"}),
    (
        "fast_sampling_is_of_the_first_runner",
        {"cluster.device": "auto", "g.vllm_cfg.fast_sampling": True, **ON_VLLM},
        {},
        {"g.vllm_cfg.fast_sampling"},
    ),
    ("engine_reaches_length", {"g.vllm_cfg.max_model_len": 609, **ON_VLLM}, {}, {"g.vllm_cfg.max_model_len"}),
    (
        "shared_devices_need_no_resources",
        {"g.colocated": {"enabled": True, "resources": {"gpus_per_node": 4, "num_nodes": 1}}},
        {},
        {"g.colocated.resources.num_nodes", "g.colocated.resources.gpus_per_node"},
    ),
    ("prompt_and_answer_fit", {"data.max_input_seq_length": 111}, {}, {"policy.max_total_sequence_length"}),
    ("model_reaches_length", {}, {"max_position": 609}, {"policy.max_total_sequence_length"}),
    ("stop_strings_say_something", {"g.stop_strings": ["end", ""]}, {}, {"g.stop_strings"}),
    ("stop_strings_say_something", {"g.stop_strings": ["x", ""]}, {}, {"g.stop_strings"}),
    ("token_ids_exist", {"g.stop_token_ids": [1002, 1003], "g.pad_token_id": 1003}, {}, {"g.stop_token_ids", "g.pad_token_id"}),
    ("algorithm_is_known", {"algorithm": "poo"}, {}, {"algorithm"}),
    ("sections_of_algorithm", {"loss_fn": ..., "env": ..., "g": None}, {}, {"loss_fn", "env", "g"}),
    (
        "steps_are_counted",
        {**OWN, "reinforce": {"prompts": 0, "max_num_steps": True}},
        {},
        {"reinforce.prompts", "reinforce.max_num_steps"},
    ),
    ("sections_have_a_reader", {**OWN, "reinforce": {"prompts": 6, "max_num_steps": 4}}, {}, {"grpo", "loss_fn"}),
    ("megatron_trains", {"o": ...}, {}, {"o"}),
    ("one_source", {"data.train.name": "owner/records"}, {}, {"data.train"}),
    ("one_source", {"data.validation.name": ...}, {}, {"data.validation"}),
    ("one_source", {"data.train.split": "train", "data.train.subset": "main"}, {}, {"data.train.split", "data.train.subset"}),
    ("one_source", {"data.train": [{**KEYS, "path": "a"}, KEYS]}, {}, {"data.train.1"}),
    ("fields_are_named", {"data.train.prompt_key": ["a", "b..c"]}, {}, {"data.train.prompt_key"}),
    ("fields_are_named", {"data.train.answer_key": []}, {}, {"data.train.answer_key"}),
    ("fields_are_named", {"data.train.messages_key": "turns"}, {}, {"data.train.prompt_key"}),
    (
        "fields_are_named",
        {"data.train.answer_key": "a..b", "data.validation.prompt_key": "[0]x"},
        {},
        {"data.train.answer_key", "data.validation.prompt_key"},
    ),
    ("fields_are_named", {"data.train.extra_keys": ["a", "a..b"]}, {}, {"data.train.extra_keys.1"}),
    ("environments_are_there", {"data.train": [A, {**A, "env_name": "sums"}]}, {}, {"data.train.1.env_name"}),
    ("environments_are_there", {"data.train.env_name": "options", "env.options": {"x": 1}}, {}, {"data.train.env_name"}),
    ("sources_can_be_mixed", {"data.train": [], "data.validation": []}, {}, {"data.train", "data.validation"}),
    ("sources_can_be_mixed", {"data.train": [{**A, "weight": 1}, A]}, {}, {"data.train.1.weight"}),
    ("sources_can_be_mixed", {"data.train": [{**A, "weight": 0}, {**A, "weight": 1}]}, {}, {"data.train.0.weight"}),
    ("sources_can_be_mixed", {"data.train": [{**A, "weight": 1, "repeat": 2}]}, {}, {"data.train.0.repeat"}),
    (
        "sources_can_be_mixed",
        {"data.train": [{**A, "repeat": 0}, {**A, "max_samples": 0}]},
        {},
        {"data.train.0.repeat", "data.train.1.max_samples"},
    ),
    ("sources_can_be_mixed", {"data.validation.weight": 1}, {}, {"data.validation.weight"}),
    (
        "sources_can_be_mixed",
        {"data.validation": [{**A, "val_top_p": 0.0}, {**B, "val_num_generations_per_prompt": 0}]},
        {},
        {"data.validation.0.val_top_p", "data.validation.1.val_num_generations_per_prompt"},
    ),
    (
        "values_in_range",
        {"data.validation.val_top_p": 2, "data.validation.val_temperature": -1},
        {},
        {"data.validation.val_top_p", "data.validation.val_temperature"},
    ),
    ("validation_sets_are_told_apart", {"data.validation": [A, {**A, "path": "b/a.jsonl"}]}, {}, {"data.validation.1.val_set"}),
    ("validation_sets_are_told_apart", {"data.validation": [A, {**B, "val_set": "a"}]}, {}, {"data.validation.0.val_set"}),
    ("validation_sets_are_told_apart", {"data.validation": [{**A, "val_set": "a b"}, B]}, {}, {"data.validation.0.val_set"}),
    (
        "validation_sets_are_told_apart",
        {"data.validation": [{**A, "val_set": "x", "val_top_p": 0.9}, {**B, "val_set": "x", "val_top_k": 5}]},
        {},
        {"data.validation.1.val_top_p", "data.validation.1.val_top_k"},
    ),
    ("several_answers_differ", {"grpo.val_num_generations_per_prompt": 2}, {}, {"policy.generation.val_temperature"}),
    (
        "several_answers_differ",
        {"data.validation": [{**A, "val_num_generations_per_prompt": 8}, B], "policy.generation.val_temperature": 0},
        {},
        {"policy.generation.val_temperature"},
    ),
    (
        "several_answers_differ",
        {
            "data.validation": [{**A, "val_temperature": 0}, B],
            "grpo.val_num_generations_per_prompt": 2,
            "policy.generation.val_temperature": 1,
        },
        {},
        {"data.validation.0.val_temperature"},
    ),
    ("prompt_template_has_place", {"data.prompt_template": "Answer: {question}"}, {}, {"data.prompt_template"}),
    *(
        (
            "metric_of_checkpoints_has_a_prefix",
            {"checkpointing.enabled": True, "checkpointing.metric_name": name},
            {},
            {"checkpointing.metric_name"},
        )
        for name in ("val:accuracy", "reward")
    ),
    ("validation_has_data", {"data.validation": None, "grpo.val_at_end": True}, {}, {"grpo.val_at_end"}),
    ("single_turn", {"grpo.max_rollout_turns": 2}, {}, {"grpo.max_rollout_turns"}),
    ("reward_is_known", {"env.reward": "exakt"}, {}, {"env.reward"}),
    ("environment_is_known", {"env.environment": "games"}, {}, {"env.environment"}),
    ("environments_in_range", {"env": {"math": {"timeout_s": 0}, "a b": {"reward": "math"}}}, {}, {"env.math.timeout_s", "env.a b"}),
    ("environments_have_names", {"env.math": {}}, {}, {"env.reward"}),
    ("services_are_named", {"logger.wandb_enabled": True}, {}, {"logger.wandb"}),
    (
        "services_are_named",
        {"logger": {"mlflow_enabled": True, "trackio_enabled": True, "mlflow": None}},
        {},
        {"logger.mlflow", "logger.trackio"},
    ),
    ("sinks_are_known", {"logger.sinks": ["no_such_package.sinks:Sink"]}, {}, {"logger.sinks"}),
    ("sinks_are_known", {"logger.sinks": ["wandb"]}, {}, {"logger.sinks"}),
    ("table_of_samples_has_a_place", {"logger.samples.wandb_table": True}, {}, {"logger.samples.wandb_table"}),
    (
        "table_of_samples_has_a_place",
        {"logger": {"wandb_enabled": True, "wandb": {"project": "p"}, "samples": {"enabled": False, "wandb_table": True}}},
        {},
        {"logger.samples.wandb_table"},
    ),
    (
        "values_in_range",
        {"grpo.num_generations_per_prompt": 0, "g.temperature": 0},
        {},
        {"grpo.num_generations_per_prompt", "g.temperature"},
    ),
    (
        "unbuilt_flags",
        {"ddp.use_custom_fsdp": True},
        {},
        {"ddp.use_custom_fsdp"},
    ),
    ("unbuilt_flags", {"o.optimizer_cpu_offload": True}, {}, {"o.optimizer_cpu_offload"}),
    ("unbuilt_share", {"o.optimizer_offload_fraction": 0.5}, {}, {"o.optimizer_offload_fraction"}),
    ("unbuilt_models", ON_DTENSOR, MIXTURE, {"policy.model_name"}),
    ("precision_aware_optimizer_on_cpu", {"o.use_precision_aware_optimizer": True}, {}, {"o.use_precision_aware_optimizer"}),
    (
        "float32_logits_in_chunks",
        {"policy.logprob_chunk_size": 64, "m.float32_logits": True},
        {},
        {"policy.logprob_chunk_size"},
    ),
]
SFT_CASES: list[tuple[str, dict[str, Any], set[str]]] = [
    ("validation_batch_divides", {"sft.val_global_batch_size": 16}, {"sft.val_global_batch_size"}),
    ("validation_batch_divides", {"sft.val_global_batch_size": 12, "sft.val_micro_batch_size": 3}, {"sft.val_micro_batch_size"}),
    (
        "validation_that_scores_draws_nothing",
        {
            "data.validation.val_set": "x",
            "data.validation.val_top_k": 4,
            "policy.generation": {"max_new_tokens": 5, "val_temperature": 0.6},
        },
        {"data.validation.val_set", "data.validation.val_top_k", "policy.generation.val_temperature"},
    ),
    ("example_fits", {"data.max_input_seq_length": 611}, {"data.max_input_seq_length"}),
    ("sections_of_algorithm", {"sft": ...}, {"sft"}),
    ("pairs_have_a_reader", {"data.train.chosen_key": "better"}, {"data.train.chosen_key"}),
    (
        "examples_are_scored_by_the_model_itself",
        {"policy.generation": {"max_new_tokens": 5, "temperature": 0.7, "top_p": 0.9, "top_k": 5}},
        {"policy.generation.temperature", "policy.generation.top_p", "policy.generation.top_k"},
    ),
]
DPO_CASES: list[tuple[str, dict[str, Any], set[str]]] = [
    (
        "fields_are_named",
        {"data.train.chosen_key": ..., "data.validation.rejected_key": ..., "data.validation.answer_key": "answer"},
        {"data.validation.answer_key"},
    ),
    (
        "fields_are_named",
        {"data.train.messages_key": "m", "data.train.extra_keys": ["x"], "data.train.chosen_key": "a["},
        {"data.train.messages_key", "data.train.extra_keys", "data.train.chosen_key"},
    ),
    ("preference_loss_goes_together", {"dpo.sft_average_log_probs": True}, {"dpo.sft_average_log_probs"}),
    ("values_in_range", {"dpo.reference_policy_kl_penalty": 0.0}, {"dpo.reference_policy_kl_penalty"}),
    ("values_in_range", {"dpo.preference_loss_weight": 0.0}, {"dpo.preference_loss_weight"}),
    ("validation_batch_divides", {"dpo.val_global_batch_size": 16}, {"dpo.val_global_batch_size"}),
    # 12 pairs are 4 on each of 3 ranks
    ("global_batch_divides", {"policy.train_global_batch_size": 12, "policy.train_micro_batch_size": 3}, {"policy.train_micro_batch_size"}),
    # two answers of 610 tokens
    (
        "token_budgets_given",
        {"policy.sequence_packing": {"enabled": True, "train_mb_tokens": 1219, "logprob_mb_tokens": 610}},
        {"policy.sequence_packing.train_mb_tokens"},
    ),
    (
        "token_budgets_given",
        {"policy.dynamic_batching": {"enabled": True, "train_mb_tokens": 1219, "logprob_mb_tokens": 610, "sequence_length_round": 2}},
        {"policy.dynamic_batching.train_mb_tokens"},
    ),
    ("example_fits", {"data.max_input_seq_length": 611}, {"data.max_input_seq_length"}),
    ("sections_have_a_reader", {"loss_fn": {}, "sft": {"max_num_steps": 3}}, {"loss_fn", "sft"}),
]
PACKS = {"policy.sequence_packing": {"enabled": True, "train_mb_tokens": 1300, "logprob_mb_tokens": 700}}
PPO_CASES: list[tuple[str, dict[str, Any], set[str]]] = [
    ("critic_warm_up_ends", {"ppo.critic_warmup_steps": 9}, {"ppo.critic_warmup_steps"}),
    (
        "what_is_bootstrapped_is_trained_on",
        {"ppo.bootstrap_truncated": True, "ppo.overlong_filtering": True},
        {"ppo.bootstrap_truncated"},
    ),
    ("single_turn", {"ppo.max_rollout_turns": 2}, {"ppo.max_rollout_turns"}),
    (
        "on_policy_batch_is_trained_on_once",
        {"loss_fn.force_on_policy_ratio": True, "policy.train_global_batch_size": 60, "ppo.ppo_epochs": 2},
        {"loss_fn.force_on_policy_ratio"},
    ),
]
DISTILLATION_CASES: list[tuple[str, dict[str, Any], set[str]]] = [
    ("somebody_teaches", {"teacher": ...}, {"teacher"}),
    ("sources_have_teachers", {"distillation.teacher_of_source": {"train": "one"}}, {"distillation.teacher_of_source"}),
    (
        "teachers_see_the_distribution_that_tokens_are_drawn_from",
        {"teacher.generation": {"temperature": 0.5}},
        {"teacher.generation.temperature"},
    ),
    ("way_of_learning_is_told_what_it_reads", {"distillation.advantage_clip_high": 2.0}, {"distillation.advantage_clip_high"}),
    (
        "way_of_learning_is_told_what_it_reads",
        {"distillation.topk_logits_k": 1, "distillation.outside_topk": "renormalize"},
        {"distillation.topk_logits_k"},
    ),
    ("teacher_has_so_many_tokens", {"distillation.topk_logits_k": 1004}, {"distillation.topk_logits_k"}),
]
RM_CASES: list[tuple[str, dict[str, Any], set[str]]] = [
    ("model_has_the_head_of_the_algorithm", {"policy.reward_model_cfg": ...}, {"policy.reward_model_cfg.enabled"}),
    ("model_has_the_head_of_the_algorithm", {"policy.reward_model_cfg.enabled": False}, {"policy.reward_model_cfg.enabled"}),
    (
        "model_that_scores_has_no_tokens_to_score",
        {"policy.generation": {"max_new_tokens": 5}, "policy.logprob_chunk_size": 64},
        {"policy.generation", "policy.logprob_chunk_size"},
    ),
    (
        "fields_are_named",
        {"data.train.chosen_key": ..., "data.validation.rejected_key": "a[b", "data.validation.answer_key": "answer"},
        {"data.validation.rejected_key", "data.validation.answer_key"},
    ),
    ("validation_batch_divides", {"rm.val_global_batch_size": 16}, {"rm.val_global_batch_size"}),
    (
        "token_budgets_given",
        {"policy.sequence_packing": {"enabled": True, "train_mb_tokens": 1219, "logprob_mb_tokens": 610}},
        {"policy.sequence_packing.train_mb_tokens"},
    ),
]
BY_NAME = {rule.__name__: rule for rule in (*RULES, *NOT_YET_RULES, *VLLM_RULES)}


def keys_named(rule: str, config: dict[str, Any], facts: Any = None) -> set[str]:
    """The keys that one rule complains about; every complaint says all four things."""
    try:
        violations = list(BY_NAME[rule](View(config, facts=facts)))
    except NotApplicableError:
        return set()
    assert all(violation.bound and violation.fix for violation in violations)
    return {violation.key for violation in violations}


def test_valid_runs_break_no_rule() -> None:
    assert check(complete(raw_grpo()), FACTS) == []
    assert check(complete(raw_sft()), FACTS) == []
    assert check(complete(raw_dpo()), FACTS) == []
    assert check(complete(raw_ppo()), FACTS, (), {"critic": FACTS}) == []
    assert check(complete(raw_distillation()), FACTS, (), {"teacher": FACTS}) == []
    packed = {"policy.sequence_packing": {"enabled": True, "train_mb_tokens": 1220, "logprob_mb_tokens": 610}}
    assert check(complete(raw_dpo(), packed), FACTS) == []
    assert check(complete(raw_rm()), FACTS) == [] == check(complete(raw_rm(), PACKS), FACTS)


@pytest.mark.parametrize(("rule", "changes", "sizes", "keys"), CASES, ids=[f"{case[0]}-{number}" for number, case in enumerate(CASES)])
def test_rule_fires_on_its_key(rule: str, changes: dict[str, Any], sizes: dict[str, Any], keys: set[str]) -> None:
    config = complete(raw_grpo(), {long(path): value for path, value in changes.items()})
    keys = {long(key) for key in keys}
    facts = dataclasses.replace(FACTS, **sizes)
    assert keys_named(rule, config, facts) == keys
    assert keys <= {violation.key for violation in check(config, facts)}
    assert keys_named(rule, complete(raw_grpo()), FACTS) == set()


@pytest.mark.parametrize(("rule", "changes", "keys"), SFT_CASES)
def test_rule_of_sft_fires_on_its_key(rule: str, changes: dict[str, Any], keys: set[str]) -> None:
    config = complete(raw_sft(), changes)
    assert keys_named(rule, config) == keys
    assert keys <= {violation.key for violation in check(config)}
    assert keys_named(rule, complete(raw_sft())) == set()


@pytest.mark.parametrize(("rule", "changes", "keys"), DPO_CASES)
def test_rule_of_dpo_fires_on_its_key(rule: str, changes: dict[str, Any], keys: set[str]) -> None:
    config = complete(raw_dpo(), changes)
    assert keys_named(rule, config) == keys
    assert keys <= {violation.key for violation in check(config)}
    assert keys_named(rule, complete(raw_dpo())) == set()


@pytest.mark.parametrize(("rule", "changes", "keys"), RM_CASES)
def test_rule_of_a_reward_model_fires_on_its_key(rule: str, changes: dict[str, Any], keys: set[str]) -> None:
    config = complete(raw_rm(), changes)
    assert keys_named(rule, config) == keys
    assert keys <= {violation.key for violation in check(config)}
    assert keys_named(rule, complete(raw_rm())) == set()


@pytest.mark.parametrize(("rule", "changes", "keys"), PPO_CASES)
def test_rule_of_ppo_fires_on_its_key(rule: str, changes: dict[str, Any], keys: set[str]) -> None:
    config = complete(raw_ppo(), changes)
    assert keys_named(rule, config) == keys
    assert keys <= {violation.key for violation in check(config)}
    assert keys_named(rule, complete(raw_ppo())) == set()


@pytest.mark.parametrize(("rule", "changes", "keys"), DISTILLATION_CASES)
def test_rule_of_distillation_fires_on_its_key(rule: str, changes: dict[str, Any], keys: set[str]) -> None:
    config = complete(raw_distillation(), changes)
    assert keys_named(rule, config, FACTS) == keys
    assert keys <= {violation.key for violation in check(config, FACTS)}
    assert keys_named(rule, complete(raw_distillation()), FACTS) == set()


def test_only_an_algorithm_that_reads_pairs_has_a_model_that_scores_and_pairs() -> None:
    config = complete(raw_sft(), {"policy.reward_model_cfg": {"enabled": True}, "data.train.chosen_key": "better"})
    keys = {violation.key for violation in check(config)}
    assert keys == {"policy.reward_model_cfg.enabled", "data.train.chosen_key"}


# what must not be refused although it is written down: it says what is so anyway
SAID_ANYWAY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a clamp that is one anyway": ({"loss_fn.reference_policy_kl_penalty": 0.0, "loss_fn.kl_input_clamp_value": 20.0}, {}),
    "a clamp of no ratio": ({"loss_fn.disable_ppo_ratio": True, "loss_fn.log_ratio_clamp_value": 20.0}, {}),
    "ratios of sequences that have weights": ({**SEQUENCES, **ONCE}, {}),
    "gradients of tokens with advantages of tokens": (
        {**SEQUENCES, **TOKENS, **IN_REWARD, "grpo.adv_estimator.name": "reinforce_plus_plus"},
        {},
    ),
    "tokens that DeepEP sends": (
        {**FLEX, **ON_GPUS, "m.moe_permute_fusion": True, "m.expert_model_parallel_size": 2, "m.sequence_parallel": True},
        MIXTURE,
    ),
    "fast sampling by the first runner": (
        {"cluster.device": "cuda", "g.vllm_cfg": {"fast_sampling": True, "env_vars": {"VLLM_USE_V2_MODEL_RUNNER": "0"}}, **ON_VLLM},
        {},
    ),
    "the class of the model": ({"m.converter_type": "Qwen2ForCausalLM"}, {}),
    "the type of the model": ({"m.converter_type": "qwen3_moe"}, {"family": "qwen3_moe"}),
    "the class of a mixture": ({"m.converter_type": "Qwen3MoeForCausalLM"}, {"family": "qwen3_moe"}),
    "the model once more": ({"g.model_name": "owner/a-model-that-is-on-no-disk"}, {}),
    "no devices of its own": ({"g.colocated": {"enabled": True, "resources": {"gpus_per_node": None, "num_nodes": None}}}, {}),
    "no losses of routers": ({"m.moe_aux_loss_coeff": 0.0, "m.moe_z_loss_coeff": 0.0, "m.freeze_moe_router": False}, {}),
    "the learning rate that is used": ({"policy.learning_rate": 1e-4}, {}),
    "no sharding by strategy": ({"ddp.data_parallel_sharding_strategy": "no_shard", "ddp.use_custom_fsdp": False}, {}),
    "no clipping": ({"o.clip_grad": 0.0}, {}),
    "one weight decay": ({"o.weight_decay": 0.3, "s.start_weight_decay": 0.3, "s.end_weight_decay": 0.3}, {}),
}


def test_only_dense_layers_have_a_width_to_divide() -> None:
    config, key = complete(raw_grpo()), f"{MEGATRON}.tensor_model_parallel_size"
    facts = dataclasses.replace(FACTS, ffn_hidden_size=181)
    assert keys_named("widths_divide", config, facts) == {key}
    assert keys_named("widths_divide", config, dataclasses.replace(facts, **MIXTURE)) == set()
    assert keys_named("widths_divide", config, dataclasses.replace(facts, mixture=mixture(dense_layers=[1]))) == {key}


@pytest.mark.parametrize("case", SAID_ANYWAY)
def test_what_is_so_anyway_may_be_written_down(case: str) -> None:
    changes, sizes = SAID_ANYWAY[case]
    assert check(complete(raw_grpo(), {long(path): value for path, value in changes.items()}), dataclasses.replace(FACTS, **sizes)) == []


def test_the_class_of_every_known_family_is_accepted_as_its_converter() -> None:
    for model_type, family in FAMILIES.items():
        config = complete(raw_grpo(), {f"{MEGATRON}.converter_type": family.architecture_class})
        assert keys_named("converter_is_the_model_s", config, dataclasses.replace(FACTS, family=model_type)) == set()


def test_no_rule_is_untested() -> None:
    assert set(BY_NAME) == {case[0] for case in (*CASES, *SFT_CASES, *DPO_CASES, *RM_CASES, *PPO_CASES, *DISTILLATION_CASES)}
    assert len(BY_NAME) == len(RULES) + len(NOT_YET_RULES) + len(VLLM_RULES)


RANGES = {path: key.bounds for path, key in bounded_keys(run_type(None)).items() if key.bounds is not None}


@pytest.mark.parametrize("key", sorted(RANGES))
def test_range_accepts_its_inside_and_refuses_its_outside(key: str) -> None:
    allowed = RANGES[key]
    inside = [
        bound
        for bound, is_open in ((allowed.low, allowed.low_open), (allowed.high, allowed.high_open))
        if bound is not None and not is_open
    ]
    outside = [allowed.low - 1] if allowed.low is not None else []
    outside += [allowed.low] if allowed.low_open and allowed.low is not None else []
    outside += [allowed.high + 1] if allowed.high is not None else []
    outside += [allowed.high] if allowed.high_open and allowed.high is not None else []
    assert outside
    for value in inside:
        assert key not in keys_named("values_in_range", complete(raw_grpo(), {key: value})), value
    for value in outside:
        assert key in keys_named("values_in_range", complete(raw_grpo(), {key: value})), value


def test_rule_on_a_key_is_silent_where_the_feature_is_not_built() -> None:
    facts = dataclasses.replace(FACTS, **MIXTURE, num_key_value_heads=5)
    violations = check(complete(raw_grpo(), {long(path): value for path, value in ON_DTENSOR.items()}), facts)
    assert [violation.bound for violation in violations if violation.key == "policy.model_name"] == [
        "the model is a mixture of 8 experts, which on the dtensor backend is not in this version"
    ]


def test_all_broken_rules_come_at_once() -> None:
    changes = {"cluster.gpus_per_node": 5, f"{DATA_PARALLEL}.average_in_collective": True, "loss_fn.ratio_clip_c": 1.0}
    keys = {violation.key for violation in check(complete(raw_grpo(), changes), FACTS)}
    assert keys == set(changes)


@sampled(2)
@pytest.mark.parametrize(
    "raw", [raw_grpo(), raw_sft(), raw_dpo(), raw_ppo(), raw_distillation()], ids=["grpo", "sft", "dpo", "ppo", "distillation"]
)
def test_no_rule_stumbles_over_an_absent_key(raw: dict[str, Any]) -> None:
    full = complete_run(raw)
    for path in _paths(full):
        check(_without(full, path), FACTS)
    check({}, FACTS)


@sampled(2)
@pytest.mark.parametrize("value", ["text", None, [3], -1, 0])
def test_no_rule_stumbles_over_a_faulty_value(value: object) -> None:
    full = complete_run(raw_grpo())
    for path in _paths(full):
        check(_with(full, path, value), FACTS, faulty={".".join(path)})


def test_a_list_with_a_faulty_member_is_left_to_the_type_check() -> None:
    config = complete(raw_grpo(), {f"{GENERATION}.stop_token_ids": [1, "two", 5000]})
    assert check(config, FACTS, faulty={f"{GENERATION}.stop_token_ids.1"}) == []


def test_range_keys_exist_in_the_schema() -> None:
    from megarl.config.schema import known_paths

    assert len(RANGES) > 80 and set(RANGES) <= set(known_paths(run_type(None)))


def _paths(config: dict[str, Any], above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for key, value in config.items():
        found.append((*above, key))
        if isinstance(value, dict):
            found.extend(_paths(value, (*above, key)))
    return found


def _without(config: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    return {
        key: (_without(value, path[1:]) if key == path[0] and len(path) > 1 else value)
        for key, value in config.items()
        if key != path[0] or len(path) > 1
    }


def _with(config: dict[str, Any], path: tuple[str, ...], new: object) -> dict[str, Any]:
    return {key: ((_with(value, path[1:], new) if len(path) > 1 else new) if key == path[0] else value) for key, value in config.items()}
