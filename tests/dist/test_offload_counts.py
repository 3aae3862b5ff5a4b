"""Bytes that a GRPO step moves to and from the host, counted on each backend: none, unless an engine or a key
asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megarl.parity.pool import WorkerPool
from tests.dist.dtensor_jobs import dtensor_config
from tests.dist.fsdp1_jobs import fsdp1_config
from tests.dist.memory_jobs import move_and_train, step_and_count, swap_and_count
from tests.models import policy_config
from tests.tiers import sampled

MAKE = {"megatron": policy_config, "dtensor": dtensor_config, "fsdp1": fsdp1_config}
# two float32 moments there and back; Megatron also the copies that it has of half-precision weights
STATE = {"megatron": 2 * 12, "dtensor": 2 * 8, "fsdp1": 2 * 8}
THERE_AND_BACK = [
    ("gradients", "host"),
    ("optimizer", "host"),
    ("gradients", "device"),
    ("optimizer", "device"),
]
WITH_AN_ENGINE = [
    *THERE_AND_BACK[:2],
    ("parameters", "host"),
    ("parameters", "device"),
    *THERE_AND_BACK[2:],
]


@sampled(1)
@pytest.mark.parametrize("backend", MAKE)
def test_the_optimizer_leaves_for_an_engine_or_when_asked(
    pool: WorkerPool, tiny_models: dict[str, Path], backend: str
) -> None:
    config = MAKE[backend](tiny_models["qwen3"], precision="bfloat16")
    assert pool.run(1, step_and_count, config, False) == [{"bytes a parameter": 0, "moves": []}]
    asked = {**config, "offload_optimizer_for_logprob": True}
    assert pool.run(1, step_and_count, asked, False) == [
        {"bytes a parameter": STATE[backend], "moves": THERE_AND_BACK}
    ]
    assert pool.run(1, step_and_count, config, True) == [
        {"bytes a parameter": STATE[backend], "moves": WITH_AN_ENGINE}
    ]


@sampled(1)
@pytest.mark.parametrize("backend", MAKE)
def test_host_copies_are_kept_and_change_nothing(
    pool: WorkerPool, tiny_models: dict[str, Path], backend: str
) -> None:
    config = MAKE[backend](tiny_models["qwen3"], precision="bfloat16")
    assert pool.run(2, move_and_train, config) == [[], []]


@sampled(1)
@pytest.mark.parametrize("backend", MAKE)
def test_the_reference_policy_needs_memory_once(
    pool: WorkerPool, tiny_models: dict[str, Path], backend: str
) -> None:
    config = MAKE[backend](tiny_models["qwen3"], precision="bfloat16")
    assert (
        pool.run(2, swap_and_count, config, False)
        == [{"copied": [1, 2], "same memory": True, "same weights": True}] * 2
    )
    assert (
        pool.run(2, swap_and_count, config, True)
        == [{"copied": [0, 0], "same memory": True, "same weights": True}] * 2
    )
