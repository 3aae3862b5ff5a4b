"""The shape of the ``policy`` section of a configuration.

Plain TypedDicts: importing this module imports neither torch nor ray. ``megarl.config.schema`` checks values against them,
``megarl.config.defaults`` holds the value of every optional key, ``megarl.config.rules`` the rules between keys.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypeAlias

from typing_extensions import TypedDict

from megarl.models.generation.interfaces import GenerationConfig

Precision: TypeAlias = Literal["float32", "bfloat16", "float16"]


class DTensorConfig(TypedDict):
    """The DTensor/FSDP2 backend.

    Attributes:
        enabled: use this backend.
        cpu_offload: keep parameters, gradients and optimizer state in host memory between uses.
        sequence_parallel: shard the activations between tensor-parallel regions over the sequence.
        activation_checkpointing: recompute every layer in the backward pass.
        tensor_parallel_size: ranks that share one layer.
        context_parallel_size: ranks that share one sequence.
        context_parallel_comm_type: how attention gets at the keys and values of the other ranks: ``all_gather``, the faster, has all of
            them on every rank; ``p2p``, ring attention, never more than two ranks' parts, for long sequences. null is all_gather.
        custom_parallel_plan: import path of a plan or of a function that returns one; null takes the built-in plan of the model.
        env_vars: environment variables of the workers.
    """

    enabled: bool
    cpu_offload: NotRequired[bool]
    sequence_parallel: NotRequired[bool]
    activation_checkpointing: NotRequired[bool]
    tensor_parallel_size: NotRequired[int]
    context_parallel_size: NotRequired[int]
    context_parallel_comm_type: NotRequired[Literal["all_gather", "p2p"] | None]
    custom_parallel_plan: NotRequired[str | None]
    env_vars: NotRequired[dict[str, str] | None]


class SequencePackingConfig(TypedDict):
    """Several sequences in one row, at most ``*_mb_tokens`` tokens a micro-batch.

    Attributes:
        enabled: pack sequences.
        train_mb_tokens: tokens a micro-batch in training.
        logprob_mb_tokens: tokens a micro-batch when log-probabilities are computed.
        algorithm: how sequences are laid together; best_fit_decreasing when absent.
    """

    enabled: bool
    train_mb_tokens: NotRequired[int]
    logprob_mb_tokens: NotRequired[int]
    algorithm: NotRequired[
        Literal["concatenative", "first_fit_decreasing", "first_fit_shuffle", "modified_first_fit_decreasing", "best_fit_decreasing"]
    ]


class DynamicBatchingConfig(TypedDict):
    """Micro-batches of sequences of like length, at most ``*_mb_tokens`` padded tokens each.

    Attributes:
        enabled: form micro-batches by length.
        train_mb_tokens: tokens a micro-batch in training, padding included.
        logprob_mb_tokens: the same when log-probabilities are computed.
        sequence_length_round: sequence lengths are rounded up to a multiple of this.
    """

    enabled: bool
    train_mb_tokens: NotRequired[int]
    logprob_mb_tokens: NotRequired[int]
    sequence_length_round: NotRequired[int]


class MegatronOptimizerConfig(TypedDict):
    """Megatron-Core's optimizer.

    Attributes:
        optimizer: kind of optimizer.
        lr: largest learning rate.
        min_lr: learning rate at the end of the decay.
        weight_decay: decoupled weight decay; ``scheduler`` may change it over time.
        bf16: the model's weights are bfloat16, the optimizer keeps float32 copies; must follow ``policy.precision``.
        fp16: the same for float16, with loss scaling.
        params_dtype: type of the parameters that the optimizer updates.
        adam_beta1: decay of the mean of the gradient.
        adam_beta2: decay of the mean of its square.
        adam_eps: added to the root of the mean square.
        sgd_momentum: momentum of SGD.
        use_distributed_optimizer: shard the optimizer state over the data-parallel ranks.
        use_precision_aware_optimizer: optimizer state below float32; needs Transformer Engine.
        clip_grad: largest norm of the gradient of the whole model; 0 turns clipping off.
    """

    lr: float
    optimizer: NotRequired[Literal["adam", "sgd"]]
    min_lr: NotRequired[float]
    weight_decay: NotRequired[float]
    bf16: NotRequired[bool]
    fp16: NotRequired[bool]
    params_dtype: NotRequired[Precision]
    adam_beta1: NotRequired[float]
    adam_beta2: NotRequired[float]
    adam_eps: NotRequired[float]
    sgd_momentum: NotRequired[float]
    use_distributed_optimizer: NotRequired[bool]
    use_precision_aware_optimizer: NotRequired[bool]
    clip_grad: NotRequired[float]


class MegatronSchedulerConfig(TypedDict):
    """Learning rate and weight decay over time; the unit of ``*_iters`` is one call of ``train``.

    Attributes:
        start_weight_decay: weight decay at the start.
        end_weight_decay: weight decay at the end.
        weight_decay_incr_style: how it goes from one to the other.
        lr_decay_style: how the learning rate goes from ``lr`` to ``min_lr``.
        lr_decay_iters: calls until ``min_lr`` is reached; null is allowed only with a constant learning rate.
        lr_warmup_iters: calls of linear warm-up.
        lr_warmup_init: learning rate at the start of the warm-up.
    """

    start_weight_decay: NotRequired[float]
    end_weight_decay: NotRequired[float]
    weight_decay_incr_style: NotRequired[Literal["constant", "linear", "cosine"]]
    lr_decay_style: NotRequired[Literal["constant", "linear", "cosine", "inverse-square-root"]]
    lr_decay_iters: NotRequired[int | None]
    lr_warmup_iters: NotRequired[int]
    lr_warmup_init: NotRequired[float]


class MegatronDDPConfig(TypedDict):
    """Megatron-Core's data parallelism.

    Attributes:
        grad_reduce_in_fp32: accumulate and reduce gradients in float32.
        overlap_grad_reduce: reduce gradients while the backward pass runs.
        overlap_param_gather: gather parameters while the forward pass runs; needs the distributed optimizer.
        average_in_collective: must be false: losses are normalised globally, so that gradients have to be summed.
        bucket_size: parameters that are reduced or gathered in one collective, with overlap; null for Megatron's choice.
        use_custom_fsdp: Megatron's own FSDP.
        data_parallel_sharding_strategy: what Megatron's own FSDP shards; ``no_shard`` without it.
    """

    grad_reduce_in_fp32: NotRequired[bool]
    overlap_grad_reduce: NotRequired[bool]
    overlap_param_gather: NotRequired[bool]
    average_in_collective: NotRequired[bool]
    bucket_size: NotRequired[int | None]
    use_custom_fsdp: NotRequired[bool]
    data_parallel_sharding_strategy: NotRequired[Literal["no_shard", "optim", "optim_grads", "optim_grads_params"]]


class MegatronConfig(TypedDict):
    """The Megatron-Core backend.

    Attributes:
        enabled: use this backend.
        empty_unused_memory_level: give cached device memory back: 0 never, 1 after forward and backward, 2 also after the optimizer step.
        activation_checkpointing: recompute every layer in the backward pass.
        converter_type: accepted for old configurations, where it names the model's own family (``Qwen2ForCausalLM``), which decides.
        tensor_model_parallel_size: ranks that share one layer.
        pipeline_model_parallel_size: stages the layers are divided into.
        virtual_pipeline_model_parallel_size: model chunks a stage; null for one.
        pipeline_model_parallel_layout: which layers each model chunk holds, in Megatron-Core's notation (``"Et*2|(tt|)*2tL"``); null for
            what the other keys say.
        num_layers_in_first_pipeline_stage: null divides evenly.
        num_layers_in_last_pipeline_stage: null divides evenly.
        context_parallel_size: ranks that share one sequence.
        context_parallel_comm_type: how attention gets at the keys and values of the other ranks: ``all_gather``, the faster, has all of
            them on every rank; ``p2p``, ring attention, never more than two ranks' parts, for long sequences. null is all_gather, and
            with Transformer Engine its own choice, p2p.
        pipeline_dtype: type of the activations sent between stages; must be ``policy.precision``.
        sequence_parallel: shard the activations between tensor-parallel regions over the sequence.
        expert_tensor_parallel_size: tensor-parallel ranks of one expert.
        expert_model_parallel_size: ranks the experts are divided over.
        moe_token_dispatcher_type: how tokens get to their experts: ``alltoall`` sends them to the ranks that have their experts,
            ``allgather`` gives every rank all of them.
        freeze_moe_router: do not train the routers.
        moe_router_dtype: type the routers compute in; null for the model's.
        moe_router_load_balancing_type: load-balancing loss of the routers: ``aux_loss`` over the global batch (a further forward pass of
            each micro-batch counts where its tokens go), ``seq_aux_loss`` over each sequence.
        moe_aux_loss_coeff: its weight in the loss, for each layer; null for the model's own ``router_aux_loss_coef``.
        moe_z_loss_coeff: weight of the mean squared log-sum-exp of the routers' logits, for each layer; null for none.
        moe_router_bias_update_rate: step of the routers' bias update; 0 for the families here, whose routers have no such bias.
        apply_rope_fusion: fused rotary embedding, where its kernel exists.
        env_vars: environment variables of the workers.
        optimizer: the optimizer; may be absent when the policy is never trained.
        scheduler: learning rate and weight decay over time.
        distributed_data_parallel_config: data parallelism.
    """

    enabled: bool
    empty_unused_memory_level: NotRequired[Literal[0, 1, 2]]
    activation_checkpointing: NotRequired[bool]
    converter_type: NotRequired[str]
    tensor_model_parallel_size: NotRequired[int]
    pipeline_model_parallel_size: NotRequired[int]
    virtual_pipeline_model_parallel_size: NotRequired[int | None]
    pipeline_model_parallel_layout: NotRequired[str | None]
    num_layers_in_first_pipeline_stage: NotRequired[int | None]
    num_layers_in_last_pipeline_stage: NotRequired[int | None]
    context_parallel_size: NotRequired[int]
    context_parallel_comm_type: NotRequired[Literal["all_gather", "p2p"] | None]
    pipeline_dtype: NotRequired[Precision]
    sequence_parallel: NotRequired[bool]
    expert_tensor_parallel_size: NotRequired[int]
    expert_model_parallel_size: NotRequired[int]
    moe_token_dispatcher_type: NotRequired[Literal["allgather", "alltoall"]]
    freeze_moe_router: NotRequired[bool]
    moe_router_dtype: NotRequired[Literal["fp32", "fp64"] | None]
    moe_router_load_balancing_type: NotRequired[Literal["none", "aux_loss", "seq_aux_loss"]]
    moe_aux_loss_coeff: NotRequired[float | None]
    moe_z_loss_coeff: NotRequired[float | None]
    moe_router_bias_update_rate: NotRequired[float]
    apply_rope_fusion: NotRequired[bool]
    env_vars: NotRequired[dict[str, str] | None]
    optimizer: NotRequired[MegatronOptimizerConfig]
    scheduler: NotRequired[MegatronSchedulerConfig]
    distributed_data_parallel_config: NotRequired[MegatronDDPConfig]


class TokenizerConfig(TypedDict):
    """The tokenizer.

    Attributes:
        name: Hugging Face id or local directory.
        chat_template: a Jinja template, "default" for the tokenizer's own, null to concatenate the messages' contents.
    """

    name: str
    chat_template: NotRequired[str | None]


class PytorchOptimizerConfig(TypedDict):
    """An optimizer of the torch backends.

    Attributes:
        name: import path of the class, for example ``torch.optim.AdamW``.
        kwargs: its keyword arguments.
        weight_decay_on_vectors: biases and norms (parameters of one dimension) decay as ``kwargs.weight_decay`` says, as in torch; false
            leaves them out, as Megatron does.
    """

    name: str
    kwargs: dict[str, Any]
    weight_decay_on_vectors: NotRequired[bool]


class SinglePytorchSchedulerConfig(TypedDict):
    """A learning-rate scheduler of the torch backends.

    Attributes:
        name: import path of the class, for example ``torch.optim.lr_scheduler.LinearLR``.
        kwargs: its keyword arguments.
    """

    name: str
    kwargs: dict[str, Any]


SchedulerMilestones: TypeAlias = dict[str, list[int]]
"""``{"milestones": [...]}``: the steps at which the next scheduler of a list takes over."""


class PolicyConfig(TypedDict):
    """A policy: its model, its batches and the backend it runs on. Exactly one backend may be enabled; with none, FSDP1 is meant.

    Attributes:
        model_name: Hugging Face id or local directory.
        tokenizer: the tokenizer.
        trust_remote_code: run Python code that comes with the model. Off unless set.
        train_global_batch_size: samples an optimizer step, over all ranks.
        train_micro_batch_size: samples a forward pass on one data-parallel rank.
        learning_rate: read by nothing itself: a value for an optimizer's ``${policy.learning_rate}``, whichever backend's it is; where it
            is given, it must be the learning rate that the optimizer has.
        logprob_batch_size: samples a forward pass when log-probabilities are computed.
        generation: generation; null or absent for a policy that never generates.
        generation_batch_size: samples a rank generates at a time.
        precision: type of the weights and activations in the model.
        dtensor_cfg: the DTensor/FSDP2 backend.
        megatron_cfg: the Megatron-Core backend.
        dynamic_batching: micro-batches by length.
        sequence_packing: several sequences a row.
        make_sequence_length_divisible_by: batches are padded to a multiple of this.
        max_total_sequence_length: longest sequence, prompt and answer together, in tokens.
        max_grad_norm: largest norm of the gradient of the whole model; null turns clipping off.
        on_nonfinite: what follows a loss or a gradient that is not finite on any rank: ``skip`` takes no step after that global batch,
            ``raise`` ends the run. Weights, optimizer and schedule are left as they are, and the batch is kept in the run's directory.
        max_consecutive_skips: the run ends when this many steps in a row were skipped so.
        refit_buffer_size_gb: GiB that a refit may take on a rank of the policy: the buffer in which weights are handed to an engine on the
            same device, both halves together, or to engines elsewhere two buffers, as large on each of their ranks; what is gathered for
            them; and on a CPU lists of them. A parameter that takes more than a sixteenth of it is gathered all the same, and FSDP1 gathers
            a layer at a time, whatever it takes. null takes half a GiB for each half (on a GPU less, when less is free), as much more as
            the largest weight needs, and 64 MiB for each of up to five buckets that are gathered.
        refit_checksum: each group of weights carries a checksum, and an engine refuses one that arrives changed.
        fsdp_offload_enabled: FSDP1 only: parameters in host memory between uses.
        activation_checkpointing_enabled: FSDP1 only: recompute layers in the backward pass.
        optimizer: optimizer of the torch backends; null with Megatron.
        scheduler: learning-rate schedule of the torch backends; null keeps it constant.
    """

    model_name: str
    tokenizer: TokenizerConfig
    trust_remote_code: NotRequired[bool]
    train_global_batch_size: int
    train_micro_batch_size: int
    learning_rate: NotRequired[float]
    logprob_batch_size: NotRequired[int]
    generation: NotRequired[GenerationConfig | None]
    generation_batch_size: NotRequired[int]
    precision: Precision
    dtensor_cfg: NotRequired[DTensorConfig]
    megatron_cfg: NotRequired[MegatronConfig]
    dynamic_batching: NotRequired[DynamicBatchingConfig]
    sequence_packing: NotRequired[SequencePackingConfig]
    make_sequence_length_divisible_by: NotRequired[int]
    max_total_sequence_length: int
    max_grad_norm: NotRequired[float | None]
    on_nonfinite: NotRequired[Literal["skip", "raise"]]
    max_consecutive_skips: NotRequired[int]
    refit_buffer_size_gb: NotRequired[float | None]
    refit_checksum: NotRequired[bool]
    fsdp_offload_enabled: NotRequired[bool]
    activation_checkpointing_enabled: NotRequired[bool]
    optimizer: NotRequired[PytorchOptimizerConfig | None]
    scheduler: NotRequired[list[SinglePytorchSchedulerConfig | SchedulerMilestones] | SinglePytorchSchedulerConfig | None]
