"""Rules in the form of a table: values that keys must have under a condition. Most refuse a setting that
nothing reads under that condition."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from megarl.config.distillation import SECTION as DISTILLATION
from megarl.config.environments import SINGLE_TURN, environments_of
from megarl.config.generation import GenerationConfig
from megarl.config.losses import ESTIMATORS, ClippedPGLossConfig, DistillationLossConfig
from megarl.config.policy import STATE_KEYS
from megarl.config.rules.backends import backend_of
from megarl.config.rules.distillation import teachers_of
from megarl.config.rules.parallel import WITHOUT_EXPERTS
from megarl.config.rules.run import ESTIMATOR, has_scoring_model
from megarl.config.rules.view import Rule, View, apply_rules
from megarl.errors import Violation
from megarl.key import defaults_of


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a rule: values that keys must have under a condition. Lines with the same ``rule`` form
    one rule.

    In keys and texts, ``{name}`` is replaced by the value of that key or of that name in ``_FACTS``;
    ``{word}`` by the last part of the violating key, and ``{first}`` by its first allowed value.

    Attributes:
        rule: name of the rule.
        keys: dotted key -> its allowed value, or a tuple of allowed values.
        where: the condition: dotted key, or name in ``_FACTS`` -> the value that it must have, or a tuple of
            such values.
        bound, fix: texts of the violation.
        proposes: offer the first allowed value as a candidate fix.
    """

    rule: str
    keys: Mapping[str, object]
    where: Mapping[str, object]
    bound: str
    fix: str
    proposes: bool = False

    def violations(self, view: View) -> Iterator[Violation]:
        """Yield a violation for each key with a value that is not allowed, if the condition holds."""
        view.require(all(_value(view, name) in _several(values) for name, values in self.where.items()))
        for pattern, values in self.keys.items():
            key, first = _filled(pattern, view), _several(values)[0]
            # An absent key counts as having its allowed value.
            value = view.get(key, first)
            if value not in _several(values):
                words = {
                    "word": key.rpartition(".")[2],
                    "first": "null" if first is None else str(first).lower(),
                }
                candidates = ({key: first},) if self.proposes else ()
                yield Violation(
                    key, value, _filled(self.bound, view, words), _filled(self.fix, view, words), candidates
                )


def _several(values: object) -> tuple[object, ...]:
    return values if isinstance(values, tuple) else (values,)


def _single_turn(view: View) -> bool:
    return all(
        inner.get("environment", SINGLE_TURN) == SINGLE_TURN
        for inner in environments_of(view["env"]).values()
    )


def _has_teachers(view: View) -> bool:
    # Called for its NotApplicableError: the row does not apply to algorithms without teachers.
    teachers_of(view)
    return not view.has_faults(DISTILLATION)


# Names that conditions and texts may use in addition to dotted keys.
_FACTS: Mapping[str, Callable[[View], object]] = {
    "backend": backend_of,
    "family": lambda view: view.facts.family,
    "has_divergence": lambda view: view.get("loss_fn.reference_policy_kl_penalty") != 0,
    "has_experts": lambda view: view.facts.num_experts > 0,
    "has_scoring_model": has_scoring_model,
    "has_teachers": _has_teachers,
    "offloads_weights": lambda view: any(
        view.get(f"policy.{key}", False) for key in ("dtensor_cfg.cpu_offload", "fsdp_offload_enabled")
    ),
    "own_estimator": lambda view: view[f"{ESTIMATOR}.name"] not in ESTIMATORS,
    "section": lambda view: view.algorithm.section(),
    "generates": lambda view: view.algorithm.GENERATES,
    "schedule": lambda view: view.get(f"{view.algorithm.section()}.async_grpo.schedule"),
    "single_turn": _single_turn,
    "turns": lambda view: view.get(f"{view.algorithm.section()}.max_rollout_turns"),
    "has_parts": lambda view: view.get(f"{view.algorithm.section()}.logprob_parts", 1) != 1,
    "has_policy_loss": lambda view: view.algorithm.SECTIONS.get("loss_fn") is ClippedPGLossConfig,
}


def _value(view: View, name: str) -> object:
    return _FACTS[name](view) if name in _FACTS else view.get(name)


