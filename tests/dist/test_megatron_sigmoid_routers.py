"""GLM-4.5, whose routers take sigmoids, prefer groups of experts and correct their choice by a bias, against plain transformers.

The bias is a buffer of Megatron's router: no gradient reaches it, and it is loaded, saved, exported and swapped with the parameters all
the same. The two tiny models route as Megatron-Core can and as only our own router does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from converters.checkpoint.source import open_source
from converters.importing import import_model, plan_import
from megarl.algorithms.loss_functions import ClippedPGLossFn, NLLLoss
from megarl.parity.pool import WorkerPool
from tests.dist import jobs, mixtures
from tests.dist.batches import make_batch
from tests.dist.test_megatron_checkpoint import load_and_train, train_and_save
from tests.dist.test_megatron_experts import LAYOUTS, check_training, export
from tests.dist.test_megatron_generation import check_logprobs, prompts
from tests.dist.test_megatron_parity import PG_LOSS
from tests.models import make_tiny, policy_config
from tests.tiers import newest_megatron, sampled, slow

BIAS = "mlp.gate.e_score_correction_bias"
FAMILIES = ("glm4_moe", "glm4_moe_mixed")
NEWEST = ("tp2-sp-ep2-etp2",)
PLACED = [
    ("ep1", "glm4_moe", "dynamic", "alltoall", "none"),
    ("tp2-sp", "glm4_moe_mixed", "fixed", "alltoall", "seq_aux_loss"),
    ("tp2-sp-ep2-etp2", "glm4_moe", "packed", "allgather", "aux_loss"),
    ("cp2-tp2-sp-ep2", "glm4_moe_mixed", "packed", "alltoall", "none"),
    ("pp2-ep2", "glm4_moe_mixed", "fixed", "allgather", "aux_loss"),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sigmoid")
    return {name: make_tiny(root / name, name, tied=False, seed=seed) for seed, name in enumerate(FAMILIES, start=51)}


@newest_megatron(layout=NEWEST)
@sampled(1)
@pytest.mark.parametrize(("layout", "family", "batching", "dispatcher", "balancing"), PLACED)
def test_three_adam_steps_equal_transformers(
    pool: WorkerPool,
    models: dict[str, Path],
    tmp_path: Path,
    layout: str,
    family: str,
    batching: str,
    dispatcher: str,
    balancing: str,
) -> None:
    """Large coefficients of balancing, so that a wrong factor cannot hide; the correction stays as it was, to the bit."""
    (world, changes), model = LAYOUTS[layout], models[family]
    batch = make_batch(rows=7, length=19, seed=3)
    options = {"batching": batching, "dispatcher": dispatcher, **changes}
    for result in pool.run(world, jobs.logprobs, policy_config(model, temperature=0.7, **options), batch):
        torch.testing.assert_close(result, mixtures.logprobs(model, batch, 0.7), atol=1e-5, rtol=0)
    before = mixtures.weights_of(mixtures.load(model), tmp_path / "before")
    weights = {} if balancing == "none" else {"balancing": balancing, "aux": 0.7, "z": 0.3}
    # No gradient reaches what a bias adds to keys where they are not rotated: it is the same for all keys of a softmax. An epsilon that is
    # large beside rounding keeps Adam from making steps of it.
    config = policy_config(model, mbs=2, clip=0.5, eps=1e-4, **options, **weights)
    result = check_training(pool, world, model, config, NLLLoss() if weights else ClippedPGLossFn(PG_LOSS))[0]
    corrections = [name for name in before if name.endswith(BIAS)]
    assert len(corrections) == (2 if family == "glm4_moe_mixed" else 3)
    for name in corrections:
        assert result["weights"][name].dtype == torch.float32 and torch.equal(result["weights"][name], before[name])


@slow
@pytest.mark.parametrize("layout", ["tp2-sp-ep2-etp2", "pp2-ep2"])
def test_greedy_equals_transformers(pool: WorkerPool, models: dict[str, Path], layout: str) -> None:
    world, changes = LAYOUTS[layout]
    model, batch = models["glm4_moe_mixed"], prompts(rows=8)
    config = policy_config(model, generation={"stop_token_ids": []}, **changes)
    for result in pool.run(world, jobs.generate, config, batch, True):
        assert [row["ids"] for row in result["rows"]] == mixtures.greedy(model, batch, 8)
        check_logprobs(result["rows"])


@sampled(1)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_export_gives_back_what_was_loaded(pool: WorkerPool, models: dict[str, Path], tmp_path: Path, precision: str) -> None:
    """The correction in float32 also where everything else is bfloat16."""
    world, changes = LAYOUTS["pp2-ep2"]
    expected = mixtures.weights_of(mixtures.load(models["glm4_moe"]), tmp_path / "expected")
    for result in pool.run(world, export, policy_config(models["glm4_moe"], precision=precision, **changes)):
        assert result.keys() == expected.keys()
        for name, tensor in result.items():
            dtype = torch.float32 if name.endswith(BIAS) else getattr(torch, precision)
            assert tensor.dtype == dtype and torch.equal(tensor, expected[name].to(dtype)), name


@newest_megatron
@slow
def test_resume_in_another_layout(pool: WorkerPool, models: dict[str, Path], tmp_path: Path) -> None:
    """From a model with another correction, so that it has to come from the checkpoint."""
    model, (world, changes), (new_world, new_changes) = models["glm4_moe_mixed"], LAYOUTS["tp2-sp-ep2"], LAYOUTS["pp2-ep2"]
    other = make_tiny(tmp_path / "other", "glm4_moe_mixed", tied=False, seed=60)
    undisturbed = pool.run(world, train_and_save, policy_config(model, **changes), tmp_path)[0]
    resumed = pool.run(new_world, load_and_train, policy_config(other, **new_changes), tmp_path, False)[0]
    torch.testing.assert_close(resumed["measured"], undisturbed["measured"], atol=1e-6, rtol=1e-5)
    for name, tensor in undisturbed["weights"].items():
        assert (resumed["weights"][name] - tensor).norm() < 1e-5 * tensor.norm(), name


def reference_after_loading(config: dict[str, Any], weights: str, batch: dict[str, Any]) -> list[torch.Tensor]:
    """Log-probabilities of the reference, which is the model as it was built, after another model's weights were read, and of that."""
    worker = jobs.build(config)
    worker.load_checkpoint(weights, None)
    sharded = jobs.dealt(worker, batch, "logprob")
    mine = sharded.shards[worker.backend.groups.data_rank]
    found = [worker.get_reference_policy_logprobs(data=mine)["reference_logprobs"], worker.get_logprobs(data=mine)["logprobs"]]
    worker.backend.close()
    return [sharded.restore([each]) for each in found]


def test_the_reference_keeps_its_own_correction(pool: WorkerPool, models: dict[str, Path], tmp_path: Path) -> None:
    """Weights of the same model, but for the correction."""
    model, batch = models["glm4_moe"], make_batch(rows=7, length=19, seed=4)
    other = mixtures.load(model)
    with torch.no_grad():
        for gate in mixtures.gates(other):
            gate.e_score_correction_bias.copy_(torch.rand(16) - 0.5)
    other.save_pretrained(tmp_path / "other")
    import_model(plan_import(open_source(tmp_path / "other")), tmp_path / "weights")
    ((reference, loaded),) = pool.run(1, reference_after_loading, policy_config(model), str(tmp_path / "weights"), batch)
    torch.testing.assert_close(reference, mixtures.logprobs(model, batch, 1.0), atol=1e-5, rtol=0)
    torch.testing.assert_close(loaded, mixtures.logprobs(tmp_path / "other", batch, 1.0), atol=1e-5, rtol=0)
    assert (reference - loaded).abs().max() > 1e-2
