"""Operations on the values of a batch (tensors, or lists with one item a row) that treat both alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch

from megarl.errors import BatchError


def count_rows(columns: Mapping[str, Any]) -> int:
    """The common number of rows of all columns; 0 without columns.

    Raises:
        BatchError: columns differ, or one has no rows at all (a scalar).
    """
    sizes: dict[str, int] = {}
    for key, value in columns.items():
        if not hasattr(value, "__len__") or (isinstance(value, torch.Tensor) and value.ndim == 0):
            raise BatchError(f"batch key {key!r} holds {type(value).__name__} without rows; give a tensor [B, ...] or a list of B items")
        sizes[key] = len(value)
    if len(set(sizes.values())) > 1:
        raise BatchError(f"Batch sizes are not the same across the rollout batch: {sizes}; give every key the same number of rows")
    return next(iter(sizes.values()), 0)


def take_rows(value: Any, rows: Sequence[int]) -> Any:
    """The given rows, in that order; always a copy for tensors, since a view would carry its whole storage along when it is pickled."""
    if isinstance(value, torch.Tensor):
        return value.index_select(0, torch.as_tensor(rows, dtype=torch.int64, device=value.device))
    return [value[row] for row in rows]


def join_rows(key: str, values: Sequence[Any], pad_value: float) -> Any:
    """One column out of many: lists joined; tensors joined along dim 0 and right-padded along dim 1 to the longest.

    Args:
        key: for messages.
        values: all lists, or all tensors with the same number of dimensions and the same dimensions from dim 2 on.
        pad_value: written on the padding.

    Raises:
        NotImplementedError: a value is neither a tensor nor a list, or the two are mixed.
        BatchError: the tensors do not fit together.
    """
    if all(isinstance(value, list) for value in values):
        return [item for value in values for item in value]
    if not all(isinstance(value, torch.Tensor) for value in values):
        kinds = sorted({type(value).__name__ for value in values})
        raise NotImplementedError(
            f"batch key {key!r} holds {kinds}; only tensors alone or lists alone can be joined, convert the values first"
        )
    shapes = [tuple(value.shape) for value in values]
    if any(len(shape) != len(shapes[0]) or not shape or shape[2:] != shapes[0][2:] for shape in shapes):
        raise BatchError(
            f"batch key {key!r} holds tensors of shapes {shapes}, which differ in more than dims 0 and 1; "
            "give them the same number of dimensions and the same sizes from dim 2 on"
        )
    if len(shapes[0]) == 1 or len({shape[1] for shape in shapes}) == 1:
        return torch.cat(list(values))
    return _join_padded(values, max(shape[1] for shape in shapes), pad_value)


def _join_padded(values: Sequence[torch.Tensor], width: int, pad_value: float) -> torch.Tensor:
    dtype = reduce(torch.promote_types, (value.dtype for value in values))
    rows = sum(value.shape[0] for value in values)
    joined = torch.full((rows, width, *values[0].shape[2:]), pad_value, dtype=dtype, device=values[0].device)
    start = 0
    for value in values:
        joined[start : start + value.shape[0], : value.shape[1]] = value
        start += value.shape[0]
    return joined
