"""A rank that shares its parameters with no other computes on them as they are: results to the bit as through
``fully_shard``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from megarl.algorithms.loss_functions import NLLLoss
from megarl.parity.pool import WorkerPool
from tests.dist import jobs
from tests.dist.batches import make_batch
from tests.dist.dtensor_jobs import dtensor_config
from tests.dist.layouts import LAYOUTS
from tests.dist.worker_jobs import differences
from tests.tiers import sampled

HERE = "tests.dist.test_dtensor_whole"


def of_torch() -> dict[str, Any]:
    """A plan in torch's own styles, whose modules need DTensors."""
    names = ("gate_proj", "up_proj")
    return {
        **{f"model.layers.*.mlp.{name}": ColwiseParallel() for name in names},
        "model.layers.*.mlp.down_proj": RowwiseParallel(),
    }


def hooks_of(model: Any) -> list[Any]:
    return [
        list(hooks.values())
        for module in model.modules()
        for hooks in (module._forward_pre_hooks, module._forward_hooks)
    ]


def both_ways(
    config: dict[str, Any], batches: list[dict[str, Any]], keeps_gradients: bool
) -> tuple[list[str], list[bool]]:
    """What differs between a worker that computes on whole parameters and one that goes through
    ``fully_shard``; and what must be true."""
    outcomes: list[dict[str, Any]] = []
    facts: list[bool] = []
    for stays in (True, False):
        worker = jobs.build(config, init_reference_model=False)
        backend = worker.backend
        facts.append(backend._stays_whole)
        backend._stays_whole = stays
        if keeps_gradients:
            backend.zero_grad = lambda: None
        before = hooks_of(backend.model)
        shares = [jobs.my_share(worker, batch) for batch in batches]
        steps = [worker.train(data=share, loss_fn=NLLLoss()) for share in shares]
        logprobs = worker.get_logprobs(data=shares[0])["logprobs"]
        facts += [
            hooks_of(backend.model) == before,
            all(isinstance(value, DTensor) for value in backend.model.parameters()),
        ]
        figures = {
            f"{key} {number}": torch.tensor(step[key])
            for number, step in enumerate(steps)
            for key in ("global_loss", "grad_norm")
        }
        outcomes.append({**jobs.full_weights(worker), **figures, "logprobs": logprobs})
        backend.close()
    return differences(*outcomes), facts


@sampled(2)
@pytest.mark.parametrize(
    ("layout", "changes", "keeps_gradients"),
    [
        ("dp1", {}, False),
        ("tp2", {"recompute": True}, True),
        ("tp2-sp", {}, False),
        ("tp2-sp", {"recompute": True}, True),
    ],
    ids=str,
)
def test_results_are_those_of_fully_shard(
    pool: WorkerPool,
    tiny_models: dict[str, Path],
    layout: str,
    changes: dict[str, Any],
    keeps_gradients: bool,
) -> None:
    world, sizes = LAYOUTS["dtensor"][layout]
    batches = [make_batch(rows=12, length=12, seed=seed) for seed in (1, 2, 3)]
    config = dtensor_config(tiny_models["qwen3-tied"], gbs=12, mbs=4, **sizes, **changes)
    for different, facts in pool.run(world, both_ways, config, batches, keeps_gradients):
        assert different == [] and all(facts), (different, facts)


def stays_whole(config: dict[str, Any]) -> bool:
    worker = jobs.build(config, init_optimizer=False, init_reference_model=False)
    stays: bool = worker.backend._stays_whole
    worker.backend.close()
    return stays


@pytest.mark.parametrize(
    ("layout", "changes", "expected"),
    [
        ("dp2", {}, False),
        ("cp2", {}, False),
        ("dp1", {"precision": "bfloat16"}, False),
        ("tp2", {"plan": "tests.dist.plans.by_names"}, True),
        ("tp2", {"plan": f"{HERE}.of_torch"}, False),
    ],
    ids=str,
)
def test_what_is_shared_copied_or_needs_dtensors_goes_through_fully_shard(
    pool: WorkerPool, tiny_models: dict[str, Path], layout: str, changes: dict[str, Any], expected: bool
) -> None:
    world, sizes = LAYOUTS["dtensor"][layout]
    assert (
        pool.run(world, stays_whole, dtensor_config(tiny_models["qwen2"], **sizes, **changes))
        == [expected] * world
    )
