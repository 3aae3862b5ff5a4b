"""Schema of the ``policy`` section of a configuration.

The sections are plain TypedDicts, so importing this module imports neither torch nor Ray.
``megarl.config.schema`` checks values against them, ``megarl.config.defaults`` fills in optional keys, and
``megarl.config.rules`` has the rules between keys.
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
        "dtype of the first moment of Adam and AdamW: 4, 2 or 1 byte a parameter. Below float32 it is "
        "rounded stochastically; ``8bit`` has a float32 scale for each 256 numbers. Checkpoints hold "
        "float32, so that any dtype resumes from any other.",
        default="float32",
    ),
]
_SecondMoment: TypeAlias = Annotated[
    MomentDtype,
    Key("dtype of the second moment of Adam and AdamW; values as of ``exp_avg_dtype``.", default="float32"),
]
MOMENT_KEYS = ("exp_avg_dtype", "exp_avg_sq_dtype")
STATE_KEYS = ("master_dtype", *MOMENT_KEYS)
"""Keys of an optimizer section that set how its states are stored."""
_Master: TypeAlias = Annotated[
    Literal["float32", "bfloat16"],
    Key(
        "dtype of the weights that the optimizer updates: ``float32`` keeps copies of 16-bit weights; "
        "``bfloat16`` updates the bfloat16 weights themselves with stochastic rounding, so that small "
        "steps are not lost on average.",
        default="float32",
    ),
]


class DTensorConfig(TypedDict):
    """The DTensor/FSDP2 backend."""

    enabled: Annotated[bool, Key("use this backend.")]
    cpu_offload: NotRequired[
        Annotated[
            bool,
            Key(
                "keep parameters, gradients and optimizer state in host memory between uses; the CPU steps "
                "them there.",
                default=False,
            ),
        ]
    ]
    sequence_parallel: NotRequired[
        Annotated[
            bool,
            Key("shard the activations between tensor-parallel regions over the sequence.", default=False),
        ]
    ]
    activation_checkpointing: NotRequired[
        Annotated[bool, Key("recompute every layer in the backward pass.", default=False)]
    ]
    tensor_parallel_size: NotRequired[
        Annotated[int, Key("tensor-parallel ranks, which share each layer.", AT_LEAST_1, default=1)]
    ]
    context_parallel_size: NotRequired[
        Annotated[int, Key("context-parallel ranks, which share each sequence.", AT_LEAST_1, default=1)]
    ]
    context_parallel_comm_type: NotRequired[
        Annotated[
            Literal["all_gather", "p2p"] | None,
            Key(
                "how attention gets the keys and values of the other ranks: ``all_gather``, the faster, "
                "gathers all of them on every rank; ``p2p``, ring attention, holds at most those of two "
                "ranks, for long sequences. null is all_gather.",
                default=None,
            ),
        ]
    ]
    custom_parallel_plan: NotRequired[
        Annotated[
            str | None,
            Key(
                "import path of a plan, or of a function that returns one; null uses the built-in plan of "
                "the model. It is applied unchanged: a replicated parameter whose module works on a shard "
                "of an activation, such as a norm of attention heads, needs "
                "``replicated_with_grad_allreduce`` or ``sequence_parallel``, or its gradient is wrong.",
                default=None,
            ),
        ]
    ]
    env_vars: NotRequired[
        Annotated[dict[str, str] | None, Key("environment variables of the workers.", default={})]
    ]


class SequencePackingConfig(TypedDict):
    """Packing of several sequences into one row, with at most ``*_mb_tokens`` tokens per micro-batch."""

    enabled: Annotated[bool, Key("pack sequences.")]
    train_mb_tokens: NotRequired[
        Annotated[
            int,
            Key(
                "tokens of a micro-batch in training; ``auto``: as many as fit by the memory plan.",
                AT_LEAST_1,
            ),
        ]
    ]
    logprob_mb_tokens: NotRequired[
        Annotated[int, Key("tokens of a micro-batch when log-probabilities are computed.", AT_LEAST_1)]
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
            Key("packing algorithm (default best_fit_decreasing)."),
        ]
    ]


class DynamicBatchingConfig(TypedDict):
    """Micro-batches of sequences of similar length, with at most ``*_mb_tokens`` padded tokens each."""

    enabled: Annotated[bool, Key("form micro-batches by length.")]
    train_mb_tokens: NotRequired[
        Annotated[
            int,
            Key("tokens of a micro-batch in training, padding included; ``auto`` as in packing.", AT_LEAST_1),
        ]
    ]
    logprob_mb_tokens: NotRequired[
        Annotated[
            int,
            Key("tokens of a micro-batch when log-probabilities are computed, padding included.", AT_LEAST_1),
        ]
    ]
    sequence_length_round: NotRequired[
        Annotated[int, Key("sequence lengths are rounded up to a multiple of this.", AT_LEAST_1)]
    ]


class MegatronOptimizerConfig(TypedDict):
    """Megatron-Core's optimizer."""

    lr: Annotated[float, Key("maximum learning rate.", ABOVE_0)]
    optimizer: NotRequired[Annotated[Literal["adam", "sgd"], Key("kind of optimizer.", default="adam")]]
    min_lr: NotRequired[Annotated[float, Key("learning rate after the decay.", AT_LEAST_0, default=0.0)]]
    weight_decay: NotRequired[
        Annotated[
            float,
            Key("decoupled weight decay; ``scheduler`` may change it over time.", AT_LEAST_0, default=0.01),
        ]
    ]
    bf16: NotRequired[
        Annotated[
            bool,
            Key(
                "train bfloat16 weights, with float32 copies in the optimizer; must follow "
                "``policy.precision``."
            ),
        ]
    ]
    fp16: NotRequired[
        Annotated[
            bool,
            Key(
                "train float16 weights, with float32 copies in the optimizer and loss scaling; must follow "
                "``policy.precision``."
            ),
        ]
    ]
    # Accept the other dtypes too, because NeMo-RL's configurations have them and a rule refuses them with its
    # reason.
    params_dtype: NotRequired[
        Annotated[Precision, Key("dtype of the parameters that the optimizer updates.", default="float32")]
    ]
    adam_beta1: NotRequired[
        Annotated[float, Key("decay rate of the gradient's running mean.", DECAY, default=0.9)]
    ]
    adam_beta2: NotRequired[
        Annotated[float, Key("decay rate of the squared gradient's running mean.", DECAY, default=0.999)]
    ]
    adam_eps: NotRequired[
        Annotated[float, Key("added to the root of the mean square.", ABOVE_0, default=1e-08)]
    ]
    sgd_momentum: NotRequired[Annotated[float, Key("momentum of SGD.", DECAY, default=0.9)]]
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
                "must be false: Transformer Engine's optimizer with state below float32. Use "
                "``master_dtype``, ``exp_avg_dtype`` and ``exp_avg_sq_dtype`` instead, which work on every "
                "device.",
                default=False,
            ),
        ]
    ]
    optimizer_cpu_offload: NotRequired[
        Annotated[
            bool,
            Key(
                "must be false: Megatron-Core's own optimizer in host memory needs Transformer Engine, and "
                "takes a step with random gradients before it reads a checkpoint, which changes the "
                "weights. Use ``optimizer_offload_fraction`` instead.",
                default=False,
            ),
        ]
    ]
    optimizer_offload_fraction: NotRequired[
        Annotated[
            float,
            Key(
                "share of the optimizer state, including float32 copies of the weights, that stays in "
                "page-locked host memory, where the CPU updates it to the same bits (many times slower for "
                "states below float32). Gradients and weights stay on the device; gradients are also "
                "copied into 2 or 4 more bytes of host memory a number during the backward pass. The "
                "update starts after it, and runs in parallel with what follows until weights are read. "
                "(``offload_optimizer_for_logprob`` moves states away between steps; the torch backends "
                "keep all of them in host memory with ``dtensor_cfg.cpu_offload`` and "
                "``fsdp_offload_enabled``.)",
                SHARE,
                default=0.0,
            ),
        ]
    ]
    clip_grad: NotRequired[
        Annotated[float, Key("maximum norm of the full model's gradient; 0 turns clipping off.", AT_LEAST_0)]
    ]


