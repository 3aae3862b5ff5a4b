"""Every key of ``policy`` with its demonstration, for what all backends share and for the torch backends."""

from __future__ import annotations

from typing import Any

from tests.dist.key_demonstrations import Changes, Demonstration, Refused, ShownBy

ADAMW = {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-2}}
WARM_UP = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"total_iters": 2}}
# room for a whole batch row, so that budgets of a few rows are legal
SHORT = {"max_total_sequence_length": 13}
PACKED = {**SHORT, "sequence_packing": {"enabled": True, "train_mb_tokens": 26, "logprob_mb_tokens": 26}}
DYNAMIC = {**SHORT, "dynamic_batching": {"enabled": True, "train_mb_tokens": 26, "logprob_mb_tokens": 26, "sequence_length_round": 1}}
SEQUENCE: list[dict[str, Any]] = [WARM_UP, {"name": "torch.optim.lr_scheduler.ExponentialLR", "kwargs": {"gamma": 0.5}}]

VALIDATES_BY_SAMPLING = {"generation.val_temperature": 1.5}
COLOCATED = {"generation.colocated.enabled": True}

GENERATION: dict[str, Demonstration] = {
    "generation.max_new_tokens": Changes(2, "generated.answers"),
    "generation.temperature": Changes(0.5, "scored.logprobs"),
    "generation.top_p": Changes(0.05, "generated.ids"),
    "generation.top_k": Changes(1, "generated.ids"),
    "generation.val_temperature": Changes(1.5, "generated.validated"),
    "generation.val_top_p": Changes(0.05, "generated.validated", beside=VALIDATES_BY_SAMPLING),
    "generation.val_top_k": Changes(1, "generated.validated", beside=VALIDATES_BY_SAMPLING),
    "generation.stop_token_ids": Changes(list(range(101)), "generated.answers"),
    "generation.stop_strings": Changes(["w"], "generated.answers"),
    "generation.pad_token_id": Changes(7, "generated.ids", beside={"generation.stop_token_ids": list(range(50))}),
    "generation.model_name": Refused(("model:other",), ("model:qwen2",), "the policy itself generates"),
    "generation.colocated.enabled": Refused((False,), (True,), "generates on the training ranks"),
    "generation.colocated.resources.gpus_per_node": Refused((1,), (None,), "colocated.enabled is true", beside=COLOCATED),
    "generation.colocated.resources.num_nodes": Refused((1,), (None,), "colocated.enabled is true", beside=COLOCATED),
}

ON_VLLM = {"generation.backend": "vllm"}
OPTIONS = "tests.unit.test_vllm_options:"

VLLM: dict[str, Demonstration] = {
    **{
        f"generation.vllm_cfg.{key}": ShownBy(f"{OPTIONS}test_a_key_changes_its_argument_alone")
        for key in (
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "expert_parallel_size",
            "gpu_memory_utilization",
            "kv_cache_gb",
            "enforce_eager",
            "load_format",
        )
    },
    "generation.vllm_cfg.fast_sampling": ShownBy("tests.unit.test_vllm_worker:test_seeds_are_those_of_the_rows_or_one_for_the_engine"),
    "generation.vllm_cfg.precision": ShownBy(f"{OPTIONS}test_what_is_not_said_is_the_policy_s"),
    "generation.vllm_cfg.max_model_len": ShownBy(f"{OPTIONS}test_what_is_not_said_is_the_policy_s"),
    "generation.vllm_cfg.async_engine": Refused((True,), (False,), "is wanted", beside=ON_VLLM),
    # without it vLLM reserves its whole cache on a CPU, for which there is no room here
    "generation.vllm_cfg.env_vars": ShownBy("tests.system.test_vllm:test_the_engines_have_the_environment_of_their_section"),
    "generation.vllm_kwargs": ShownBy(f"{OPTIONS}test_further_arguments_come_last"),
}

