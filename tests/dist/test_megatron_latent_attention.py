"""DeepSeek-V2 and -V3, whose attention goes through latent vectors, against one process of plain transformers.

Queries and keys are wider than values, a part of every key is one for all heads, and YaRN also scales the scores; the sequences are longer
than the length that it was scaled from. Routers take softmaxes or sigmoids, with groups of experts or without.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

from megarl.algorithms.loss_functions import ClippedPGLossFn, NLLLoss
from megarl.parity.pool import WorkerPool
from tests.dist import jobs, mixtures
from tests.dist.batches import make_batch
from tests.dist.test_megatron_checkpoint import load_and_train, train_and_save
from tests.dist.test_megatron_experts import LAYOUTS, check_training, export
from tests.dist.test_megatron_generation import check_logprobs, prompts
from tests.dist.test_megatron_parity import PG_LOSS, run_reference
from tests.models import make_tiny, policy_config
from tests.prediction_layers import add_prediction_layers
from tests.tiers import newest_megatron, sampled, slow

FAMILIES = ("deepseek_v2", "deepseek_v2_groups", "deepseek_v3", "deepseek_v3_dense")
NEWEST = ("tp2", "tp2-sp-ep2-etp2")
SPARSE = [
    ("ep1", "deepseek_v2_groups", "dynamic", "alltoall", "none"),
    ("tp2-sp", "deepseek_v3", "fixed", "alltoall", "none"),
    ("tp2-sp-ep2-etp2", "deepseek_v3", "packed", "allgather", "aux_loss"),
    ("cp2-tp2-sp-ep2", "deepseek_v2", "packed", "alltoall", "none"),
    ("pp2-ep2", "deepseek_v2", "fixed", "allgather", "seq_aux_loss"),
]
# without experts: tensor parallelism without sequence parallelism, and keys that travel round with values of another width
DENSE: dict[str, tuple[int, dict[str, Any]]] = {
    "tp1": (1, {"batching": "packed"}),
    "tp2": (2, {"tp": 2, "recompute": True}),
    "tp2-sp": (2, {"tp": 2, "sp": True, "multiple": 2, "batching": "packed"}),
    "cp2-ring": (2, {"cp": 2, "comm": "p2p", "multiple": 4, "batching": "packed"}),
    "pp2": (2, {"pp": 2, "first": 1, "last": 2, "batching": "dynamic"}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("latent")
    return {name: make_tiny(root / name, name, tied=False, seed=seed) for seed, name in enumerate(FAMILIES, start=61)}


@newest_megatron(layout=NEWEST)
@sampled(1)
@pytest.mark.parametrize("layout", DENSE)
def test_attention_trains_as_in_transformers(pool: WorkerPool, models: dict[str, Path], layout: str) -> None:
    (world, changes), model = DENSE[layout], models["deepseek_v3_dense"]
    config = policy_config(model, mbs=2, clip=0.5, **changes)
    batches = [make_batch(rows=8, length=14, seed=seed) for seed in (1, 2, 3)]
    losses, norms, weights = run_reference(model, config, batches, ClippedPGLossFn(PG_LOSS))
    for result in pool.run(world, jobs.train, config, batches, ClippedPGLossFn(PG_LOSS)):
        torch.testing.assert_close([step[0] for step in result["losses"]], losses, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(result["norms"], norms, atol=1e-6, rtol=1e-5)
        assert result["weights"].keys() == weights.keys()
        for name, tensor in result["weights"].items():
            assert (tensor - weights[name]).norm() < 1e-5 * weights[name].norm(), name


def tables_made(config: dict[str, Any], batch: dict[str, torch.Tensor]) -> list[int]:
    """How many tables of angles the first, the second and the third pass over the same lengths make."""
    worker = jobs.build(config, init_optimizer=False, init_reference_model=False)
    calls: list[int] = []
    made = YarnRotaryEmbedding.get_emb

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        return made(*arguments, **options)

    counts = []
    with mock.patch.object(YarnRotaryEmbedding, "get_emb", counted):
        for _ in range(3):
            before = len(calls)
            jobs.logprobs_of(worker, batch)
            counts.append(len(calls) - before)
    worker.backend.close()
    return counts


@newest_megatron
def test_many_layers_share_a_table_of_angles(pool: WorkerPool, tmp_path: Path) -> None:
    """More layers than Megatron-Core keeps tables for; one length in one pass."""
    model = make_tiny(tmp_path / "deep", "deepseek_v3_dense", tied=False, seed=65, layers=34)
    batch, config = make_batch(rows=3, length=13, seed=3), policy_config(model, logprob_batch_size=3)
    assert pool.run(1, tables_made, config, batch) == [[1, 0, 0]]


@newest_megatron(layout=NEWEST)
@sampled(1)
@pytest.mark.parametrize(("layout", "family", "batching", "dispatcher", "balancing"), SPARSE)
def test_three_adam_steps_equal_transformers(
    pool: WorkerPool, models: dict[str, Path], layout: str, family: str, batching: str, dispatcher: str, balancing: str
) -> None:
    (world, changes), model = LAYOUTS[layout], models[family]
    options = {"batching": batching, "dispatcher": dispatcher, "balancing": balancing, "aux": 0.7}
    check_training(pool, world, model, policy_config(model, mbs=2, clip=0.5, **options, **changes), ClippedPGLossFn(PG_LOSS))


@newest_megatron
@pytest.mark.parametrize(
    ("layout", "family"),
    [("cp2-ep2", "deepseek_v2_groups"), pytest.param("pp3", "deepseek_v3", marks=slow)],
)
def test_logprobs_equal_transformers(pool: WorkerPool, models: dict[str, Path], layout: str, family: str) -> None:
    (world, changes), model, batch = LAYOUTS[layout], models[family], make_batch(rows=7, length=19, seed=3)
    for result in pool.run(world, jobs.logprobs, policy_config(model, temperature=0.7, batching="packed", **changes), batch):
        torch.testing.assert_close(result, mixtures.logprobs(model, batch, 0.7), atol=1e-5, rtol=0)


@slow
@newest_megatron(layout=NEWEST)
@pytest.mark.parametrize(("layout", "family"), [("tp2-sp-ep2-etp2", "deepseek_v3"), ("cp2-ep2", "deepseek_v2")])
def test_greedy_equals_transformers(pool: WorkerPool, models: dict[str, Path], layout: str, family: str) -> None:
    """With the keys and values of Megatron's cache, which are of different widths."""
    (world, changes), model, batch = LAYOUTS[layout], models[family], prompts(rows=8)
    for result in pool.run(world, jobs.generate, policy_config(model, generation={"stop_token_ids": []}, **changes), batch, True):
        assert [row["ids"] for row in result["rows"]] == mixtures.greedy(model, batch, 8)
        check_logprobs(result["rows"])


