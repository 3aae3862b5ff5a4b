"""Bytes that a worker allocates, counted: what a save and a load of the optimizer need beside the model, and
what a backward pass keeps."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from converters.checkpoint.boxes import part
from converters.torch_dist.reader import TorchDistCheckpoint
from megarl.models.megatron.state_stream import boxes
from megarl.parity.pool import WorkerPool
from tests.dist.batches import make_batch
from tests.dist.counted_memory import MEBIBYTE, Allocations, saved_for_backward
from tests.dist.dtensor_jobs import dtensor_config
from tests.dist.fsdp1_jobs import fsdp1_config
from tests.dist.memory_jobs import (
    kept_for_backward,
    load_and_count,
    load_weights_and_count,
    peaks_of_steps,
    save_and_count,
)
from tests.dist.save_jobs import differences, files_of, largest_piece
from tests.models import LAYERS, policy_config, tiny_config
from tests.tiers import newest_megatron, sampled

SLICE = 4096
SMALL = 64
"""Bytes for what Megatron-Core makes of its schedule."""


def test_allocations_are_counted_while_they_last() -> None:
    with Allocations() as counted:
        torch.ones(100)
        kept = torch.ones(25).view(5, 5)
        kept.add_(1)
        torch.ones(50)
        torch.ones(200, dtype=torch.int64)
    assert counted.peak == 4 * 100
    with Allocations() as counted:
        both = torch.ones(100), torch.ones(20)
    assert counted.peak == 4 * 120 and len(both) == 2
    with Allocations() as counted:
        emptied = torch.ones(100)
        emptied.untyped_storage().resize_(0)
        torch.ones(90)
    assert counted.peak == 4 * 100


class Doubled(torch.autograd.Function):
    """Saves two views of one tensor."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        double = value * 2
        ctx.save_for_backward(double[:1], double[1:])
        return double.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.cat(ctx.saved_tensors) * gradient


