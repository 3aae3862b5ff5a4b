"""Every backend in every layout and kind of micro-batch against one process of plain transformers:
log-probabilities, and losses, gradient norms and weights of three Adam steps. The cases are a table,
``tests/data/training.yaml``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.algorithms.loss_functions import NLLLoss
from megarl.parity.pool import WorkerPool
from tests.dist import jobs, reference
from tests.dist.batches import make_batch
from tests.dist.layouts import CONFIG, layout
from tests.dist.training import check_fusions, check_training
from tests.models import policy_config
from tests.tables import read_table
from tests.tiers import newest_megatron, sampled, slow

# layouts that together have every group and both pipeline schedules
NEWEST = ("tp2-pp2", "tp2-dp2", "cp2-tp2-sp", "cp2-pp2", "cp3-ring", "pp2-vpp2-tp2-sp", "cp2-dp2")
NAMES = ("backend", "model", "layout", "batching", "loss", "padded", "changes")


def cases(kind: str) -> Iterator[Any]:
    for row in read_table("training.yaml")[kind]:
        for model in row["models"].split():
            for name in row["layouts"].split():
                for batching in row.get("batchings", "fixed").split():
                    changes = row.get("changes", {})
                    values = (
                        row["backend"],
                        model,
                        name,
                        batching,
                        row.get("loss", ""),
                        row.get("padded", False),
                        changes,
                    )
                    words = [*values[:5], *(f"{key}={value}" for key, value in changes.items())]
                    yield pytest.param(
                        *values, id="-".join(filter(None, words)), marks=[slow] if "slow" in row else []
                    )


def placed(
    backend: str, name: str, padded: bool, batching: str, changes: dict[str, Any]
) -> tuple[int, dict[str, Any]]:
    """Ranks, and all changes of a configuration."""
    world, sizes = layout(name, torch=backend != "megatron", padded=padded)
    return world, {**sizes, "batching": batching, **changes}


@newest_megatron(backend=["megatron"], layout=["tp2-pp2"])
@sampled(18)
@pytest.mark.parametrize(NAMES, cases("logprobs"))
def test_logprobs_equal_transformers(
    pool: WorkerPool,
    model_of: Callable[[str], Path],
    backend: str,
    model: str,
    layout: str,
    batching: str,
    loss: str,
    padded: bool,
    changes: dict[str, Any],
) -> None:
    world, settings = placed(backend, layout, padded, batching, changes)
    batch = make_batch(rows=10, length=19, seed=3)
    expected = reference.logprobs_of(model_of(model), batch, 0.7)
    for result in pool.run(
        world, jobs.logprobs, CONFIG[backend](model_of(model), temperature=0.7, **settings), batch
    ):
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)
        assert result[:, 0].eq(0).all()


@newest_megatron(backend=["megatron"], layout=NEWEST)
@sampled(36)
@pytest.mark.parametrize(NAMES, cases("training"))
def test_three_adam_steps_equal_transformers(
    pool: WorkerPool,
    model_of: Callable[[str], Path],
    backend: str,
    model: str,
    layout: str,
    batching: str,
    loss: str,
    padded: bool,
    changes: dict[str, Any],
) -> None:
    world, settings = placed(backend, layout, padded, batching, changes)
    check_training(pool, backend, world, model_of(model), loss, **settings)


@sampled(1)
@newest_megatron
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_reductions_in_overlap_change_no_bit(
    pool: WorkerPool, tiny_models: dict[str, Path], precision: str
) -> None:
    """As they are by default on two replicas, each with four micro-batches; there is one bucket, so that what
    is added is the same.

    Megatron-Core learns in the first batch when a bucket is complete: the others are reduced in overlap.
    """
    batches, seen = [make_batch(rows=8, length=12, seed=seed) for seed in (1, 2, 3)], []
    for overlaps in (False, None):
        config = policy_config(tiny_models["qwen3-tied"], precision=precision, mbs=1)
        config["megatron_cfg"]["distributed_data_parallel_config"]["overlap_grad_reduce"] = overlaps
        seen.append(pool.run(2, jobs.train, config, batches, NLLLoss())[0])
    assert (seen[0]["losses"], seen[0]["norms"]) == (seen[1]["losses"], seen[1]["norms"])
    for name, tensor in seen[0]["weights"].items():
        assert torch.equal(seen[1]["weights"][name], tensor), name


@sampled(1)
@newest_megatron
@pytest.mark.parametrize("changes", [{}, {"recompute": ["mlp"]}], ids=["kept", "recomputed"])
def test_functions_that_a_gpu_fuses_give_the_same(
    pool: WorkerPool, tiny_models: dict[str, Path], changes: dict[str, Any]
) -> None:
    check_fusions(pool, policy_config(tiny_models["qwen3"], **changes))