@newest_megatron
@slow
@pytest.mark.parametrize(
    ("written", "read"), [pytest.param("tp2-sp-ep2-etp2", "tp2-sp-ep2-etp2", marks=slow), ("tp2-sp-ep2-etp2", "pp2-ep2")]
)
def test_resume(pool: WorkerPool, models: dict[str, Path], tmp_path: Path, written: str, read: str) -> None:
    """A run goes on as the undisturbed one: bit for bit in the same layout, within rounding in another."""
    model, (world, changes), (new_world, new_changes) = models["deepseek_v3"], LAYOUTS[written], LAYOUTS[read]
    undisturbed = pool.run(world, train_and_save, policy_config(model, **changes), tmp_path)[0]
    resumed = pool.run(new_world, load_and_train, policy_config(model, **new_changes), tmp_path, False)[0]
    torch.testing.assert_close(resumed["measured"], undisturbed["measured"], atol=1e-6, rtol=1e-5)
    for name, tensor in undisturbed["weights"].items():
        assert (resumed["weights"][name] - tensor).norm() < 1e-5 * tensor.norm(), name
        assert written != read or torch.equal(resumed["weights"][name], tensor), name


def export_and_warnings(config: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[str]]:
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megarl.models.megatron.backend")
    logger.addHandler(handler)
    try:
        return export(config), warnings
    finally:
        logger.removeHandler(handler)


def test_layers_that_predict_further_are_left_out_aloud(pool: WorkerPool, models: dict[str, Path], tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "hf", "deepseek_v3", tied=False, seed=3)
    expected = mixtures.weights_of(mixtures.load(model), tmp_path / "expected")
    add_prediction_layers(model)
    for weights, warnings in pool.run(2, export_and_warnings, policy_config(model, tp=2, sp=True, multiple=2)):
        assert weights.keys() == expected.keys() and all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
        assert any("1 layers that predict further tokens" in text for text in warnings)


@slow
@pytest.mark.parametrize("precision", ["bfloat16", pytest.param("float16", marks=slow)])
def test_half_precision_trains_in_step(pool: WorkerPool, models: dict[str, Path], precision: str) -> None:
    norms = {}
    for name in ("float32", precision):
        config = policy_config(models["deepseek_v2"], precision=name, tp=2, sp=True, multiple=2)
        norms[name] = pool.run(2, jobs.train, config, [make_batch(rows=8, length=12, seed=1)], NLLLoss())[0]["norms"][0]
    assert norms[precision] == pytest.approx(norms["float32"], rel=0.05)