class MegatronSchedulerConfig(TypedDict):
    """Schedule of learning rate and weight decay. The unit of ``*_iters`` is one call of ``train``."""

    start_weight_decay: NotRequired[Annotated[float, Key("weight decay at the start.", AT_LEAST_0)]]
    end_weight_decay: NotRequired[Annotated[float, Key("weight decay at the end.", AT_LEAST_0)]]
    weight_decay_incr_style: NotRequired[
        Annotated[
            Literal["constant", "linear", "cosine"],
            Key("how weight decay goes from the start value to the end value.", default="constant"),
        ]
    ]
    lr_decay_style: NotRequired[
        Annotated[
            Literal["constant", "linear", "cosine", "inverse-square-root"],
            Key("how the learning rate decays from ``lr`` to ``min_lr``.", default="constant"),
        ]
    ]
    lr_decay_iters: NotRequired[
        Annotated[
            int | None,
            Key(
                "calls until ``min_lr`` is reached; null is allowed only with a constant learning rate.",
                AT_LEAST_1,
                default=None,
            ),
        ]
    ]
    lr_warmup_iters: NotRequired[Annotated[int, Key("calls of linear warm-up.", AT_LEAST_0, default=0)]]
    lr_warmup_init: NotRequired[
        Annotated[float, Key("learning rate at the start of the warm-up.", AT_LEAST_0, default=0.0)]
    ]


