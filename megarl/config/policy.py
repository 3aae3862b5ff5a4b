"""Schema of the ``policy`` section of a configuration.

The sections are plain TypedDicts, so importing this module imports neither torch nor Ray.
``megarl.config.schema`` checks values against them, ``megarl.config.defaults`` fills in optional keys, and
``megarl.config.rules`` checks which values are compatible with each other.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypeAlias

from typing_extensions import TypedDict

from megarl.config.generation import GenerationConfig
from megarl.key import ABOVE_0, AT_LEAST_0, AT_LEAST_1, DECAY, SHARE, Key, Range

Precision: TypeAlias = Literal["float32", "bfloat16", "float16"]
MomentDtype: TypeAlias = Literal["float32", "bfloat16", "8bit"]
_FirstMoment: TypeAlias = Annotated[
    MomentDtype,
    Key(
        "dtype of Adam's and AdamW's first moment (running mean of the gradient): 4, 2 or 1 bytes "
        "per parameter. Below float32 it is rounded stochastically; ``8bit`` keeps one float32 "
        "scale per 256 numbers. Checkpoints store float32, so a run with one dtype can resume from "
        "a run with another.",
        default="float32",
    ),
]
_SecondMoment: TypeAlias = Annotated[
    MomentDtype,
    Key(
        "dtype of Adam's and AdamW's second moment (running mean of the squared gradient), with the "
        "same values as ``exp_avg_dtype``.",
        default="float32",
    ),
]
MOMENT_KEYS = ("exp_avg_dtype", "exp_avg_sq_dtype")
STATE_KEYS = ("master_dtype", *MOMENT_KEYS)
"""Keys of an optimizer section that set the dtypes of the optimizer state."""
_Master: TypeAlias = Annotated[
    Literal["float32", "bfloat16"],
    Key(
        "dtype of the weights that the optimizer updates: ``float32`` keeps float32 copies of "
        "16-bit weights; ``bfloat16`` updates the bfloat16 weights in place with stochastic "
        "rounding, so that even updates smaller than a rounding step take effect on average.",
        default="float32",
    ),
]


class DTensorConfig(TypedDict):
    """Settings of the DTensor/FSDP2 backend."""

    enabled: Annotated[bool, Key("use the DTensor/FSDP2 backend.")]
    cpu_offload: NotRequired[
        Annotated[
            bool,
            Key(
                "keep parameters, gradients and optimizer state in host memory between uses; the optimizer "
                "step runs on the CPU.",
                default=False,
            ),
        ]
    ]
    sequence_parallel: NotRequired[
        Annotated[
            bool,
            Key(
                "in layers that are not tensor-parallel (norms, residuals), shard activations along the "
                "sequence over the tensor-parallel ranks.",
                default=False,
            ),
        ]
    ]
    activation_checkpointing: NotRequired[
        Annotated[
            bool,
            Key(
                "recompute the activations of every layer in the backward pass instead of storing them.",
                default=False,
            ),
        ]
    ]
    tensor_parallel_size: NotRequired[
        Annotated[
            int, Key("number of tensor-parallel ranks over which each layer is split.", AT_LEAST_1, default=1)
        ]
    ]
    context_parallel_size: NotRequired[
        Annotated[
            int,
            Key("number of context-parallel ranks over which each sequence is split.", AT_LEAST_1, default=1),
        ]
    ]
    context_parallel_comm_type: NotRequired[
        Annotated[
            Literal["all_gather", "p2p"] | None,
            Key(
                "how attention obtains the keys and values of the other context-parallel ranks: "
                "``all_gather`` gathers all of them on every rank, and is faster; ``p2p`` (ring attention) "
                "holds those of at most two ranks at a time, for long sequences. null means all_gather.",
                default=None,
            ),
        ]
    ]
    custom_parallel_plan: NotRequired[
        Annotated[
            str | None,
            Key(
                "import path of a tensor-parallel plan, or of a function that returns one; null uses the "
                "model's built-in plan. The plan is applied unchanged: a replicated parameter whose module "
                "works on a shard of an activation, such as a norm of attention heads, needs "
                "``replicated_with_grad_allreduce`` or ``sequence_parallel``, else its gradient is wrong.",
                default=None,
            ),
        ]
    ]
    env_vars: NotRequired[
        Annotated[
            dict[str, str] | None,
            Key(
                "environment variables set in the policy's worker processes, by name; null for none.",
                default={},
            ),
        ]
    ]


class SequencePackingConfig(TypedDict):
    """Packing of several sequences into one row. Micro-batches are limited by tokens (``*_mb_tokens``), not
    by samples."""

    enabled: Annotated[bool, Key("pack several sequences into one row, without padding between them.")]
    # ``auto`` needs no type here: ``token_budget`` replaces it by a number before types are checked.
    train_mb_tokens: NotRequired[
        Annotated[
            int,
            Key(
                "maximum number of tokens of a micro-batch in training; ``auto`` takes as many as the "
                "memory plan allows on a GPU of ``cluster.device_memory_gib``.",
                AT_LEAST_1,
            ),
        ]
    ]
    logprob_mb_tokens: NotRequired[
        Annotated[
            int,
            Key(
                "maximum number of tokens of a micro-batch in a pass that only computes log-probabilities.",
                AT_LEAST_1,
            ),
        ]
    ]
    algorithm: NotRequired[
        Annotated[
            Literal[
                "concatenative",
                "first_fit_decreasing",
                "first_fit_shuffle",
                "modified_first_fit_decreasing",
                "best_fit_decreasing",
            ],
            Key("bin-packing algorithm that chooses the sequences of a row (default best_fit_decreasing)."),
        ]
    ]


class DynamicBatchingConfig(TypedDict):
    """Micro-batches of sequences of similar length, limited by padded tokens (``*_mb_tokens``), not by
    samples."""

    enabled: Annotated[
        bool, Key("form micro-batches of sequences of similar length, so that less is padded.")
    ]
    # ``auto`` needs no type here: ``token_budget`` replaces it by a number before types are checked.
    train_mb_tokens: NotRequired[
        Annotated[
            int,
            Key(
                "maximum number of tokens, padding included, of a micro-batch in training; ``auto`` takes "
                "as many as the memory plan allows on a GPU of ``cluster.device_memory_gib``.",
                AT_LEAST_1,
            ),
        ]
    ]
    logprob_mb_tokens: NotRequired[
        Annotated[
            int,
            Key(
                "maximum number of tokens, padding included, of a micro-batch in a pass that only computes "
                "log-probabilities.",
                AT_LEAST_1,
            ),
        ]
    ]
    sequence_length_round: NotRequired[
        Annotated[
            int,
            Key(
                "number of tokens to whose multiples the padded length of a micro-batch is rounded up "
                "(default 64).",
                AT_LEAST_1,
            ),
        ]
    ]


class MegatronOptimizerConfig(TypedDict):
    """Settings of Megatron-Core's optimizer."""

    lr: Annotated[float, Key("maximum learning rate, reached at the end of the warm-up.", ABOVE_0)]
    optimizer: NotRequired[
        Annotated[
            Literal["adam", "sgd"],
            Key("optimizer: ``adam`` (AdamW, with decoupled weight decay) or ``sgd``.", default="adam"),
        ]
    ]
    min_lr: NotRequired[
        Annotated[
            float, Key("learning rate at the end of the decay, and afterwards.", AT_LEAST_0, default=0.0)
        ]
    ]
    weight_decay: NotRequired[
        Annotated[
            float,
            Key(
                "decoupled weight decay; constant unless ``scheduler.weight_decay_incr_style`` lets it grow.",
                AT_LEAST_0,
                default=0.01,
            ),
        ]
    ]
    bf16: NotRequired[
        Annotated[
            bool,
            Key(
                "train bfloat16 weights, with float32 copies in the optimizer; derived from "
                "``policy.precision`` when absent, and must agree with it."
            ),
        ]
    ]
    fp16: NotRequired[
        Annotated[
            bool,
            Key(
                "train float16 weights, with loss scaling and float32 copies in the optimizer; derived from "
                "``policy.precision`` when absent, and must agree with it."
            ),
        ]
    ]
    # The schema allows the other dtypes because NeMo-RL's configurations have them; a rule refuses them with
    # the reason.
    params_dtype: NotRequired[
        Annotated[
            Precision,
            Key("must be float32: dtype of the parameters that the optimizer updates.", default="float32"),
        ]
    ]
    adam_beta1: NotRequired[
        Annotated[
            float,
            Key("decay rate of Adam's running mean of the gradient, per optimizer step.", DECAY, default=0.9),
        ]
    ]
    adam_beta2: NotRequired[
        Annotated[
            float,
            Key(
                "decay rate of Adam's running mean of the squared gradient, per optimizer step.",
                DECAY,
                default=0.999,
            ),
        ]
    ]
    adam_eps: NotRequired[
        Annotated[
            float,
            Key(
                "epsilon that Adam adds to the square root of the second moment, against division by 0.",
                ABOVE_0,
                default=1e-08,
            ),
        ]
    ]
    sgd_momentum: NotRequired[Annotated[float, Key("momentum of ``sgd``; 0 for none.", DECAY, default=0.9)]]
    use_distributed_optimizer: NotRequired[
        Annotated[bool, Key("shard the optimizer state over the data-parallel ranks.", default=True)]
    ]
    master_dtype: NotRequired[_Master]
    exp_avg_dtype: NotRequired[_FirstMoment]
    exp_avg_sq_dtype: NotRequired[_SecondMoment]
    use_precision_aware_optimizer: NotRequired[
        Annotated[
            bool,
            Key(
                "must be false: Transformer Engine's optimizer with states below float32 is not supported. "
                "``master_dtype``, ``exp_avg_dtype`` and ``exp_avg_sq_dtype`` do the same on every device.",
                default=False,
            ),
        ]
    ]
    optimizer_cpu_offload: NotRequired[
        Annotated[
            bool,
            Key(
                "must be false: Megatron-Core's own CPU offload needs Transformer Engine, and changes the "
                "weights by a step with random gradients before it reads a checkpoint. Use "
                "``optimizer_offload_fraction``.",
                default=False,
            ),
        ]
    ]
    optimizer_offload_fraction: NotRequired[
        Annotated[
            float,
            Key(
                "share of the optimizer state (moments and float32 copies of the weights) that is kept in "
                "page-locked host memory and updated by the CPU, with bitwise equal results; 0 keeps all on "
                "the device. CPU updates of states below float32 are many times slower. Weights and "
                "gradients stay on the device; the backward pass also copies each gradient to host memory "
                "(2 or 4 bytes per parameter). The update starts after the backward pass and overlaps with "
                "whatever follows until weights are read. (To move states away only between steps, see "
                "``offload_optimizer_for_logprob``; the torch backends have ``dtensor_cfg.cpu_offload`` and "
                "``fsdp_offload_enabled`` for all states.)",
                SHARE,
                default=0.0,
            ),
        ]
    ]
    clip_grad: NotRequired[
        Annotated[
            float,
            Key(
                "maximum norm of the gradient of all parameters together, 0 for no clipping; derived from "
                "``policy.max_grad_norm`` when absent, and must agree with it.",
                AT_LEAST_0,
            ),
        ]
    ]


