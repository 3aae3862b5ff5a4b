"""Weights that leave a device's process: to another process by IPC, and to the host and back.

Skipped where there is no CUDA device; ``MEGARL_GPU_TESTS_ON=cpu`` runs the bodies on a CPU, where weights lie
in shared memory of the host and no speed is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.dist.batches import make_batch
from tests.gpu import jobs
from tests.gpu.conftest import DEVICE, ON_GPU, DeviceProcess, needs_device
from tests.models import make_tiny, policy_config

pytestmark = [needs_device, pytest.mark.gpu_handover]
BATCHES = [make_batch(rows=8, length=64, seed=seed) for seed in (1, 2)]
SLOWEST = 20e9
"""Bytes a second between host and device: page-locked memory over PCIe 4 gives 25, over PCIe 5 50; pageable
memory 3 to 10."""
# some 215 million parameters, 3 GB with float32 copies and moments, so that a tenth of a second is measured
LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32_000,
}
REPEATS = 4
# GiB, of which the weights of the small models fill several
SMALL_BUFFER = {"float32": 0.006, "bfloat16": 0.003}


@pytest.fixture
def engine() -> Iterator[DeviceProcess]:
    """A second process on the same device."""
    process = DeviceProcess(DEVICE)
    yield process
    process.close()


def refit(policy: DeviceProcess, engine: DeviceProcess) -> dict[str, Tensor]:
    received: dict[str, Tensor] = {}
    groups = policy.run(jobs.open_refit)
    assert len(groups) > 2, "one group shows nothing of a buffer that is written anew"
    for keys in groups:
        received |= engine.run(jobs.receive_group, policy.run(jobs.send_group, keys))
    return received


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_another_process_reads_every_version_of_the_weights(
    cuda: DeviceProcess, engine: DeviceProcess, wide_models: dict[str, Path], precision: str
) -> None:
    """Three refits over one buffer, with a training step between them; no version is mistaken for another."""
    config = {
        **policy_config(wide_models["qwen3"], precision=precision, max_length=64),
        "refit_buffer_size_gb": SMALL_BUFFER[precision],
    }
    description = cuda.run(jobs.begin_refits, config)
    identity = engine.run(jobs.begin_receiving, description)
    assert identity.startswith("GPU-") is ON_GPU
    expected, seen = cuda.run(jobs.kept_weights), []
    for batch in (*BATCHES, None):
        received = refit(cuda, engine)
        assert received.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(received[name], expected[name])] == []
        seen.append(engine.run(jobs.received_version))
        if batch is not None:
            before, expected = expected, cuda.run(jobs.kept_step, batch)
            assert any(not torch.equal(before[name], expected[name]) for name in expected)
    assert None not in seen and len(set(seen)) == 3
    cuda.run(jobs.end_refits)
    engine.run(jobs.end_refits)


def test_an_engine_that_ends_leaves_the_policy_its_device(
    cuda: DeviceProcess, wide_models: dict[str, Path]
) -> None:
    """A reader that is killed in the middle of a refit: the policy trains on, and hands over to the next
    one."""
    config = {
        **policy_config(wide_models["qwen2"], precision="bfloat16", max_length=64),
        "refit_buffer_size_gb": SMALL_BUFFER["bfloat16"],
    }
    description = cuda.run(jobs.begin_refits, config)
    first = DeviceProcess(DEVICE)
    first.run(jobs.begin_receiving, description)
    first.run(jobs.receive_group, cuda.run(jobs.send_group, cuda.run(jobs.open_refit)[0]))
    first.close()
    expected = cuda.run(jobs.kept_step, BATCHES[0])
    second = DeviceProcess(DEVICE)
    second.run(jobs.begin_receiving, description)
    received = refit(cuda, second)
    second.close()
    cuda.run(jobs.end_refits)
    assert [name for name in expected if not torch.equal(received[name], expected[name])] == []


def test_everything_leaves_the_device_and_comes_back_at_the_speed_of_its_link(
    cuda: DeviceProcess, tmp_path: Path
) -> None:
    """The first time page-locked memory is taken, which costs what it costs; from then on only the link
    counts."""
    layers, sizes = (12, LARGE) if ON_GPU else (2, {"max_position_embeddings": 64})
    model = make_tiny(tmp_path / "model", "qwen2", tied=True, layers=layers, **sizes)
    config: dict[str, Any] = policy_config(model, precision="bfloat16", max_length=64)
    times = cuda.run(jobs.offload_times, config, BATCHES[0], REPEATS)
    assert len(times) == REPEATS and all(time["out"] > 0 and time["back"] > 0 for time in times)
    if not ON_GPU:
        return
    assert min(time["bytes"] for time in times) > 2e9
    out, back = (max(time["bytes"] / time[way] for time in times[1:]) for way in ("out", "back"))
    assert out > SLOWEST and back > SLOWEST, (
        f"{out / 1e9:.1f} GB/s to the host, {back / 1e9:.1f} GB/s back; {times}"
    )
