"""Every key of ``policy`` that Megatron alone has, or has in its own way, with its demonstration."""

from __future__ import annotations

from tests.dist.key_demonstrations import Changes, Demonstration, Refused, ShownBy
from tests.dist.key_tables import ADAMW, SEQUENCE, WARM_UP

M = "megatron_cfg"
OPTIMIZER = f"{M}.optimizer"
SCHEDULER = f"{M}.scheduler"
DATA_PARALLEL = f"{M}.distributed_data_parallel_config"
UNUSED = "the Megatron backend does not use it"

TWO_STAGES = {f"{M}.pipeline_model_parallel_size": 2}
TWO_TENSOR_RANKS = {f"{M}.tensor_model_parallel_size": 2}
TWO_EXPERT_RANKS = {f"{M}.expert_model_parallel_size": 2}
SGD = {f"{OPTIMIZER}.optimizer": "sgd", f"{OPTIMIZER}.use_distributed_optimizer": False}
DECAYING = {f"{SCHEDULER}.lr_decay_style": "linear", f"{SCHEDULER}.lr_decay_iters": 4}
GROWING = {
    f"{SCHEDULER}.weight_decay_incr_style": "linear",
    f"{SCHEDULER}.lr_decay_iters": 4,
    f"{SCHEDULER}.start_weight_decay": 0.1,
    f"{SCHEDULER}.end_weight_decay": 0.4,
}
SMALL_BUCKETS = {f"{DATA_PARALLEL}.bucket_size": 2000}
OVERLAPPED = {**SMALL_BUCKETS, f"{DATA_PARALLEL}.overlap_grad_reduce": True}
SELECTIVE = {f"{M}.activation_checkpointing": True, f"{M}.recompute_granularity": "selective"}
BALANCED = {f"{M}.moe_router_load_balancing_type": "aux_loss"}

OF_MEGATRON: dict[str, Demonstration] = {
    "activation_checkpointing_enabled": Refused((True,), (False,), "only FSDP1 reads it"),
    "fsdp_offload_enabled": Refused((True,), (False,), "only FSDP1 reads it"),
    "optimizer.name": Refused((ADAMW,), (None,), UNUSED, path="optimizer"),
    "optimizer.kwargs": Refused((ADAMW,), (None,), UNUSED, path="optimizer"),
    "optimizer.weight_decay_on_vectors": Refused((ADAMW,), (None,), UNUSED, path="optimizer"),
    "scheduler.name": Refused((WARM_UP,), (None,), UNUSED, path="scheduler"),
    "scheduler.kwargs": Refused((WARM_UP,), (None,), UNUSED, path="scheduler"),
    "scheduler.milestones": Refused(([*SEQUENCE, {"milestones": [1]}],), (None,), UNUSED, path="scheduler"),
    # Megatron builds its own model; the code that it may run is the tokenizer's
    "trust_remote_code": ShownBy("test_code_that_comes_with_a_tokenizer_runs_only_where_it_is_trusted"),
    "generation.backend": Refused(("hf",), ("megatron", "vllm"), ""),
    "dtensor_cfg.enabled": Refused((True,), (False,), "a policy has one backend"),
    f"{M}.enabled": Changes(False, "built.worker", with_it={"optimizer": ADAMW, "generation.backend": "hf"}),
    f"{M}.empty_unused_memory_level": Changes(2, "trained.emptied", before=1),
    f"{M}.activation_checkpointing": Changes(True, "trained.modules"),
    f"{M}.recompute_granularity": Changes("selective", "trained.modules", beside={f"{M}.activation_checkpointing": True}),
    f"{M}.recompute_modules": Changes(["mlp"], "trained.modules", beside=SELECTIVE),
    f"{M}.converter_type": Refused(("LlamaForCausalLM", "Qwen3ForCausalLM"), ("Qwen2ForCausalLM",), "the model's own config.json decides"),
    f"{M}.family_file": ShownBy("tests.dist.test_selftest:test_a_family_of_a_user"),
    f"{M}.ignore_config_keys": ShownBy("tests.dist.test_published_configs:test_ignored_config_keys"),
    # whether it works on a GPU is shown by tests.unit.test_transformer_engine with packages that are written for it
    f"{M}.transformer_engine": Refused((True,), ("auto", False), "needs a GPU"),
    f"{M}.float32_logits": Changes(True, "scored.logprobs", beside={"precision": "bfloat16"}),
    f"{M}.apply_rope_fusion": ShownBy("test_rope_fusion_reaches_megatron_where_its_kernel_is"),
    f"{M}.env_vars": ShownBy("tests.system.test_worker_environment:test_workers_have_the_environment_of_their_section"),
}

