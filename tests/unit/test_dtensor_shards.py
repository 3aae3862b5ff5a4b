"""Where a rank's piece lies: the blocks of all ranks cover a parameter exactly."""

from __future__ import annotations

import itertools

import pytest
import torch

from megarl.models.dtensor.shards import Block
from megarl.models.huggingface.optimizer import BACKOFF, GROWTH, INITIAL, INTERVAL, LossScale


@pytest.mark.parametrize("dimension", [None, 0, 1])
@pytest.mark.parametrize(("tensor", "sharding"), [(1, 1), (2, 1), (1, 5), (2, 3), (3, 4), (2, 9)])
def test_blocks_cover_the_parameter_once(dimension: int | None, tensor: int, sharding: int) -> None:
    counts = torch.zeros(6, 12, dtype=torch.int64)
    for tensor_rank, sharding_rank in itertools.product(range(tensor), range(sharding)):
        block = Block((6, 12), dimension, tensor_rank, tensor, sharding_rank, sharding)
        counts[block.slices] += 1
    assert counts.eq(tensor if dimension is None else 1).all()


@pytest.mark.parametrize(("rows", "sharding"), [(7, 3), (2, 5), (9, 4), (1, 2)])
def test_runs_are_those_of_torch_chunk(rows: int, sharding: int) -> None:
    chunks = torch.arange(rows).chunk(sharding)
    for rank in range(sharding):
        block = Block((rows,), None, 0, 1, rank, sharding)
        expected = chunks[rank].tolist() if rank < len(chunks) else []
        assert list(range(*block.rows)) == expected


def test_a_scale_that_is_not_dynamic_lets_everything_pass() -> None:
    scale = LossScale()
    assert scale.accepts(float("nan")) and scale.accepts(1.0) and scale.factor == 1.0


def test_the_loss_scale_falls_on_overflow_and_grows_after_clean_steps() -> None:
    scale = LossScale.for_float16()
    assert not scale.accepts(float("inf")) and scale.factor == INITIAL * BACKOFF
    assert not scale.accepts(float("nan")) and scale.factor == INITIAL * BACKOFF**2
    assert all(scale.accepts(1.0) for _ in range(INTERVAL - 1)) and scale.factor == INITIAL * BACKOFF**2
    assert not scale.accepts(float("inf")) and scale.factor == INITIAL * BACKOFF**3
    assert all(scale.accepts(1.0) for _ in range(INTERVAL)) and scale.factor == INITIAL * BACKOFF**3 * GROWTH
    for _ in range(100):
        scale.accepts(float("inf"))
    assert scale.factor == 1.0
