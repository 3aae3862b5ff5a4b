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
from torch import Tensor

from megarl.parity.pool import WorkerPool
from tests.dist import jobs, mixtures
from tests.dist.batches import make_batch
from tests.dist.checks import check_equal
from tests.dist.test_megatron_experts import export
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


def export_and_warnings(config: dict[str, Any]) -> tuple[dict[str, Tensor], list[str]]:
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megarl.models.megatron.backend")
    logger.addHandler(handler)
    try:
        return export(config), warnings
    finally:
        logger.removeHandler(handler)


def test_layers_that_predict_further_are_left_out_aloud(pool: WorkerPool, tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "hf", "deepseek_v3", tied=False, seed=3)
    expected = mixtures.weights_of(mixtures.load(model), tmp_path / "expected")
    add_prediction_layers(model)
    results = pool.run(2, export_and_warnings, policy_config(model, tp=2, sp=True, multiple=2))
    for weights, _ in results:
        check_equal(weights, expected)
    # by one rank
    assert [
        "1 layers that predict further tokens" in text for _, warnings in results for text in warnings
    ].count(True) == 1
