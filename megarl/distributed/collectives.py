"""Collectives for data of different size on each rank. They work in any process group, on the device that its backend serves."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megarl.errors import BatchError

ObjectT = TypeVar("ObjectT")

_MAX_DIMENSIONS = 8
_DTYPES: tuple[torch.dtype, ...] = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


def rebalance_nd_tensor(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The rows of all ranks, stacked in rank order, on every rank.

    Args:
        tensor: ``[rows, ...]``, the number of rows may differ between ranks (also be 0); the other dimensions and the dtype may not.
        group: process group, None for the default one.

    Returns:
        ``[sum of rows, ...]``, detached, on the device of ``tensor``.

    Raises:
        BatchError: on every rank, if dtypes or trailing dimensions differ.
    """
    row_counts = _gather_row_counts(tensor, group)
    row_bytes = _row_bytes(tensor)
    padded = torch.zeros(max(row_counts) * row_bytes, dtype=torch.uint8, device=tensor.device)
    own = _as_bytes(tensor)
    padded[: own.numel()] = own
    received = [torch.empty_like(padded) for _ in row_counts]
    dist.all_gather(received, padded, group=group)
    rows = torch.cat([chunk[: count * row_bytes] for chunk, count in zip(received, row_counts, strict=True)])
    return _from_bytes(rows, like=tensor, rows=sum(row_counts))


def gather_jagged_object_lists(objects: list[ObjectT], group: dist.ProcessGroup | None = None) -> list[ObjectT]:
    """The lists of all ranks joined in rank order, on every rank. Lists may have different lengths.

    Objects travel pickled between the ranks of the job, so ``group`` must hold ranks of this job only.
    """
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, objects, group=group)
    return [item for part in gathered for item in part]


def _gather_row_counts(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> list[int]:
    """Rows on every rank. All ranks see all shapes, so that all raise the same error where one would otherwise wait for ever."""
    known = tensor.dtype in _DTYPES and 1 <= tensor.ndim <= _MAX_DIMENSIONS
    header = [_DTYPES.index(tensor.dtype) if known else -1, tensor.ndim, *list(tensor.shape)[:_MAX_DIMENSIONS]]
    header += [0] * (_MAX_DIMENSIONS + 2 - len(header))
    mine = torch.tensor(header, dtype=torch.int64, device=tensor.device)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    headers = [part.tolist() for part in gathered]
    if any(entry[0] < 0 for entry in headers):
        ranks = [rank for rank, entry in enumerate(headers) if entry[0] < 0]
        raise BatchError(
            f"ranks {ranks} hold a tensor that has no rows, more than {_MAX_DIMENSIONS} dimensions or an unsupported dtype; "
            f"give a tensor of 1 to {_MAX_DIMENSIONS} dimensions with one of {[str(dtype) for dtype in _DTYPES]}"
        )
    if any(entry[:2] + entry[3:] != headers[0][:2] + headers[0][3:] for entry in headers):
        described = [f"rank {rank}: {_DTYPES[entry[0]]} {entry[2 : 2 + entry[1]]}" for rank, entry in enumerate(headers)]
        raise BatchError(f"tensors differ in more than the number of rows ({'; '.join(described)}); pad them to one shape and dtype first")
    return [entry[2] for entry in headers]


def _row_bytes(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape[1:]) * tensor.element_size()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes carry every dtype over every backend; gloo has no bool, and not every operation has bfloat16."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _from_bytes(data: torch.Tensor, like: torch.Tensor, rows: int) -> torch.Tensor:
    return data.view(like.dtype).reshape(rows, *like.shape[1:])
