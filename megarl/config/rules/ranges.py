"""Bounds of single values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megarl.config.rules.view import Rule, View
from megarl.errors import Violation


@dataclass(frozen=True, slots=True)
class Range:
    """An interval of numbers; null is left to the schema.

    Attributes:
        low: smallest value, None for no bound.
        high: largest value, None for no bound.
        low_open: ``low`` itself is outside.
        high_open: ``high`` itself is outside.
    """

    low: float | None = None
    high: float | None = None
    low_open: bool = False
    high_open: bool = False

    def holds(self, value: float) -> bool:
        """Whether ``value`` is inside."""
        if self.low is not None and (value <= self.low if self.low_open else value < self.low):
            return False
        return self.high is None or not (value >= self.high if self.high_open else value > self.high)

    def __str__(self) -> str:
        low = "" if self.low is None else f"{'more than' if self.low_open else 'at least'} {self.low:g}"
        high = "" if self.high is None else f"{'less than' if self.high_open else 'at most'} {self.high:g}"
        return " and ".join(part for part in (low, high) if part)


AT_LEAST_1 = Range(low=1)
AT_LEAST_0 = Range(low=0)
ABOVE_0 = Range(low=0, low_open=True)
DECAY = Range(low=0, high=1, high_open=True)

MEGATRON = "policy.megatron_cfg"
DTENSOR = "policy.dtensor_cfg"

RANGES: dict[str, Range] = {
    "seed": Range(low=0, high=2**63 - 1),
    "cluster.gpus_per_node": AT_LEAST_1,
    "cluster.num_nodes": AT_LEAST_1,
    "policy.megatron_cfg.distributed_data_parallel_config.bucket_size": AT_LEAST_1,
    "deadlines.init_s": ABOVE_0,
    "deadlines.step_s": ABOVE_0,
    "deadlines.save_s": ABOVE_0,
    "policy.train_global_batch_size": AT_LEAST_1,
    "policy.train_micro_batch_size": AT_LEAST_1,
    "policy.logprob_batch_size": AT_LEAST_1,
    "policy.generation_batch_size": AT_LEAST_1,
    "policy.make_sequence_length_divisible_by": AT_LEAST_1,
    "policy.max_total_sequence_length": Range(low=2),
    "policy.max_grad_norm": ABOVE_0,
    "policy.max_consecutive_skips": AT_LEAST_1,
    "policy.refit_buffer_size_gb": ABOVE_0,
    "policy.dynamic_batching.train_mb_tokens": AT_LEAST_1,
    "policy.dynamic_batching.logprob_mb_tokens": AT_LEAST_1,
    "policy.dynamic_batching.sequence_length_round": AT_LEAST_1,
    "policy.sequence_packing.train_mb_tokens": AT_LEAST_1,
    "policy.sequence_packing.logprob_mb_tokens": AT_LEAST_1,
    f"{DTENSOR}.tensor_parallel_size": AT_LEAST_1,
    f"{DTENSOR}.context_parallel_size": AT_LEAST_1,
    f"{MEGATRON}.tensor_model_parallel_size": AT_LEAST_1,
    f"{MEGATRON}.pipeline_model_parallel_size": AT_LEAST_1,
    f"{MEGATRON}.virtual_pipeline_model_parallel_size": AT_LEAST_1,
    f"{MEGATRON}.num_layers_in_first_pipeline_stage": AT_LEAST_1,
    f"{MEGATRON}.num_layers_in_last_pipeline_stage": AT_LEAST_1,
    f"{MEGATRON}.context_parallel_size": AT_LEAST_1,
    f"{MEGATRON}.expert_tensor_parallel_size": AT_LEAST_1,
    f"{MEGATRON}.expert_model_parallel_size": AT_LEAST_1,
    f"{MEGATRON}.moe_router_bias_update_rate": AT_LEAST_0,
    f"{MEGATRON}.moe_aux_loss_coeff": AT_LEAST_0,
    f"{MEGATRON}.moe_z_loss_coeff": AT_LEAST_0,
    f"{MEGATRON}.optimizer.lr": ABOVE_0,
    f"{MEGATRON}.optimizer.min_lr": AT_LEAST_0,
    f"{MEGATRON}.optimizer.weight_decay": AT_LEAST_0,
    f"{MEGATRON}.optimizer.adam_beta1": DECAY,
    f"{MEGATRON}.optimizer.adam_beta2": DECAY,
    f"{MEGATRON}.optimizer.adam_eps": ABOVE_0,
    f"{MEGATRON}.optimizer.sgd_momentum": DECAY,
    f"{MEGATRON}.optimizer.clip_grad": AT_LEAST_0,
    f"{MEGATRON}.scheduler.start_weight_decay": AT_LEAST_0,
    f"{MEGATRON}.scheduler.end_weight_decay": AT_LEAST_0,
    f"{MEGATRON}.scheduler.lr_decay_iters": AT_LEAST_1,
    f"{MEGATRON}.scheduler.lr_warmup_iters": AT_LEAST_0,
    f"{MEGATRON}.scheduler.lr_warmup_init": AT_LEAST_0,
    "policy.generation.max_new_tokens": AT_LEAST_1,
    "policy.generation.temperature": ABOVE_0,
    "policy.generation.top_p": Range(low=0, high=1, low_open=True),
    "policy.generation.top_k": AT_LEAST_1,
    "policy.generation.pad_token_id": AT_LEAST_0,
    "policy.generation.vllm_cfg.tensor_parallel_size": AT_LEAST_1,
    "policy.generation.vllm_cfg.max_model_len": AT_LEAST_1,
    "cluster.device_memory_gib": Range(low=0, low_open=True),
    "policy.generation.vllm_cfg.gpu_memory_utilization": Range(low=0, high=1, low_open=True),
    "policy.generation.vllm_cfg.kv_cache_gb": ABOVE_0,
    "policy.generation.vllm_cfg.refit_delta_share": Range(low=0, high=1),
    "loss_fn.reference_policy_kl_penalty": AT_LEAST_0,
    "loss_fn.ratio_clip_min": Range(low=0, high=1),
    "loss_fn.ratio_clip_max": AT_LEAST_0,
    "loss_fn.ratio_clip_c": Range(low=1, low_open=True),
    "loss_fn.log_ratio_clamp_value": ABOVE_0,
    "loss_fn.kl_input_clamp_value": ABOVE_0,
    "loss_fn.kl_output_clamp_value": ABOVE_0,
    "grpo.num_prompts_per_step": AT_LEAST_1,
    "grpo.num_generations_per_prompt": Range(low=2),
    "grpo.max_token_mult_prob_error": AT_LEAST_1,
    "grpo.max_num_steps": AT_LEAST_1,
    "grpo.max_num_epochs": AT_LEAST_1,
    "grpo.val_period": AT_LEAST_0,
    "grpo.max_val_samples": AT_LEAST_1,
    "grpo.val_batch_size": AT_LEAST_1,
    "sft.max_num_steps": AT_LEAST_1,
    "sft.max_num_epochs": AT_LEAST_1,
    "sft.val_period": AT_LEAST_0,
    "sft.val_batches": AT_LEAST_1,
    "sft.val_global_batch_size": AT_LEAST_1,
    "sft.val_micro_batch_size": AT_LEAST_1,
    "env.processes": AT_LEAST_1,
    "env.timeout_s": ABOVE_0,
    "data.max_input_seq_length": AT_LEAST_1,
    "data.train.max_samples": AT_LEAST_1,
    "data.validation.max_samples": AT_LEAST_1,
    "checkpointing.save_period": AT_LEAST_1,
    "checkpointing.keep_top_k": AT_LEAST_1,
}

ADVICE = {
    "policy.generation.temperature": "sample at 1.0; greedy decoding is asked for call by call",
    "policy.max_grad_norm": "write null to turn clipping off",
    "policy.generation.top_k": "write null to keep all tokens",
    "loss_fn.ratio_clip_c": "write null to turn the second clip off, or for example 3.0",
    "grpo.num_generations_per_prompt": "write 2 or more: an answer is judged against the others of its prompt",
    "grpo.val_period": "write 0 for no validation",
}


def values_in_range(view: View) -> Iterator[Violation]:
    """Every number lies within its bounds."""
    for key, allowed in RANGES.items():
        value = view.get(key)
        if value is not None and not allowed.holds(value):
            yield Violation(key, value, f"it must be {allowed}", ADVICE.get(key, f"write a value that is {allowed}"))


RANGE_RULES: tuple[Rule, ...] = (values_in_range,)
