"""Experts in grouped products against Megatron's loop over them, to the bit, and against one process of plain
transformers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megarl.algorithms.loss_functions import NLLLoss
from megarl.models.megatron import grouped_experts
from megarl.parity.pool import WorkerPool
from tests.dist import jobs
from tests.dist.mixtures import BATCHES, check_training
from tests.dist.test_megatron_checkpoint import load_and_train, train_and_save
from tests.dist.test_megatron_experts import LAYOUTS
from tests.models import make_tiny, policy_config
from tests.tiers import newest_megatron, sampled, slow

# rows of 16 bytes in every layout and in 16 bit too
WIDE = {"hidden_size": 48, "intermediate_size": 64}
PLACED = [
    ("ep1", "packed", "alltoall"),
    ("ep2-dp2", "dynamic", "allgather"),
    ("tp2-sp-ep2-etp2", "fixed", "alltoall"),
    ("pp2-ep2", "packed", "alltoall"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("grouped")
    return {
        family: make_tiny(root / family, family, tied=False, seed=17, **WIDE)
        for family in ("mixtral", "gpt_oss")
    }


def train_and_count(config: dict[str, Any], batches: list[dict[str, Tensor]], loss_fn: Any) -> dict[str, Any]:
    """As ``jobs.train``; ``calls``: of the grouped product, of it with weights that are seen in Megatron's
    buffers, and of buffers of gradients that all are added to at once."""
    calls: Counter[str] = Counter()
    product, view = grouped_experts.grouped_mm, grouped_experts.shared_view

    def counted(*arguments: Any, **options: Any) -> Tensor:
        calls["products"] += 1
        return product(*arguments, **options)

    def seen(tensors: Any) -> Tensor | None:
        found = view(tensors)
        calls["views" if found is not None else "copies"] += 1
        return found

    with (
        mock.patch.object(grouped_experts, "grouped_mm", counted),
        mock.patch.object(grouped_experts, "shared_view", seen),
    ):
        return {**jobs.train(config, batches, loss_fn), "calls": calls}


def check_equal(
    pool: WorkerPool, world: int, model: Path, options: dict[str, Any], *, exactly: bool = True
) -> None:
    """Losses and weights; without clipping, because the norm of the gradient is summed up in another
    order."""
    loop, grouped = (
        pool.run(
            world,
            train_and_count,
            policy_config(model, mbs=2, clip=0.0, grouped=chosen, **options),
            BATCHES,
            NLLLoss(),
        )[0]
        for chosen in (None, True)
    )
    assert not loop["calls"] and grouped["calls"]["products"] > 0
    # weights and sums of gradients lie in Megatron's buffers in the order of the experts: nothing is copied
    assert not grouped["calls"]["copies"], grouped["calls"]
    bounds = {"atol": 0.0, "rtol": 0.0} if exactly else {"atol": 1e-6, "rtol": 1e-5}
    torch.testing.assert_close(grouped["losses"], loop["losses"], **bounds)
    torch.testing.assert_close(grouped["norms"], loop["norms"], atol=1e-6, rtol=1e-5)
    for name, tensor in loop["weights"].items():
        assert (grouped["weights"][name] - tensor).norm() <= (0 if exactly else 1e-5) * tensor.norm(), name


@newest_megatron(layout=["tp2-sp-ep2-etp2"])
@sampled(1)
@pytest.mark.parametrize(("layout", "batching", "dispatcher"), PLACED)
def test_training_equals_the_loop(
    pool: WorkerPool, models: dict[str, Path], layout: str, batching: str, dispatcher: str
) -> None:
    world, changes = LAYOUTS[layout]
    check_equal(pool, world, models["mixtral"], {"batching": batching, "dispatcher": dispatcher, **changes})


@newest_megatron(precision=["bfloat16"])
@slow
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_equals_the_loop(pool: WorkerPool, models: dict[str, Path], precision: str) -> None:
    check_equal(pool, 2, models["mixtral"], {"ep": 2, "precision": precision, "recompute": True})


@slow
@newest_megatron
def test_experts_with_biases_equal_transformers(pool: WorkerPool, models: dict[str, Path]) -> None:
    """Gradients of biases are summed up in another order than in the loop."""
    model = models["gpt_oss"]
    check_equal(pool, 2, model, {"ep": 2, "batching": "packed"}, exactly=False)
    check_training(pool, 2, model, policy_config(model, mbs=2, clip=0.5, grouped=True, ep=2), NLLLoss())


@newest_megatron
@sampled(1)
@pytest.mark.parametrize("layout", ["ep1", "ep2"])
def test_mixtures_equal_transformers(pool: WorkerPool, models: dict[str, Path], layout: str) -> None:
    world, changes = LAYOUTS[layout]
    config = policy_config(
        models["mixtral"], mbs=2, grouped=True, batching="packed", balancing="aux_loss", aux=0.7, **changes
    )
    check_training(pool, world, models["mixtral"], config, NLLLoss())


@slow
@newest_megatron
@sampled(1)
@pytest.mark.parametrize(
    "options", [{}, {"distributed_optimizer": False}, {"overlap": True}], ids=["sharded", "plain", "overlap"]
)
def test_a_run_goes_on_with_the_other_kind(
    pool: WorkerPool, models: dict[str, Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    """Each reads the checkpoint of the other, weights and optimizer, and ends with the same weights to the
    bit."""
    for written, read in ((None, True), (True, None)):
        directory = tmp_path / str(written)
        configs = {
            kind: policy_config(models["mixtral"], ep=2, clip=0.0, grouped=kind, **options)
            for kind in (written, read)
        }
        undisturbed = pool.run(2, train_and_save, configs[written], directory)[0]
        resumed = pool.run(2, load_and_train, configs[read], directory, False)[0]
        torch.testing.assert_close(resumed["measured"], undisturbed["measured"], atol=0.0, rtol=1e-6)
        for name, tensor in undisturbed["weights"].items():
            assert torch.equal(resumed["weights"][name], tensor), name