class MegatronSchedulerConfig(TypedDict):
    """Schedule of learning rate and weight decay. ``*_iters`` count ``train`` calls of the policy: one per
    training step (PPO: one per epoch of a step), however many optimizer steps a call takes."""

    start_weight_decay: NotRequired[
        Annotated[
            float,
            Key("weight decay at the start of the run; ``optimizer.weight_decay`` when absent.", AT_LEAST_0),
        ]
    ]
    end_weight_decay: NotRequired[
        Annotated[
            float,
            Key(
                "weight decay after ``lr_decay_iters`` steps, at least ``start_weight_decay``; "
                "``optimizer.weight_decay`` when absent.",
                AT_LEAST_0,
            ),
        ]
    ]
    weight_decay_incr_style: NotRequired[
        Annotated[
            Literal["constant", "linear", "cosine"],
            Key(
                "curve by which weight decay grows from the start value to the end value.", default="constant"
            ),
        ]
    ]
    lr_decay_style: NotRequired[
        Annotated[
            Literal["constant", "linear", "cosine", "inverse-square-root"],
            Key(
                "curve by which the learning rate falls from ``optimizer.lr`` to ``optimizer.min_lr``; "
                "``constant`` keeps ``optimizer.lr``.",
                default="constant",
            ),
        ]
    ]
    lr_decay_iters: NotRequired[
        Annotated[
            int | None,
            Key(
                "number of training steps (PPO: epochs, `ppo_epochs` per step), however many optimizer "
                "steps each takes, until the learning rate reaches `optimizer.min_lr`, warm-up included; "
                "null is allowed only with a constant learning rate and weight decay.",
                AT_LEAST_1,
                default=None,
            ),
        ]
    ]
    lr_warmup_iters: NotRequired[
        Annotated[
            int,
            Key(
                "number of training steps (PPO: epochs, `ppo_epochs` per step) in which the learning rate "
                "rises linearly to ``optimizer.lr``; 0 for no warm-up.",
                AT_LEAST_0,
                default=0,
            ),
        ]
    ]
    lr_warmup_init: NotRequired[
        Annotated[float, Key("learning rate at the start of the warm-up.", AT_LEAST_0, default=0.0)]
    ]