def _filled(text: str, view: View, words: Mapping[str, str] = {}) -> str:
    return re.sub(r"\{([a-z_.]+)\}", lambda found: words.get(found[1]) or str(_value(view, found[1])), text)


def defaults(section: str, kind: Any, *names: str) -> dict[str, object]:
    """Return the defaults of a section's keys by dotted key: of all keys, or of ``names``."""
    known = defaults_of(kind)
    return {f"{section}.{name}": known[name] for name in names or known}


ROWS_OF_MODELS = (
    Row(
        "one_backend",
        {"policy.dtensor_cfg.enabled": False},
        {"policy.megatron_cfg.enabled": True},
        "megatron_cfg is enabled too, but a policy has one backend",
        "set one of the two to false",
    ),
    Row(
        "fsdp1_limits",
        {"policy.precision": ("float32", "bfloat16")},
        {"backend": "fsdp1"},
        "FSDP1 has no loss scaling",
        "write bfloat16 or float32",
    ),
    Row(
        "torch_optimizer_unused",
        {"policy.optimizer": None, "policy.scheduler": None},
        {"backend": "megatron"},
        "the Megatron backend does not use it",
        "set it to null and use policy.megatron_cfg.{word}",
    ),
    Row(
        "switches_of_fsdp1",
        {"policy.activation_checkpointing_enabled": False},
        {"backend": ("megatron", "dtensor")},
        "only FSDP1 reads it, and this policy runs on {backend}",
        "set it to false and use policy.{backend}_cfg.activation_checkpointing",
    ),
    Row(
        "switches_of_fsdp1",
        {"policy.fsdp_offload_enabled": False},
        {"backend": "dtensor"},
        "only FSDP1 reads it, and this policy runs on {backend}",
        "set it to false and use policy.dtensor_cfg.cpu_offload",
    ),
    Row(
        "switches_of_fsdp1",
        {"policy.fsdp_offload_enabled": False},
        {"backend": "megatron"},
        "only FSDP1 reads it, and this policy runs on {backend}",
        "set it to false and use the optimizer's own keys",
    ),
    Row(
        "transformer_engine_needs_a_gpu",
        {"policy.megatron_cfg.transformer_engine": ("auto", False)},
        {"backend": "megatron", "cluster.device": "cpu"},
        "Transformer Engine needs a GPU, and cluster.device is cpu",
        "write auto or false",
    ),
    Row(
        "recomputation_is_on",
        {"policy.megatron_cfg.recompute_modules": ["core_attn"]},
        {"backend": "megatron", "policy.megatron_cfg.recompute_granularity": "full"},
        "policy.megatron_cfg.recompute_granularity is full, so it would do nothing",
        "set policy.megatron_cfg.recompute_granularity to selective, or remove the line",
    ),
    Row(
        "recomputation_is_on",
        {"policy.megatron_cfg.recompute_granularity": "full"},
        {"backend": "megatron", "policy.megatron_cfg.activation_checkpointing": False},
        "policy.megatron_cfg.activation_checkpointing is false, so that nothing is recomputed",
        "set policy.megatron_cfg.activation_checkpointing to true",
    ),
    Row(
        "sequence_parallel_needs_tensor",
        {"policy.dtensor_cfg.sequence_parallel": False},
        {"backend": "dtensor", "policy.dtensor_cfg.tensor_parallel_size": 1},
        "it shards between tensor-parallel ranks and there is only one",
        "set it to false",
    ),
    Row(
        "sequence_parallel_needs_tensor",
        {"policy.megatron_cfg.sequence_parallel": False},
        {"backend": "megatron", "policy.megatron_cfg.tensor_model_parallel_size": 1},
        "it shards between tensor-parallel ranks and there is only one",
        "set it to false, or policy.megatron_cfg.tensor_model_parallel_size to 2 or more",
        proposes=True,
    ),
    Row(
        "chunks_need_stages",
        {"policy.megatron_cfg.virtual_pipeline_model_parallel_size": (None, 0, 1)},
        {"backend": "megatron", "policy.megatron_cfg.pipeline_model_parallel_size": 1},
        "there is one pipeline stage (policy.megatron_cfg.pipeline_model_parallel_size = 1)",
        "write null",
    ),
    Row(
        "experts_are_there",
        WITHOUT_EXPERTS,
        {"backend": "megatron", "has_experts": False},
        "the model has no experts, so it would do nothing",
        "remove the line, or write {first}",
    ),
    Row(
        "router_options_fit",
        {"policy.megatron_cfg.moe_router_bias_update_rate": 0},
        {"backend": "megatron", "has_experts": True},
        "the router biases of {family} are not updated in training",
        "write 0; to balance the experts set policy.megatron_cfg.moe_router_load_balancing_type",
    ),
    Row(
        "router_options_fit",
        {"policy.megatron_cfg.moe_aux_loss_coeff": (None, 0)},
        {
            "backend": "megatron",
            "has_experts": True,
            "policy.megatron_cfg.moe_router_load_balancing_type": "none",
        },
        "policy.megatron_cfg.moe_router_load_balancing_type is none",
        "write null, or choose aux_loss",
    ),
    Row(
        "parameter_type",
        {"policy.megatron_cfg.optimizer.params_dtype": "float32"},
        {"backend": "megatron"},
        "the optimizer always keeps float32 parameters",
        "write float32, or remove the line",
    ),
    Row(
        "distributed_optimizer_is_adam",
        {"policy.megatron_cfg.optimizer.optimizer": "adam"},
        {"backend": "megatron", "policy.megatron_cfg.optimizer.use_distributed_optimizer": True},
        "the distributed optimizer works only with adam",
        "set policy.megatron_cfg.optimizer.use_distributed_optimizer to false",
    ),
    Row(
        "precision_aware_optimizer",
        {"policy.megatron_cfg.optimizer.use_precision_aware_optimizer": False},
        {"backend": "megatron"},
        "megarl's own states below float32 replace it, on every device and in every layout",
        "set it to false; states stay float32 unless master_dtype, exp_avg_dtype or exp_avg_sq_dtype chooses "
        "bfloat16, or 8bit for the last two",
    ),
    # It requires Transformer Engine. Without state, it steps with random gradients before it reads a
    # checkpoint, which changes the weights that were read before. Creating the state first would avoid that
    # step, but then its hooks rebuild float32 copies from 16-bit weights.
    Row(
        "own_optimizer_in_host_memory",
        {"policy.megatron_cfg.optimizer.optimizer_cpu_offload": False},
        {"backend": "megatron"},
        "Megatron-Core's optimizer in host memory steps with random gradients before it reads a checkpoint",
        "set it to false, and policy.megatron_cfg.optimizer.optimizer_offload_fraction to 1",
    ),
    Row(
        "states_in_host_memory",
        {"policy.megatron_cfg.optimizer.optimizer_offload_fraction": 0},
        {"backend": "megatron", "policy.megatron_cfg.optimizer.use_distributed_optimizer": False},
        "only the distributed optimizer, which is Adam, has states in host memory",
        "set policy.megatron_cfg.optimizer.use_distributed_optimizer to true, or write 0",
    ),
    Row(
        "states_in_host_memory",
        {"policy.megatron_cfg.optimizer.optimizer_offload_fraction": 0},
        {"backend": "megatron", "policy.megatron_cfg.optimizer.master_dtype": "bfloat16"},
        (
            "policy.megatron_cfg.optimizer.master_dtype is bfloat16, which updates the weights "
            "themselves, on the device"
        ),
        "write 0, or master_dtype: float32, whose copies are then in host memory",
    ),
    Row(
        "states_in_host_memory",
        {"policy.optimizer.master_dtype": "float32"},
        {"backend": ("dtensor", "fsdp1"), "offloads_weights": True},
        "the updated weights are in host memory, where float32 takes no device memory",
        "write float32, or set policy.dtensor_cfg.cpu_offload and policy.fsdp_offload_enabled to false",
    ),
    Row(
        "states_below_float32",
        {f"policy.megatron_cfg.optimizer.{name}": "float32" for name in STATE_KEYS},
        {"backend": "megatron", "policy.megatron_cfg.optimizer.use_distributed_optimizer": False},
        "only the distributed optimizer, which is Adam, has states below float32",
        "set policy.megatron_cfg.optimizer.use_distributed_optimizer to true, or write float32",
    ),
    Row(
        "states_below_float32",
        {"policy.megatron_cfg.optimizer.master_dtype": "float32"},
        {"backend": "megatron", "policy.precision": ("float32", "float16")},
        "policy.precision is {policy.precision}, and only bfloat16 weights can be updated without "
        "float32 copies",
        "write float32, or remove the line",
    ),
    Row(
        "states_below_float32",
        {"policy.optimizer.master_dtype": "float32"},
        {"backend": ("dtensor", "fsdp1"), "policy.precision": ("float32", "float16")},
        "policy.precision is {policy.precision}, and only bfloat16 weights can be updated without "
        "float32 copies",
        "write float32, or remove the line",
    ),
    Row(
        "gradients_are_summed",
        {"policy.megatron_cfg.distributed_data_parallel_config.average_in_collective": False},
        {"backend": "megatron"},
        (
            "losses are divided by the global number of tokens or sequences, so gradients are summed; "
            "averaging "
            "would divide twice"
        ),
        "set it to false",
    ),
    Row(
        "overlap_of_parameter_gather",
        {"policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather": False},
        {"backend": "megatron", "policy.megatron_cfg.optimizer.use_distributed_optimizer": False},
        "only the distributed optimizer gathers parameters",
        "set it to false, or policy.megatron_cfg.optimizer.use_distributed_optimizer to true",
    ),
    Row(
        "overlap_of_parameter_gather",
        {"policy.megatron_cfg.distributed_data_parallel_config.overlap_param_gather": False},
        {
            "backend": "megatron",
            "policy.megatron_cfg.distributed_data_parallel_config.overlap_grad_reduce": False,
        },
        "it needs overlap_grad_reduce",
        "set policy.megatron_cfg.distributed_data_parallel_config.overlap_grad_reduce to true or null",
    ),
    Row(
        "sharding_strategy_is_used",
        {"policy.megatron_cfg.distributed_data_parallel_config.data_parallel_sharding_strategy": "no_shard"},
        {
            "backend": "megatron",
            "policy.megatron_cfg.distributed_data_parallel_config.use_custom_fsdp": False,
        },
        "only Megatron's own FSDP reads it, and use_custom_fsdp is false, so it would do nothing",
        "remove the line; policy.megatron_cfg.optimizer.use_distributed_optimizer shards the optimizer state",
    ),
    Row(
        "model_that_scores_has_no_tokens_to_score",
        {"policy.generation": None, "policy.logprob_chunk_size": None},
        {"has_scoring_model": True},
        "policy.reward_model_cfg.enabled is true, and a model that scores has no output layer over tokens",
        "write null, or set policy.reward_model_cfg.enabled to false",
    ),
)
"""Rows that apply to the policy and to every other model."""

