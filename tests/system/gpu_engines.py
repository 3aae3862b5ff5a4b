"""A program: the configuration of vLLM engines as GPUs would get them, printed as text, on a machine without
one.

A stand-in takes the place of the devices: vLLM's build for CPUs is told that it is on them, and makes its
configuration up to the point at which an engine would start. Nothing of it can run. ``gpu_engines.txt`` has
what it printed; after a change that is meant, write it again:

    python -m tests.system.gpu_engines > tests/system/gpu_engines.txt
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from megarl import env
from megarl.config import validate_config
from megarl.config.load import load_config
from megarl.config.rules.view import View
from megarl.models.generation.vllm.configuration import sized
from tests.system.model_runners import pretend_a_backend
from tests.unit.published_models import published
from tests.unit.test_memory_fit import LARGE

ROOT = Path(__file__).parents[2]
RECORDED = Path(__file__).with_suffix(".txt")
H100 = {"name": "NVIDIA H100 80GB HBM3", "capability": (9, 0), "gib": 80}
LOOK = """
import sys
from vllm.model_executor.models.registry import ModelRegistry
ModelRegistry.models[sys.argv[1]].inspect_model_cls()
"""
"""Notes what a model's code can do, as vLLM does before the first engine of it on a machine."""
B200 = {"name": "NVIDIA B200", "capability": (10, 0), "gib": 180}


@dataclass(frozen=True, slots=True)
class Case:
    """An engine of a recipe.

    Attributes:
        recipe: file of ``configs``.
        published: text of a config.json in ``tests/data/published_configs``.
        device: name, compute capability and memory of the GPUs.
        changes: to the config.json.
        overrides: of the recipe.
    """

    recipe: str
    published: str
    device: Mapping[str, Any]
    changes: Mapping[str, Any]
    overrides: tuple[str, ...] = ()


QWEN_1_5B = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
}
CASES = {
    "1.5B": Case(
        "grpo-qwen2.5-1.5b-1gpu-megatron",
        "Qwen2.5-7B-Instruct",
        H100,
        {**QWEN_1_5B, "vocab_size": 151936, "tie_word_embeddings": True},
    ),
    "7B": Case("grpo-qwen2.5-7b-8gpu-megatron", "Qwen2.5-7B-Instruct", H100, {}),
    "30B-A3B": Case("grpo-qwen3-30b-a3b-2x8gpu-megatron", "Qwen3-30B-A3B", H100, {}),
    "671B": Case("grpo-qwen3-30b-a3b-2x8gpu-megatron", "DeepSeek-V3-bf16__no_quant_", B200, {}, LARGE[1:]),
}


def pretend_devices(device: Mapping[str, Any], count: int = 8) -> None:
    """Before vLLM asks what it runs on."""
    major, minor = device["capability"]
    memory = device["gib"] * 2**30
    properties = SimpleNamespace(
        name=device["name"], total_memory=memory, multi_processor_count=132, major=major, minor=minor
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": count,
        "current_device": 0,
        "get_device_name": device["name"],
    }
    answers |= {"get_device_capability": (major, minor), "get_device_properties": properties}
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    for name, answer in {
        "is_available": True,
        "device_count": count,
        "current_accelerator": torch.device("cuda"),
    }.items():
        setattr(torch.accelerator, name, lambda *_, answer=answer, **__: answer)
    # its kernels, which the build for CPUs lacks and a configuration does not call
    sys.modules["vllm._C_stable_libtorch"] = ModuleType("vllm._C_stable_libtorch")
    pretend_a_backend()
    from vllm import platforms
    from vllm.platforms.cuda import CudaPlatform

    platforms.current_platform = CudaPlatform()
    from vllm.device_allocator import cumem

    cumem.cumem_available = True