class MegatronDDPConfig(TypedDict):
    """Settings of Megatron-Core's distributed data parallelism."""

    grad_reduce_in_fp32: NotRequired[
        Annotated[
            bool,
            Key(
                "accumulate and reduce gradients in float32 instead of the dtype of the weights.",
                default=False,
            ),
        ]
    ]
    overlap_grad_reduce: NotRequired[
        Annotated[
            bool | None,
            Key(
                "overlap gradient reduction with the backward pass. null does so if there are several data- "
                "or context-parallel ranks, if ``overlap_param_gather`` is true, or if "
                "``optimizer_offload_fraction`` is above 0.",
                default=None,
            ),
        ]
    ]
    overlap_param_gather: NotRequired[
        Annotated[
            bool,
            Key(
                "overlap the all-gather of updated parameters with the forward pass; needs "
                "``use_distributed_optimizer``.",
                default=False,
            ),
        ]
    ]
    average_in_collective: NotRequired[
        Annotated[
            bool,
            Key(
                "must be false: losses are normalised over the global batch, so gradients are summed over "
                "ranks, not averaged.",
                default=False,
            ),
        ]
    ]
    bucket_size: NotRequired[
        Annotated[
            int | None,
            Key(
                "number of parameters per gradient bucket, which is reduced by one collective when "
                "communication overlaps computation; null for Megatron's default.",
                AT_LEAST_1,
                default=None,
            ),
        ]
    ]
    use_custom_fsdp: NotRequired[
        Annotated[bool, Key("must be false: Megatron's own FSDP is not supported.", default=False)]
    ]
    data_parallel_sharding_strategy: NotRequired[
        Annotated[
            Literal["no_shard", "optim", "optim_grads", "optim_grads_params"],
            Key("must be ``no_shard``: Megatron's own FSDP is not supported.", default="no_shard"),
        ]
    ]


