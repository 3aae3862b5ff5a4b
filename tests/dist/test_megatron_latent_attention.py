"""Attention of DeepSeek-V3, which goes through latent vectors, without experts; that it trains is in
``test_training.py``.

Queries and keys are wider than values, a part of every key is one for all heads, and YaRN also scales the
scores; the sequences are longer than the length that it was scaled from.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from safetensors.torch import load_file
from torch import Tensor

from converters.exporting import export_model, plan_export
from converters.opening import open_megatron
from megarl.algorithms.loss_functions import NLLLoss
from megarl.parity.pool import WorkerPool
from tests.dist import jobs
from tests.dist.batches import make_batch
from tests.dist.checks import check_equal
from tests.models import make_tiny, policy_config
from tests.prediction_layers import add_prediction_layers
from tests.tiers import newest_megatron


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("latent") / "dense", "deepseek_v3_dense", tied=False, seed=64)


def tables_made(config: dict[str, Any], batch: dict[str, Tensor]) -> list[int]:
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


def train_and_export(config: dict[str, Any], directory: str) -> tuple[dict[str, Tensor], list[str]]:
    """Weights after a step, which are written as a model and as a checkpoint, and warnings."""
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megarl.models.megatron.backend")
    logger.addHandler(handler)
    try:
        worker = jobs.build(config, init_reference_model=False)
        jobs.step(worker, make_batch(rows=8, length=9, seed=1), NLLLoss())
        worker.export_hf(f"{directory}/hf")
        worker.save_checkpoint(f"{directory}/weights")
        weights = jobs.full_weights(worker)
        worker.backend.close()
        return weights, warnings
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_layers_that_predict_further_are_exported_as_they_were(
    pool: WorkerPool, tmp_path: Path, family: str
) -> None:
    """In a model as in what becomes of a checkpoint; without copies of embedding and output layer, which are
    trained."""
    model = make_tiny(tmp_path / "hf", family, tied=False, seed=3)
    added = add_prediction_layers(model, count=2)
    results = pool.run(
        2, train_and_export, policy_config(model, tp=2, sp=True, multiple=2), str(tmp_path / "out")
    )
    weights = results[0][0]
    kept = {
        name: tensor
        for name, tensor in added.items()
        if not name.endswith(("embed_tokens.weight", "head.weight"))
    }
    assert len(added) - len(kept) == 4 and not weights.keys() & added.keys()
    exported = load_file(tmp_path / "out" / "hf" / "model.safetensors")
    check_equal(exported, weights | kept)
    # by one rank
    told = f"not trained, and exported as it was: prediction layer ({len(kept)} tensors)"
    assert [told in text for _, warnings in results for text in warnings].count(True) == 1
    checkpoint = open_megatron(tmp_path / "out" / "weights")
    assert (
        plan_export(checkpoint).notes["prediction_layers"].startswith("2 counted in config.json are missing")
    )
    completed = plan_export(checkpoint, untouched_from=model)
    assert "prediction_layers" not in completed.notes
    export_model(completed, tmp_path / "exported")
    check_equal(load_file(tmp_path / "exported" / "model.safetensors"), exported)