def arguments_of(case: Case, model: Path) -> dict[str, Any]:
    """What a worker would give ``LLM``."""
    from megarl.models.generation.vllm import plugin
    from megarl.models.generation.vllm.options import engine_options

    plugin.register()
    (model / "config.json").write_text(json.dumps({**published(case.published), **case.changes}))
    named = (f"policy.model_name={model}", f"policy.tokenizer.name={model}")
    config = validate_config(load_config(ROOT / f"configs/{case.recipe}.yaml", (*named, *case.overrides)))
    return engine_options(sized(View(config)), config["seed"], on_cpu=False)


def configuration_of(arguments: dict[str, Any]) -> dict[str, Any]:
    """What vLLM makes of them, as far as it bears on speed, memory, and whether the answers are the
    policy's."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    made: Any = EngineArgs(**arguments, skip_tokenizer_init=True).create_engine_config(UsageContext.LLM_CLASS)
    model, cache, parallel = made.model_config, made.cache_config, made.parallel_config
    compilation, scheduler = made.compilation_config, made.scheduler_config
    return {
        "model runner": 2 if made.use_v2_model_runner else 1,
        "compile mode": compilation.mode.name,
        "CUDA graphs": compilation.cudagraph_mode.name,
        "captured sizes": len(compilation.cudagraph_capture_sizes),
        "largest captured size": compilation.max_cudagraph_capture_size,
        "graphs leave with sleep": made.use_cumem_cudagraph_pool,
        "sampler's counters, MB": round(4 * scheduler.max_num_seqs * model.get_vocab_size() / 1e6),
        "sequences at a time": scheduler.max_num_seqs,
        "tokens at a time": scheduler.max_num_batched_tokens,
        "asynchronous scheduling": scheduler.async_scheduling,
        "chunked prefill": scheduler.enable_chunked_prefill,
        "prefix caching": cache.enable_prefix_caching,
        "type of keys and values": cache.cache_dtype,
        "latent attention": model.use_mla,
        "kernels of experts": made.kernel_config.moe_backend if model.is_moe else None,
        "ranks": f"{parallel.tensor_parallel_size} tensor x {parallel.pipeline_parallel_size} stages",
        "experts are divided": parallel.enable_expert_parallel,
        "executor": getattr(
            parallel.distributed_executor_backend, "__name__", parallel.distributed_executor_backend
        ),
        "sleep": model.sleep_mode_backend if model.enable_sleep_mode else None,
        "log-probabilities": model.logprobs_mode,
        "quantization": model.quantization,
        "weights come by": made.weight_transfer_config.backend,
    }


def lines_of(name: str) -> Iterator[str]:
    """What there is to say of a case; changes this process for good."""
    case = CASES[name]
    pretend_devices(case.device)
    with tempfile.TemporaryDirectory() as directory:
        arguments = arguments_of(case, Path(directory))
        yield f"{name}: configs/{case.recipe}.yaml, {case.device['name']}"
        module, _, executor = str(arguments.get("distributed_executor_backend", "")).rpartition(".")
        if module:
            arguments["distributed_executor_backend"] = getattr(
                __import__(module, fromlist=[executor]), executor
            )
        for key, value in configuration_of(dict(arguments)).items():
            yield f"  {key:25} {value}"
        shown = {
            key: value
            for key, value in arguments.items()
            if key not in ("model", "tokenizer", "distributed_executor_backend")
        }
        yield "  arguments"
        yield from (f"    {key} = {json.dumps(value)}" for key, value in shown.items())


def configured(name: str) -> str:
    """What a process of its own says of a case."""
    variables = {"MEGARL_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    # it imports kernels, which the build for CPUs has of its own alone
    [architecture] = published(CASES[name].published)["architectures"]
    subprocess.run([sys.executable, "-c", LOOK, architecture], capture_output=True, check=True, timeout=300)
    command = [sys.executable, "-m", "tests.system.gpu_engines", name]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**env.snapshot(), **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if done.returncode:
        raise RuntimeError(f"{name}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    if sys.argv[1:]:
        print("\n".join(lines_of(sys.argv[1])))
    else:
        print("\n".join(map(configured, CASES)), end="")