class MegatronConfig(TypedDict):
    """Settings of the Megatron-Core backend."""

    enabled: Annotated[bool, Key("use the Megatron-Core backend.")]
    empty_unused_memory_level: NotRequired[
        Annotated[
            Literal[0, 1, 2],
            Key(
                "when to free PyTorch's cached device memory: 0 never, 1 after each forward and backward "
                "pass, 2 also after each optimizer step.",
                default=0,
            ),
        ]
    ]
    activation_checkpointing: NotRequired[
        Annotated[
            bool,
            Key(
                "recompute the activations of layers, or of parts of them, in the backward pass instead of "
                "storing them; see ``recompute_granularity``.",
                default=False,
            ),
        ]
    ]
    recompute_granularity: NotRequired[
        Annotated[
            Literal["full", "selective"],
            Key(
                "what ``activation_checkpointing`` recomputes: ``full`` every layer, ``selective`` only the "
                "parts of a layer that ``recompute_modules`` lists.",
                default="full",
            ),
        ]
    ]
    recompute_modules: NotRequired[
        Annotated[
            list[Literal["core_attn", "mlp", "moe"]],
            Key(
                "parts of a layer that ``selective`` recomputes: ``core_attn`` the attention between its "
                "projections, ``mlp`` the MLP of a dense layer, ``moe`` router and experts of a "
                "mixture-of-experts layer.",
                default=["core_attn"],
            ),
        ]
    ]
    converter_type: NotRequired[
        Annotated[
            str,
            Key(
                "accepted for old configurations, without effect: it must be the architecture of the model "
                "(``Qwen2ForCausalLM``)."
            ),
        ]
    ]
    family_file: NotRequired[
        Annotated[
            str | None,
            Key(
                "Python file that defines the model's architecture family (``megarl convert "
                "--family-file``). It is executed, and must exist on every node. null for the built-in "
                "families.",
                default=None,
            ),
        ]
    ]
    ignore_config_keys: NotRequired[
        Annotated[
            list[str],
            Key(
                "keys of the model's ``config.json`` that are unknown to megarl and do not affect the "
                "model; other unknown keys are refused (``megarl convert --ignore-config-key``).",
                default=[],
            ),
        ]
    ]
    model_class: NotRequired[
        Annotated[
            Literal["gpt", "hybrid"] | None,
            Key(
                "Megatron-Core's model class: ``gpt`` is GPTModel, ``hybrid`` its successor HybridModel "
                "(release 0.19.2 or later); null uses GPTModel if the installed release has it, else "
                "HybridModel. Checkpoints have the same format.",
                default=None,
            ),
        ]
    ]
    tensor_model_parallel_size: NotRequired[
        Annotated[
            int, Key("number of tensor-parallel ranks over which each layer is split.", AT_LEAST_1, default=1)
        ]
    ]
    pipeline_model_parallel_size: NotRequired[
        Annotated[
            int,
            Key("number of pipeline stages over which the layers are distributed.", AT_LEAST_1, default=1),
        ]
    ]
    virtual_pipeline_model_parallel_size: NotRequired[
        Annotated[
            int | None,
            Key(
                "number of model chunks per pipeline stage (interleaved schedule); null for one.",
                AT_LEAST_1,
                default=None,
            ),
        ]
    ]
    pipeline_model_parallel_layout: NotRequired[
        Annotated[
            str | None,
            Key(
                'layers of each model chunk, in Megatron-Core\'s notation (``"Et*2|(tt|)*2tL"``); null '
                "distributes them according to the other pipeline keys.",
                default=None,
            ),
        ]
    ]
    num_layers_in_first_pipeline_stage: NotRequired[
        Annotated[
            int | None,
            Key(
                "number of layers in the first pipeline stage; null gives it an equal share.",
                AT_LEAST_1,
                default=None,
            ),
        ]
    ]
    num_layers_in_last_pipeline_stage: NotRequired[
        Annotated[
            int | None,
            Key(
                "number of layers in the last pipeline stage; null gives it an equal share.",
                AT_LEAST_1,
                default=None,
            ),
        ]
    ]
    context_parallel_size: NotRequired[
        Annotated[
            int,
            Key("number of context-parallel ranks over which each sequence is split.", AT_LEAST_1, default=1),
        ]
    ]
    context_parallel_comm_type: NotRequired[
        Annotated[
            Literal["all_gather", "p2p"] | None,
            Key(
                "how attention obtains the keys and values of the other context-parallel ranks: "
                "``all_gather`` gathers all of them on every rank, and is faster; ``p2p`` (ring attention) "
                "holds those of at most two ranks at a time, for long sequences. null means all_gather, and "
                "p2p with Transformer Engine.",
                default=None,
            ),
        ]
    ]
    pipeline_dtype: NotRequired[
        Annotated[
            Precision,
            Key(
                "dtype of the activations sent between pipeline stages; ``policy.precision`` when absent, "
                "and must equal it."
            ),
        ]
    ]
    sequence_parallel: NotRequired[
        Annotated[
            bool,
            Key(
                "in layers that are not tensor-parallel (norms, residuals), shard activations along the "
                "sequence over the tensor-parallel ranks.",
                default=False,
            ),
        ]
    ]
    expert_tensor_parallel_size: NotRequired[
        Annotated[
            int,
            Key("number of tensor-parallel ranks over which each expert is split.", AT_LEAST_1, default=1),
        ]
    ]
    expert_model_parallel_size: NotRequired[
        Annotated[
            int,
            Key(
                "number of expert-parallel ranks over which the experts of a layer are distributed.",
                AT_LEAST_1,
                default=1,
            ),
        ]
    ]
    moe_token_dispatcher_type: NotRequired[
        Annotated[
            Literal["allgather", "alltoall", "flex"],
            Key(
                "token exchange between expert-parallel ranks: ``alltoall`` sends a token to each of its "
                "experts, ``allgather`` sends all tokens to all ranks, ``flex`` sends a token only once to "
                "a rank with several of its experts, with DeepEP's kernels (GPUs and bfloat16 only; not "
                "tested on a GPU yet).",
                default="alltoall",
            ),
        ]
    ]
    moe_permute_fusion: NotRequired[
        Annotated[
            bool,
            Key(
                "sort tokens by expert with Transformer Engine's fused kernels (GPUs only; not tested on a "
                "GPU yet).",
                default=False,
            ),
        ]
    ]
    moe_grouped_gemm: NotRequired[
        Annotated[
            bool | None,
            Key(
                "compute all experts of a rank with one grouped matmul instead of one after another; null "
                "does so on CUDA devices. Checkpoints have the same format.",
                default=None,
            ),
        ]
    ]
    freeze_moe_router: NotRequired[
        Annotated[bool, Key("keep the routers' weights unchanged in training.", default=False)]
    ]
    moe_router_dtype: NotRequired[
        Annotated[
            Literal["fp32", "fp64"] | None,
            Key(
                "dtype in which routers compute; null for the dtype of the model's own implementation.",
                default=None,
            ),
        ]
    ]
    moe_router_load_balancing_type: NotRequired[
        Annotated[
            Literal["none", "aux_loss", "seq_aux_loss"],
            Key(
                "auxiliary loss that balances the load of the experts: ``aux_loss`` over the global batch, "
                "at the cost of one more forward pass per micro-batch to count the tokens of each expert; "
                "``seq_aux_loss`` over each sequence; ``none`` adds no such loss.",
                default="none",
            ),
        ]
    ]
    moe_aux_loss_coeff: NotRequired[
        Annotated[
            float | None,
            Key(
                "weight of the load-balancing loss of each layer; null for ``router_aux_loss_coef`` in the "
                "model's ``config.json``.",
                AT_LEAST_0,
                default=None,
            ),
        ]
    ]
    moe_z_loss_coeff: NotRequired[
        Annotated[
            float | None,
            Key(
                "weight of the z-loss of each layer, the mean squared log-sum-exp of the router's logits; "
                "null for no z-loss.",
                AT_LEAST_0,
                default=None,
            ),
        ]
    ]
    moe_router_bias_update_rate: NotRequired[
        Annotated[
            float,
            Key(
                "must be 0: the supported model families have no router bias that is updated in training.",
                AT_LEAST_0,
                default=0.0,
            ),
        ]
    ]
    transformer_engine: NotRequired[
        Annotated[
            Literal["auto"] | bool,
            Key(
                "use Transformer Engine's layers: ``auto`` does so if all ranks run on GPUs where it works, "
                "except for dense bfloat16 models, which trained faster without it when measured; true "
                "refuses to start, with the error, if it does not work; false uses the portable layers.",
                default="auto",
            ),
        ]
    ]
    float32_logits: NotRequired[
        Annotated[
            bool,
            Key(
                "keep the logits of 16-bit models in float32, as the output layer accumulates them, instead "
                "of rounding them to 16 bits; they take twice the memory.",
                default=False,
            ),
        ]
    ]
    apply_rope_fusion: NotRequired[
        Annotated[
            bool,
            Key(
                "with Transformer Engine: apply the rotary embedding with a fused kernel (default true); "
                "not for latent attention."
            ),
        ]
    ]
    env_vars: NotRequired[
        Annotated[
            dict[str, str] | None,
            Key(
                "environment variables set in the policy's worker processes, by name; null for none.",
                default={},
            ),
        ]
    ]
    optimizer: NotRequired[
        Annotated[
            MegatronOptimizerConfig,
            Key("settings of the optimizer; may be absent if the model is never trained."),
        ]
    ]
    scheduler: NotRequired[
        Annotated[MegatronSchedulerConfig, Key("schedule of learning rate and weight decay.")]
    ]
    distributed_data_parallel_config: NotRequired[
        Annotated[
            MegatronDDPConfig,
            Key("settings of data parallelism: reduction of gradients and gathering of parameters."),
        ]
    ]