ROWS_OF_RUNS = (
    Row(
        "shared_devices_need_no_resources",
        {
            "policy.generation.colocated.resources.gpus_per_node": None,
            "policy.generation.colocated.resources.num_nodes": None,
        },
        {"policy.generation.colocated.enabled": True},
        "colocated.enabled is true: generation runs on the devices of training, so it would do nothing",
        "write null, or remove the line",
    ),
    Row(
        "engines_apart_are_checked",
        {"policy.generation.engine_check.sequences": 0},
        {"policy.generation.colocated.enabled": True},
        (
            "colocated.enabled is true: each batch is sampled with the newest weights, and mismatch_mean "
            "compares it with the policy"
        ),
        "write 0, or remove the line",
    ),
    Row(
        "examples_are_scored_by_the_model_itself",
        defaults("policy.generation", GenerationConfig, "temperature", "top_p", "top_k"),
        {"generates": False},
        (
            "{algorithm} trains the model's own probabilities, and these sampling settings would "
            "change its log-probabilities"
        ),
        "write {first}, or remove the section",
    ),
    Row(
        "validation_that_scores_samples_nothing",
        defaults("policy.generation", GenerationConfig, "val_temperature", "val_top_p", "val_top_k"),
        {"generates": False},
        "the validation of {algorithm} scores the reference answers of all sources as one set",
        "remove it",
    ),
    Row(
        "turns_have_an_environment",
        {"{section}.max_rollout_turns": (1, 0)},
        {"single_turn": True},
        (
            "env.environment is single_turn, which ends a conversation with its first response, so that it "
            "would do nothing"
        ),
        "write 1, or name an environment with several turns",
    ),
    Row(
        "rewards_of_turns_have_turns",
        {"{section}.rewards_by_turn": False},
        {"turns": 1},
        "{section}.max_rollout_turns is 1, so that it would do nothing",
        "write false, or let conversations have several turns",
    ),
    Row(
        "entropy_can_be_raised",
        {"loss_fn.entropy_coef": 0},
        {"has_policy_loss": True, "policy.generation.top_k": 1},
        "policy.generation.top_k is 1: only one token can be sampled, and its entropy is always 0",
        "write 0, or raise top_k",
    ),
    Row(
        "estimator_is_told_what_it_reads",
        {"grpo.adv_estimator.minus_baseline": False},
        {"grpo.adv_estimator.name": ("grpo", "rloo", "gdpo")},
        "grpo.adv_estimator.name is {grpo.adv_estimator.name}, which has a baseline of its own",
        "write false, or name: reinforce_plus_plus",
    ),
    Row(
        "estimator_is_told_what_it_reads",
        {"grpo.adv_estimator.minus_baseline": False},
        {"own_estimator": True},
        "grpo.adv_estimator.name is {grpo.adv_estimator.name}, which has options instead",
        "write false, or name: reinforce_plus_plus",
    ),
    Row(
        "estimator_is_told_what_it_reads",
        {"grpo.use_leave_one_out_baseline": True, "grpo.std": "population"},
        {"grpo.adv_estimator.name": ("rloo", "reinforce_plus_plus")},
        "grpo.adv_estimator.name is {grpo.adv_estimator.name}, which does not read it",
        "remove it",
    ),
    Row(
        "estimator_is_told_what_it_reads",
        {"grpo.normalize_rewards": True},
        {"grpo.adv_estimator.name": "reinforce_plus_plus"},
        "grpo.adv_estimator.name is {grpo.adv_estimator.name}, which does not read it",
        "remove it",
    ),
    Row(
        "estimator_is_told_what_it_reads",
        {"grpo.std": "population"},
        {"grpo.adv_estimator.name": ("grpo", "gdpo"), "grpo.normalize_rewards": False},
        "grpo.normalize_rewards is false: advantages are not divided by a deviation, and nothing reads it",
        "remove it, or write normalize_rewards: true",
    ),
    Row(
        "parts_are_scored_while_others_are_sampled",
        {
            "policy.generation.colocated.enabled": False,
            "{section}.async_grpo.enabled": False,
            "{section}.use_dynamic_sampling": False,
            "{section}.max_rollout_turns": 1,
        },
        {"has_parts": True},
        "{section}.logprob_parts is more than 1: the policy scores finished parts of a step's "
        "single-turn batch, while engines on separate ranks sample the others",
        "write {first}, or {section}.logprob_parts: 1",
    ),
    Row(
        "schedule_of_sampling",
        {
            "{section}.async_grpo.lookahead_steps": 1,
            "{section}.async_grpo.on_stale": "wait",
            "{section}.async_grpo.in_flight_weight_updates": True,
            "{section}.async_grpo.replay": None,
        },
        {"schedule": "in_order"},
        "{section}.async_grpo.schedule is in_order, and nothing reads it",
        "remove the line, or write {section}.async_grpo.schedule: ready_first",
    ),
    Row(
        "schedule_of_sampling",
        {"grpo.use_dynamic_sampling": False},
        {"grpo.async_grpo.enabled": True, "grpo.async_grpo.schedule": "ready_first"},
        "with grpo.async_grpo.schedule: ready_first a step takes the groups that are complete "
        "first, while dynamic sampling fills its rounds in the order of the data; the two together "
        "are not in this version",
        "write false, or grpo.async_grpo.schedule: in_order",
    ),
    # ready_first has not been tested with a critic or a teacher.
    Row(
        "schedule_of_sampling",
        {"ppo.async_grpo.schedule": "in_order"},
        {"ppo.async_grpo.enabled": True},
        "training on groups in the order of completion is not in this version with a critic",
        "write in_order",
    ),
    Row(
        "schedule_of_sampling",
        {"distillation.async_grpo.schedule": "in_order"},
        {"distillation.async_grpo.enabled": True},
        "training on groups in the order of completion is not in this version with a teacher",
        "write in_order",
    ),
    Row(
        "pass_before_training_is_read",
        {"distillation.async_grpo.recompute_logprobs": True},
        {"distillation.mode": "topk"},
        "distillation.mode is topk, whose loss has no ratio, and nothing reads it",
        "write true, or distillation.mode: reverse_kl_advantage",
    ),
    Row(
        "dynamic_sampling_is_on",
        {"grpo.batch_multiplier": 1, "grpo.dynamic_sampling_max_gen_batches": 10},
        {"grpo.use_dynamic_sampling": False},
        "grpo.use_dynamic_sampling is false, and nothing reads it",
        "write grpo.use_dynamic_sampling: true, or {first}",
    ),
    Row(
        "what_is_bootstrapped_is_trained_on",
        {"ppo.bootstrap_truncated": False},
        {"ppo.overlong_filtering": True},
        "ppo.overlong_filtering is true: truncated responses are left out, and nothing reads their values",
        "switch one of the two off",
    ),
    Row(
        "weights_of_scores_have_a_model",
        {"{section}.reward_model_weight": 1, "{section}.env_reward_weight": 1},
        {"reward_model": None},
        "there is no section reward_model, and nothing reads it",
        "write 1, or add the section",
    ),
    Row(
        "table_of_samples_has_a_place",
        {"logger.samples.wandb_table": False},
        {"logger.samples.enabled": False},
        "logger.samples.enabled is false: there are no samples",
        "write logger.samples.enabled: true",
    ),
    Row(
        "table_of_samples_has_a_place",
        {"logger.samples.wandb_table": False},
        {"logger.samples.enabled": True, "logger.wandb_enabled": False},
        "logger.wandb_enabled is false: no service receives the table",
        "write logger.wandb_enabled: true",
    ),
    Row(
        "recorders_have_steps",
        {"profiler.torch_ranks": [], "profiler.nsys_workers": (None, "")},
        {"profiler.steps": None},
        "profiler.steps is null, so no step is recorded",
        "write profiler.steps: [3, 5]",
    ),
    Row(
        "loss_of_teachers_is_read",
        {"loss_fn": None},
        {"has_teachers": True, "distillation.mode": "topk"},
        "distillation.mode is topk, whose loss is in distillation",
        "remove it: loss_fn: null",
    ),
    Row(
        "loss_of_teachers_is_read",
        {"distillation.mixed_kl_weight": 0.5},
        {"has_teachers": True, "distillation.mode": "topk", "distillation.kl_type": ("forward", "reverse")},
        "distillation.kl_type is {distillation.kl_type}, which does not use this weight",
        "remove it, or write mixed",
    ),
    Row(
        "loss_of_teachers_is_read",
        {"distillation.advantage_clip_low": None, "distillation.advantage_clip_high": None},
        {"has_teachers": True, "distillation.mode": "topk"},
        "distillation.mode is topk, which does not read it",
        "remove it, or write mode: reverse_kl_advantage",
    ),
    Row(
        "loss_of_teachers_is_read",
        {**defaults(DISTILLATION, DistillationLossConfig), "distillation.topk_logits_k": 64},
        {"has_teachers": True, "distillation.mode": "reverse_kl_advantage"},
        "distillation.mode is {distillation.mode}, which does not read it",
        "remove it, or write mode: topk",
    ),
    Row(
        "loss_of_teachers_is_read",
        {"loss_fn.use_kl_in_reward": False},
        {"has_teachers": True, "distillation.mode": "reverse_kl_advantage"},
        "advantages are computed from the teacher's log-probabilities, and no reward is read",
        "write false",
    ),
)
"""Rows that apply to a run as a whole."""


def _rules_of(table: tuple[Row, ...]) -> Iterator[Rule]:
    # Rows of one rule must be adjacent in the table, because groupby only groups neighbours.
    for name, rows in groupby(table, lambda row: row.rule):
        yield _rule(name, [row.violations for row in rows])


def _rule(name: str, rows: list[Rule]) -> Rule:
    def rule(view: View) -> Iterator[Violation]:
        return apply_rules(rows, view)

    # Tests find a rule by its name.
    rule.__name__ = name
    return rule


TABLE_OF_MODELS = tuple(_rules_of(ROWS_OF_MODELS))
TABLE_OF_RUNS = (*TABLE_OF_MODELS, *_rules_of(ROWS_OF_RUNS))