LAYOUT: dict[str, Demonstration] = {
    f"{M}.tensor_model_parallel_size": Changes(2, "built.parameters", world=2),
    f"{M}.pipeline_model_parallel_size": Changes(2, "built.chunks", world=2, model="deep"),
    f"{M}.virtual_pipeline_model_parallel_size": Changes(2, "built.chunks", beside=TWO_STAGES, world=2, model="deep"),
    f"{M}.pipeline_model_parallel_layout": Changes("Et|tttL", "built.chunks", beside=TWO_STAGES, world=2, model="deep"),
    f"{M}.num_layers_in_first_pipeline_stage": Changes(1, "built.chunks", beside=TWO_STAGES, world=2, model="deep"),
    f"{M}.num_layers_in_last_pipeline_stage": Changes(1, "built.chunks", beside=TWO_STAGES, world=2, model="deep"),
    f"{M}.context_parallel_size": Changes(2, "scored.tokens", world=2),
    f"{M}.context_parallel_comm_type": Changes("p2p", "communicated.collectives", beside={f"{M}.context_parallel_size": 2}, world=2),
    f"{M}.pipeline_dtype": Refused(("bfloat16", "float16"), ("float32",), "it must be policy.precision"),
    f"{M}.sequence_parallel": Changes(True, "communicated.collectives", beside=TWO_TENSOR_RANKS, world=2),
}

EXPERTS: dict[str, Demonstration] = {
    f"{M}.expert_model_parallel_size": Changes(2, "built.parameters", world=2, model="mixtral"),
    f"{M}.expert_tensor_parallel_size": Changes(
        2, "built.parameters", beside={**TWO_TENSOR_RANKS, f"{M}.sequence_parallel": True}, world=2, model="mixtral"
    ),
    f"{M}.moe_token_dispatcher_type": Changes("allgather", "communicated.collectives", beside=TWO_EXPERT_RANKS, world=2, model="mixtral"),
    # that it reaches Megatron-Core is shown by tests.dist.test_configuration_keys:test_the_fused_permutation_reaches_megatron
    f"{M}.moe_permute_fusion": Refused((True,), (False,), "needs a GPU", model="mixtral"),
    f"{M}.moe_grouped_gemm": Changes(True, "trained.modules", model="mixtral"),
    f"{M}.freeze_moe_router": Changes(True, "trained.routers", model="mixtral"),
    f"{M}.moe_router_dtype": Changes("fp64", "scored.logprobs", beside={"precision": "bfloat16"}, model="mixtral"),
    f"{M}.moe_router_load_balancing_type": Changes("aux_loss", "trained.norms", with_it={f"{M}.moe_aux_loss_coeff": 0.5}, model="mixtral"),
    f"{M}.moe_aux_loss_coeff": Changes(0.5, "trained.norms", beside=BALANCED, model="mixtral"),
    f"{M}.moe_z_loss_coeff": Changes(0.5, "trained.norms", model="mixtral"),
    f"{M}.moe_router_bias_update_rate": Refused((1e-3,), (0.0,), "no bias", model="mixtral"),
}