class RewardModelConfig(TypedDict):
    """Score head of a reward model or critic: a linear layer with one output replaces the output layer. Its
    weight is ``score.weight`` of transformers' ``...ForSequenceClassification``; a language model gets a new
    one, initialised from the seed."""

    enabled: Annotated[
        bool,
        Key(
            "give the model a scalar score head in place of its output layer: it has no "
            "log-probabilities, generates nothing, and is trained with losses on scores."
        ),
    ]
    reward_model_type: NotRequired[
        Annotated[
            Literal["bradley_terry"],
            Key(
                "``bradley_terry``: one score per sequence, from a head without bias; the difference of two "
                "scores is the log-odds that the first answer is preferred.",
                default="bradley_terry",
            ),
        ]
    ]


class PeftConfig(TypedDict):
    """Low-rank adapters (LoRA): the product (alpha / dim) B A is added to selected linear layers W, and only
    A and B are trained.

    Each of a layer's query, key, value, gate and up matrices has its own adapter, as in PEFT, on every
    backend. NeMo-RL's ``policy.megatron_cfg.peft`` and ``policy.dtensor_cfg.lora_cfg`` are read as this
    section.
    """

    enabled: Annotated[
        bool, Key("train low-rank adapters; the base weights stay frozen, and serve as the reference policy.")
    ]
    target_modules: NotRequired[
        Annotated[
            list[str],
            Key(
                "linear layers that get an adapter: names, or ends of names, of Hugging Face modules "
                "(``q_proj``), names with ``*``, or Megatron-Core's ``linear_qkv``, ``linear_proj``, "
                "``linear_fc1`` and ``linear_fc2``. An empty list selects all linear layers of attention "
                "and dense MLPs. ``embed_tokens`` and ``lm_head`` get an adapter if a name matches them and "
                "the two are not tied; on Megatron, each expert that a name matches gets its own "
                "(``*.experts.*.down_proj``).",
                default=[],
            ),
        ]
    ]
    target_parameters: NotRequired[
        Annotated[
            list[str],
            Key(
                "stacked expert weights that get adapters, as in PEFT's key of this name: "
                "``experts.gate_up_proj``, ``experts.down_proj``. Each expert has its own factors A and B; "
                "its gate and up matrices share A. Megatron only, and only without dropout.",
                default=[],
            ),
        ]
    ]
    exclude_modules: NotRequired[
        Annotated[
            list[str],
            Key(
                "layers that get no adapter although ``target_modules`` selects them, named in the same "
                "forms.",
                default=[],
            ),
        ]
    ]
    dim: NotRequired[
        Annotated[
            int, Key("rank of every adapter: the inner size of its product B A.", AT_LEAST_1, default=8)
        ]
    ]
    alpha: NotRequired[
        Annotated[
            float,
            Key(
                "scale of the adapters: the product B A is multiplied by alpha / dim.", ABOVE_0, default=32.0
            ),
        ]
    ]
    use_rslora: NotRequired[
        Annotated[
            bool,
            Key(
                "multiply the product B A by alpha / sqrt(dim) instead of alpha / dim (rsLoRA).",
                default=False,
            ),
        ]
    ]
    dropout: NotRequired[
        Annotated[
            float,
            Key("dropout probability of the adapters in training; 0 for no dropout.", DECAY, default=0.0),
        ]
    ]
    dropout_position: NotRequired[
        Annotated[
            Literal["pre", "post"],
            Key(
                "apply dropout to the adapter's input (``pre``, as PEFT does) or to its output (``post``).",
                default="pre",
            ),
        ]
    ]
    lora_A_init_method: NotRequired[
        Annotated[
            Literal["kaiming", "xavier", "normal"],
            Key(
                "initial values of A: ``kaiming`` uniform within 1 / sqrt(inputs), PEFT's default; "
                "``xavier`` normal with variance 2 / (inputs + dim); ``normal`` with standard deviation 1 / "
                "dim. A seed gives the same values on every layout and backend.",
                default="kaiming",
            ),
        ]
    ]
    lora_B_init_method: NotRequired[
        Annotated[
            Literal["zero"],
            Key("initial values of B: zero, so a new adapter does not change the model.", default="zero"),
        ]
    ]
    lora_dtype: NotRequired[
        Annotated[
            Precision | None,
            Key(
                "dtype in which the adapters compute; must be ``policy.precision``, which null means too.",
                default=None,
            ),
        ]
    ]
    adapter_path: NotRequired[
        Annotated[
            str | None,
            Key(
                "directory of a PEFT adapter with the same modules, rank and scale, from which training "
                "starts; null starts from new adapters.",
                default=None,
            ),
        ]
    ]