SHARED: dict[str, Demonstration] = {
    "model_name": Changes("model:other", "built.weights"),
    "tokenizer.name": ShownBy("test_the_tokenizer_s_keys_decide_what_a_prompt_becomes"),
    "tokenizer.chat_template": ShownBy("test_the_tokenizer_s_keys_decide_what_a_prompt_becomes"),
    "tokenizer.chat_template_kwargs": ShownBy("test_the_tokenizer_s_keys_decide_what_a_prompt_becomes"),
    "tokenizer.template_date": ShownBy("tests.unit.test_chat_templates:test_a_clock_shows_the_day_of_the_run"),
    "train_global_batch_size": Changes(4, "trained.losses", beside={"train_micro_batch_size": 2}),
    "train_micro_batch_size": Changes(2, "trained.micro_batches"),
    "learning_rate": ShownBy("test_the_learning_rate_is_what_an_optimizer_refers_to"),
    "logprob_batch_size": Changes(2, "scored.micro_batches"),
    "logprob_chunk_size": ShownBy("tests.dist.test_output_layer:test_a_chunk_of_logits_is_there_at_a_time"),
    "reward_model_cfg.enabled": ShownBy("tests.dist.test_scoring:test_what_a_model_that_scores_does_not_do"),
    "reward_model_cfg.reward_model_type": ShownBy("tests.dist.test_scoring:test_a_language_model_gets_a_score_layer_and_is_exported"),
    "generation_batch_size": Changes(1, "generated.rows_at_once"),
    "precision": Changes("bfloat16", "scored.logprobs"),
    "make_sequence_length_divisible_by": Changes(4, "scored.micro_batches"),
    "max_total_sequence_length": Changes(6, "generated.answers"),
    "max_grad_norm": Changes(None, "trained.weights"),
    "on_nonfinite": ShownBy("tests.dist.test_nonfinite:test_all_ranks_end_where_it_is_not_allowed"),
    "max_consecutive_skips": ShownBy("tests.dist.test_nonfinite:test_too_many_in_a_row_end_the_run"),
    "offload_optimizer_for_logprob": ShownBy("tests.dist.test_offload_counts:test_the_optimizer_leaves_for_an_engine_or_when_asked"),
    "deterministic": ShownBy("tests.unit.test_arithmetic:test_the_key_reaches_the_device"),
    "refit_buffer_size_gb": ShownBy("tests.dist.test_refit:test_the_buffer_has_the_configured_size"),
    "refit_checksum": ShownBy("tests.dist.test_refit:test_weights_carry_a_checksum_where_it_is_configured"),
    "dynamic_batching.enabled": Changes(False, "trained.micro_batches", beside=DYNAMIC),
    "dynamic_batching.train_mb_tokens": Changes(39, "trained.micro_batches", beside=DYNAMIC),
    "dynamic_batching.logprob_mb_tokens": Changes(39, "scored.micro_batches", beside=DYNAMIC),
    "dynamic_batching.sequence_length_round": Changes(13, "trained.micro_batches", beside=DYNAMIC),
    "sequence_packing.enabled": Changes(False, "trained.micro_batches", beside=PACKED),
    "sequence_packing.train_mb_tokens": Changes(39, "trained.micro_batches", beside=PACKED),
    "sequence_packing.logprob_mb_tokens": Changes(39, "scored.micro_batches", beside=PACKED),
    "sequence_packing.algorithm": Changes("concatenative", "trained.micro_batches", beside=PACKED),
    **GENERATION,
    **VLLM,
}

TORCH: dict[str, Demonstration] = {
    "trust_remote_code": Changes(True, "built.config_class", model="remote"),
    "generation.backend": Refused(("megatron",), ("hf", "vllm"), ""),
    "optimizer.name": Changes("torch.optim.SGD", "trained.weights"),
    "optimizer.kwargs": Changes({"lr": 1e-2, "weight_decay": 0.5}, "trained.weights"),
    "optimizer.weight_decay_on_vectors": Changes(False, "trained.weights"),
    "scheduler.name": Changes("torch.optim.lr_scheduler.ConstantLR", "trained.rates", beside={"scheduler": WARM_UP}),
    "scheduler.kwargs": Changes({"total_iters": 3}, "trained.rates", beside={"scheduler": WARM_UP}),
    "scheduler.milestones": Changes(
        [*SEQUENCE, {"milestones": [2]}], "trained.rates", before=[*SEQUENCE, {"milestones": [1]}], path="scheduler"
    ),
}

ON_TWO_TENSOR_RANKS = {"dtensor_cfg.tensor_parallel_size": 2}
ON_TWO_CONTEXT_RANKS = {"dtensor_cfg.context_parallel_size": 2}

DTENSOR: dict[str, Demonstration] = {
    "activation_checkpointing_enabled": Refused((True,), (False,), "only FSDP1 reads it"),
    "fsdp_offload_enabled": Refused((True,), (False,), "only FSDP1 reads it"),
    "megatron_cfg.enabled": Refused((True,), (False,), "a policy has one backend", named="dtensor_cfg.enabled"),
    "dtensor_cfg.enabled": Changes(False, "built.worker"),
    # on a CPU all memory is host memory, and the worker says so
    "dtensor_cfg.cpu_offload": Changes(True, "built.notices"),
    "dtensor_cfg.sequence_parallel": Changes(True, "communicated.collectives", beside=ON_TWO_TENSOR_RANKS, world=2),
    "dtensor_cfg.activation_checkpointing": Changes(True, "trained.modules"),
    "dtensor_cfg.tensor_parallel_size": Changes(2, "built.parameters", world=2),
    "dtensor_cfg.context_parallel_size": Changes(2, "scored.tokens", world=2),
    "dtensor_cfg.context_parallel_comm_type": Changes("p2p", "communicated.collectives", beside=ON_TWO_CONTEXT_RANKS, world=2),
    "dtensor_cfg.custom_parallel_plan": Changes(
        "tests.dist.key_observations.MLPS_ALONE", "built.parameters", beside=ON_TWO_TENSOR_RANKS, world=2
    ),
    "dtensor_cfg.env_vars": ShownBy("tests.system.test_worker_environment:test_workers_have_the_environment_of_their_section"),
}

FSDP1: dict[str, Demonstration] = {
    "activation_checkpointing_enabled": Changes(True, "trained.modules"),
    # on a CPU all memory is host memory, and the worker says so
    "fsdp_offload_enabled": Changes(True, "built.notices"),
    "megatron_cfg.enabled": Changes(
        True, "built.worker", with_it={"optimizer": None, "megatron_cfg.optimizer": {"lr": 1e-2}, "generation.backend": "megatron"}
    ),
    "dtensor_cfg.enabled": Changes(True, "built.worker"),
}