TRAINING: dict[str, Demonstration] = {
    f"{OPTIMIZER}.optimizer": Changes("sgd", "trained.weights", beside={f"{OPTIMIZER}.use_distributed_optimizer": False}),
    f"{OPTIMIZER}.lr": Changes(2e-2, "trained.weights"),
    f"{OPTIMIZER}.min_lr": Changes(5e-3, "trained.rates", beside=DECAYING),
    f"{OPTIMIZER}.weight_decay": Changes(0.5, "trained.weights"),
    f"{OPTIMIZER}.bf16": Refused((True,), (False,), "policy.precision is float32"),
    f"{OPTIMIZER}.fp16": Refused((True,), (False,), "policy.precision is float32"),
    f"{OPTIMIZER}.params_dtype": Refused(("bfloat16", "float16"), ("float32",), "always keeps float32"),
    f"{OPTIMIZER}.adam_beta1": Changes(0.5, "trained.weights"),
    f"{OPTIMIZER}.adam_beta2": Changes(0.5, "trained.weights"),
    f"{OPTIMIZER}.adam_eps": Changes(1e-2, "trained.weights"),
    f"{OPTIMIZER}.sgd_momentum": Changes(0.0, "trained.weights", beside=SGD),
    f"{OPTIMIZER}.use_distributed_optimizer": Changes(False, "trained.optimizer_state", world=2),
    f"{OPTIMIZER}.use_precision_aware_optimizer": Refused((True,), (False,), "Transformer Engine"),
    f"{OPTIMIZER}.optimizer_cpu_offload": Refused((True,), (False,), "not in this version"),
    f"{OPTIMIZER}.optimizer_offload_fraction": Refused((0.5, 1.0), (0.0,), "it would do nothing"),
    f"{OPTIMIZER}.clip_grad": Changes(0.0, "trained.weights"),
    f"{SCHEDULER}.start_weight_decay": Changes(0.2, "trained.decays", beside=GROWING),
    f"{SCHEDULER}.end_weight_decay": Changes(0.8, "trained.decays", beside=GROWING),
    f"{SCHEDULER}.weight_decay_incr_style": Changes("cosine", "trained.decays", beside=GROWING),
    f"{SCHEDULER}.lr_decay_style": Changes("cosine", "trained.rates", beside=DECAYING),
    f"{SCHEDULER}.lr_decay_iters": Changes(6, "trained.rates", beside=DECAYING),
    f"{SCHEDULER}.lr_warmup_iters": Changes(2, "trained.rates"),
    f"{SCHEDULER}.lr_warmup_init": Changes(5e-3, "trained.rates", beside={f"{SCHEDULER}.lr_warmup_iters": 2}),
    f"{DATA_PARALLEL}.grad_reduce_in_fp32": Changes(True, "built.gradient_types", beside={"precision": "bfloat16"}),
    f"{DATA_PARALLEL}.overlap_grad_reduce": Changes(False, "communicated.collectives", beside=SMALL_BUCKETS, world=2),
    # gathered in the next pass instead of in the step
    f"{DATA_PARALLEL}.overlap_param_gather": Changes(True, "communicated.collectives", beside=OVERLAPPED, world=2),
    f"{DATA_PARALLEL}.average_in_collective": Refused((True,), (False,), "averaging would divide twice"),
    f"{DATA_PARALLEL}.bucket_size": Changes(2000, "built.buckets", beside={f"{DATA_PARALLEL}.overlap_grad_reduce": True}, world=2),
    f"{DATA_PARALLEL}.use_custom_fsdp": Refused((True,), (False,), "not in this version"),
    f"{DATA_PARALLEL}.data_parallel_sharding_strategy": Refused(
        ("optim", "optim_grads", "optim_grads_params"), ("no_shard",), "use_custom_fsdp is false"
    ),
}

MEGATRON: dict[str, Demonstration] = {**OF_MEGATRON, **LAYOUT, **EXPERTS, **TRAINING}