def test_what_autograd_saves_counts_once_and_as_long_as_it_is_saved() -> None:
    value = torch.ones(4, MEBIBYTE // 16, requires_grad=True)  # 1 MiB
    weight = torch.nn.Parameter(torch.ones(MEBIBYTE // 16, 8))
    with saved_for_backward() as saved:
        for _ in range(3):
            Doubled.apply(value).backward()
        assert saved.peak == 1.0, "one at a time"
        losses = [Doubled.apply(value) for _ in range(3)]
        assert saved.peak == 3.0
        del losses
    with saved_for_backward() as saved:
        product = value @ weight + value @ weight.t().t()
        assert saved.peak == 1.0, "the value once, the parameter and its views not at all"
        del product
    exact = torch.full_like(value, 2.0 * 3)
    assert value.grad is not None and torch.equal(value.grad, exact), "counting changes no gradient"


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "dp2": (2, {}),
    "buckets": (2, {"overlap": True, "bucket_size": 3001}),
}


@sampled(1)
@newest_megatron
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_save_takes_a_piece(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, layout: str
) -> None:
    """On every rank, what it writes of one tensor, and nothing of what the others write."""
    world, changes = LAYOUTS[layout]
    config = policy_config(tiny_models["qwen2-tied"], precision="bfloat16", **changes)
    counted = pool.run(world, save_and_count, config, make_batch(8, 9, seed=0), tmp_path)
    stored = TorchDistCheckpoint(tmp_path / "pieces")
    state = sum(4 * torch.Size(stored.shape(key)).numel() for key in stored)
    largest = largest_piece(tmp_path / "pieces")
    assert state > 10 * largest, "too small a model to see a difference"
    assert all(rank["pieces"] <= largest + SMALL for rank in counted), counted
    assert min(rank["whole"] for rank in counted) > state, "what is not streamed is seen"
    assert differences(tmp_path / "pieces", tmp_path / "whole") == []


@sampled(1)
@newest_megatron
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_load_takes_a_slice(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, layout: str
) -> None:
    """On every rank one slice, whatever the size of a tensor; and the state is that which was saved."""
    world, changes = LAYOUTS[layout]
    config = policy_config(tiny_models["qwen2-tied"], precision="bfloat16", **changes)
    pool.run(world, save_and_count, config, make_batch(8, 9, seed=0), tmp_path)
    counted = pool.run(world, load_and_count, config, tmp_path, SLICE)
    stored = TorchDistCheckpoint(tmp_path / "pieces")
    state = sum(4 * torch.Size(stored.shape(key)).numel() for key in stored)
    assert all(rank["slices"] <= SLICE + SMALL for rank in counted), counted
    assert all(rank["whole"] > state > 100 * SLICE for rank in counted), "what is not streamed is seen"
    files, again = (files_of(tmp_path / name) for name in ("pieces", "again"))
    assert len(files) == world and files == again


@newest_megatron
@pytest.mark.parametrize("layout", ["alone", "dp2"])
def test_a_load_of_weights_takes_a_tensor_and_the_one_before(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, layout: str
) -> None:
    """torch's reader has a name for what it has read until it has read the next one: two tensors that follow
    each other in the plan.

    There is nothing beside them, since where that memory is given back at once, it is one tensor. Without
    outlines Megatron-Core puts the gated layers together in other memory, all before any is copied."""
    world, changes = LAYOUTS[layout]
    config = policy_config(tiny_models["qwen2"], precision="bfloat16", **changes)
    counted = pool.run(world, load_weights_and_count, config, tmp_path / "saved")
    stored = TorchDistCheckpoint(tmp_path / "saved")
    for rank in counted:
        assert rank["whole again"]
        assert sum(rank["read"]) == sum(2 * torch.Size(stored.shape(key)).numel() for key in stored), (
            "every tensor is read once"
        )
        assert rank["one by one"] == max(rank["read"])
        assert rank["placed"] == max(map(sum, itertools.pairwise(rank["read"]))) < rank["copied"], counted


@pytest.mark.parametrize("shape", [(), (7,), (1, 1), (3, 4), (4, 1, 3), (2, 3, 4)], ids=str)
def test_boxes_are_a_range(shape: tuple[int, ...]) -> None:
    """Of every range of every shape."""
    elements = torch.arange(torch.Size(shape).numel())
    for start in range(len(elements) + 1):
        for stop in range(start, len(elements) + 1):
            found = [part(elements.view(shape), box) for box in boxes(shape, start, stop)]
            assert torch.equal(
                torch.cat([elements[:0], *(each.flatten() for each in found)]), elements[start:stop]
            ), (start, stop)
            assert len(found) <= max(1, 2 * len(shape) - 1)


def test_recomputed_parts_keep_less(pool: WorkerPool, tiny_models: dict[str, Path]) -> None:
    """Without the MLPs at least what the estimate of memory counts for them: gate, up, activated gate and
    their product."""
    batch, rows, length = make_batch(8, 40, seed=0), 8, 40
    ways: dict[str, Any] = {
        "nothing": False,
        "attention": ["core_attn"],
        "mlp": ["mlp"],
        "both": ["mlp", "core_attn"],
        "layers": True,
    }
    kept = {}
    for name, recompute in ways.items():
        (kept[name],) = pool.run(
            1, kept_for_backward, policy_config(tiny_models["qwen3"], mbs=rows, recompute=recompute), batch
        )
    assert (
        kept["layers"] < kept["both"] < kept["mlp"] < kept["nothing"]
        and kept["both"] < kept["attention"] < kept["nothing"]
    )
    width = tiny_config("qwen3", tied=False).intermediate_size
    # one MLP is there again while its layer goes back
    assert kept["nothing"] - kept["mlp"] >= (LAYERS - 1) * rows * length * 4 * width * 4 / MEBIBYTE, kept


@pytest.mark.parametrize("make", [policy_config, dtensor_config])
def test_context_ranks_keep_their_share(
    pool: WorkerPool, tiny_models: dict[str, Path], make: Callable[..., Any]
) -> None:
    """Of one sequence; where keys and values are gathered, also those of the other ranks."""
    batch = make_batch(1, 40, seed=0)
    batch["input_lengths"][:] = 40
    sizes = {"gbs": 1, "mbs": 1, "multiple": 8}
    (alone,) = pool.run(1, kept_for_backward, make(tiny_models["qwen3"], **sizes), batch)
    for comm, ranks, share in (
        ("p2p", 2, 0.55),
        ("p2p", 4, 0.275),
        ("all_gather", 2, 0.59),
        ("all_gather", 4, 0.32),
    ):
        kept = pool.run(
            ranks, kept_for_backward, make(tiny_models["qwen3"], cp=ranks, comm=comm, **sizes), batch
        )
        assert max(kept) <= share * alone, (comm, ranks)


@pytest.mark.parametrize("make", [policy_config, dtensor_config, fsdp1_config])
def test_memory_does_not_grow_with_steps(
    pool: WorkerPool, tiny_models: dict[str, Path], make: Callable[..., Any]
) -> None:
    ((one, many),) = pool.run(1, peaks_of_steps, make(tiny_models["qwen3"]), make_batch(8, 9, seed=0))
    assert one == many > 0
