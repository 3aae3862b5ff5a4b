"""GPT-OSS (attention sinks, windows in some layers, biases everywhere, clamped experts) against one process of plain transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megarl.algorithms.loss_functions import ClippedPGLossFn, NLLLoss
from megarl.parity.pool import JobError, WorkerPool
from tests.dist import jobs, mixtures
from tests.dist.batches import make_batch
from tests.dist.test_megatron_checkpoint import load_and_train, train_and_save
from tests.dist.test_megatron_experts import LAYOUTS, check_training, export
from tests.dist.test_megatron_generation import check_logprobs, prompts
from tests.dist.test_megatron_parity import PG_LOSS, check_fusions
from tests.models import make_tiny, policy_config
from tests.tiers import newest_megatron, sampled, slow

NEWEST = ("tp2-sp-ep2",)
PLACED = [
    ("ep1", "dynamic", "alltoall", "none"),
    ("tp2-sp-ep2", "packed", "alltoall", "seq_aux_loss"),
    ("pp2-ep2", "fixed", "allgather", "none"),
    ("cp2-ep2", "packed", "alltoall", "none"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("sinks") / "gpt_oss", "gpt_oss", tied=False, seed=71)


@newest_megatron(layout=NEWEST)
@sampled(1)
@pytest.mark.parametrize(("layout", "batching", "dispatcher", "balancing"), PLACED)
def test_three_adam_steps_equal_transformers(
    pool: WorkerPool, model: Path, tmp_path: Path, layout: str, batching: str, dispatcher: str, balancing: str
) -> None:
    (world, changes), batch = LAYOUTS[layout], make_batch(rows=7, length=19, seed=3)
    options = {"batching": batching, "dispatcher": dispatcher, **changes}
    for result in pool.run(world, jobs.logprobs, policy_config(model, temperature=0.7, **options), batch):
        torch.testing.assert_close(result, mixtures.logprobs(model, batch, 0.7), atol=1e-5, rtol=0)
    weights = {} if balancing == "none" else {"balancing": balancing, "aux": 0.7, "z": 0.3}
    config = policy_config(model, mbs=2, clip=0.5, **options, **weights)
    result = check_training(pool, world, model, config, NLLLoss() if weights else ClippedPGLossFn(PG_LOSS))[0]
    before = mixtures.weights_of(mixtures.load(model), tmp_path / "before")
    assert all(not torch.equal(result["weights"][name], tensor) for name, tensor in before.items()), "everything learns"


@slow
def test_functions_that_a_gpu_fuses_give_the_same(pool: WorkerPool, model: Path) -> None:
    """Without that of gates, which Megatron-Core would limit before their bias is added."""
    check_fusions(pool, policy_config(model))


@slow
@pytest.mark.parametrize("layout", ["tp2-sp-ep2", "pp2-ep2"])
def test_greedy_equals_transformers(pool: WorkerPool, model: Path, layout: str) -> None:
    (world, changes), batch = LAYOUTS[layout], prompts(rows=8)
    config = policy_config(model, generation={"stop_token_ids": []}, **changes)
    for result in pool.run(world, jobs.generate, config, batch, True):
        assert [row["ids"] for row in result["rows"]] == mixtures.greedy(model, batch, 8)
        check_logprobs(result["rows"])


@sampled(1)
@pytest.mark.parametrize("layout", ["tp2-sp-ep2", "pp2-ep2"])
def test_export_gives_back_what_was_loaded(pool: WorkerPool, model: Path, tmp_path: Path, layout: str) -> None:
    """All experts of a layer together, transposed, with rows of gate and up in turns."""
    world, changes = LAYOUTS[layout]
    expected = mixtures.weights_of(mixtures.load(model), tmp_path / "expected")
    for result in pool.run(world, export, policy_config(model, **changes)):
        assert result.keys() == expected.keys()
        for name, tensor in result.items():
            assert torch.equal(tensor, expected[name]), name


@newest_megatron
@slow
def test_resume_in_another_layout(pool: WorkerPool, model: Path, tmp_path: Path) -> None:
    (world, changes), (new_world, new_changes) = LAYOUTS["tp2-sp-ep2"], LAYOUTS["pp2-ep2"]
    other = make_tiny(tmp_path / "other", "gpt_oss", tied=False, seed=72)
    undisturbed = pool.run(world, train_and_save, policy_config(model, **changes), tmp_path)[0]
    resumed = pool.run(new_world, load_and_train, policy_config(other, **new_changes), tmp_path, False)[0]
    torch.testing.assert_close(resumed["measured"], undisturbed["measured"], atol=1e-6, rtol=1e-5)
    for name, tensor in undisturbed["weights"].items():
        assert (resumed["weights"][name] - tensor).norm() < 1e-5 * tensor.norm(), name


def test_a_ring_is_refused(pool: WorkerPool, model: Path) -> None:
    with pytest.raises(JobError, match="sinks does not send keys and values round; choose all_gather"):
        pool.run(2, export, policy_config(model, cp=2, comm="p2p", multiple=4))
