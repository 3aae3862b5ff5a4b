"""A program: either of vLLM's model runners on a CPU, refitted twice; the newer one with its kernels in
Triton's interpreter.

vLLM's build for CPUs has the runner, and takes Triton for its kernels only with a backend for CPUs, of which
there is no package. The interpreter needs no backend, so the name of one is enough.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.device import DeviceRuntime
from megarl.weight_sync.manifest import Manifest
from megarl.weight_sync.session import SlicesHere, WeightSender
from tests.system.vllm_engines import NEW, PROMPTS, dense_model, greedy_answers, rows_of

TEMPERATURE = 0.7


def pretend_a_backend() -> None:
    """Before vLLM asks which backends Triton has."""
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)


def make_engine(model: Path) -> Any:
    """In this process, with weights of its own that no refit has."""
    from megarl.models.generation.vllm.options import completed
    from megarl.models.generation.vllm.worker import VllmGenerationWorker

    settings = {
        "load_format": "dummy",
        "kv_cache_gb": 0.02,
        "max_model_len": 64,
        "precision": "float32",
        "gpu_memory_utilization": 0.2,
    }
    generation = {
        "model_name": str(model),
        "max_new_tokens": NEW,
        "temperature": TEMPERATURE,
        "top_k": None,
        "top_p": 1.0,
    }
    generation |= {
        "stop_token_ids": [],
        "stop_strings": None,
        "pad_token_id": 0,
        "colocated": {"enabled": True},
    }
    return VllmGenerationWorker(completed({**generation, "vllm_cfg": {**settings, "enforce_eager": True}}))


def refit(engine: Any, weights: dict[str, Tensor], version: int) -> None:
    """Group by group, out of a buffer of this process."""
    manifest = Manifest.of(iter(weights.items()))
    sender = WeightSender(
        lambda: iter(weights.items()),
        DeviceRuntime(torch.device("cpu"), "gloo"),
        slices=SlicesHere(manifest, 0, True),
    )
    engine.connect(
        [
            [tensor.name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
            for tensor in manifest.tensors
        ],
        None,
    )
    for group in manifest.groups(max(sender.begin(version) // 4, manifest.largest[1])):
        found = engine.update_from_handles(sender.send_part(group.first, group.count))
    assert found == version
    sender.close()


def scores(directory: Path, output: Any) -> Tensor:
    """[B, S] log-probabilities of the answers, as transformers has them."""
    model, found = (
        AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32),
        torch.zeros(output["logprobs"].shape),
    )
    for row, (ids, prompt) in enumerate(zip(rows_of(output), PROMPTS["input_lengths"].tolist(), strict=True)):
        with torch.no_grad():
            logprobs = (model(torch.tensor([ids])).logits[0] / TEMPERATURE).log_softmax(-1)
        for place in range(prompt, len(ids)):
            found[row, place] = logprobs[place - 1, ids[place]]
    return found


def main(directory: Path, *, newer: bool) -> None:
    if newer:
        pretend_a_backend()
    model = dense_model(
        directory / "model", intermediate_size=112, num_hidden_layers=2, initializer_range=0.2
    )
    engine = make_engine(model)
    seeded: BatchedDataDict[Any] = BatchedDataDict({**PROMPTS, "sampling_seeds": torch.tensor([5, 6, 7])})
    found: dict[str, Any] = {
        "newer": bool(engine._engine._llm.llm_engine.vllm_config.use_v2_model_runner),
        "greedy": [],
        "error": [],
    }
    for version in range(2):
        weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        with torch.no_grad():
            for parameter in weights.parameters():
                parameter.add_(
                    0.1
                    * version
                    * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(version))
                )
        weights.save_pretrained(directory / str(version))
        sent = {name: tensor.detach() for name, tensor in weights.named_parameters()}
        refit(engine, sent, version)
        found["greedy"].append(rows_of(engine.generate(PROMPTS, greedy=True, version=version)))
        assert found["greedy"][-1] == greedy_answers(directory / str(version)), found["greedy"]
        drawn, again = (engine.generate(seeded, greedy=False, version=version) for _ in range(2))
        assert rows_of(drawn) == rows_of(again)
        found["error"].append(
            float((scores(directory / str(version), drawn) - drawn["logprobs"]).abs().max())
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), newer=sys.argv[2] == "newer")
