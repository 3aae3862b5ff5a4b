"""Context parallelism, packing, dynamic batching and the interleaved pipeline against one process of plain transformers."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.algorithms.loss_functions import ClippedPGLossFn, DPOLossFn, NLLLoss
from megarl.parity.pool import WorkerPool
from tests.dist import jobs, reference
from tests.dist.batches import make_batch
from tests.dist.layouts import layout
from tests.dist.test_megatron_parity import PG_LOSS, check_fusions, check_training
from tests.models import policy_config
from tests.tiers import newest_megatron, sampled

OVER = "tp1 dp2 cp2 cp3 cp2-tp2-sp cp2-pp2 pp2 pp2-vpp2 pp2-vpp2-tp2-sp cp2-dp2 cp3-ring cp2-tp2-sp-ring"
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    **{name: layout(name, padded=True) for name in OVER.split()},
    "pp2-written": (2, {"pp": 2, "pipeline_layout": "Et*2|tL"}),
    "pp2-vpp2-written": (2, {"pp": 2, "pipeline_layout": "Et|(tt|)*1|tL"}),
}
BATCHING = ["fixed", "dynamic", "packed"]
DPO_LOSS = {
    "reference_policy_kl_penalty": 0.3,
    "preference_loss_weight": 1.0,
    "sft_loss_weight": 0.2,
    "preference_average_log_probs": False,
    "sft_average_log_probs": False,
}


def family_for(layout: str) -> str:
    """The interleaved pipeline wants a number of layers that its chunks divide."""
    return "qwen3-tied-four" if "vpp" in layout else "llama"


@sampled(5)
@pytest.mark.parametrize("batching", BATCHING)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logprobs_equal_transformers(pool: WorkerPool, tiny_models: dict[str, Path], layout: str, batching: str) -> None:
    world, changes = LAYOUTS[layout]
    model = tiny_models[family_for(layout)]
    batch = make_batch(rows=7, length=19, seed=3)
    expected = reference.logprobs_of(model, batch, 0.7)
    config = policy_config(model, temperature=0.7, batching=batching, **changes)
    for result in pool.run(world, jobs.logprobs, config, batch):
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)
        assert result[:, 0].eq(0).all()


@newest_megatron(layout=["cp2-tp2-sp", "cp2-pp2", "pp2-vpp2-tp2-sp", "cp3-ring"])
@sampled(5)
@pytest.mark.parametrize("batching", BATCHING)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_adam_steps_equal_transformers(pool: WorkerPool, tiny_models: dict[str, Path], layout: str, batching: str) -> None:
    world, changes = LAYOUTS[layout]
    model = tiny_models[family_for(layout)]
    config = policy_config(model, mbs=2, clip=0.5, batching=batching, **changes)
    check_training(pool, world, model, config, ClippedPGLossFn(PG_LOSS))


LOSSES = {"nll": NLLLoss(), "dpo": DPOLossFn(DPO_LOSS)}


@sampled("values")
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("batching", BATCHING)
@pytest.mark.parametrize("layout", ["dp2", "cp2", "pp2"])
def test_other_losses(pool: WorkerPool, tiny_models: dict[str, Path], layout: str, batching: str, loss: str) -> None:
    world, changes = LAYOUTS[layout]
    config = policy_config(tiny_models["llama"], mbs=2, batching=batching, **changes)
    check_training(pool, world, tiny_models["llama"], config, LOSSES[loss])


OPTIONS: list[dict[str, Any]] = [
    {"overlap": True},
    {"recompute": True},
    {"recompute": ["core_attn"]},
    {"recompute": ["mlp", "core_attn"]},
    {"distributed_optimizer": False},
]


@newest_megatron(layout=["cp2-dp2"])
@sampled(3)
@pytest.mark.parametrize("changes", OPTIONS, ids=lambda c: "-".join(map(str, chain(*c.items()))))
@pytest.mark.parametrize("layout", ["cp2-dp2", "cp3-ring", "pp2-vpp2"])
def test_options_change_nothing(pool: WorkerPool, tiny_models: dict[str, Path], layout: str, changes: dict[str, Any]) -> None:
    world, placed = LAYOUTS[layout]
    model = tiny_models[family_for(layout)]
    config = policy_config(model, batching="packed", **placed, **changes)
    check_training(pool, world, model, config, NLLLoss())


@sampled(1)
@newest_megatron
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_reductions_in_overlap_change_no_bit(pool: WorkerPool, tiny_models: dict[str, Path], precision: str) -> None:
    """As they are by default on two replicas, each with four micro-batches; there is one bucket, so that what is added is the same.

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
def test_functions_that_a_gpu_fuses_give_the_same(pool: WorkerPool, tiny_models: dict[str, Path], changes: dict[str, Any]) -> None:
    check_fusions(pool, policy_config(tiny_models["qwen3"], **changes))


@newest_megatron(micro_batch=[1, 8])
@sampled(1, micro_batch=[8])
@pytest.mark.parametrize("micro_batch", [1, 2, 4, 8])
def test_any_number_of_micro_batches_goes_through_the_interleaved_pipeline(
    pool: WorkerPool, tiny_models: dict[str, Path], micro_batch: int
) -> None:
    """8, 4, 2 and 1 micro-batches over two stages; a single one needs a filler."""
    model = tiny_models["qwen3-tied-four"]
    check_training(pool, 2, model, policy_config(model, pp=2, vpp=2, mbs=micro_batch), NLLLoss())