class TokenizerConfig(TypedDict):
    """Tokenizer and chat template."""

    name: Annotated[str, Key("tokenizer: Hugging Face id or local directory.")]
    chat_template: NotRequired[
        Annotated[
            str | None,
            Key(
                'a Jinja template; "default" for the tokenizer\'s own; null for prompts that are already '
                "rendered, whose messages' contents are concatenated. An exported model keeps the "
                "tokenizer's own template in any case."
            ),
        ]
    ]
    chat_template_kwargs: NotRequired[
        Annotated[
            dict[str, Any] | None,
            Key(
                "values of variables that the chat template reads, for example ``{enable_thinking: "
                "false}``; null for none."
            ),
        ]
    ]
    template_date: NotRequired[
        Annotated[
            str | None,
            Key(
                "date, as `2026-11-27`, for a chat template that reads the current date; null or absent for "
                "the day of the run's first start, which its checkpoints store."
            ),
        ]
    ]


class PytorchOptimizerConfig(TypedDict):
    """Optimizer of the DTensor and FSDP1 backends."""

    name: Annotated[str, Key("import path of the optimizer class, for example ``torch.optim.AdamW``.")]
    kwargs: Annotated[
        dict[str, Any],
        Key(
            "keyword arguments of the optimizer class. Adam and AdamW use torch's fused kernel, unless "
            "``fused``, ``foreach``, ``capturable`` or ``differentiable`` is given here; a resumed run "
            "uses the kernel with which its checkpoint was written."
        ),
    ]
    weight_decay_on_vectors: NotRequired[
        Annotated[
            bool,
            Key(
                "apply ``kwargs.weight_decay`` also to one-dimensional parameters (biases and norms), as "
                "torch does; false does not, as Megatron does.",
                default=True,
            ),
        ]
    ]
    master_dtype: NotRequired[_Master]
    exp_avg_dtype: NotRequired[_FirstMoment]
    exp_avg_sq_dtype: NotRequired[_SecondMoment]


