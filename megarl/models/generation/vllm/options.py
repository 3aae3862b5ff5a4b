"""Conversion of the configuration into arguments of vLLM's ``LLM``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from megarl.config.generation import GenerationConfig, VllmConfig
from megarl.errors import ConfigError
from megarl.models.generation.vllm import plugin
from megarl.models.generation.vllm.configuration import LORA_RANKS, complete_vllm
from megarl.models.generation.vllm.nodes import Part

# Without these keys a response would not end where the model ends it.
OF_THE_TOKENIZER = ("pad_token_id", "stop_token_ids")
GIB = 2**30
CACHE_ON_A_CPU = GIB
# This is vLLM's own limit below Blackwell: for larger batches the kernels take longer than their launches.
LARGEST_GRAPH = 512


def completed(
    config: Mapping[str, Any], model: str | None = None, longest: int | None = None, dtype: str | None = None
) -> GenerationConfig:
    """Return a generation configuration in which no value is absent.

    Args:
        config: the generation configuration.
        model, longest, dtype: replace its ``model_name``, ``vllm_cfg.max_model_len`` and
            ``vllm_cfg.precision``.

    Raises:
        ConfigError: a value is absent that has no default.
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
    """Return the number of ranks of one engine, by its ``vllm_cfg``."""
    return int(settings["tensor_parallel_size"] * settings["pipeline_parallel_size"])


def engine_options(
    config: GenerationConfig,
    seed: int,
    tokenizer: str | None = None,
    *,
    on_cpu: bool,
    part: Part | None = None,
    adapter: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the arguments of ``LLM`` for one engine.

    Args:
        config: the generation configuration, completed.
        seed: seed of vLLM itself; responses depend on the seeds of their rows.
        tokenizer: directory or hub id; stop strings are searched in its decoded text. Defaults to the
            model's.
        on_cpu: the engine runs without a GPU.
        part: this node's part of an engine over several nodes.
        adapter: fields of an ``AdapterScale``, for a policy that sends only its adapter.
    """
    settings = config["vllm_cfg"]
    shared = bool(config["colocated"]["enabled"])
    options: dict[str, Any] = {
        "model": config["model_name"],
        "tokenizer": tokenizer or config["model_name"],
        # By itself vLLM takes Mistral's own for a directory with tekken.json, which is not the policy's.
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
        # The responses to one prompt share its keys and values. A refit discards those computed with older
        # weights.
        "enable_prefix_caching": True,
        # Return log-probabilities of the distribution that tokens are sampled from, as the policy does.
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": {"backend": plugin.COLOCATED if shared else plugin.APART},
        "worker_extension_cls": plugin.EXTENSION,
        "trust_remote_code": False,
        "disable_log_stats": True,
        # The policy is only the text part of a vision-language model, so that no refit sends the weights of
        # the tower.
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
            # vLLM accepts only these ranks; a rule of the configuration bounds the adapter's rank.
            "max_lora_rank": next(rank for rank in LORA_RANKS if rank >= adapter["rank"]),
        }
    further = config.get("vllm_kwargs") or {}
    if on_cpu:
        options["block_size"] = 32
        # For a prompt that is read in pieces, vLLM rewinds the row's random numbers, which torch cannot do on
        # a CPU.
        options["enable_chunked_prefill"] = False
    else:
        # The kernels that vLLM prefers on Blackwell keep experts in shuffled blocks, into which no refit has
        # been seen to load.
        options["moe_backend"] = "triton"
        # While the engine sleeps, the policy also gets the memory of CUDA graphs.
        options["sleep_mode_offload_cudagraph"] = shared and not settings["enforce_eager"]
        if "max_num_seqs" in further and not settings["enforce_eager"] and not _chooses_graphs(further):
            options["cudagraph_capture_sizes"] = capture_sizes(further["max_num_seqs"])
    if part is not None:
        options |= part.options()
    elif ranks_of(settings) > 1:
        # Inside a Ray actor vLLM would choose Ray, which it refuses on a CPU. Besides, the bundles next to
        # the actor's already belong to the engine.
        options["distributed_executor_backend"] = plugin.EXECUTOR
    # The user's arguments come last; rules of the configuration refuse those that a refit relies on.
    return {**options, **further}


def capture_sizes(rows: int) -> list[int]:
    """Return the batch sizes for which vLLM captures CUDA graphs, for at most ``rows`` rows: vLLM's own
    steps, and the whole batch. Without the latter, a batch size between two steps would run without a graph,
    since no captured size may exceed the batch."""
    largest = min(rows, LARGEST_GRAPH)
    steps = (1, 2, 4, *range(8, 256, 8), *range(256, largest, 16))
    return sorted({size for size in steps if size < largest} | {largest})


def _chooses_graphs(further: Mapping[str, Any]) -> bool:
    """Return whether the user's arguments set the captured sizes; vLLM does not accept two such arguments."""
    own = further.get("compilation_config")
    keys = {"cudagraph_capture_sizes", "max_cudagraph_capture_size"}
    return bool(keys & (further.keys() | (own.keys() if isinstance(own, Mapping) else set())))
