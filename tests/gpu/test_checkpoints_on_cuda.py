"""Checkpoints of a worker alone on a CUDA device whose tensors wait in memory: those that are written at
once.

Skipped where there is no CUDA device; ``MEGARL_GPU_TESTS_ON=cpu`` runs the bodies on a CPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.batches import make_batch
from tests.dist.dtensor_jobs import dtensor_config
from tests.dist.fsdp1_jobs import fsdp1_config
from tests.dist.save_jobs import PARTS, differences, files_of
from tests.gpu import jobs
from tests.gpu.conftest import DeviceProcess, needs_device
from tests.models import policy_config

pytestmark = [needs_device, pytest.mark.gpu_worker]
CONFIGS = {"megatron": policy_config, "dtensor": dtensor_config, "fsdp1": fsdp1_config}
BATCHES = [make_batch(rows=8, length=12, seed=seed) for seed in (1, 2)]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", CONFIGS)
def test_a_staged_checkpoint_is_the_one_that_is_written(
    cuda: DeviceProcess, tiny_models: dict[str, Path], tmp_path: Path, backend: str, precision: str
) -> None:
    config = CONFIGS[backend](tiny_models["qwen2"], precision=precision)
    cuda.run(jobs.save_staged, config, BATCHES, tmp_path)
    for part in PARTS:
        assert differences(tmp_path / "staged" / part, tmp_path / "written" / part) == []
    assert files_of(tmp_path / "staged") == files_of(tmp_path / "written")
