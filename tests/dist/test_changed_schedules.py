"""A run that goes on with another learning rate or schedule: the rates are those of a closed form, all else
is the checkpoint's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.algorithms.loss_functions import NLLLoss
from megarl.config.nested import merge
from megarl.parity.pool import WorkerPool
from tests.dist import jobs
from tests.dist.batches import make_batch
from tests.dist.layouts import CONFIG
from tests.models import policy_config
from tests.tiers import sampled

BATCHES = [make_batch(rows=8, length=12, seed=seed) for seed in range(5)]
SAVED_AFTER = 2
LR, NEW_LR = 1e-3, 2e-3


def train_on(worker: Any, batch: Mapping[str, Any]) -> float:
    """The learning rate of the step."""
    _, norm, rate = jobs.step(worker, batch, NLLLoss())
    assert norm > 0
    return rate


def go_on(
    before: Mapping[str, Any], configs: list[Mapping[str, Any]], directory: Path
) -> list[dict[str, Any]]:
    """Train and save; then of each configuration that goes on from there the rates, and by how much its first
    step moved each weight.

    The first configuration also writes the next checkpoint, from which the last one goes on.
    """
    paths = [
        (str(directory / name / "weights"), str(directory / name / "optimizer"))
        for name in ("first", "second")
    ]
    worker = jobs.build(before, init_reference_model=False)
    for batch in BATCHES[:SAVED_AFTER]:
        train_on(worker, batch)
    worker.save_checkpoint(*paths[0])
    saved = jobs.full_weights(worker)
    worker.backend.close()
    found = []
    for config in configs:
        worker = jobs.build(
            config, weights_path=paths[0][0], optimizer_path=paths[0][1], init_reference_model=False
        )
        rates = [train_on(worker, BATCHES[SAVED_AFTER])]
        now = jobs.full_weights(worker)
        if config is configs[-1]:
            worker.save_checkpoint(*paths[1])
            worker.load_checkpoint(*paths[1])
        rates += [train_on(worker, batch) for batch in BATCHES[SAVED_AFTER + 1 :]]
        found.append({"rates": rates, "moved": {name: tensor - saved[name] for name, tensor in now.items()}})
        worker.backend.close()
    return found


def torch_schedule(name: str, **kwargs: Any) -> dict[str, Any]:
    return {"name": f"torch.optim.lr_scheduler.{name}", "kwargs": kwargs}


WARM_UP = torch_schedule("LinearLR", start_factor=0.25, total_iters=4)
COSINE = torch_schedule("CosineAnnealingLR", T_max=10, eta_min=1e-4)
HALVES = [
    torch_schedule("ConstantLR", factor=1.0, total_iters=1),
    torch_schedule("StepLR", step_size=1, gamma=0.5),
    {"milestones": [3]},
]


def cosine(step: int) -> float:
    return 1e-4 + (NEW_LR - 1e-4) * (1 + math.cos(math.pi * step / 10)) / 2


TORCH: dict[str, tuple[Any, Any, Callable[[int], float]]] = {
    "another rate": (None, None, lambda step: NEW_LR),
    "another rate of a warm-up": (WARM_UP, WARM_UP, lambda step: NEW_LR * (0.25 + 0.75 * min(step, 4) / 4)),
    "a schedule for none": (None, COSINE, cosine),
    "another kind": (WARM_UP, COSINE, cosine),
    "another length": (torch_schedule("CosineAnnealingLR", T_max=50), COSINE, cosine),
    "a sequence": (WARM_UP, HALVES, lambda step: NEW_LR * 0.5 ** max(step - 3, 0)),
    "none for a schedule": (COSINE, None, lambda step: NEW_LR),
}
MEGATRON: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[int], float]]] = {
    "another rate": ({}, {}, lambda step: NEW_LR),
    "a longer warm-up": (
        {},
        {"lr_warmup_iters": 4, "lr_warmup_init": 4e-4},
        lambda step: 4e-4 + (NEW_LR - 4e-4) * min(step, 4) / 4,
    ),
    "a decay": (
        {},
        {"lr_decay_style": "linear", "lr_decay_iters": 10, "lr_warmup_iters": 0},
        lambda step: 1e-4 + (NEW_LR - 1e-4) * (1 - step / 10),
    ),
    "another length": (
        {"lr_decay_style": "cosine", "lr_decay_iters": 50},
        {"lr_decay_style": "cosine", "lr_decay_iters": 10, "lr_warmup_iters": 0},
        cosine,
    ),
}


def check(found: list[dict[str, Any]], rate_of: Callable[[int], float]) -> None:
    unchanged, changed = found
    assert changed["rates"] == pytest.approx(
        [rate_of(step) for step in range(SAVED_AFTER, len(BATCHES))], rel=1e-9
    )
    # AdamW moves a weight in proportion to the rate; moments and their counts, which decide the rest, are the
    # checkpoint's
    factor = changed["rates"][0] / unchanged["rates"][0]
    assert abs(factor - 1) > 0.05
    for name, moved in unchanged["moved"].items():
        assert moved.norm() > 0
        torch.testing.assert_close(changed["moved"][name], moved * factor, rtol=1e-3, atol=1e-6, msg=name)


@sampled(2)
@pytest.mark.parametrize("case", TORCH)
@pytest.mark.parametrize("kind", ["dtensor", "fsdp1"])
def test_torch_takes_the_changed_schedule_at_its_step(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, kind: str, case: str
) -> None:
    old, new, rate_of = TORCH[case]
    before, after = (
        CONFIG[kind](tiny_models["qwen2-tied"], lr=lr, scheduler=chosen)
        for lr, chosen in ((LR, old), (NEW_LR, new))
    )
    check(pool.run(2, go_on, before, [before, after], tmp_path)[0], rate_of)


@sampled(2)
@pytest.mark.parametrize("distributed", [True, False], ids=["distributed", "plain"])
@pytest.mark.parametrize("case", MEGATRON)
def test_megatron_takes_the_changed_schedule_at_its_step(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, case: str, distributed: bool
) -> None:
    old, new, rate_of = MEGATRON[case]
    before, after = (
        merge(
            policy_config(tiny_models["qwen2-tied"], lr=lr, distributed_optimizer=distributed),
            {"megatron_cfg": {"scheduler": schedule, "optimizer": {"min_lr": lowest}}},
        )
        for lr, lowest, schedule in ((LR, 0.0, old), (NEW_LR, 1e-4, new))
    )
    check(pool.run(2, go_on, before, [before, after], tmp_path)[0], rate_of)
