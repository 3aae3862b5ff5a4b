"""FSDP1 in every number of ranks and kind of micro-batch against one process of plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.algorithms.loss_functions import ClippedPGLossFn, NLLLoss
from megarl.parity.pool import WorkerPool
from tests.dist import fsdp1_jobs, jobs, reference
from tests.dist.batches import make_batch
from tests.dist.checks import check_trained, run_reference
from tests.dist.fsdp1_jobs import BATCHING, fsdp1_config
from tests.dist.test_megatron_parity import PG_LOSS
from tests.models import policy_config
from tests.tiers import sampled

FAMILIES = ["llama", "qwen2-tied", "qwen3"]
WORLDS = {"dp1": 1, "dp2": 2, "dp3": 3}


@sampled(5)
@pytest.mark.parametrize("batching", BATCHING)
@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_transformers(pool: WorkerPool, tiny_models: dict[str, Path], family: str, world: int, batching: str) -> None:
    batch = make_batch(rows=10, length=13, seed=3)
    expected = reference.logprobs_of(tiny_models[family], batch, 0.7)
    for result in pool.run(world, jobs.logprobs, fsdp1_config(tiny_models[family], batching, temperature=0.7), batch):
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)
        assert result[:, 0].eq(0).all()


@sampled(5)
@pytest.mark.parametrize("batching", BATCHING)
@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_three_adam_steps_equal_transformers(
    pool: WorkerPool, tiny_models: dict[str, Path], family: str, world: int, batching: str
) -> None:
    check_training(pool, world, tiny_models[family], ClippedPGLossFn(PG_LOSS), batching, mbs=2, clip=0.5)


@sampled(2)
@pytest.mark.parametrize("world", [1, 2], ids=["dp1", "dp2"])
@pytest.mark.parametrize(
    "changes",
    [{"recompute": True}, {"clip": None}, {"multiple": 5}, {"mbs": 1}, {"mbs": 6}],
    ids=lambda changes: "-".join(f"{key}-{value}" for key, value in changes.items()),
)
def test_options_change_nothing(pool: WorkerPool, tiny_models: dict[str, Path], changes: dict[str, Any], world: int) -> None:
    check_training(pool, world, tiny_models["qwen2-tied"], NLLLoss(), "fixed", **changes)


def check_training(pool: WorkerPool, world: int, model: Path, loss_fn: Any, batching: str, **changes: Any) -> None:
    batches = [make_batch(rows=12, length=12, seed=seed) for seed in (1, 2, 3)]
    described = {**changes, "clip": changes.get("clip", 1.0) or 0.0}
    expected = run_reference(model, policy_config(model, gbs=12, **described), batches, loss_fn)
    check_trained(pool.run(world, jobs.train, fsdp1_config(model, batching, gbs=12, **changes), batches, loss_fn), *expected)


def test_one_rank_computes_in_bfloat16_as_many_do(pool: WorkerPool, tiny_models: dict[str, Path]) -> None:
    """One rank has no FSDP: its own half precision has to round where FSDP's does. The same micro-batches, so only float32 sums differ."""
    batch = make_batch(rows=12, length=12, seed=1)
    config = fsdp1_config(tiny_models["qwen2-tied"], precision="bfloat16", gbs=12)
    alone, together = (pool.run(world, jobs.train, config, [batch], NLLLoss())[0] for world in (1, 3))
    torch.testing.assert_close(alone["losses"], together["losses"], atol=0, rtol=1e-6)
    torch.testing.assert_close(alone["norms"], together["norms"], atol=0, rtol=1e-5)
    assert all(tensor.dtype == torch.bfloat16 for tensor in alone["weights"].values())
    exact = pool.run(2, jobs.train, {**config, "precision": "float32"}, [batch], NLLLoss())[0]
    assert exact["losses"] != alone["losses"]
    torch.testing.assert_close(exact["losses"], alone["losses"], atol=0.02, rtol=0.02)


def test_the_model_is_never_whole_on_a_rank_while_it_is_built(pool: WorkerPool, tiny_models: dict[str, Path]) -> None:
    for result in pool.run(3, fsdp1_jobs.peak_of_build, fsdp1_config(tiny_models["llama"])):
        assert result["peak"] < result["total"] * 2 / 3
