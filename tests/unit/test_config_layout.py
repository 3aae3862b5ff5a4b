"""Order of ranks, layers of stages, and the arithmetic of batches, against plain references."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.config.arithmetic import BatchPlan, padded_vocabulary
from megarl.config.layout import Coordinates, Layout, layers_per_stage
from tests.tables import read_table

TABLES = read_table("config_layout.yaml")

SIZES = st.integers(1, 5)


@settings(max_examples=80, derandomize=True)
@given(pipeline=SIZES, data=SIZES, context=SIZES, tensor=SIZES, per_node=st.integers(1, 9))
def test_coordinates_are_those_of_the_rank_array(
    pipeline: int, data: int, context: int, tensor: int, per_node: int
) -> None:
    layout = Layout(pipeline, data, context, tensor, per_node)
    array = numpy.arange(pipeline * data * context * tensor).reshape(pipeline, data, context, tensor)
    assert layout.world_size == array.size
    for rank in range(layout.world_size):
        place = tuple(int(index) for index in numpy.argwhere(array == rank)[0])
        assert layout.coordinates(rank) == Coordinates(
            rank, *place, node=rank // per_node, local_rank=rank % per_node
        )


@pytest.mark.parametrize("rank", [-1, 30])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(IndexError, match=f"rank {rank} is not one of the 30"):
        Layout(5, 1, 3, 2, 30).coordinates(rank)


@pytest.mark.parametrize(
    ("arguments", "layers"),
    TABLES["layers of stages"],
)
def test_layers_of_stages(arguments: tuple[int, ...], layers: list[int]) -> None:
    assert layers_per_stage(*arguments) == layers


@pytest.mark.parametrize(
    ("arguments", "message"),
    TABLES["layers that do not divide"],
)
def test_layers_that_do_not_divide(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layers_per_stage(*arguments)


@settings(max_examples=80, derandomize=True)
@given(
    ranks=SIZES,
    micro=SIZES,
    micro_batches=SIZES,
    global_batches=SIZES,
    generations=SIZES,
    length=st.integers(1, 99),
)
def test_batches_of_a_step_by_counting(
    ranks: int, micro: int, micro_batches: int, global_batches: int, generations: int, length: int
) -> None:
    size = ranks * micro * micro_batches
    prompts = size * global_batches
    plan = BatchPlan(prompts, generations, size, ranks, micro, length)
    passes = 0
    for _ in range(0, prompts * generations, size):
        for rank in range(ranks):
            mine = range(rank * (size // ranks), (rank + 1) * (size // ranks))
            passes += len(range(0, len(mine), micro))
    assert plan.global_batches * plan.micro_batches * ranks == passes
    assert plan.global_batches == global_batches * generations
    assert passes * plan.tokens_per_micro_batch == plan.tokens_per_step
    assert plan.samples_per_rank * ranks == size


@pytest.mark.parametrize(
    ("size", "tensor", "padded"), [(100, 1, 100), (101, 2, 102), (101, 3, 102), (99, 3, 99), (1, 7, 7)]
)
def test_padded_vocabulary(size: int, tensor: int, padded: int) -> None:
    assert padded_vocabulary(size, tensor) == padded