class SinglePytorchSchedulerConfig(TypedDict):
    """Learning-rate scheduler of the DTensor and FSDP1 backends."""

    name: Annotated[
        str, Key("import path of the scheduler class, for example ``torch.optim.lr_scheduler.LinearLR``.")
    ]
    kwargs: Annotated[dict[str, Any], Key("keyword arguments of the scheduler class, without the optimizer.")]


SchedulerMilestones: TypeAlias = dict[str, list[int]]
"""``{"milestones": [...]}``: numbers of ``train`` calls after which the next scheduler of a list takes
over."""


class PolicyConfig(TypedDict):
    """A model with its batch sizes and its backend. At most one of ``megatron_cfg`` and ``dtensor_cfg`` may
    be enabled; with neither, the backend is FSDP1."""

    model_name: Annotated[str, Key("model to train: Hugging Face id or local directory.")]
    tokenizer: Annotated[TokenizerConfig, Key("tokenizer and chat template of the model.")]
    trust_remote_code: NotRequired[
        Annotated[
            bool,
            Key(
                "run Python code from the model's repository; false refuses models that need such code.",
                default=False,
            ),
        ]
    ]
    train_global_batch_size: Annotated[
        int,
        Key(
            "number of samples (DPO and reward models: pairs) per optimizer step, over all ranks.", AT_LEAST_1
        ),
    ]
    train_micro_batch_size: Annotated[
        int,
        Key(
            "number of samples (DPO and reward models: pairs) per forward pass on one data-parallel rank.",
            AT_LEAST_1,
        ),
    ]
    learning_rate: NotRequired[
        Annotated[
            float,
            Key(
                "a number to which the optimizer section of any backend may refer as "
                "``${policy.learning_rate}``; it has no other effect, and must equal the optimizer's "
                "learning rate if given."
            ),
        ]
    ]
    logprob_batch_size: NotRequired[
        Annotated[
            int,
            Key(
                "number of samples per forward pass on one data-parallel rank when only log-probabilities "
                "are computed; ``train_micro_batch_size`` when absent.",
                AT_LEAST_1,
                follows="train_micro_batch_size",
            ),
        ]
    ]
    logprob_chunk_size: NotRequired[
        Annotated[
            int | None,
            Key(
                "number of token positions whose logits a rank holds at a time, in training and in "
                "log-probability passes. The output layer and the log-probabilities are computed chunk by "
                "chunk, and the backward pass recomputes the logits. null computes a whole micro-batch at "
                "once.",
                AT_LEAST_1,
                default=None,
            ),
        ]
    ]
    generation: NotRequired[
        Annotated[
            GenerationConfig | None,
            Key("generation of responses; null or absent for a policy that never generates.", default=None),
        ]
    ]
    generation_batch_size: NotRequired[
        Annotated[
            int,
            Key(
                "number of responses that a data-parallel rank generates at a time, if the policy itself "
                "generates; ``logprob_batch_size`` when absent.",
                AT_LEAST_1,
            ),
        ]
    ]
    precision: Annotated[Precision, Key("dtype of the model's weights and activations.")]
    reward_model_cfg: NotRequired[
        Annotated[
            RewardModelConfig | None,
            Key("score head of a reward model or critic; null or absent for a language model.", default=None),
        ]
    ]
    peft: NotRequired[
        Annotated[
            PeftConfig | None,
            Key("low-rank adapters (LoRA); null or absent trains all weights.", default=None),
        ]
    ]
    merged_adapter: NotRequired[
        Annotated[
            str | None,
            Key(
                "directory of a LoRA adapter of PEFT or Megatron-Bridge that is merged into the weights of "
                "``model_name`` when they are read (``megarl eval --adapter``); null for none.",
                default=None,
            ),
        ]
    ]
    dtensor_cfg: NotRequired[
        Annotated[DTensorConfig, Key("settings of the DTensor/FSDP2 backend.", default={"enabled": False})]
    ]
    megatron_cfg: NotRequired[
        Annotated[MegatronConfig, Key("settings of the Megatron-Core backend.", default={"enabled": False})]
    ]
    dynamic_batching: NotRequired[
        Annotated[
            DynamicBatchingConfig,
            Key(
                "micro-batches of sequences of similar length, limited by their number of tokens.",
                default={"enabled": False},
            ),
        ]
    ]
    sequence_packing: NotRequired[
        Annotated[
            SequencePackingConfig,
            Key(
                "sequence packing: several sequences in each row of a micro-batch, up to a number of tokens.",
                default={"enabled": False},
            ),
        ]
    ]
    make_sequence_length_divisible_by: NotRequired[
        Annotated[
            int,
            Key(
                "pad the sequence length of a batch to a multiple of this number of tokens; when absent, "
                "the smallest number that the tensor- and context-parallel ranks can divide evenly.",
                AT_LEAST_1,
                default=1,
            ),
        ]
    ]
    max_total_sequence_length: Annotated[
        # The minimum is 2, because prompt and response have at least one token each.
        int, Key("maximum number of tokens of a sequence, prompt and response together.", Range(low=2))
    ]
    max_grad_norm: NotRequired[
        Annotated[
            float | None,
            Key(
                "maximum norm of the gradient of all parameters together; a larger gradient is scaled down "
                "to it. null turns clipping off.",
                ABOVE_0,
                default=1.0,
                advice="write null to turn clipping off",
            ),
        ]
    ]
    on_nonfinite: NotRequired[
        Annotated[
            Literal["skip", "raise"],
            Key(
                "what happens if a loss or gradient is NaN or infinite on some rank: ``skip`` leaves out "
                "the optimizer step of that global batch, ``raise`` ends the run. In both cases weights, "
                "optimizer state and schedule stay unchanged, and the batch is saved in the run directory.",
                default="skip",
            ),
        ]
    ]
    deterministic: NotRequired[
        Annotated[
            bool,
            Key(
                "on GPUs: make runs bit-identical if they have the same parallel layout, the same GPUs and "
                "the same software versions; runs on CPUs always are. Kernels are slower, and an operation "
                "without a deterministic kernel ends the run with an error that names it. Tokens sampled "
                "by vLLM are not covered. Not tested on a GPU yet.",
                default=False,
            ),
        ]
    ]
    max_consecutive_skips: NotRequired[
        Annotated[
            int,
            Key(
                "the run ends after this number of consecutive steps that ``on_nonfinite`` skipped, or that "
                "had no response to train on (all truncated, for example).",
                AT_LEAST_1,
                default=3,
            ),
        ]
    ]
    offload_optimizer_for_logprob: NotRequired[
        Annotated[
            bool,
            Key(
                "on GPUs: move gradients and optimizer state to host memory while log-probabilities are "
                "computed and while the policy itself generates, and back afterwards: 24 bytes per "
                "parameter in each step, both directions together. For an engine on the same GPU they are "
                "moved in any case.",
                default=False,
            ),
        ]
    ]
    refit_buffer_size_gb: NotRequired[
        Annotated[
            float | None,
            Key(
                "device memory in GiB that a refit may use on a rank of the policy: the buffers through "
                "which weights are sent (for an engine on the same device one, with two halves; for other "
                "engines two, which each receiving rank needs as well), the weights that are being gathered "
                "into them, and on a CPU the lists of their contents. A parameter larger than a sixteenth "
                "of this is gathered anyway, and FSDP1 always gathers a whole layer. null uses 0.5 GiB per "
                "half (less if a GPU has less free; more if the largest weight needs it), and 64 MiB for "
                "each of up to five buckets that are being gathered.",
                ABOVE_0,
                default=None,
            ),
        ]
    ]
    refit_checksum: NotRequired[
        Annotated[
            bool,
            Key(
                "send a checksum with each bucket of weights in a refit; an engine refuses a bucket that "
                "does not match.",
                default=False,
            ),
        ]
    ]
    fsdp_offload_enabled: NotRequired[
        Annotated[
            bool,
            Key(
                "FSDP1 only: keep parameters, gradients and optimizer state in host memory between uses; "
                "the optimizer step runs on the CPU.",
                default=False,
            ),
        ]
    ]
    activation_checkpointing_enabled: NotRequired[
        Annotated[
            bool,
            Key(
                "FSDP1 only: recompute the activations of every layer in the backward pass instead of "
                "storing them.",
                default=False,
            ),
        ]
    ]
    optimizer: NotRequired[
        Annotated[
            PytorchOptimizerConfig | None,
            Key(
                "optimizer of the DTensor and FSDP1 backends; null with Megatron, whose optimizer is in "
                "``megatron_cfg``.",
                default=None,
            ),
        ]
    ]
    scheduler: NotRequired[
        Annotated[
            list[SinglePytorchSchedulerConfig | SchedulerMilestones] | SinglePytorchSchedulerConfig | None,
            Key(
                "learning-rate schedule of the DTensor and FSDP1 backends: one scheduler, or a list of them "
                "that take over from each other at ``milestones`` (numbers of ``train`` calls); null keeps "
                "the learning rate constant.",
                default=None,
            ),
        ]
    ]
