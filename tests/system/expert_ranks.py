"""A rank of an engine that has vLLM's model and nothing else of vLLM: what refits leave in it, and what
vLLM's own loader would.

``python -m tests.system.expert_ranks RANK RANKS tensor|experts|stages DIRECTORY``: of two checkpoints below
the directory.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.reload import layerwise

from converters.checkpoint.source import open_source
from megarl.models.generation.vllm.weight_engines import Connection, SharedMemoryEngine
from megarl.weight_sync.manifest import Manifest
from megarl.weight_sync.session import WeightReceiver
from megarl.weight_sync.slices import Slice

# weights that come at once, so that a layer's experts come in several groups
GROUP = 7


def main(rank: int, ranks: int, divided: str, directory: Path) -> None:
    """Fill a model with two checkpoints in turn, by whole weights and by slices, and write what it has after
    each."""
    # as vLLM's runner for CPUs has it
    torch.accelerator.empty_cache = torch.accelerator.synchronize = lambda *_: None  # type: ignore[assignment]
    config = configured(directory / "0", "dummy", ranks, divided)
    # as its workers have it: a name of the ranks' shared memory, of which vLLM's kernels for this CPU may
    # make use
    os.environ["VLLM_DIST_IDENT"] = f"expert-ranks-{os.getppid()}"
    with set_current_vllm_config(config):
        init_distributed_environment(ranks, rank, f"file://{directory / 'store'}", rank, "gloo")
        initialize_model_parallel(*((1, ranks) if divided == "stages" else (ranks, 1)))
        model = get_model(vllm_config=config)
    weights = []
    for step in range(2):
        source = open_source(directory / str(step))
        weights.append({name: source.read(name) for name in source.names()})
    engine: Any = SharedMemoryEngine.__new__(SharedMemoryEngine)
    engine.model, engine.model_config, engine.device = model, config.model_config, torch.device("cpu")
    engine.parallel_config = SimpleNamespace(world_size=ranks)
    manifest = Manifest.of(iter(weights[0].items()))
    engine._receiver = WeightReceiver(manifest, engine.device)
    engine.learn(manifest, Connection([]))
    slices = {name: Slice(*where) for name, where in engine.slices_read()[1].items()}
    refits = []
    for step, names in ((0, []), (1, list(slices)), (0, list(slices))):
        engine.take_slices(names)
        sent = [
            (name, slices[name].of(tensor).contiguous() if name in names else tensor)
            for name, tensor in weights[step].items()
        ]
        kept = 0
        with (
            set_current_vllm_config(config),
            mock.patch.object(layerwise, "get_numel_loaded", wraps=layerwise.get_numel_loaded) as calls,
        ):
            engine.start_weight_update()
            for first in range(0, len(sent), GROUP):
                engine.load(sent[first : first + GROUP])
                kept = max(kept, kept_bytes(engine))
            engine._receiver.version = step
            engine.finish_weight_update()
        refits.append({"step": step, "bits": bits(model), "calls": calls.call_count, "kept": kept})
    stacked = set(engine._stacks.names)
    others = [name for name in weights[0] if name not in stacked]
    engine.take_slices([])
    with (
        set_current_vllm_config(config),
        mock.patch.object(layerwise, "get_numel_loaded", wraps=layerwise.get_numel_loaded) as calls,
    ):
        engine.start_weight_update()
        engine.load([(name, weights[0][name]) for name in others])
        engine._abandon()
    loaded = []
    for step in range(2):
        config = configured(directory / str(step), "auto", ranks, divided)
        with set_current_vllm_config(config):
            loaded.append(bits(get_model(vllm_config=config)))
    reads = {name: where.plain() for name, where in slices.items()}
    found = {
        "reads": reads,
        "refits": refits,
        "stacked": len(stacked),
        "others": calls.call_count,
        "loaded": loaded,
    }
    (directory / f"{rank}.json").write_text(json.dumps(found))


def configured(model: Path, load_format: str, ranks: int, divided: str) -> Any:
    return EngineArgs(
        model=str(model),
        load_format=load_format,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=64,
        tensor_parallel_size=1 if divided == "stages" else ranks,
        pipeline_parallel_size=ranks if divided == "stages" else 1,
        enable_expert_parallel=divided == "experts",
        kv_cache_memory_bytes=2**24,
    ).create_engine_config()


def kept_bytes(engine: Any) -> int:
    """Bytes that wait until their layers are complete, in vLLM's reload and in stacks of experts."""
    waiting = [
        getattr(getattr(value, "_root", None), "part", value)
        for layer in engine.model.modules()
        for _, call in layerwise.get_layerwise_info(layer).loaded_weights
        for name, value in call.arguments.items()
        if isinstance(value, torch.Tensor) and name != "param"
    ]
    waiting += [stack.values for stack, _ in engine._stacks._places.values() if stack.values is not None]
    memory = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in waiting}
    return sum(memory.values())


def bits(model: torch.nn.Module) -> dict[str, str]:
    """A hash of each parameter and buffer."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {
        name: hashlib.sha256(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()
        for name, tensor in tensors
    }


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
