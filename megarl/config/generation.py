"""Schema of the ``policy.generation`` section of a configuration, in plain TypedDicts without torch or
Ray."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from typing_extensions import TypedDict

from megarl.key import ABOVE_0, AT_LEAST_0, AT_LEAST_1, POSITIVE_SHARE, Key


class ResourcesConfig(TypedDict):
    """Nodes and ranks that are reserved for engines."""

    gpus_per_node: NotRequired[
        Annotated[
            int | None,
            Key(
                "number of ranks per node that are reserved for engines; required if the run has one node, "
                "null for all ranks of ``num_nodes`` nodes."
            ),
        ]
    ]
    num_nodes: NotRequired[
        Annotated[
            int | None,
            Key(
                "number of nodes reserved for engines; null if the run has a single node, whose ranks are "
                "divided between engines and training."
            ),
        ]
    ]


class ColocationConfig(TypedDict):
    """Placement of engines: on the devices of training, or on separate devices."""

    enabled: Annotated[
        bool,
        Key(
            "true: engines and training use the same devices in turn; false: engines have ranks of "
            "their own, see ``resources``."
        ),
    ]
    resources: NotRequired[
        Annotated[ResourcesConfig, Key("nodes and ranks reserved for engines when ``enabled`` is false.")]
    ]


class VllmConfig(TypedDict):
    """Settings of vLLM engines."""

    tensor_parallel_size: NotRequired[
        Annotated[
            int,
            Key(
                "number of ranks over which each layer of an engine is split. An engine has this times "
                "``pipeline_parallel_size`` ranks, and as many engines start as the generation ranks allow. "
                "The ranks of an engine are on one node, or fill whole nodes: 32 is an engine on four nodes "
                "of 8.",
                AT_LEAST_1,
                default=1,
            ),
        ]
    ]
    pipeline_parallel_size: NotRequired[
        Annotated[
            int,
            Key(
                "number of pipeline stages of an engine, each on ranks of its own; must be 1 on a CPU.",
                AT_LEAST_1,
                default=1,
            ),
        ]
    ]
    expert_parallel_size: NotRequired[
        Annotated[
            int,
            Key(
                "number of ranks over which the experts of a mixture-of-experts model are distributed: 1 "
                "splits each expert over ``tensor_parallel_size`` ranks, ``tensor_parallel_size`` gives "
                "each rank complete experts; must be 1 on a CPU.",
                AT_LEAST_1,
                default=1,
            ),
        ]
    ]
    fast_sampling: NotRequired[
        Annotated[
            bool,
            Key(
                "sample with one seed per engine and call instead of one per response, as the fast sampler "
                "of vLLM's first (V1) model runner requires. A response then depends on the others in its "
                "batch and on the number of engines. Refused on GPUs unless V1 is chosen there: vLLM's "
                "default on GPUs, the second (V2) runner, is as fast with one seed per response.",
                default=False,
            ),
        ]
    ]
    # The key exists only because NeMo-RL's configurations have it.
    async_engine: NotRequired[
        Annotated[
            Literal[False],
            Key(
                "must be false: an engine gets whole batches of prompts, not a stream of requests.",
                default=False,
            ),
        ]
    ]
    precision: NotRequired[
        Annotated[
            Literal["float32", "bfloat16", "float16"],
            Key("dtype of the engine's weights and activations; ``policy.precision`` when absent."),
        ]
    ]
    max_model_len: NotRequired[
        Annotated[
            int,
            Key(
                "maximum number of tokens of a prompt and its response together; "
                "``policy.max_total_sequence_length`` when absent.",
                AT_LEAST_1,
            ),
        ]
    ]
    gpu_memory_utilization: NotRequired[
        Annotated[
            float,
            Key(
                "share of a GPU's memory that an engine may use for weights and KV cache together.",
                POSITIVE_SHARE,
                default=0.6,
            ),
        ]
    ]
    kv_cache_gb: NotRequired[
        Annotated[
            float | None,
            Key(
                "size of an engine's KV cache in GiB; null for the memory that ``gpu_memory_utilization`` "
                "leaves on a GPU, and for 1 GiB on a CPU.",
                ABOVE_0,
                default=None,
            ),
        ]
    ]
    enforce_eager: NotRequired[
        Annotated[
            bool,
            Key(
                "run the model without compilation and CUDA graphs: engines start sooner and generate more "
                "slowly.",
                default=False,
            ),
        ]
    ]
    load_format: NotRequired[
        Annotated[
            Literal["dummy", "auto"],
            Key(
                "weights that an engine starts with: ``dummy`` leaves them unset until the first refit, "
                "``auto`` reads them from the model's files.",
                default="dummy",
            ),
        ]
    ]
    enable_lora: NotRequired[
        Annotated[
            bool,
            Key(
                "serve LoRA in the engines: they read the base weights from the model's files at start, and "
                "a refit sends only the adapters of ``policy.peft``. Needs ``load_format: auto``. false "
                "sends the merged weights at every refit.",
                default=False,
            ),
        ]
    ]
    env_vars: NotRequired[
        Annotated[
            dict[str, str] | None,
            Key("environment variables set in the engines' processes, by name; null for none.", default={}),
        ]
    ]


class EngineCheckConfig(TypedDict):
    """Check that engines on separate devices compute with the weights that the policy sent."""

    sequences: NotRequired[
        Annotated[
            int,
            Key(
                "number of responses, sampled by the seed from the last batch, whose log-probabilities "
                "engines and policy both compute after a refit, to compare them. If the engines run the "
                "policy's own backend, all weights are also compared, bit for bit. 0 for no check.",
                AT_LEAST_0,
                default=0,
            ),
        ]
    ]
    on_difference: NotRequired[
        Annotated[
            Literal["stop", "warn"],
            Key(
                "what happens if engines and policy differ by more than rounding explains: ``stop`` ends "
                "the run, ``warn`` logs a warning.",
                default="stop",
            ),
        ]
    ]


class GenerationConfig(TypedDict):
    """Engine and sampling settings for the generation of responses."""

    backend: NotRequired[
        Annotated[
            str,
            Key(
                "generator of the responses: `megatron` (for Megatron) or `hf` (for DTensor and FSDP1) is "
                "the policy itself, also when absent; `vllm`; or the import path of a custom engine, "
                "`path/to/file.py:KIND`, see `megarl.models.generation.engines`."
            ),
        ]
    ]
    max_new_tokens: Annotated[int, Key("maximum response length in tokens.", AT_LEAST_1)]
    temperature: NotRequired[
        Annotated[
            float,
            Key(
                "sampling temperature: logits are divided by it when responses are sampled, and wherever "
                "log-probabilities are computed.",
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
                "sample from the smallest set of most likely tokens whose probabilities sum to at least "
                "this, and compute log-probabilities over that set; 1 keeps all tokens.",
                POSITIVE_SHARE,
                default=1.0,
            ),
        ]
    ]
    top_k: NotRequired[
        Annotated[
            int | None,
            Key(
                "sample from this number of most likely tokens, and compute log-probabilities over them; "
                "null keeps all tokens.",
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
                "sampling temperature in validations, 0 for greedy decoding. A source of "
                "``data.validation`` may override it, as well as ``val_top_p`` and ``val_top_k``.",
                AT_LEAST_0,
                default=0.0,
            ),
        ]
    ]
    val_top_p: NotRequired[
        Annotated[
            float,
            Key("``top_p`` in validations with a ``val_temperature`` above 0.", POSITIVE_SHARE, default=1.0),
        ]
    ]
    val_top_k: NotRequired[
        Annotated[
            int | None,
            Key(
                "``top_k`` in validations with a ``val_temperature`` above 0; null keeps all tokens.",
                AT_LEAST_1,
                default=None,
                advice="write null to keep all tokens",
            ),
        ]
    ]
    model_name: NotRequired[
        Annotated[
            str,
            Key(
                "model that the engine loads; ``policy.model_name`` when absent, and must equal it otherwise."
            ),
        ]
    ]
    stop_token_ids: NotRequired[
        Annotated[
            list[int] | None,
            Key(
                "ids of the tokens that end a response; null or absent for all that the tokenizer, "
                "``generation_config.json``, ``config.json`` and the chat template declare.",
                default=None,
            ),
        ]
    ]
    stop_strings: NotRequired[
        Annotated[
            list[str] | None,
            Key("texts that end a response as soon as they appear in it; null for none.", default=None),
        ]
    ]
    pad_token_id: NotRequired[
        Annotated[
            int,
            Key(
                "id of the token with which responses are padded to equal length; the tokenizer's when "
                "absent.",
                AT_LEAST_0,
            ),
        ]
    ]
    colocated: NotRequired[
        Annotated[
            ColocationConfig,
            Key("placement of engines: on the devices of training, or on others.", default={"enabled": True}),
        ]
    ]
    engine_check: NotRequired[
        Annotated[
            EngineCheckConfig,
            Key(
                "check, after refits, that engines on ranks of their own compute with the policy's weights.",
                default={"sequences": 0, "on_difference": "stop"},
            ),
        ]
    ]
    vllm_cfg: NotRequired[Annotated[VllmConfig, Key("settings of vLLM engines (``backend: vllm``).")]]
    vllm_kwargs: NotRequired[
        Annotated[
            dict[str, Any],
            Key(
                "further keyword arguments of vLLM's ``LLM``, which override those derived from "
                "``vllm_cfg``; arguments on which refits or log-probabilities depend are refused."
            ),
        ]
    ]
    engine_cfg: NotRequired[
        Annotated[
            dict[str, Any],
            Key(
                "settings of a custom engine; the ``section`` of its ``EngineKind`` defines the keys "
                "(``megarl.config.plugins``)."
            ),
        ]
    ]
