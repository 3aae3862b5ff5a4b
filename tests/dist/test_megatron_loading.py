"""Weights of a model's files on the ranks of Megatron: each slice is read by one of the ranks that hold it,
and is on all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from converters.checkpoint.source import open_source
from megarl.parity.pool import WorkerPool
from tests.dist import jobs
from tests.models import make_tiny, policy_config
from tests.tiers import sampled

LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "dp2": (2, "float32", {}),
    "dp2-bfloat16": (2, "bfloat16", {}),
    "cp2-dp2": (4, "float32", {"cp": 2, "multiple": 4}),
    "tp2-dp2": (4, "float32", {"tp": 2}),
}


@sampled(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_get_the_bytes_that_the_first_of_them_read(
    pool: WorkerPool, tiny_models: dict[str, Path], layout: str
) -> None:
    world, precision, changes = LAYOUTS[layout]
    results = pool.run(
        world, jobs.loaded, policy_config(tiny_models["qwen2"], precision=precision, **changes)
    )
    parts = changes.get("tp", 1)
    assert sum(bool(read) for read, _ in results) == parts
    assert results[0][0] and not results[parts][0]
    source = open_source(tiny_models["qwen2"])
    for _, weights in results:
        for name, weight in weights.items():
            assert torch.equal(weight, source.read(name).to(weight.dtype)), name
        assert set(weights) == set(source.names())


def test_experts_are_read_once_by_each_of_their_groups(pool: WorkerPool, tmp_path: Path) -> None:
    """Two halves of the experts on four data-parallel ranks: the rest of the model is read by one rank, each
    half by one."""
    model = make_tiny(tmp_path / "model", "qwen3_moe_mixed", tied=False, seed=5, layers=4)
    results = pool.run(4, jobs.loaded, policy_config(model, ep=2))
    experts = [{name for name in read if ".experts." in name} for read, _ in results]
    assert [bool(found) for found in experts] == [True, True, False, False] and not experts[0] & experts[1]
    assert [bool(set(read) - own) for (read, _), own in zip(results, experts, strict=True)] == [
        True,
        False,
        False,
        False,
    ]
    source = open_source(model)
    for _, weights in results:
        assert all(torch.equal(weight, source.read(name)) for name, weight in weights.items())


def test_a_rank_that_cannot_read_keeps_no_other_one_waiting(
    pool: WorkerPool, tiny_models: dict[str, Path]
) -> None:
    first, *others = pool.run(4, jobs.not_loaded, policy_config(tiny_models["qwen2"], tp=2))
    assert first == "OSError: the disk is gone"
    assert all(said.startswith("ModelError: another rank could not read the weights in ") for said in others)


BYTES: dict[str, dict[str, Any]] = {
    "dp4": {},
    "tp2-dp2": {"tp": 2},
    "pp2-dp2": {"pp": 2, "first": 1, "last": 2},
    "tp2-pp2": {"tp": 2, "pp": 2, "first": 1, "last": 2},
}


@pytest.mark.parametrize("layout", BYTES)
def test_bytes_go_only_to_ranks_that_keep_them(
    pool: WorkerPool, tiny_models: dict[str, Path], layout: str
) -> None:
    """A rank gets what it keeps or reads it; of the other stages and tensor-parallel ranks it gets
    nothing."""
    counted = pool.run(4, jobs.loaded_bytes, policy_config(tiny_models["qwen2"], **BYTES[layout]))
    assert all(rank["read"] + rank["got"] == rank["own"] for rank in counted), counted
    parts = {"dp4": 1, "tp2-dp2": 2, "pp2-dp2": 2, "tp2-pp2": 4}[layout]
    assert [bool(rank["read"]) for rank in counted].count(True) == parts
    got, whole = sum(rank["got"] for rank in counted), counted[0]["model"]
    # norms, biases of row-parallel layers and padding of the vocabulary are on every tensor-parallel rank
    assert abs(got - (4 - parts) / parts * whole) <= 0.02 * whole * (4 - parts)


def test_experts_go_only_to_ranks_that_keep_them(pool: WorkerPool, tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "model", "qwen3_moe_mixed", tied=False, seed=5, layers=4)
    counted = pool.run(4, jobs.loaded_bytes, policy_config(model, ep=2))
    assert all(rank["read"] + rank["got"] == rank["own"] < 0.9 * rank["model"] for rank in counted), counted
    assert sum(rank["got"] for rank in counted) < 0.9 * 3 * counted[0]["model"]
