"""vLLM beside the policy on one device: its start, what it leaves of the device while it sleeps, refits by
IPC, and whose answers it gives.

Skipped where there is no CUDA device or no vLLM; ``MEGARL_GPU_TESTS_ON=cpu`` runs the bodies with vLLM's
build for CPUs. No GPU has run them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.config.memory_run import ENGINE_REST
from tests.dist.batches import make_batch
from tests.gpu import engine_jobs, jobs
from tests.gpu.conftest import DEVICE, ON_GPU, DeviceProcess, needs_device
from tests.models import policy_config

pytestmark = [
    needs_device,
    pytest.mark.gpu_vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
ROWS, PROMPT, NEW = 20, 16, 32
SESSION = 7
BATCH = make_batch(rows=8, length=PROMPT + NEW, seed=1)


@pytest.fixture
def engine() -> Iterator[DeviceProcess]:
    """A second process on the same device."""
    process = DeviceProcess(DEVICE, start=engine_jobs.start)
    yield process
    process.close()


def prompts(seed: int) -> dict[str, Tensor]:
    ids = torch.randint(3, 90, (ROWS, PROMPT), generator=torch.Generator().manual_seed(0))
    return {
        "input_ids": ids,
        "input_lengths": torch.full((ROWS,), PROMPT),
        "sampling_seeds": torch.arange(ROWS) + 1000 * seed,
    }


def refit(policy: DeviceProcess, engine: DeviceProcess, ticket: int) -> None:
    """As a step of a run does it: parameters alone on the device, weights over, cache behind them."""
    policy.run(jobs.kept_call, "offload_before_refit")
    engine.run(engine_jobs.wake, ["weights"])
    giving, taking = (
        policy.submit(jobs.kept_call, "hand_over_weights", SESSION, ticket),
        engine.submit(engine_jobs.take_weights, ticket),
    )
    engine.result(taking)
    policy.result(giving)
    policy.run(jobs.kept_call, "offload_after_refit")
    engine.run(engine_jobs.wake, ["kv_cache"])


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_an_engine_answers_with_the_weights_of_each_refit(
    cuda: DeviceProcess, engine: DeviceProcess, wide_models: dict[str, Path], family: str
) -> None:
    """Three versions, far from each other, by the same CUDA graphs: log-probabilities are the policy's, and
    stale ones would show."""
    description = cuda.run(
        jobs.begin_refits, policy_config(wide_models[family], precision="bfloat16", max_length=PROMPT + NEW)
    )
    cuda.run(jobs.kept_call, "offload_after_refit")
    free = cuda.run(jobs.free_bytes)
    config = engine_jobs.engine_config(wide_models[family], PROMPT, NEW, ROWS, eager=not ON_GPU)
    facts = engine.run(engine_jobs.begin_engine, config)
    assert facts["second runner"] is facts["offloads graphs"] is ON_GPU
    assert not ON_GPU or facts["sizes"] == [1, 2, 4, 8, 16, ROWS]
    engine.run(engine_jobs.sleep)
    assert cuda.run(jobs.free_bytes) >= free - ENGINE_REST, (
        "an engine that sleeps keeps more than the memory plan says"
    )
    cuda.run(jobs.kept_call, "prepare_for_lp_inference")
    engine.run(engine_jobs.connect, description, cuda.run(jobs.kept_call, "mailbox"), SESSION)
    for version in range(3):
        refit(cuda, engine, 1 + version)
        answers, again, others = (engine.run(engine_jobs.generate, prompts(seed)) for seed in (1, 1, 2))
        assert torch.equal(answers["output_ids"], again["output_ids"])
        assert not torch.equal(answers["output_ids"], others["output_ids"])
        engine.run(engine_jobs.sleep)
        own = scores(cuda, answers)
        cuda.run(jobs.kept_call, "prepare_for_training")
        cuda.run(jobs.kept_step, BATCH)
        cuda.run(jobs.kept_call, "_add_noise_to_weights")
        gap, change = (distance(answers["logprobs"], own), distance(scores(cuda, answers), own))
        assert gap < 0.1 * change, f"{gap:.1e} from the policy; the next version is {change:.1e} from it"
    engine.run(engine_jobs.end_engine)
    cuda.run(jobs.end_refits)


def scores(policy: DeviceProcess, answers: dict[str, Any]) -> Tensor:
    """Log-probabilities [B, S] that the policy gives the responses."""
    batch = {"input_ids": answers["output_ids"], "input_lengths": answers["unpadded_sequence_lengths"]}
    return policy.run(jobs.kept_logprobs, batch)


def distance(ours: Tensor, theirs: Tensor) -> float:
    """Mean absolute difference over the responses."""
    return float((ours - theirs)[:, PROMPT:].abs().mean())
