"""A worker of DTensor and of FSDP1 alone on a CUDA device: the same numbers as transformers, offload and
back, generation.

Skipped where there is no CUDA device; ``MEGARL_GPU_TESTS_ON=cpu`` runs the bodies on a CPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.algorithms.loss_functions import NLLLoss
from tests.dist import reference
from tests.dist.batches import make_batch
from tests.dist.dtensor_jobs import dtensor_config
from tests.dist.fsdp1_jobs import fsdp1_config
from tests.gpu import jobs
from tests.gpu.conftest import ON_GPU, DeviceProcess, needs_device
from tests.models import policy_config

pytestmark = [needs_device, pytest.mark.gpu_worker, pytest.mark.parametrize("backend", ["dtensor", "fsdp1"])]
CONFIGS = {"dtensor": dtensor_config, "fsdp1": fsdp1_config}
BATCHES = [make_batch(rows=8, length=12, seed=seed) for seed in (1, 2, 3)]


def config_of(backend: str, model: Path, **changes: Any) -> dict[str, Any]:
    return CONFIGS[backend](model, **changes)


def test_three_adam_steps_equal_transformers(
    cuda: DeviceProcess, tiny_models: dict[str, Path], backend: str
) -> None:
    trainer = reference.ReferenceTrainer(
        reference.load(tiny_models["qwen2"]), policy_config(tiny_models["qwen2"], clip=0.5)
    )
    expected = [trainer.step(batch, NLLLoss()) for batch in BATCHES]
    result = cuda.run(jobs.train_on, config_of(backend, tiny_models["qwen2"], clip=0.5), BATCHES)
    torch.testing.assert_close(result["measured"], expected, atol=1e-5, rtol=1e-4)
    weights = dict(trainer.model.state_dict())
    for name, tensor in result["weights"].items():
        assert (tensor - weights[name]).norm() < 1e-4 * weights[name].norm(), name


def test_packed_bfloat16_training_follows_float32(
    cuda: DeviceProcess, tiny_models: dict[str, Path], backend: str
) -> None:
    exact = cuda.run(jobs.train_on, config_of(backend, tiny_models["qwen3"]), BATCHES)["measured"]
    config = config_of(backend, tiny_models["qwen3"], precision="bfloat16", batching="packed")
    rounded = cuda.run(jobs.train_on, config, BATCHES)["measured"]
    assert rounded != exact
    torch.testing.assert_close([loss for loss, _ in rounded], [loss for loss, _ in exact], atol=0, rtol=3e-2)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_offload_frees_memory_and_changes_nothing(
    cuda: DeviceProcess, tiny_models: dict[str, Path], backend: str, precision: str
) -> None:
    config = config_of(backend, tiny_models["llama"], precision=precision)
    undisturbed = cuda.run(jobs.train_on, config, BATCHES)
    moved = cuda.run(jobs.train_on, config, BATCHES, True)
    torch.testing.assert_close(moved["measured"], undisturbed["measured"], atol=1e-6, rtol=1e-5)
    for name, tensor in undisturbed["weights"].items():
        torch.testing.assert_close(
            moved["weights"][name], tensor, atol=1e-6, rtol=1e-2 if tensor.dtype is torch.bfloat16 else 1e-5
        )
    if ON_GPU:
        weights = sum(tensor.numel() * 4 for tensor in undisturbed["weights"].values())
        # parameters and two moments, in float32; a tenth may stay for rounding and alignment
        freed = [there - gone for there, gone in zip(moved["in_training"], moved["offloaded"], strict=True)]
        assert min(freed) > 0.9 * 3 * weights


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_greedy_answers_equal_transformers(
    cuda: DeviceProcess, tiny_models: dict[str, Path], backend: str, family: str
) -> None:
    batch = {
        key: value
        for key, value in make_batch(rows=6, length=9, seed=5).items()
        if key in ("input_ids", "input_lengths")
    }
    expected = cuda.run(jobs.transformers_greedy, tiny_models[family], batch, 8, 2)
    output = cuda.run(jobs.greedy, config_of(backend, tiny_models[family]), batch, backend)
    lengths = output["unpadded_sequence_lengths"].tolist()
    assert [
        ids[:length].tolist() for ids, length in zip(output["output_ids"], lengths, strict=True)
    ] == expected
    answered = output["logprobs"] != 0
    assert answered.sum() == output["generation_lengths"].sum()
    torch.testing.assert_close(
        output["logprobs"][answered], output["recomputed"][answered], atol=1e-4, rtol=0
    )
