"""Conversion of the configuration to arguments of vLLM's ``LLM``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict, cast

from megarl.config.generation import GenerationConfig, VllmConfig
from megarl.errors import ConfigError
from megarl.models.generation.vllm import plugin
from megarl.models.generation.vllm.configuration import LORA_RANKS, complete_vllm
from megarl.models.generation.vllm.nodes import LlmArguments, Part

# Without these keys a response would not end at the model's stop tokens.
OF_THE_TOKENIZER = ("pad_token_id", "stop_token_ids")
GIB = 2**30
CACHE_ON_A_CPU = GIB
# vLLM's own limit on GPUs before Blackwell: in larger batches, kernels take longer than their launches, so a
# graph would not help.
LARGEST_GRAPH = 512


class AdapterScale(TypedDict):
    """Rank and scale of an adapter. Its factors do not contain them.

    Keys:
        rank: rank of every adapted module.
        alpha: ``policy.peft.alpha``.
        rank_stabilized: ``policy.peft.use_rslora``.
    """

    rank: int
    alpha: float
    rank_stabilized: bool


def completed(
    config: Mapping[str, Any], model: str | None = None, longest: int | None = None, dtype: str | None = None
) -> GenerationConfig:
    """Return a generation configuration with all values present.

    Args:
        config: the generation configuration.
        model, longest, dtype: override ``model_name``, ``vllm_cfg.max_model_len`` and ``vllm_cfg.precision``.

    Raises:
        ConfigError: a value without a default is absent.
    """
    filled = complete_vllm(config)
    given = {"max_model_len": longest, "precision": dtype}
    filled["vllm_cfg"] = settings = {
        **filled["vllm_cfg"],
        **{key: value for key, value in given.items() if value is not None},
    }
    filled["model_name"] = model or filled.get("model_name")
    absent = [key for key in ("model_name", "max_new_tokens", *OF_THE_TOKENIZER) if filled.get(key) is None]
    absent += [f"vllm_cfg.{key}" for key in given if settings.get(key) is None]
    if absent:
        raise ConfigError(
            f"the generation configuration lacks {', '.join(absent)}. Fix: write them; "
            f"{' and '.join(OF_THE_TOKENIZER)} come from "
            "configure_generation_config(config, tokenizer)"
        )
    return cast(GenerationConfig, filled)


def ranks_of(settings: VllmConfig) -> int:
    """Return the number of ranks of one engine: tensor-parallel times pipeline-parallel size."""
    return int(settings["tensor_parallel_size"] * settings["pipeline_parallel_size"])


def engine_options(
    config: GenerationConfig,
    seed: int,
    tokenizer: str | None = None,
    *,
    on_cpu: bool,
    part: Part | None = None,
    adapter: AdapterScale | None = None,
) -> LlmArguments:
    """Return the arguments of ``LLM`` for one engine.

    Args:
        config: the generation configuration, from ``completed``.
        seed: seed of vLLM itself. Responses depend on the rows' own seeds.
        tokenizer: directory or hub id of the tokenizer that decodes responses for stop strings; defaults to
            the model's.
        on_cpu: the engine runs without a GPU.
        part: this node's part of an engine that spans several nodes.
        adapter: rank and scale of the policy's adapter, if refits send only its factors.
    """
    settings = config["vllm_cfg"]
    shared = bool(config["colocated"]["enabled"])
    options: LlmArguments = {
        "model": config["model_name"],
        "tokenizer": tokenizer or config["model_name"],
        # By default, vLLM would use Mistral's own tokenizer for a directory with tekken.json. The policy uses
        # the Hugging Face one.
        "tokenizer_mode": "hf",
        "tensor_parallel_size": settings["tensor_parallel_size"],
        "pipeline_parallel_size": settings["pipeline_parallel_size"],
        "enable_expert_parallel": settings["expert_parallel_size"] > 1,
        "dtype": settings["precision"],
        "seed": seed,
        "load_format": settings["load_format"],
        "max_model_len": settings["max_model_len"],
        "enforce_eager": settings["enforce_eager"],
        "gpu_memory_utilization": settings["gpu_memory_utilization"],
        "enable_sleep_mode": shared and not on_cpu,
        # All responses to a prompt share its KV cache. A refit resets the cache, which depends on the
        # weights.
        "enable_prefix_caching": True,
        # Return log-probabilities under the distribution from which tokens are sampled, like the policy.
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": {"backend": plugin.COLOCATED if shared else plugin.APART},
        "worker_extension_cls": plugin.EXTENSION,
        "trust_remote_code": False,
        "disable_log_stats": True,
        # The policy is only the text part of a vision-language model, so refits do not send the vision tower.
        "language_model_only": True,
    }
    if settings["kv_cache_gb"] is not None:
        options["kv_cache_memory_bytes"] = int(settings["kv_cache_gb"] * GIB)
    elif on_cpu:
        options["kv_cache_memory_bytes"] = CACHE_ON_A_CPU
    if adapter is not None:
        options |= {
            "enable_lora": True,
            "max_loras": 1,
            # vLLM accepts only these ranks. A configuration rule limits the adapter's rank to the largest
            # one.
            "max_lora_rank": next(rank for rank in LORA_RANKS if rank >= adapter["rank"]),
        }
    further = config.get("vllm_kwargs") or {}
    if on_cpu:
        options["block_size"] = 32
        # After each chunk of a prompt, vLLM rewinds the row's random generator, which torch cannot do on a
        # CPU.
        options["enable_chunked_prefill"] = False
    else:
        # The expert kernels that vLLM prefers on Blackwell use shuffled weights. Refits into these are
        # untested.
        options["moe_backend"] = "triton"
        # Free the memory of CUDA graphs too while the engine sleeps, because the policy needs it.
        options["sleep_mode_offload_cudagraph"] = shared and not settings["enforce_eager"]
        if "max_num_seqs" in further and not settings["enforce_eager"] and not _chooses_graphs(further):
            options["cudagraph_capture_sizes"] = capture_sizes(further["max_num_seqs"])
    if part is not None:
        options |= part.options()
    elif ranks_of(settings) > 1:
        # Inside a Ray actor, vLLM would choose its Ray executor, which it does not support on a CPU, and
        # which would need more bundles: the adjacent ones already belong to this engine.
        options["distributed_executor_backend"] = plugin.EXECUTOR
    # The user's arguments come last and override the others. A configuration rule rejects arguments on which
    # refits rely.
    return {**options, **further}


def capture_sizes(rows: int) -> list[int]:
    """Return the batch sizes for which vLLM captures CUDA graphs: vLLM's own steps, and the largest batch.

    No captured size may exceed the largest batch. So without its own graph, a batch between the last step and
    ``rows`` would run without one.

    Args:
        rows: maximum number of rows of a batch.
    """
    largest = min(rows, LARGEST_GRAPH)
    steps = (1, 2, 4, *range(8, 256, 8), *range(256, largest, 16))
    return sorted({size for size in steps if size < largest} | {largest})


def _chooses_graphs(further: LlmArguments) -> bool:
    """Return whether the user's arguments set the captured sizes. vLLM does not accept this setting twice."""
    own = further.get("compilation_config")
    keys = {"cudagraph_capture_sizes", "max_cudagraph_capture_size"}
    return bool(keys & (further.keys() | (own.keys() if isinstance(own, Mapping) else set())))
