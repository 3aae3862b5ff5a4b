"""Environment variables of a backend's section are those of its workers, and of no other backend's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.distributed.virtual_cluster import RayVirtualCluster
from megarl.models.policy.lm_policy import Policy
from tests.models import make_tiny
from tests.tiers import slow

# get_gpu_info reports variables whose names begin with CUDA
NAME = "CUDA_OF_THE_SECTION"
ADAMW = {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-3}}
SECTIONS: dict[str, dict[str, Any]] = {
    "megatron": {
        "megatron_cfg": {"enabled": True, "env_vars": {NAME: "megatron's"}, "optimizer": {"lr": 1e-3}},
        "dtensor_cfg": {"enabled": False, "env_vars": {NAME: "dtensor's"}},
    },
    "dtensor": {
        "megatron_cfg": {"enabled": False, "env_vars": {NAME: "megatron's"}},
        "dtensor_cfg": {"enabled": True, "env_vars": {NAME: "dtensor's"}},
        "optimizer": ADAMW,
    },
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("environment") / "qwen2", "qwen2", tied=True, layers=1)


@slow
@pytest.mark.parametrize("backend", SECTIONS)
def test_workers_have_the_environment_of_their_section(local_ray: int, model: Path, backend: str) -> None:
    config: Any = {
        "model_name": str(model),
        "tokenizer": {"name": str(model)},
        "train_global_batch_size": 2,
        "train_micro_batch_size": 1,
        "precision": "float32",
        "max_total_sequence_length": 32,
        **SECTIONS[backend],
    }
    cluster = RayVirtualCluster([1], use_gpus=False, name=f"environment-{backend}")
    policy = Policy(cluster, config, None, init_optimizer=False, init_reference_model=False)  # type: ignore[arg-type]
    try:
        future = policy.worker_group.run_all_workers_single_data("get_gpu_info")
        assert [info["env_vars"][NAME] for info in policy.worker_group.get_all_worker_results(future)] == [
            f"{backend}'s"
        ]
    finally:
        policy.shutdown()
        cluster.shutdown()
