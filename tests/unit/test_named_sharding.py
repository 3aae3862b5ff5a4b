"""Rank grids, against plain indexing of numpy arrays."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.distributed.named_sharding import NamedSharding

AXES = ["pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"]


@given(sizes=st.tuples(*[st.integers(1, 4)] * 4), data=st.data())
def test_coordinates_and_ranks_are_inverse(sizes: tuple[int, ...], data: st.DataObject) -> None:
    layout = np.array(data.draw(st.permutations(range(int(np.prod(sizes)))))).reshape(sizes)
    grid = NamedSharding(layout, AXES)
    assert (
        grid.shape == dict(zip(AXES, sizes, strict=True))
        and grid.names == AXES
        and grid.ndim == 4
        and grid.size == layout.size
    )
    for rank in range(grid.size):
        coordinates = grid.get_worker_coords(rank)
        assert layout[tuple(coordinates[axis] for axis in AXES)] == rank
        assert grid.get_ranks_by_coord(**coordinates) == [rank]
        assert grid.get_ranks(**coordinates) == rank
    chosen = data.draw(st.integers(0, sizes[1] - 1))
    assert grid.get_ranks_by_coord(data_parallel=chosen) == sorted(layout[:, chosen].ravel().tolist())
    part = grid.get_ranks(data_parallel=chosen)
    assert part == NamedSharding(layout[:, chosen], [AXES[0], AXES[2], AXES[3]])
    assert grid.get_ranks() == grid


def test_lookups_and_their_errors() -> None:
    grid = NamedSharding([[7, 3, 5], [0, 2, 9]], ["a", "b"])
    assert (grid.get_axis_index("b"), grid.get_axis_size("b")) == (1, 3)
    assert grid.get_ranks_by_coord(a=0) == [3, 5, 7]
    assert grid.get_ranks_by_coord(b=3) == [] and grid.get_ranks_by_coord(a=-1) == []
    assert isinstance(grid.get_ranks(a=1, b=2), int)
    with pytest.raises(IndexError, match="Index 3 is out of bounds for axis 'b'"):
        grid.get_ranks(b=3)
    with pytest.raises(IndexError, match="Index -1 is out of bounds for axis 'a'"):
        grid.get_ranks(a=-1)
    for lookup in (grid.get_ranks, grid.get_ranks_by_coord):
        with pytest.raises(ValueError, match="Invalid axis name: 'x'"):
            lookup(x=0)
    with pytest.raises(ValueError, match="Invalid axis name: 'x'"):
        grid.get_axis_index("x")
    with pytest.raises(ValueError, match="Invalid axis name: 'x'"):
        grid.get_axis_size("x")
    with pytest.raises(ValueError, match=r"Worker ID 4 not found in sharding layout\."):
        grid.get_worker_coords(4)


@pytest.mark.parametrize(
    "layout, names, message",
    [
        ([[0, 1]], ["a"], "Number of dimensions.*must match"),
        ([0, 1], ["a", "b"], "Number of dimensions.*must match"),
        ([0, 1.5], ["a"], "Layout must contain only integer rank IDs"),
        ([0, float("nan")], ["a"], "Layout must contain only integer rank IDs"),
        (["0", "1"], ["a"], "Layout must contain only integer rank IDs"),
        ([True, False], ["a"], "Layout must contain only integer rank IDs"),
        ([0, -1], ["a"], "Layout must contain only integer rank IDs"),
        ([[0, 1], [2]], ["a", "b"], "Layout must contain only integer rank IDs"),
        ([[0, 1], [1, 2]], ["a", "b"], "Duplicate ranks found"),
        ([[0, 1]], ["a", "a"], "not distinct"),
    ],
)
def test_malformed_layouts(layout: list, names: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NamedSharding(layout, names)


def test_whole_floats_count_as_ranks() -> None:
    assert NamedSharding([0.0, 1.0], ["a"]) == NamedSharding([0, 1], ["a"])


def test_value_semantics() -> None:
    grid = NamedSharding(np.arange(6).reshape(2, 3), ["a", "b"])
    grid.layout[0, 0] = 99
    grid.names.append("c")
    assert grid.layout[0, 0] == 0 and grid.names == ["a", "b"]
    twin = pickle.loads(pickle.dumps(grid))
    assert twin == grid and hash(twin) == hash(grid)
    assert grid != NamedSharding(np.arange(6).reshape(2, 3), ["b", "a"]) and grid != NamedSharding(
        np.arange(6).reshape(3, 2), ["a", "b"]
    )
    assert grid != "grid"
    assert "a" in repr(grid) and "[[0, 1, 2], [3, 4, 5]]" in repr(grid)
