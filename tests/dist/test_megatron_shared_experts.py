"""Qwen2-MoE, whose layers have a gated shared expert beside the routed ones, against one process of plain transformers.

The shared expert is cut over the tensor-parallel ranks, the routed ones over ranks of their own; under sequence parallelism a rank sees a
part of the tokens only, so that the gradients of the gate, which is whole on every rank, have to be added up.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.algorithms.loss_functions import ClippedPGLossFn, NLLLoss
from megarl.parity.pool import WorkerPool
from tests.dist import jobs, mixtures
from tests.dist.batches import make_batch
from tests.dist.test_megatron_checkpoint import load_and_train, train_and_save
from tests.dist.test_megatron_experts import LAYOUTS, check_training, export
from tests.dist.test_megatron_generation import check_logprobs, prompts
from tests.dist.test_megatron_parity import PG_LOSS, check_fusions
from tests.models import make_tiny, policy_config
from tests.tiers import newest_megatron, sampled, slow

GATE = "mlp.shared_expert_gate.weight"
NEWEST = ("tp2-sp-ep2-etp2",)
# every kind of rank, each with micro-batches of another kind and another dispatcher
PLACED = [
    ("ep1", "dynamic", "alltoall"),
    ("ep2-dp2", "packed", "allgather"),
    ("tp2-sp", "fixed", "alltoall"),
    ("tp2-sp-ep2-etp2", "dynamic", "allgather"),
    ("cp2-tp2-sp-ep2", "packed", "alltoall"),
    ("pp2-tp2-sp-ep2", "fixed", "allgather"),
    ("pp2-vpp2-ep2", "packed", "alltoall"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("shared")
    tiny = {name: make_tiny(root / name, name, tied=False, seed=seed) for name, seed in (("qwen2_moe", 41), ("qwen2_moe_mixed", 42))}
    return tiny | {"four": make_tiny(root / "four", "qwen2_moe", tied=True, seed=43, layers=4)}


def name_for(layout: str, otherwise: str) -> str:
    """The interleaved pipeline wants a number of layers that its chunks divide."""
    return "four" if "vpp" in layout else otherwise


@slow
def test_functions_that_a_gpu_fuses_give_the_same(pool: WorkerPool, models: dict[str, Path]) -> None:
    check_fusions(pool, policy_config(models["qwen2_moe_mixed"]))


@newest_megatron(layout=NEWEST)
@sampled(2)
@pytest.mark.parametrize(("layout", "batching", "dispatcher"), PLACED)
def test_logprobs_equal_transformers(pool: WorkerPool, models: dict[str, Path], layout: str, batching: str, dispatcher: str) -> None:
    world, changes = LAYOUTS[layout]
    model, batch = models[name_for(layout, "qwen2_moe_mixed")], make_batch(rows=7, length=19, seed=3)
    config = policy_config(model, temperature=0.7, batching=batching, dispatcher=dispatcher, **changes)
    for result in pool.run(world, jobs.logprobs, config, batch):
        torch.testing.assert_close(result, mixtures.logprobs(model, batch, 0.7), atol=1e-5, rtol=0)


@newest_megatron(layout=NEWEST)
@sampled(1)
@pytest.mark.parametrize(("layout", "batching", "dispatcher"), PLACED)
def test_three_adam_steps_equal_transformers(
    pool: WorkerPool, models: dict[str, Path], tmp_path: Path, layout: str, batching: str, dispatcher: str
) -> None:
    world, changes = LAYOUTS[layout]
    model = models[name_for(layout, "qwen2_moe")]
    before = mixtures.weights_of(mixtures.load(model), tmp_path / "before")
    config = policy_config(model, mbs=2, clip=0.5, batching=batching, dispatcher=dispatcher, **changes)
    result = check_training(pool, world, model, config, ClippedPGLossFn(PG_LOSS))[0]
    moved = [name for name, tensor in result["weights"].items() if name.endswith(GATE) and not torch.equal(tensor, before[name])]
    assert len(moved) == (4 if "vpp" in layout else 3)


@slow
@pytest.mark.parametrize(
    "options",
    [{"recompute": True}, {"overlap": True}, {"distributed_optimizer": False}, {"balancing": "aux_loss", "aux": 0.7, "z": 0.3}],
    ids=str,
)
def test_options_change_nothing(pool: WorkerPool, models: dict[str, Path], options: dict[str, Any]) -> None:
    world, changes = LAYOUTS["tp2-sp-ep2"]
    config = policy_config(models["qwen2_moe_mixed"], **changes, **options)
    check_training(pool, world, models["qwen2_moe_mixed"], config, NLLLoss())


@slow
@newest_megatron(layout=NEWEST)
@sampled(1)
@pytest.mark.parametrize("layout", ["ep2-dp2", "tp2-sp-ep2-etp2", "cp2-ep2", "pp2-ep2"])
def test_greedy_equals_transformers(pool: WorkerPool, models: dict[str, Path], layout: str) -> None:
    world, changes = LAYOUTS[layout]
    model, batch = models["qwen2_moe_mixed"], prompts(rows=8)
    config = policy_config(model, generation={"stop_token_ids": []}, **changes)
    for result in pool.run(world, jobs.generate, config, batch, True):
        assert [row["ids"] for row in result["rows"]] == mixtures.greedy(model, batch, 8)
        check_logprobs(result["rows"])


@sampled(1)
@pytest.mark.parametrize("layout", ["tp2-sp-ep2-etp2", "pp2-tp2-sp-ep2"])
def test_export_gives_back_what_was_loaded(pool: WorkerPool, models: dict[str, Path], tmp_path: Path, layout: str) -> None:
    world, changes = LAYOUTS[layout]
    expected = mixtures.weights_of(mixtures.load(models["qwen2_moe_mixed"]), tmp_path / "expected")
    for result in pool.run(world, export, policy_config(models["qwen2_moe_mixed"], **changes)):
        assert result.keys() == expected.keys()
        for name, tensor in result.items():
            assert torch.equal(tensor, expected[name]), name


@newest_megatron
@slow
@pytest.mark.parametrize(
    ("written", "read"), [("tp2-sp-ep2-etp2", "tp2-sp-ep2-etp2"), ("tp2-sp-ep2-etp2", "pp2-ep2"), ("ep2-dp2", "tp2-sp-ep4")]
)
def test_resume(pool: WorkerPool, models: dict[str, Path], tmp_path: Path, written: str, read: str) -> None:
    """A run goes on as the undisturbed one: bit for bit in the same layout, within rounding in another."""
    model, (world, changes), (new_world, new_changes) = models["qwen2_moe_mixed"], LAYOUTS[written], LAYOUTS[read]
    undisturbed = pool.run(world, train_and_save, policy_config(model, **changes), tmp_path)[0]
    resumed = pool.run(new_world, load_and_train, policy_config(model, **new_changes), tmp_path, False)[0]
    torch.testing.assert_close(resumed["measured"], undisturbed["measured"], atol=1e-6, rtol=1e-5)
    assert written != read or resumed["measured"] == undisturbed["measured"]
    for name, tensor in undisturbed["weights"].items():
        assert (resumed["weights"][name] - tensor).norm() < 1e-5 * tensor.norm(), name
        assert written != read or torch.equal(resumed["weights"][name], tensor), name


@slow
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precision_trains_in_step(pool: WorkerPool, models: dict[str, Path], precision: str) -> None:
    norms = {}
    for name in ("float32", precision):
        config = policy_config(models["qwen2_moe"], precision=name, tp=2, sp=True, multiple=2)
        norms[name] = pool.run(2, jobs.train, config, [make_batch(rows=8, length=12, seed=1)], NLLLoss())[0]["norms"][0]
    assert norms[precision] == pytest.approx(norms["float32"], rel=0.05)
