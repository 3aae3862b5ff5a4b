"""Optimizers of torch on divided parameters: those that step, in every implementation, as transformers does;
the others are refused when the worker is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.parity.pool import WorkerPool
from tests.dist import jobs
from tests.dist.dtensor_jobs import dtensor_config
from tests.dist.layouts import LAYOUTS
from tests.dist.training import check_training
from tests.tiers import sampled


@sampled(1)
@pytest.mark.parametrize("layout", ["tp2-sp", "tp2-dp2"])
@pytest.mark.parametrize("implementation", [{"foreach": True}, {}, {"fused": True}], ids=str)
def test_adamw_steps_as_transformers(
    pool: WorkerPool, tiny_models: dict[str, Path], layout: str, implementation: dict[str, Any]
) -> None:
    world, changes = LAYOUTS["dtensor"][layout]
    adam = dict(dtensor_config(tiny_models["qwen3-tied"])["optimizer"]["kwargs"])
    del adam["foreach"], adam["fused"]
    optimizer = {
        "name": "torch.optim.AdamW",
        "kwargs": {**adam, **implementation},
        "weight_decay_on_vectors": False,
    }
    check_training(
        pool,
        "dtensor",
        world,
        tiny_models["qwen3-tied"],
        mbs=2,
        clip=0.5,
        **changes,
        torch_optimizer=optimizer,
    )


@sampled(1)
@pytest.mark.parametrize(
    ("name", "kwargs"),
    [("SGD", {"fused": True}), ("Adafactor", {}), ("ASGD", {"foreach": True}), ("Rprop", {"foreach": False})],
    ids=str,
)
def test_what_cannot_step_is_refused(
    pool: WorkerPool, tiny_models: dict[str, Path], name: str, kwargs: dict[str, Any]
) -> None:
    config = dtensor_config(
        tiny_models["qwen2"],
        tp=2,
        torch_optimizer={"name": f"torch.optim.{name}", "kwargs": {"lr": 0.01, **kwargs}},
    )
    for message in pool.run(2, jobs.build_error, config):
        assert (
            message.startswith("ConfigError")
            and "policy.optimizer" in message
            and "its step fails on parameters" in message
        ), message


@sampled(1)
@pytest.mark.parametrize(
    ("name", "kwargs"), [("SGD", {"momentum": 0.9, "foreach": True}), ("RMSprop", {}), ("ASGD", {})], ids=str
)
def test_what_can_step_is_not(
    pool: WorkerPool, tiny_models: dict[str, Path], name: str, kwargs: dict[str, Any]
) -> None:
    config = dtensor_config(
        tiny_models["qwen2"],
        tp=2,
        torch_optimizer={"name": f"torch.optim.{name}", "kwargs": {"lr": 0.01, **kwargs}},
    )
    assert pool.run(2, jobs.build_error, config) == ["no error"] * 2
