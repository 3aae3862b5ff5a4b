"""What the process beside the policy's runs: one engine of vLLM, which takes the policy's weights where they
lie."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.models.generation.vllm.options import completed
from megarl.models.generation.vllm.worker import VllmGenerationWorker
from megarl.weight_sync.manifest import Manifest

_kept: dict[str, VllmGenerationWorker] = {}


def start(device: str, *unused: Any) -> None:
    """Make this process one of an engine on ``device``, without a group of ranks: vLLM makes its own."""
    os.environ.update(
        {
            "MEGARL_DEVICE": device,
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
    )
    if device == "cpu":
        # nothing is compiled for sizes of batches that may never come
        os.environ.update({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_CI_ENV": "1"})


def engine_config(model: Path, prompt: int, new_tokens: int, rows: int, *, eager: bool) -> dict[str, Any]:
    """A generation configuration of an engine on the policy's device, as recipes have it."""
    settings: dict[str, Any] = {
        "precision": "bfloat16",
        "max_model_len": prompt + new_tokens,
        "gpu_memory_utilization": 0.3,
    }
    settings |= {
        "enforce_eager": eager,
        **({"kv_cache_gb": 0.02} if os.environ.get("MEGARL_GPU_TESTS_ON") == "cpu" else {}),
    }
    generation: dict[str, Any] = {
        "model_name": str(model),
        "max_new_tokens": new_tokens,
        "pad_token_id": 0,
        "stop_token_ids": [],
    }
    generation |= {"temperature": 1.0, "top_p": 1.0, "top_k": None}
    own = {"vllm_cfg": settings, "vllm_kwargs": {"max_num_seqs": rows, "skip_tokenizer_init": True}}
    return completed({**generation, "colocated": {"enabled": True}, **own})


def begin_engine(config: Mapping[str, Any]) -> dict[str, Any]:
    """Start the engine; the model runner and the CUDA graphs that it has."""
    _kept["engine"] = engine = VllmGenerationWorker(config)
    made = engine._engine._llm.llm_engine.vllm_config
    sizes = made.compilation_config.cudagraph_capture_sizes or ()
    return {
        "second runner": bool(made.use_v2_model_runner),
        "sizes": list(sizes),
        "offloads graphs": made.use_cumem_cudagraph_pool,
    }


def sleep() -> None:
    """Give the engine's memory back."""
    _kept["engine"].finish_generation()


def wake(tags: list[str]) -> None:
    """Take memory again."""
    _kept["engine"].prepare_for_generation(tags)


def connect(description: Mapping[str, Any], mailboxes: dict[str, Any], session: int) -> None:
    """Learn the weights that will come, and find the policy's rank."""
    tensors = Manifest.from_description(description).tensors
    _kept["engine"].connect(
        [[tensor.name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for tensor in tensors],
        None,
    )
    _kept["engine"].meet(mailboxes, session)


def take_weights(ticket: int) -> None:
    """Load the weights of a refit."""
    _kept["engine"].update_from_policy(ticket)


def generate(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Responses to prompts, each by its own seed."""
    engine = _kept["engine"]
    return dict(engine.generate(BatchedDataDict(batch), greedy=False, version=engine._version))


def end_engine() -> None:
    """End vLLM's processes."""
    _kept.pop("engine").shutdown()
