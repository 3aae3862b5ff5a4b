"""Schema of the ``policy.generation`` section of a configuration.

The sections are plain TypedDicts, as in ``megarl.config.policy``.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from typing_extensions import TypedDict

from megarl.key import ABOVE_0, AT_LEAST_0, AT_LEAST_1, POSITIVE_SHARE, Key


class ResourcesConfig(TypedDict):
    """Devices reserved for generation engines."""

    gpus_per_node: NotRequired[
        Annotated[int | None, Key("worker ranks of the engines per node; null for all ranks of a node.")]
    ]
    num_nodes: NotRequired[
        Annotated[
            int | None,
            Key("number of nodes that the engines occupy; null if they share the only node with training."),
        ]
    ]


class ColocationConfig(TypedDict):
    """Placement of generation: on the training devices, or on separate devices."""

    enabled: Annotated[bool, Key("let generation and training share devices, one at a time.")]
    resources: NotRequired[
        Annotated[ResourcesConfig, Key("the engine's own devices when ``enabled`` is false.")]
    ]


class VllmConfig(TypedDict):
    """vLLM engines."""

    tensor_parallel_size: NotRequired[
        Annotated[
            int,
            Key(
                "ranks that share each layer. An engine has this times ``pipeline_parallel_size`` ranks, "
                "and as many engines start as the ranks for generation allow. The ranks of an engine are "
                "on one node, or fill whole nodes: 32 is an engine over four nodes of 8.",
                AT_LEAST_1,
                default=1,
            ),
        ]
    ]
    pipeline_parallel_size: NotRequired[
        Annotated[
            int,
            Key("pipeline stages of an engine, each on ranks of its own; 1 on a CPU.", AT_LEAST_1, default=1),
        ]
    ]
    expert_parallel_size: NotRequired[
        Annotated[
            int,
            Key(
                "ranks over which the experts of a mixture are divided: 1 cuts each expert over "
                "``tensor_parallel_size`` ranks, ``tensor_parallel_size`` gives each rank complete "
                "experts; 1 on a CPU.",
                AT_LEAST_1,
                default=1,
            ),
        ]
    ]
    fast_sampling: NotRequired[
        Annotated[
            bool,
            Key(
                "use one seed per engine and call instead of one per response, as the fast sampler of "
                "vLLM's first model runner needs. GPUs use the second model runner, which would gain "
                "nothing, so it is refused there. A response then depends on the other responses of its "
                "batch and on the number of engines.",
                default=False,
            ),
        ]
    ]
    # Accept the key, because NeMo-RL's configurations have it.
    async_engine: NotRequired[
        Annotated[
            Literal[False], Key("must be false: an engine gets a batch of prompts at once.", default=False)
        ]
    ]
    precision: NotRequired[
        Annotated[
            Literal["float32", "bfloat16", "float16"],
            Key("dtype of the engine's weights; the policy's when absent."),
        ]
    ]
    max_model_len: NotRequired[
        Annotated[
            int,
            Key(
                "maximum tokens of prompt and response together; ``policy.max_total_sequence_length`` when "
                "absent.",
                AT_LEAST_1,
            ),
        ]
    ]
    gpu_memory_utilization: NotRequired[
        Annotated[
            float,
            Key(
                "share of a GPU's memory that an engine may use, weights and key-value cache together.",
                POSITIVE_SHARE,
                default=0.6,
            ),
        ]
    ]
    kv_cache_gb: NotRequired[
        Annotated[
            float | None,
            Key(
                "GiB of an engine's key-value cache; null for what ``gpu_memory_utilization`` leaves, and "
                "1 on a CPU.",
                ABOVE_0,
                default=None,
            ),
        ]
    ]
    enforce_eager: NotRequired[
        Annotated[
            bool,
            Key("do not compile the model: engines start sooner and generate more slowly.", default=False),
        ]
    ]
    load_format: NotRequired[
        Annotated[
            Literal["dummy", "auto"],
            Key(
                "``dummy``: engines get their weights from the first refit only; ``auto``: engines also "
                "read the model's files before it.",
                default="dummy",
            ),
        ]
    ]
    enable_lora: NotRequired[
        Annotated[
            bool,
            Key(
                "let engines read the model's own weights from its files, once; a refit then sends them "
                "only the adapters of ``policy.peft``. false sends merged weights. true needs "
                "``load_format: auto``.",
                default=False,
            ),
        ]
    ]
    env_vars: NotRequired[
        Annotated[dict[str, str] | None, Key("environment variables of the engines.", default={})]
    ]


class EngineCheckConfig(TypedDict):
    """Check that engines on separate devices compute with the weights that they received."""

    sequences: NotRequired[
        Annotated[
            int,
            Key(
                "number of responses of the last batch that both the engines and the policy score after a "
                "refit, sampled by the seed. If the engines run the policy's own backend, all weights are "
                "compared too, bit for bit. 0 for no check.",
                AT_LEAST_0,
                default=0,
            ),
        ]
    ]
    on_difference: NotRequired[
        Annotated[
            Literal["stop", "warn"],
            Key(
                "what happens if the difference is larger than rounding explains: stop the run, or warn.",
                default="stop",
            ),
        ]
    ]


class GenerationConfig(TypedDict):
    """Generation of responses."""

    backend: NotRequired[
        Annotated[
            str,
            Key(
                "`megatron` or `hf` (DTensor and FSDP1): the policy itself, also when absent; `vllm`; or "
                "the import path "
                "of an engine, `path/to/file.py:KIND`, see `megarl.models.generation.engines`."
            ),
        ]
    ]
    max_new_tokens: Annotated[int, Key("maximum response length in tokens.", AT_LEAST_1)]
    temperature: NotRequired[
        Annotated[
            float,
            Key(
                "logits are divided by it, in sampling and wherever log-probabilities are computed.",
                ABOVE_0,
                default=1.0,
                advice="sample at 1.0; greedy decoding is asked for call by call",
            ),
        ]
    ]
    top_p: NotRequired[
        Annotated[
            float,
            Key(
                "keep the smallest set of tokens with at least this probability, in sampling and in "
                "log-probabilities; 1 keeps all.",
                POSITIVE_SHARE,
                default=1.0,
            ),
        ]
    ]
    top_k: NotRequired[
        Annotated[
            int | None,
            Key(
                "keep only this many of the most likely tokens, in sampling and in log-probabilities; null "
                "keeps all.",
                AT_LEAST_1,
                default=None,
                advice="write null to keep all tokens",
            ),
        ]
    ]
    val_temperature: NotRequired[
        Annotated[
            float,
            Key(
                "sampling temperature of validations, 0 for greedy decoding. A source of "
                "``data.validation`` may override it, and ``val_top_p`` and ``val_top_k``.",
                AT_LEAST_0,
                default=0.0,
            ),
        ]
    ]
    val_top_p: NotRequired[
        Annotated[float, Key("``top_p`` of a validation that samples.", POSITIVE_SHARE, default=1.0)]
    ]
    val_top_k: NotRequired[
        Annotated[
            int | None,
            Key(
                "``top_k`` of a validation that samples; null keeps all.",
                AT_LEAST_1,
                default=None,
                advice="write null to keep all tokens",
            ),
        ]
    ]
    model_name: NotRequired[
        Annotated[str, Key("the engine's model, which must be the policy's; the policy's when absent.")]
    ]
    stop_token_ids: NotRequired[
        Annotated[
            list[int] | None,
            Key(
                "tokens that end a response; null or absent for all those that the tokenizer, "
                "``generation_config.json``, ``config.json`` and the chat template name.",
                default=None,
            ),
        ]
    ]
    stop_strings: NotRequired[Annotated[list[str] | None, Key("texts that end a response.", default=None)]]
    pad_token_id: NotRequired[
        Annotated[int, Key("token that pads responses; the tokenizer's when absent.", AT_LEAST_0)]
    ]
    colocated: NotRequired[
        Annotated[
            ColocationConfig, Key("whether training and generation share devices.", default={"enabled": True})
        ]
    ]
    engine_check: NotRequired[
        Annotated[
            EngineCheckConfig,
            Key(
                "check that engines on ranks of their own compute with the policy's weights.",
                default={"sequences": 0, "on_difference": "stop"},
            ),
        ]
    ]
    vllm_cfg: NotRequired[Annotated[VllmConfig, Key("settings of vLLM engines, with ``backend: vllm``.")]]
    vllm_kwargs: NotRequired[
        Annotated[
            dict[str, Any],
            Key(
                "further arguments of vLLM's ``LLM``, which override those from ``vllm_cfg``; arguments "
                "that refits or log-probabilities depend on are refused."
            ),
        ]
    ]
    engine_cfg: NotRequired[
        Annotated[
            dict[str, Any],
            Key(
                "settings of a custom engine; the ``section`` of its kind defines the keys "
                "(``megarl.config.plugins``)."
            ),
        ]
    ]
