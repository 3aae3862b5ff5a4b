"""Two ranks over NCCL: sums, tensor and data parallel training as on one device, weights to an engine on the
other device.

They have two CUDA devices, or share one: NCCL 2.30 and newer lets them with ``NCCL_MULTI_RANK_GPU_ENABLE=1``.
Two processes of a device take turns on it, so that this shows correct numbers and no speed. Skipped where
there is neither; when this was written no second device was at hand. The bodies were run on a CPU over gloo
(``MEGARL_GPU_TESTS_ON=cpu``).
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.algorithms.loss_functions import NLLLoss
from tests.dist import jobs as rank_jobs
from tests.dist.batches import make_batch
from tests.gpu import jobs
from tests.gpu.conftest import DEVICE, DevicePair, DeviceProcess, needs_two_ranks
from tests.models import policy_config

pytestmark = [needs_two_ranks, pytest.mark.gpu_pair]
BATCHES = [make_batch(rows=8, length=64, seed=seed) for seed in (1, 2, 3)]


@pytest.fixture(scope="module")
def pair() -> Iterator[DevicePair]:
    made = DevicePair(DEVICE)
    yield made
    made.close()


def test_two_devices_add_up_numbers(pair: DevicePair) -> None:
    assert all(seconds > 0 for seconds in pair.run(jobs.sum_over_ranks, 1 << 24))


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2},
        {"tp": 2, "sp": True, "multiple": 2},
        {"pp": 2, "first": 2},
        {"cp": 2, "multiple": 4},
        {"overlap": True},
        {"distributed_optimizer": False},
    ],
    ids=["tensor", "sequence", "pipeline", "context", "data-overlapped", "data-plain"],
)
def test_a_layout_of_two_devices_trains_as_one_device_does(
    pair: DevicePair, cuda: DeviceProcess, wide_models: dict[str, Path], layout: dict[str, Any]
) -> None:
    alone = cuda.run(rank_jobs.train, policy_config(wide_models["qwen3"]), BATCHES, NLLLoss())
    for result in pair.run(
        rank_jobs.train, policy_config(wide_models["qwen3"], **layout), BATCHES, NLLLoss()
    ):
        torch.testing.assert_close(
            torch.tensor(result["losses"]), torch.tensor(alone["losses"]), atol=1e-5, rtol=1e-3
        )
        torch.testing.assert_close(
            torch.tensor(result["norms"]), torch.tensor(alone["norms"]), atol=1e-5, rtol=1e-3
        )


def test_experts_on_two_devices(pair: DevicePair, cuda: DeviceProcess, wide_models: dict[str, Path]) -> None:
    alone = cuda.run(rank_jobs.train, policy_config(wide_models["qwen3_moe"]), BATCHES, NLLLoss())
    for result in pair.run(
        rank_jobs.train, policy_config(wide_models["qwen3_moe"], ep=2), BATCHES, NLLLoss()
    ):
        torch.testing.assert_close(
            torch.tensor(result["losses"]), torch.tensor(alone["losses"]), atol=1e-5, rtol=1e-3
        )


def test_weights_reach_an_engine_on_the_other_device(
    cuda: DeviceProcess, wide_models: dict[str, Path]
) -> None:
    """Two refits over one group, as with engines apart."""
    engine = DeviceProcess(DEVICE, local_rank=1)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    description = cuda.run(jobs.begin_refits, policy_config(wide_models["qwen3"], precision="bfloat16"))
    joining, leading = (
        engine.submit(jobs.join_transfer, port, description),
        cuda.submit(jobs.lead_transfer, port),
    )
    cuda.result(leading)
    engine.result(joining)
    expected = cuda.run(jobs.kept_weights)
    for batch in BATCHES[:2]:
        listening, sending = engine.submit(jobs.listen), cuda.submit(jobs.broadcast)
        received = engine.result(listening)
        cuda.result(sending)
        assert [name for name in expected if not torch.equal(received[name], expected[name])] == []
        expected = cuda.run(jobs.kept_step, batch)
    engine.close()
    cuda.run(jobs.end_refits)
