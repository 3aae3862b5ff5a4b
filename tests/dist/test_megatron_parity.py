"""Every layout against one process of plain transformers: log-probabilities, loss, gradient norm and weights after three Adam steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.algorithms.loss_functions import ClippedPGLossFn, NLLLoss
from megarl.parity.pool import WorkerPool
from tests.dist import jobs, reference
from tests.dist.batches import make_batch
from tests.dist.checks import check_trained, run_reference
from tests.dist.layouts import LAYOUTS as LAYOUTS_OF_ALL
from tests.models import policy_config
from tests.tiers import newest_megatron, sampled

TRAINED = ["llama", "qwen2-tied", "qwen3-tied"]
FAMILIES = [*TRAINED, "qwen2", "qwen3"]
OVER = ["tp1", "tp2", "tp2-sp", "pp2-uneven", "dp2", "tp2-pp2", "tp2-dp2"]
LAYOUTS = {name: LAYOUTS_OF_ALL["megatron"][name] for name in OVER}
PG_LOSS = {
    "reference_policy_kl_penalty": 0.05,
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.28,
    "ratio_clip_c": 3.0,
    "use_on_policy_kl_approximation": False,
    "use_importance_sampling_correction": True,
    "token_level_loss": True,
}


@newest_megatron(layout=["tp2-pp2"])
@sampled(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_transformers(pool: WorkerPool, tiny_models: dict[str, Path], family: str, layout: str) -> None:
    world, changes = LAYOUTS[layout]
    batch = make_batch(rows=10, length=13, seed=3)
    expected = reference.logprobs_of(tiny_models[family], batch, 0.7)
    config = policy_config(tiny_models[family], temperature=0.7, **changes)
    for result in pool.run(world, jobs.logprobs, config, batch):
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)
        assert result[:, 0].eq(0).all()


@newest_megatron(layout=["tp2-pp2", "tp2-dp2"])
@sampled(5)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", TRAINED)
def test_three_adam_steps_equal_transformers(pool: WorkerPool, tiny_models: dict[str, Path], family: str, layout: str) -> None:
    world, changes = LAYOUTS[layout]
    config = policy_config(tiny_models[family], mbs=2, clip=0.5, **changes)
    check_training(pool, world, tiny_models[family], config, ClippedPGLossFn(PG_LOSS))


@sampled(2)
@pytest.mark.parametrize("micro_batch", [1, 2, 4])
@pytest.mark.parametrize("layout", ["tp2-dp2", "pp2-uneven"])
def test_micro_batch_size_changes_nothing(pool: WorkerPool, tiny_models: dict[str, Path], layout: str, micro_batch: int) -> None:
    world, changes = LAYOUTS[layout]
    config = policy_config(tiny_models["qwen2-tied"], mbs=micro_batch, **changes)
    check_training(pool, world, tiny_models["qwen2-tied"], config, NLLLoss())


@newest_megatron
@sampled(2)
@pytest.mark.parametrize(
    "changes",
    [
        {"overlap": True},
        {"multiple": 5},
        {"distributed_optimizer": False},
        {"recompute": True},
        {"clip": 0.0},
        {"tp": 2, "overlap": True, "sp": True},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_options_change_nothing(pool: WorkerPool, tiny_models: dict[str, Path], changes: dict[str, Any]) -> None:
    config = policy_config(tiny_models["qwen3-tied"], **changes)
    check_training(pool, 2 * changes.get("tp", 1), tiny_models["qwen3-tied"], config, NLLLoss())


def check_fusions(pool: WorkerPool, config: dict[str, Any]) -> None:
    """The functions that torch.compile fuses on a GPU, whose backward passes Megatron-Core has by hand, give what the others give."""
    batches = [make_batch(rows=8, length=12, seed=seed) for seed in (1, 2)]
    (plain,), (fused,) = (pool.run(1, job, config, batches, NLLLoss()) for job in (jobs.train, jobs.train_with_fusions))
    check_trained([fused], plain["losses"], plain["norms"], plain["weights"])


@sampled(1)
@pytest.mark.parametrize("layout", ["tp2", "tp2-sp", "tp2-pp2"])
def test_an_output_layer_in_float32_learns_in_every_layout(pool: WorkerPool, tiny_models: dict[str, Path], layout: str) -> None:
    """Its collectives are not Megatron-Core's own."""
    world, changes = LAYOUTS[layout]
    config = policy_config(tiny_models["qwen2-tied"], **changes)
    config["megatron_cfg"]["float32_logits"] = True
    check_training(pool, world, tiny_models["qwen2-tied"], config, NLLLoss())


def check_training(pool: WorkerPool, world: int, model: Path, config: dict[str, Any], loss_fn: Any) -> None:
    batches = [make_batch(rows=8, length=12, seed=seed) for seed in (1, 2, 3)]
    check_trained(pool.run(world, jobs.train, config, batches, loss_fn), *run_reference(model, config, batches, loss_fn))
