"""A grid of ranks with named axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megarl.errors import MegarlError


class ShardingError(MegarlError, ValueError):
    """The layout of ranks is malformed, or does not contain an axis or a rank."""


class ShardingIndexError(MegarlError, IndexError):
    """A coordinate is out of range for its axis."""


class NamedSharding:
    """Ranks in an n-dimensional grid whose axes have names.

    Example: in ``NamedSharding(numpy.arange(4).reshape(2, 2), ["data_parallel", "tensor_parallel"])``, rank 2
    has the coordinates data_parallel 1 and tensor_parallel 0.

    Args:
        layout: array or nested lists of distinct ranks. Floats with integer values are accepted.
        names: one distinct name per axis.

    Raises:
        ShardingError: (a ValueError) the names do not match the layout, or the layout does not contain
            distinct ranks.
    """

    def __init__(self, layout: Sequence[Any] | np.ndarray, names: Sequence[str]) -> None:
        self._layout = _as_rank_array(layout)
        self._names = list(names)
        if self._layout.ndim != len(self._names):
            raise ShardingError(
                f"Number of dimensions of the layout ({self._layout.ndim}) must match the number of axis "
                f"names ({len(self._names)}: "
                f"{self._names}); give one name an axis"
            )
        if len(set(self._names)) != len(self._names):
            raise ShardingError(f"Axis names {self._names} are not distinct; rename one")
        self._coordinates = {
            int(rank): tuple(map(int, place)) for place, rank in np.ndenumerate(self._layout)
        }

    @property
    def shape(self) -> dict[str, int]:
        """Size of each axis, in axis order."""
        return dict(zip(self._names, self._layout.shape, strict=True))

    @property
    def names(self) -> list[str]:
        """Axis names, in axis order."""
        return list(self._names)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self._layout.ndim

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._layout.size

    @property
    def layout(self) -> np.ndarray:
        """A copy of the ranks as an int64 array."""
        return self._layout.copy()

    def get_worker_coords(self, worker_id: int) -> dict[str, int]:
        """Return the coordinates of a rank.

        Raises:
            ShardingError: the rank is not in the layout.
        """
        if worker_id not in self._coordinates:
            raise ShardingError(
                f"Worker ID {worker_id} not found in sharding layout. It holds {self.size} ranks, shape "
                f"{self.shape}"
            )
        return dict(zip(self._names, self._coordinates[worker_id], strict=True))

    def get_ranks_by_coord(self, **coords: int) -> list[int]:
        """Return all ranks with the given coordinates, sorted. Axes that are not given are not restricted.

        The list is empty if a coordinate is out of range for its axis.

        Raises:
            ShardingError: an axis name is unknown.
        """
        for axis, index in coords.items():
            if not 0 <= index < self.get_axis_size(axis):
                return []
        selected = self._layout[self._selector(coords)]
        return sorted(map(int, np.ravel(selected)))

    def get_ranks(self, **coords: int) -> NamedSharding | int:
        """Return the sub-grid with the given coordinates, over the remaining axes; or a single rank if all
        axes are given.

        Raises:
            ShardingError: an axis name is unknown.
            ShardingIndexError: (an IndexError) a coordinate is out of range for its axis.
        """
        for axis, index in coords.items():
            size = self.get_axis_size(axis)
            if not 0 <= index < size:
                raise ShardingIndexError(
                    f"Index {index} is out of bounds for axis '{axis}' of size {size}; use 0 to {size - 1}"
                )
        selected = self._layout[self._selector(coords)]
        remaining = [name for name in self._names if name not in coords]
        return NamedSharding(selected, remaining) if remaining else int(selected)

    def get_axis_index(self, axis: str) -> int:
        """Return the index of an axis.

        Raises:
            ShardingError: the name is unknown.
        """
        if axis not in self._names:
            raise ShardingError(f"Invalid axis name: '{axis}'. Valid names are {self._names}")
        return self._names.index(axis)

    def get_axis_size(self, axis: str) -> int:
        """Return the size of an axis.

        Raises:
            ShardingError: the name is unknown.
        """
        return int(self._layout.shape[self.get_axis_index(axis)])

    def _selector(self, coords: dict[str, int]) -> tuple[int | slice, ...]:
        return tuple(coords.get(name, slice(None)) for name in self._names)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NamedSharding):
            return NotImplemented
        return self._names == other._names and np.array_equal(self._layout, other._layout)

    def __hash__(self) -> int:
        # Equal grids have equal bytes: all layouts are int64, and tobytes uses C order.
        return hash((tuple(self._names), self._layout.shape, self._layout.tobytes()))

    def __repr__(self) -> str:
        return f"NamedSharding(shape={self.shape}, names={self._names}, layout={self._layout.tolist()})"


def _as_rank_array(layout: Sequence[Any] | np.ndarray) -> np.ndarray:
    """Return the layout as an int64 array of distinct, nonnegative ranks."""
    only_integers = "Layout must contain only integer rank IDs"
    try:
        given = np.asarray(layout)
    except ValueError as error:
        raise ShardingError(
            f"{only_integers} in a full grid, got {layout!r} ({error}); give every row the same length"
        ) from None
    # Reject booleans and strings, but accept floats with integer values, as NeMo-RL's class does.
    if given.size and not (np.issubdtype(given.dtype, np.integer) or np.issubdtype(given.dtype, np.floating)):
        raise ShardingError(f"{only_integers}, got values of type {given.dtype}; write ranks 0, 1, 2, ...")
    if not np.all(np.isfinite(given)) or np.any(given != np.floor(given)) or np.any(given < 0):
        raise ShardingError(f"{only_integers} of at least 0, got {given.tolist()}; write ranks 0, 1, 2, ...")
    ranks = given.astype(np.int64)
    values, counts = np.unique(ranks, return_counts=True)
    if np.any(counts > 1):
        raise ShardingError(
            f"Duplicate ranks found in layout: {values[counts > 1].tolist()}; every rank may appear once"
        )
    return ranks
