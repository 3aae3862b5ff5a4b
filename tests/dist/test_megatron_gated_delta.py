"""Checkpoints of gated delta nets in Megatron's GPT layers, and generation with them; that they train is in
``test_training.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.parity.pool import WorkerPool
from tests.dist import jobs, mixtures
from tests.dist.batches import make_batch
from tests.dist.checks import check_generated, check_resumed, likely_stop, prompts, transformers_greedy
from tests.dist.test_megatron_checkpoint import load_and_train, train_and_save
from tests.models import make_tiny, policy_config
from tests.tiers import newest_megatron, sampled, slow

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp1": (1, {"batching": "packed"}),
    "tp2": (2, {"tp": 2, "recompute": True}),
    "tp2-sp": (2, {"tp": 2, "sp": True, "multiple": 2, "batching": "packed"}),
    "cp2": (2, {"cp": 2, "multiple": 4, "batching": "packed", "recompute": True}),
    "cp2-ring": (2, {"cp": 2, "comm": "p2p", "multiple": 4}),
    "cp2-tp2-sp": (4, {"cp": 2, "tp": 2, "sp": True, "multiple": 8, "batching": "packed"}),
    "cp4": (4, {"cp": 4, "multiple": 8, "batching": "packed"}),
    "pp2": (2, {"pp": 2, "first": 1, "last": 2, "batching": "dynamic"}),
    "pp2-vpp2": (2, {"pp": 2, "vpp": 2, "batching": "packed"}),
    "dp2": (2, {"overlap": True, "batching": "packed"}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    root = tmp_path_factory.mktemp("hybrids")
    return {
        layers: make_tiny(root / str(layers), "qwen3_next_dense", tied=False, seed=66, layers=layers)
        for layers in (3, 4)
    }


@slow
@newest_megatron
@pytest.mark.parametrize(
    ("written", "read"), [("tp2-sp", "tp2-sp"), ("pp2", "tp2-sp"), ("tp2", "cp2"), ("cp2-tp2-sp", "tp1")]
)
def test_resume(pool: WorkerPool, models: dict[int, Path], tmp_path: Path, written: str, read: str) -> None:
    """From another model where the layout is another one, so that all of it has to come from the
    checkpoint."""
    other = (
        models[3]
        if written == read
        else make_tiny(tmp_path / "other", "qwen3_next_dense", tied=False, seed=67)
    )
    (world, changes), (new_world, new_changes) = LAYOUTS[written], LAYOUTS[read]
    before, after = (
        (world, policy_config(models[3], **changes)),
        (new_world, policy_config(other, **new_changes)),
    )
    check_resumed(pool, train_and_save, load_and_train, before, after, tmp_path)


@newest_megatron(layout=("tp2-sp",))
@sampled(2)
@pytest.mark.parametrize("layout", ["tp1", "tp2-sp", "cp2", "pp2", "pp2-vpp2"])
def test_greedy_equals_transformers(pool: WorkerPool, models: dict[int, Path], layout: str) -> None:
    """Prompts of many lengths, in several passes; rows leave when they stop."""
    (world, changes), model = LAYOUTS[layout], models[4 if "vpp" in layout else 3]
    batch = prompts(rows=8)
    for stop in ([], [likely_stop(model, batch)]):
        config = policy_config(model, generation={"stop_token_ids": stop}, **changes)
        check_generated(pool, world, config, batch, True, transformers_greedy(model, batch, 8, stop))


@newest_megatron(layout=("tp2", "cp2-tp2-sp"))
@sampled(2)
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
@pytest.mark.parametrize("layout", ["tp2", "tp2-sp", "cp2-tp2-sp", "pp2"])
def test_log_probabilities_are_those_of_transformers(
    pool: WorkerPool, tmp_path: Path, family: str, layout: str
) -> None:
    """Of rows of many lengths, packed where the layout packs, as transformers computes each by itself."""
    model = make_tiny(tmp_path / "model", family, tied=False, seed=72)
    world, changes = LAYOUTS[layout]
    batch = make_batch(rows=8, length=14, seed=4)
    expected = mixtures.logprobs(model, batch, 1.0)
    for found in pool.run(world, jobs.logprobs, policy_config(model, **changes), batch):
        torch.testing.assert_close(found, expected, atol=5e-6, rtol=0)
