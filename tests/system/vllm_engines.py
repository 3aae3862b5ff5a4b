"""Real vLLM engines of tiny models, the policies that refit them, and what both answer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from converters.files.process import status_bytes
from megarl import env
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.virtual_cluster import RayVirtualCluster
from megarl.distributed.worker_groups import RayWorkerGroup
from megarl.models.generation.vllm.generation import VllmGeneration
from megarl.models.policy.lm_policy import Policy
from tests.dist.dtensor_jobs import dtensor_config
from tests.dist.fsdp1_jobs import fsdp1_config
from tests.dist.key_models import SPECIAL, tokenizer_of_words
from tests.models import VOCABULARY, policy_config

NEW = 10
TORCHVISION = env.text("MEGARL_TEST_TORCHVISION")
"""Where ``launch/test.sh`` has put torchvision, for engines alone: on a torch for CPUs its operators are
absent, and transformers would take its processors of pictures."""
MAKE = {"megatron": policy_config, "dtensor": dtensor_config, "fsdp1": fsdp1_config}
POLICIES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "megatron-tp2-pp2": ("megatron", 4, {"tp": 2, "pp": 2}),
    "dtensor-tp2": ("dtensor", 2, {"tp": 2}),
    "fsdp1-dp2": ("fsdp1", 2, {}),
    "megatron-tp1": ("megatron", 1, {}),
    "megatron-tp2": ("megatron", 2, {"tp": 2}),
    "megatron-pp2": ("megatron", 2, {"pp": 2}),
}
SAMPLING = {"temperature": 0.7, "top_k": 30, "top_p": 0.9}
PROMPTS = BatchedDataDict(
    {
        "input_ids": torch.tensor([[5, 9, 33, 4], [7, 8, 0, 0], [3, 6, 41, 0]]),
        "input_lengths": torch.tensor([4, 2, 3]),
    }
)


def dense_model(path: Path, **sizes: Any) -> Path:
    """With random weights, a tied head unless ``sizes`` say otherwise, and a tokenizer of words."""
    torch.manual_seed(3)
    config = Qwen2Config(
        hidden_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=None,
        bos_token_id=None,
        **{"vocab_size": VOCABULARY, "tie_word_embeddings": True, **sizes},
    )
    Qwen2ForCausalLM(config).save_pretrained(path)
    return tokenizer_of_words(path, [f"w{number}" for number in range(len(SPECIAL), VOCABULARY)])


def engines(
    model: Path,
    name: str,
    *,
    colocated: bool,
    places: int | list[int] = 1,
    tensor_parallel: int = 1,
    changes: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Any] | None = None,
    adapter: Any = None,
    sampling: Mapping[str, Any] = SAMPLING,
    **environment: str,
) -> VllmGeneration:
    """With ``changes`` of ``vllm_cfg``, ``arguments`` for vLLM itself, and ``adapter`` of policies that send
    theirs alone."""
    settings = {
        "tensor_parallel_size": tensor_parallel,
        "load_format": "dummy",
        "enforce_eager": True,
        "gpu_memory_utilization": 0.2,
        "kv_cache_gb": 0.02,
        "max_model_len": 64,
        "precision": "float32",
        "env_vars": {"VLLM_CPU_CI_ENV": "1", **environment},
        **(changes or {}),
    }
    generation = {
        "backend": "vllm",
        "model_name": str(model),
        "max_new_tokens": NEW,
        **sampling,
        "stop_token_ids": [],
        "stop_strings": None,
        "pad_token_id": 0,
        "colocated": {"enabled": colocated},
        "vllm_cfg": settings,
        **({"vllm_kwargs": dict(arguments)} if arguments else {}),
    }
    cluster = RayVirtualCluster([places] if isinstance(places, int) else places, use_gpus=False, name=name)
    return VllmGeneration(cluster, generation, adapter=adapter)


def policy_of(name: str, model: Path, refit_buffer_size_gb: float = 0.0005, **environment: str) -> Policy:
    backend, world, changes = POLICIES[name]
    config = MAKE[backend](model, gbs=8, mbs=2, **changes)
    if environment:
        config[f"{backend}_cfg"]["env_vars"] = environment
    config["generation"] |= SAMPLING
    # several groups, so that one is gathered while another is loaded
    config["refit_buffer_size_gb"] = refit_buffer_size_gb
    if backend != "megatron":
        config["generation"] = {**config["generation"], "backend": "hf"}
    return Policy(
        RayVirtualCluster([world], use_gpus=False, name=name), config, None, init_reference_model=False
    )


def greedy_answers(directory: Path, prompts: BatchedDataDict[Any] = PROMPTS) -> list[list[int]]:
    loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    rows = []
    for prompt, length in zip(prompts["input_ids"], prompts["input_lengths"].tolist(), strict=True):
        rows.append(
            loaded.generate(
                prompt[None, :length], max_new_tokens=NEW, do_sample=False, pad_token_id=0, eos_token_id=None
            )[0].tolist()
        )
    return rows


def rows_of(output: BatchedDataDict[Any]) -> list[list[int]]:
    return [
        ids[:length].tolist()
        for ids, length in zip(output["output_ids"], output["unpadded_sequence_lengths"], strict=True)
    ]


def processes_of(group: RayWorkerGroup) -> list[int]:
    """Process ids of the workers."""
    found = [group._registry.process(future) for future in group.run_all_workers_single_data("is_alive")]
    return [process.process_id for process in found if process is not None]


def resident_bytes(process: int) -> int:
    """Of a process's own memory, without what it shares with others."""
    return status_bytes("RssAnon", process)
