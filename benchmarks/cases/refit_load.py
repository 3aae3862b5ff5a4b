"""Host time of loading a mixture's weights into vLLM's model at a refit: all experts of a layer at once,
against one weight after another.

An engine's rank uses vLLM's own layer-wise reload, on a model of few layers and small weights, so that the
bytes hardly count. A GPU's host spends time on each weight in the same way. This needs vLLM's build for CPUs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from benchmarks.point import Metric, Point, sides
from benchmarks.timing import spent_in_turn

if TYPE_CHECKING:
    from megarl.weight_sync.plan import TensorInfo

LAYERS, EXPERTS = 3, (8, 128)
REPEATS, QUICK_REPEATS = 5, 2
# The engine gets this many weights at once.
GROUP = 1000


def measure(quick: bool) -> Iterator[Point]:
    """Yield one point for each number of experts per layer."""
    from transformers import Qwen3MoeConfig
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    from converters.families.read import read_architecture
    from converters.mapping.rules import hf_tensors
    from megarl.weight_sync.plan import TensorInfo

    # vLLM's runner for CPUs replaces these functions in the same way.
    torch.accelerator.empty_cache = torch.accelerator.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.set_num_threads(1)
    for experts in EXPERTS:
        model_config = Qwen3MoeConfig(
            vocab_size=512,
            hidden_size=128,
            intermediate_size=256,
            moe_intermediate_size=64,
            num_experts=experts,
            num_hidden_layers=LAYERS,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=64,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            architectures=["Qwen3MoeForCausalLM"],
        )
        tensors = [
            TensorInfo(part.name, part.shape, torch.bfloat16)
            for part in hf_tensors(read_architecture(model_config))
        ]
        with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
            model_config.save_pretrained(directory)
            # There are no weights on disk and no tokenizer, because the reload brings all weights.
            options = {
                "load_format": "dummy",
                "skip_tokenizer_init": True,
                "enforce_eager": True,
                "max_model_len": 64,
            }
            config = EngineArgs(
                model=directory, dtype="bfloat16", kv_cache_memory_bytes=2**24, **options
            ).create_engine_config()
            stack.enter_context(set_current_vllm_config(config))
            # Create vLLM's groups only once per process, for both sizes.
            if not torch.distributed.is_initialized():
                init_distributed_environment(1, 0, f"file://{Path(directory) / 'store'}", 0, "gloo")
                initialize_model_parallel(1)
            metrics = _metrics(
                get_model(vllm_config=config),
                config.model_config,
                tensors,
                QUICK_REPEATS if quick else REPEATS,
            )
        yield Point({"experts": experts, "layers": LAYERS, "weights": len(tensors)}, metrics)


def _metrics(model: Any, model_config: Any, tensors: Sequence[TensorInfo], repeats: int) -> dict[str, Metric]:
    from vllm.model_executor.model_loader.reload import layerwise

    from megarl.models.generation.vllm.expert_stacks import ExpertStacks

    generator = torch.Generator().manual_seed(0)
    weights = [(info.name, torch.randn(info.shape, generator=generator).to(info.dtype)) for info in tensors]
    together, single = ExpertStacks(model, tensors, {}), ExpertStacks(model, (), {})
    ways = {
        "together": partial(_reload, model, model_config, together, weights),
        "single": partial(_reload, model, model_config, single, weights),
    }
    calls, found = {}, {}
    for name, way in ways.items():
        # vLLM's reload calls this function once for every call of a loader.
        with mock.patch.object(layerwise, "get_numel_loaded", wraps=layerwise.get_numel_loaded) as loader:
            way()
        calls[name] = loader.call_count
        found[name] = {name: parameter.clone() for name, parameter in model.named_parameters()}
        # Clear the weights, so that the second way cannot pass with what the first has left.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    if any(not torch.equal(tensor, found["single"][name]) for name, tensor in found["together"].items()):
        raise RuntimeError("experts loaded together are others than those that were loaded one by one")
    spent = spent_in_turn(ways, repeats=repeats)
    return {
        **sides("load", spent["together"], "one weight after another", spent["single"]),
        "loads": Metric.of("calls of vLLM's loaders", [calls["together"]]),
        "loads_single": Metric.of("calls of vLLM's loaders, one weight after another", [calls["single"]]),
        "ms_single": Metric.of(
            "CPU ms a weight, one after another", [1000 * cpu / len(tensors) for cpu in spent["single"].cpu]
        ),
    }


def _reload(model: Any, model_config: Any, stacks: Any, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Load the weights as an engine's rank does in a refit on the policy's device."""
    from megarl.models.generation.vllm.weight_engines import SharedMemoryEngine

    # Do not call the constructor: the attributes below are all that loading uses.
    engine: Any = SharedMemoryEngine.__new__(SharedMemoryEngine)
    engine.model, engine.model_config, engine.device = model, model_config, torch.device("cpu")
    engine._stacks, engine._reads = stacks, {}
    engine._receiver = SimpleNamespace(version=0, manifest=SimpleNamespace(slices={}))
    engine.start_weight_update()
    for first in range(0, len(weights), GROUP):
        engine.load(list(weights[first : first + GROUP]))
    engine.finish_weight_update()