class MegatronDDPConfig(TypedDict):
    """Megatron-Core's data parallelism."""

    grad_reduce_in_fp32: NotRequired[
        Annotated[bool, Key("accumulate and reduce gradients in float32.", default=False)]
    ]
    overlap_grad_reduce: NotRequired[
        Annotated[
            bool | None,
            Key(
                "reduce gradients while the backward pass runs; null does so if several data- or "
                "context-parallel ranks share them, and if ``optimizer_offload_fraction`` is above 0.",
                default=None,
            ),
        ]
    ]
    overlap_param_gather: NotRequired[
        Annotated[
            bool,
            Key(
                "gather parameters while the forward pass runs; needs the distributed optimizer.",
                default=False,
            ),
        ]
    ]
    average_in_collective: NotRequired[
        Annotated[
            bool,
            Key(
                "must be false: losses are normalised globally, so that gradients have to be summed.",
                default=False,
            ),
        ]
    ]
    bucket_size: NotRequired[
        Annotated[
            int | None,
            Key(
                "parameters per collective, if communication overlaps computation; null for Megatron's "
                "choice.",
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
    """The Megatron-Core backend."""

    enabled: Annotated[bool, Key("use this backend.")]
    empty_unused_memory_level: NotRequired[
        Annotated[
            Literal[0, 1, 2],
            Key(
                "when to return cached device memory: 0 never, 1 after forward and backward, 2 also after "
                "the optimizer step.",
                default=0,
            ),
        ]
    ]
    activation_checkpointing: NotRequired[
        Annotated[
            bool,
            Key(
                "recompute layers, or parts of them, in the backward pass instead of storing their "
                "activations.",
                default=False,
            ),
        ]
    ]
    recompute_granularity: NotRequired[
        Annotated[
            Literal["full", "selective"],
            Key(
                "what ``activation_checkpointing`` recomputes: ``full`` every layer, ``selective`` the "
                "parts of a layer that ``recompute_modules`` names.",
                default="full",
            ),
        ]
    ]
    recompute_modules: NotRequired[
        Annotated[
            list[Literal["core_attn", "mlp", "moe"]],
            Key(
                "parts of a layer to recompute: ``core_attn`` attention between its projections, ``mlp`` "
                "the MLP of a dense layer, ``moe`` router and experts of a mixture's layer.",
                default=["core_attn"],
            ),
        ]
    ]
    converter_type: NotRequired[
        Annotated[
            str,
            Key(
                "accepted for old configurations; it must name the model's own family "
                "(``Qwen2ForCausalLM``), which is used anyway."
            ),
        ]
    ]
    family_file: NotRequired[
        Annotated[
            str | None,
            Key(
                "Python file that defines the model's family (``megarl convert --family-file``); it must "
                "exist on every machine, and is executed. null for the built-in families.",
                default=None,
            ),
        ]
    ]
    ignore_config_keys: NotRequired[
        Annotated[
            list[str],
            Key(
                "keys of the model's ``config.json`` that do not affect it but would be refused otherwise "
                "(``megarl convert --ignore-config-key``).",
                default=[],
            ),
        ]
    ]
    model_class: NotRequired[
        Annotated[
            Literal["gpt", "hybrid"] | None,
            Key(
                "Megatron-Core's model class: ``gpt`` for GPTModel, ``hybrid`` for its successor "
                "HybridModel (release 0.19.2 or later); null uses GPTModel if the release has it, else "
                "HybridModel. Checkpoints are the same.",
                default=None,
            ),
        ]
    ]
    tensor_model_parallel_size: NotRequired[
        Annotated[int, Key("tensor-parallel ranks, which share each layer.", AT_LEAST_1, default=1)]
    ]
    pipeline_model_parallel_size: NotRequired[
        Annotated[int, Key("pipeline stages that the layers are divided over.", AT_LEAST_1, default=1)]
    ]
    virtual_pipeline_model_parallel_size: NotRequired[
        Annotated[int | None, Key("model chunks per pipeline stage; null for one.", AT_LEAST_1, default=None)]
    ]
    pipeline_model_parallel_layout: NotRequired[
        Annotated[
            str | None,
            Key(
                'layers of each model chunk, in Megatron-Core\'s notation (``"Et*2|(tt|)*2tL"``); null '
                "derives them from the other keys.",
                default=None,
            ),
        ]
    ]
    num_layers_in_first_pipeline_stage: NotRequired[
        Annotated[int | None, Key("null divides evenly.", AT_LEAST_1, default=None)]
    ]
    num_layers_in_last_pipeline_stage: NotRequired[
        Annotated[int | None, Key("null divides evenly.", AT_LEAST_1, default=None)]
    ]
    context_parallel_size: NotRequired[
        Annotated[int, Key("context-parallel ranks, which share each sequence.", AT_LEAST_1, default=1)]
    ]
    context_parallel_comm_type: NotRequired[
        Annotated[
            Literal["all_gather", "p2p"] | None,
            Key(
                "how attention gets the keys and values of the other ranks: ``all_gather``, the faster, "
                "gathers all of them on every rank; ``p2p``, ring attention, holds at most those of two "
                "ranks, for long sequences. null is all_gather, but p2p with Transformer Engine.",
                default=None,
            ),
        ]
    ]
    pipeline_dtype: NotRequired[
        Annotated[
            Precision, Key("dtype of the activations sent between stages; must be ``policy.precision``.")
        ]
    ]
    sequence_parallel: NotRequired[
        Annotated[
            bool,
            Key("shard the activations between tensor-parallel regions over the sequence.", default=False),
        ]
    ]
    expert_tensor_parallel_size: NotRequired[
        Annotated[int, Key("tensor-parallel ranks of one expert.", AT_LEAST_1, default=1)]
    ]
    expert_model_parallel_size: NotRequired[
        Annotated[int, Key("ranks that the experts are divided over.", AT_LEAST_1, default=1)]
    ]
    moe_token_dispatcher_type: NotRequired[
        Annotated[
            Literal["allgather", "alltoall", "flex"],
            Key(
                "how tokens reach their experts: ``alltoall`` sends them to the ranks of their experts, "
                "``allgather`` gives every rank all of them, ``flex`` sends them once to each rank with "
                "the kernels of DeepEP (GPUs, bfloat16; not run on one yet).",
                default="alltoall",
            ),
        ]
    ]
    moe_permute_fusion: NotRequired[
        Annotated[
            bool,
            Key(
                "sort tokens by expert in kernels of Transformer Engine, which needs GPUs (not run on one "
                "yet).",
                default=False,
            ),
        ]
    ]
    moe_grouped_gemm: NotRequired[
        Annotated[
            bool | None,
            Key(
                "run the experts of a rank as one grouped matrix product instead of one after another; "
                "null does so on CUDA devices. Checkpoints are the same.",
                default=None,
            ),
        ]
    ]
    freeze_moe_router: NotRequired[Annotated[bool, Key("do not train the routers.", default=False)]]
    moe_router_dtype: NotRequired[
        Annotated[
            Literal["fp32", "fp64"] | None,
            Key("dtype of the routers' computation; null for the model's.", default=None),
        ]
    ]
    moe_router_load_balancing_type: NotRequired[
        Annotated[
            Literal["none", "aux_loss", "seq_aux_loss"],
            Key(
                "load-balancing loss of the routers: ``aux_loss`` balances the global batch, and costs one "
                "more forward pass of each micro-batch, which counts the tokens of each expert; "
                "``seq_aux_loss`` balances each sequence.",
                default="none",
            ),
        ]
    ]
    moe_aux_loss_coeff: NotRequired[
        Annotated[
            float | None,
            Key(
                "weight of that loss, per layer; null for the model's own ``router_aux_loss_coef``.",
                AT_LEAST_0,
                default=None,
            ),
        ]
    ]
    moe_z_loss_coeff: NotRequired[
        Annotated[
            float | None,
            Key(
                "weight of the mean squared log-sum-exp of the routers' logits, per layer; null for none.",
                AT_LEAST_0,
                default=None,
            ),
        ]
    ]
    moe_router_bias_update_rate: NotRequired[
        Annotated[
            float,
            Key(
                "step size of the routers' bias update; must be 0, because the routers of the families "
                "here have no such bias.",
                AT_LEAST_0,
                default=0.0,
            ),
        ]
    ]
    transformer_engine: NotRequired[
        Annotated[
            Literal["auto"] | bool,
            Key(
                "whether to use Transformer Engine's layers: ``auto`` uses them if the ranks run on GPUs "
                "and it works on all of them, except for dense models in bfloat16, which trained faster "
                "without when measured; true refuses to start if it does not work, with its error; false "
                "uses the portable layers.",
                default="auto",
            ),
        ]
    ]
    float32_logits: NotRequired[
        Annotated[
            bool,
            Key(
                "keep the logits of 16-bit weights in float32, as their products were summed, instead of "
                "rounding them to 16 bits; it takes twice the memory.",
                default=False,
            ),
        ]
    ]
    apply_rope_fusion: NotRequired[
        Annotated[bool, Key("fuse the rotary embedding if a kernel for it exists.")]
    ]
    env_vars: NotRequired[
        Annotated[dict[str, str] | None, Key("environment variables of the workers.", default={})]
    ]
    optimizer: NotRequired[
        Annotated[
            MegatronOptimizerConfig, Key("the optimizer; may be absent when the policy is never trained.")
        ]
    ]
    scheduler: NotRequired[
        Annotated[MegatronSchedulerConfig, Key("learning rate and weight decay over time.")]
    ]
    distributed_data_parallel_config: NotRequired[Annotated[MegatronDDPConfig, Key("data parallelism.")]]


class RewardModelConfig(TypedDict):
    """A scoring model: a linear layer with one output replaces the output layer. It is ``score.weight`` of
    transformers' ``...ForSequenceClassification``; a language model gets a new one, sampled from the seed."""

    enabled: Annotated[
        bool,
        Key(
            "let the model score: it has no log-probabilities, generates nothing, and is trained with "
            "losses of values."
        ),
    ]
    reward_model_type: NotRequired[
        Annotated[
            Literal["bradley_terry"],
            Key(
                "``bradley_terry``: one score, without a bias; differences of scores are log-odds of "
                "preferences.",
                default="bradley_terry",
            ),
        ]
    ]


class PeftConfig(TypedDict):
    """Low-rank adapters (LoRA): next to selected linear layers W, only the product (alpha / dim) B A is
    trained.

    Each of a layer's query, key, value, gate and up matrices has its own adapter, as in PEFT, on every
    backend. NeMo-RL's ``policy.megatron_cfg.peft`` and ``policy.dtensor_cfg.lora_cfg`` are read as this
    section.
    """

    enabled: Annotated[
        bool, Key("train adapters; the model's own weights stay unchanged and are the reference policy.")
    ]
    target_modules: NotRequired[
        Annotated[
            list[str],
            Key(
                "linear layers that get an adapter: names, or ends of names, of Hugging Face modules "
                "(``q_proj``), names with ``*``, or Megatron-Core's ``linear_qkv``, ``linear_proj``, "
                "``linear_fc1`` and ``linear_fc2``. An empty list selects all linear layers of attention "
                "and dense MLPs. ``embed_tokens`` and ``lm_head`` get one if a name matches them and they "
                "are not tied; on Megatron, so does each expert that a name matches "
                "(``*.experts.*.down_proj``).",
                default=[],
            ),
        ]
    ]
    target_parameters: NotRequired[
        Annotated[
            list[str],
            Key(
                "stacked weights of experts that get an adapter, as in PEFT's key of this name: "
                "``experts.gate_up_proj``, ``experts.down_proj``. Each expert has factors of its own, and "
                "its gate and up matrices share A. Megatron only, without dropout.",
                default=[],
            ),
        ]
    ]
    exclude_modules: NotRequired[
        Annotated[
            list[str],
            Key(
                "layers that get no adapter although ``target_modules`` selects them, in the same forms.",
                default=[],
            ),
        ]
    ]
    dim: NotRequired[Annotated[int, Key("rank of every adapter.", AT_LEAST_1, default=8)]]
    alpha: NotRequired[
        Annotated[
            float,
            Key("scale of the adapters: their product is multiplied by alpha / dim.", ABOVE_0, default=32.0),
        ]
    ]
    use_rslora: NotRequired[
        Annotated[bool, Key("multiply by alpha / sqrt(dim) instead (rsLoRA).", default=False)]
    ]
    dropout: NotRequired[Annotated[float, Key("dropout probability in training.", DECAY, default=0.0)]]
    dropout_position: NotRequired[
        Annotated[
            Literal["pre", "post"],
            Key(
                "drop values of the adapter's input (``pre``, as PEFT does) or of its output (``post``).",
                default="pre",
            ),
        ]
    ]
    lora_A_init_method: NotRequired[
        Annotated[
            Literal["kaiming", "xavier", "normal"],
            Key(
                "initial values of A: ``kaiming`` uniform up to 1 / sqrt(inputs), PEFT's default; "
                "``xavier`` normal with variance 2 / (inputs + dim); ``normal`` with standard deviation 1 "
                "/ dim. A seed gives the same values on every layout and backend.",
                default="kaiming",
            ),
        ]
    ]
    lora_B_init_method: NotRequired[
        Annotated[
            Literal["zero"],
            Key("initial values of B: zero, so that a new adapter changes nothing.", default="zero"),
        ]
    ]
    lora_dtype: NotRequired[
        Annotated[
            Precision | None,
            Key(
                "dtype of the adapters' computation: ``policy.precision``, or null for the same.",
                default=None,
            ),
        ]
    ]
    adapter_path: NotRequired[
        Annotated[
            str | None,
            Key(
                "directory of a PEFT adapter with the same modules, rank and scale, from which training "
                "continues; null starts new adapters.",
                default=None,
            ),
        ]
    ]


class TokenizerConfig(TypedDict):
    """The tokenizer."""

    name: Annotated[str, Key("Hugging Face id or local directory.")]
    chat_template: NotRequired[
        Annotated[
            str | None,
            Key(
                "a Jinja template, \"default\" for the tokenizer's own, null to concatenate the messages' "
                "contents, for prompts that were rendered beforehand; an export keeps the tokenizer's own."
            ),
        ]
    ]
    chat_template_kwargs: NotRequired[
        Annotated[
            dict[str, Any] | None,
            Key("values that the chat template reads, for example ``{enable_thinking: false}``."),
        ]
    ]
    template_date: NotRequired[
        Annotated[
            str | None,
            Key(
                "day that a chat template reads from its clock, as `2026-11-27`; null or absent for the day "
                "of the run's first start, "
                "which its checkpoints keep."
            ),
        ]
    ]


class PytorchOptimizerConfig(TypedDict):
    """An optimizer of the torch backends."""

    name: Annotated[str, Key("import path of the class, for example ``torch.optim.AdamW``.")]
    kwargs: Annotated[
        dict[str, Any],
        Key(
            "keyword arguments of the optimizer. Unless they name ``fused``, ``foreach``, ``capturable`` "
            "or ``differentiable``, Adam and AdamW use torch's fused kernel, and a resumed run uses the "
            "kernel that its checkpoint was written with."
        ),
    ]
    weight_decay_on_vectors: NotRequired[
        Annotated[
            bool,
            Key(
                "apply ``kwargs.weight_decay`` to biases and norms (parameters of one dimension) too, as "
                "torch does; false leaves them out, as Megatron does.",
                default=True,
            ),
        ]
    ]
    master_dtype: NotRequired[_Master]
    exp_avg_dtype: NotRequired[_FirstMoment]
    exp_avg_sq_dtype: NotRequired[_SecondMoment]


class SinglePytorchSchedulerConfig(TypedDict):
    """A learning-rate scheduler of the torch backends."""

    name: Annotated[str, Key("import path of the class, for example ``torch.optim.lr_scheduler.LinearLR``.")]
    kwargs: Annotated[dict[str, Any], Key("keyword arguments of the scheduler.")]


SchedulerMilestones: TypeAlias = dict[str, list[int]]
"""``{"milestones": [...]}``: the steps at which the next scheduler in a list takes over."""


class PolicyConfig(TypedDict):
    """A policy: its model, its batches and its backend. At most one backend may be enabled; with none
    enabled, FSDP1 is used."""

    model_name: Annotated[str, Key("Hugging Face id or local directory.")]
    tokenizer: Annotated[TokenizerConfig, Key("the tokenizer and its chat template.")]
    trust_remote_code: NotRequired[
        Annotated[bool, Key("run Python code that comes with the model (default false).", default=False)]
    ]
    train_global_batch_size: Annotated[
        int, Key("samples (DPO: pairs) per optimizer step, over all ranks.", AT_LEAST_1)
    ]
    train_micro_batch_size: Annotated[
        int, Key("samples (DPO: pairs) per forward pass on one data-parallel rank.", AT_LEAST_1)
    ]
    learning_rate: NotRequired[
        Annotated[
            float,
            Key(
                "a value that the optimizer of any backend may refer to as ``${policy.learning_rate}``; it "
                "has no other effect. If given, it must equal the optimizer's learning rate."
            ),
        ]
    ]
    logprob_batch_size: NotRequired[
        Annotated[
            int,
            Key(
                "samples per forward pass when log-probabilities are computed.",
                AT_LEAST_1,
                follows="train_micro_batch_size",
            ),
        ]
    ]
    logprob_chunk_size: NotRequired[
        Annotated[
            int | None,
            Key(
                "number of positions whose logits a rank has in memory at a time, in training and in "
                "log-probability passes: the output layer and the log-probabilities are computed part by "
                "part, and the backward pass computes the logits once more. null computes those of a whole "
                "micro-batch at once.",
                AT_LEAST_1,
                default=None,
            ),
        ]
    ]
    generation: NotRequired[
        Annotated[
            GenerationConfig | None,
            Key("generation; null or absent for a policy that never generates.", default=None),
        ]
    ]
    generation_batch_size: NotRequired[
        Annotated[int, Key("samples that a rank generates at a time.", AT_LEAST_1)]
    ]
    precision: Annotated[Precision, Key("dtype of the weights and activations in the model.")]
    reward_model_cfg: NotRequired[
        Annotated[
            RewardModelConfig | None,
            Key("settings of a model that scores; null or absent for a language model.", default=None),
        ]
    ]
    peft: NotRequired[
        Annotated[
            PeftConfig | None, Key("low-rank adapters; null or absent trains all weights.", default=None)
        ]
    ]
    merged_adapter: NotRequired[
        Annotated[
            str | None,
            Key(
                "directory of a LoRA adapter of PEFT or Megatron-Bridge that is merged into the weights of "
                "``model_name`` as they are read (``megarl eval --adapter``); null for none.",
                default=None,
            ),
        ]
    ]
    dtensor_cfg: NotRequired[
        Annotated[DTensorConfig, Key("the DTensor/FSDP2 backend.", default={"enabled": False})]
    ]
    megatron_cfg: NotRequired[
        Annotated[MegatronConfig, Key("the Megatron-Core backend.", default={"enabled": False})]
    ]
    dynamic_batching: NotRequired[
        Annotated[DynamicBatchingConfig, Key("micro-batches formed by length.", default={"enabled": False})]
    ]
    sequence_packing: NotRequired[
        Annotated[SequencePackingConfig, Key("several sequences per row.", default={"enabled": False})]
    ]
    make_sequence_length_divisible_by: NotRequired[
        Annotated[int, Key("pad batches to a multiple of this length.", AT_LEAST_1, default=1)]
    ]
    max_total_sequence_length: Annotated[
        # The minimum is 2, because prompt and response have at least one token each.
        int, Key("maximum sequence length in tokens, prompt and response together.", Range(low=2))
    ]
    max_grad_norm: NotRequired[
        Annotated[
            float | None,
            Key(
                "maximum norm of the full model's gradient; null turns clipping off.",
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
                "what happens if a loss or gradient is not finite on some rank: ``skip`` takes no "
                "optimizer step for that global batch, ``raise`` ends the run. Weights, optimizer and "
                "schedule stay unchanged, and the batch is saved in the run's directory.",
                default="skip",
            ),
        ]
    ]
    deterministic: NotRequired[
        Annotated[
            bool,
            Key(
                "on GPUs: make a run give the same bits again on the same kind and number of devices, "
                "layout and versions, as it does on CPUs anyway. It uses slower kernels; an operation "
                "without a deterministic kernel ends the run with its name. What vLLM generates is not "
                "covered. Not tried on a GPU yet.",
                default=False,
            ),
        ]
    ]
    max_consecutive_skips: NotRequired[
        Annotated[
            int,
            Key(
                "maximum number of consecutive steps that are skipped by ``on_nonfinite``, or that have no "
                "response to train on (all truncated, for example), before the run ends.",
                AT_LEAST_1,
                default=3,
            ),
        ]
    ]
    offload_optimizer_for_logprob: NotRequired[
        Annotated[
            bool,
            Key(
                "move gradients and optimizer state from a GPU to host memory while log-probabilities are "
                "computed and while the policy itself generates: 24 bytes a parameter, there and back, in "
                "each step. They are always moved for an engine that shares the GPU.",
                default=False,
            ),
        ]
    ]
    refit_buffer_size_gb: NotRequired[
        Annotated[
            float | None,
            Key(
                "GiB that a refit may use on a rank of the policy. It covers the buffer through which "
                "weights pass to an engine on the same device (both halves together), or two buffers for "
                "engines elsewhere, which take as much on each of their ranks; the weights being gathered "
                "for them; and on a CPU the lists of what the buffers hold. A parameter larger than a "
                "sixteenth of it is gathered anyway, and FSDP1 gathers a layer at a time, whatever its "
                "size. null uses half a GiB for each half (on a GPU less, if less is free), more if the "
                "largest weight needs it, and 64 MiB for each of up to five buckets being gathered.",
                ABOVE_0,
                default=None,
            ),
        ]
    ]
    refit_checksum: NotRequired[
        Annotated[
            bool,
            Key(
                "send a checksum with each group of weights; an engine refuses a group that was changed on "
                "the way.",
                default=False,
            ),
        ]
    ]
    fsdp_offload_enabled: NotRequired[
        Annotated[
            bool,
            Key(
                "FSDP1 only: keep parameters, gradients and optimizer state in host memory between uses; "
                "the CPU steps them there.",
                default=False,
            ),
        ]
    ]
    activation_checkpointing_enabled: NotRequired[
        Annotated[bool, Key("FSDP1 only: recompute layers in the backward pass.", default=False)]
    ]
    optimizer: NotRequired[
        Annotated[
            PytorchOptimizerConfig | None,
            Key("optimizer of the torch backends; null with Megatron.", default=None),
        ]
    ]
    scheduler: NotRequired[
        Annotated[
            list[SinglePytorchSchedulerConfig | SchedulerMilestones] | SinglePytorchSchedulerConfig | None,
            Key("learning-rate schedule of the torch backends; null keeps it constant.", default=None),
        ]
    ]
