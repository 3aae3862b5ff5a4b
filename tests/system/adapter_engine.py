"""One engine of vLLM, in this process, whose adapter is bound several times: what it answers, as JSON.

Run as ``python -m tests.system.adapter_engine MODEL ADAPTER``, the directories of a base and of PEFT's
adapter of rank 3, alpha 5.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from safetensors.torch import load_file

from megarl.errors import RefitError
from megarl.models.generation.vllm import plugin
from megarl.models.generation.vllm.adapter_binding import AdapterBinding
from megarl.models.generation.vllm.options import AdapterScale, completed
from megarl.models.generation.vllm.worker import VllmGenerationWorker
from tests.system.vllm_engines import PROMPTS, rows_of

SCALE = AdapterScale(rank=3, alpha=5.0, rank_stabilized=False)


def refusal(binding: AdapterBinding, factors: dict[str, torch.Tensor]) -> str:
    binding.take(list(factors.items()))
    try:
        binding.bind()
    except RefitError as error:
        return str(error)
    return ""


def answers(worker: VllmGenerationWorker) -> list[Any]:
    found = worker.generate(PROMPTS, True, 0)
    return [rows_of(found), found["logprobs"].tolist()]


def main(model: str, adapter: str) -> None:
    plugin.register()
    settings = {
        "load_format": "auto",
        "enable_lora": True,
        "enforce_eager": True,
        "kv_cache_gb": 0.02,
        "max_model_len": 64,
        "precision": "float32",
    }
    config = {
        "backend": "vllm",
        "model_name": model,
        "max_new_tokens": 10,
        "temperature": 1.0,
        "top_k": None,
        "top_p": 1.0,
    }
    config |= {
        "stop_token_ids": [],
        "stop_strings": None,
        "pad_token_id": 0,
        "colocated": {"enabled": True},
        "vllm_cfg": settings,
    }
    worker = VllmGenerationWorker(completed(config), adapter=SCALE)
    worker._version = 0
    binding = AdapterBinding(
        worker._engine._llm.llm_engine.model_executor.driver_worker.worker.model_runner.model, SCALE
    )
    factors = load_file(f"{adapter}/adapter_model.safetensors")
    said: dict[str, Any] = {}
    beside, worker._beside = worker._beside, dict  # type: ignore[method-assign, assignment]
    said["base"] = answers(worker)
    worker._beside = beside  # type: ignore[method-assign]
    for name, change in (("zero", 0.0), ("trained", 1.0), ("twice", 2.0), ("again", 1.0)):
        changed = {key: tensor * change if ".lora_B." in key else tensor for key, tensor in factors.items()}
        binding.take(list(changed.items()))
        said["bound"] = binding.bind()
        worker._engine.call("reset_prefix_cache")
        said[name] = answers(worker)
    strange = {key.replace(".self_attn.", ".cross_attn."): tensor for key, tensor in factors.items()}
    said["no module"] = refusal(binding, strange)
    first = {
        key.replace("layers.0.", "layers.9."): tensor for key, tensor in factors.items() if "layers.0." in key
    }
    said["some modules"] = refusal(binding, factors | first)
    print("\n" + json.dumps(said))
    worker.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
