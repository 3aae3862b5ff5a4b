"""A dictionary of columns with one row per sample: joining, sharding over data-parallel ranks,
micro-batching,
and its collectives.

Columns are tensors, or lists with one item per row. The collectives accept data of different size on each
rank, in any process group, on the device that its backend serves.
"""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import reduce
from itertools import chain
from typing import Any, Generic, Self, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.distributed.parcels import Packer, Parcels
from megarl.distributed.shard_plan import (
    DynamicBatchingArgs,
    SequencePackingArgs,
    ShardPlan,
    plan_dynamic,
    plan_even,
    plan_packed,
    plan_uneven,
)
from megarl.errors import BatchError

ObjectT = TypeVar("ObjectT")

_MAX_DIMENSIONS = 8
_OUT_OF_BAND = 5
# The header of a gather gives a dtype by its position in this tuple, so all ranks need the same order.
_DTYPES: tuple[torch.dtype, ...] = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


def rebalance_nd_tensor(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the rows of all ranks, stacked in rank order, on every rank.

    Args:
        tensor: ``[rows, ...]``. The number of rows may differ between ranks and may be 0; the other
            dimensions and the dtype may not differ.
        group: process group, None for the default one.

    Returns:
        ``[sum of rows, ...]``, detached, on the device of ``tensor``.

    Raises:
        BatchError: on every rank, if dtypes or trailing dimensions differ.
    """
    row_counts = _gather_row_counts(tensor, group)
    row_bytes = _row_bytes(tensor)
    # Pad the rows, because all_gather requires the same size on all ranks. The padding is removed afterwards.
    padded = torch.zeros(max(row_counts) * row_bytes, dtype=torch.uint8, device=tensor.device)
    own = _as_bytes(tensor)
    padded[: own.numel()] = own
    received = [torch.empty_like(padded) for _ in row_counts]
    dist.all_gather(received, padded, group=group)
    rows = torch.cat([chunk[: count * row_bytes] for chunk, count in zip(received, row_counts, strict=True)])
    return _from_bytes(rows, like=tensor, rows=sum(row_counts))


def gather_jagged_object_lists(
    objects: list[ObjectT], group: dist.ProcessGroup | None = None
) -> list[ObjectT]:
    """Return the lists of all ranks joined in rank order, on every rank. Lists may have different lengths.

    Objects travel pickled between the ranks of the job, so ``group`` must hold ranks of this job only.
    """
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, objects, group=group)
    return list(chain.from_iterable(gathered))


def _gather_row_counts(tensor: Tensor, group: dist.ProcessGroup | None) -> list[int]:
    """Return the number of rows on every rank. All ranks see all shapes, so that all raise the same error,
    where otherwise one would wait indefinitely."""
    known = tensor.dtype in _DTYPES and 1 <= tensor.ndim <= _MAX_DIMENSIONS
    header = [
        _DTYPES.index(tensor.dtype) if known else -1,
        tensor.ndim,
        *list(tensor.shape)[:_MAX_DIMENSIONS],
    ]
    # Give the header a fixed size: the ranks do not know yet whether they have the same number of dimensions.
    header += [0] * (_MAX_DIMENSIONS + 2 - len(header))
    mine = torch.tensor(header, dtype=torch.int64, device=tensor.device)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    headers = [part.tolist() for part in gathered]
    ranks = [rank for rank, entry in enumerate(headers) if entry[0] < 0]
    if ranks:
        raise BatchError(
            f"ranks {ranks} hold a tensor that has no rows, more than {_MAX_DIMENSIONS} dimensions or an "
            "unsupported dtype; "
            f"give a tensor of 1 to {_MAX_DIMENSIONS} dimensions with one of "
            f"{list(map(str, _DTYPES))}"
        )
    # Compare all entries but entry 2, the number of rows, which alone may differ.
    if any(entry[:2] + entry[3:] != headers[0][:2] + headers[0][3:] for entry in headers):
        described = [
            f"rank {rank}: {_DTYPES[entry[0]]} {entry[2 : 2 + entry[1]]}"
            for rank, entry in enumerate(headers)
        ]
        raise BatchError(
            f"tensors differ in more than the number of rows ({'; '.join(described)}); pad them to one "
            "shape and dtype first"
        )
    return [entry[2] for entry in headers]


def _row_bytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape[1:]) * tensor.element_size()


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes, which carry every dtype over every backend: gloo has no bool, and not every
    operation has bfloat16."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _from_bytes(data: Tensor, like: Tensor, rows: int) -> Tensor:
    return data.view(like.dtype).reshape(rows, *like.shape[1:])


def count_rows(columns: Mapping[str, Any]) -> int:
    """Return the common number of rows of all columns; 0 without columns.

    Raises:
        BatchError: columns differ, or one has no rows at all (a scalar).
    """
    sizes: dict[str, int] = {}
    for key, value in columns.items():
        if not hasattr(value, "__len__") or (isinstance(value, Tensor) and value.ndim == 0):
            raise BatchError(
                f"batch key {key!r} holds {type(value).__name__} without rows; give a tensor [B, ...] or a "
                "list of B items"
            )
        sizes[key] = len(value)
    if len(set(sizes.values())) > 1:
        raise BatchError(
            f"Batch sizes are not the same across the rollout batch: {sizes}; give every key the same "
            "number of rows"
        )
    return next(iter(sizes.values()), 0)


def take_rows(value: Any, rows: Sequence[int]) -> Any:
    """Return the given rows, in that order. Tensors are always copied, because a pickled view would carry its
    whole storage."""
    if isinstance(value, Tensor):
        return value.index_select(0, torch.as_tensor(rows, dtype=torch.int64, device=value.device))
    return [value[row] for row in rows]


def join_rows(key: str, values: Sequence[Any], pad_value: float) -> Any:
    """Join several columns into one: lists are concatenated; tensors are joined along dim 0 and right-padded
    along dim 1 to the longest.

    Args:
        key: for messages.
        values: all lists, or all tensors with the same number of dimensions and the same dimensions from dim
            2 on.
        pad_value: value of the padding.

    Raises:
        NotImplementedError: a value is neither a tensor nor a list, or the two are mixed.
        BatchError: the tensors do not fit together.
    """
    if all(isinstance(value, list) for value in values):
        return list(chain.from_iterable(values))
    if not all(isinstance(value, Tensor) for value in values):
        kinds = sorted({type(value).__name__ for value in values})
        raise NotImplementedError(
            f"batch key {key!r} holds {kinds}; only tensors alone or lists alone can be joined, convert the "
            "values first"
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


def _join_padded(values: Sequence[Tensor], width: int, pad_value: float) -> Tensor:
    # Use the dtype that torch.cat would choose: a column's type must not depend on whether widths differ.
    dtype = reduce(torch.promote_types, (value.dtype for value in values))
    rows = sum(value.shape[0] for value in values)
    joined = torch.full((rows, width, *values[0].shape[2:]), pad_value, dtype=dtype, device=values[0].device)
    start = 0
    for value in values:
        joined[start : start + value.shape[0], : value.shape[1]] = value
        start += value.shape[0]
    return joined


__all__ = ["BatchedDataDict", "DynamicBatchingArgs", "SequencePackingArgs", "SlicedDataDict"]

DictT = TypeVar("DictT", bound=Mapping[str, Any])


class BatchedDataDict(UserDict[str, Any], Generic[DictT]):
    """Columns of equal length: tensors ``[B, ...]`` whose dim 1, if any, is the sequence dimension, or lists
    of B items.

    Attributes:
        micro_batch_indices: for each global batch, ``[start, end]`` of each micro-batch, counted from the
            first row of that global batch; None unless the batch came from dynamic batching or sequence
            packing.
        micro_batch_lengths: for each global batch, the padded row length (dynamic) or padded total length
            (packed) of each micro-batch.
        elem_counts_per_gb: for each global batch, its number of rows here; None unless the batch came from
            sequence packing.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.micro_batch_indices: list[list[list[int]]] | None = None
        self.micro_batch_lengths: list[list[int]] | None = None
        self.elem_counts_per_gb: list[int] | None = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Only protocol 5 passes the bytes of arrays on without a copy. copy.deepcopy uses an older protocol.
        if protocol < _OUT_OF_BAND:
            return super().__reduce_ex__(protocol)
        attributes = {name: value for name, value in vars(self).items() if name != "data"}
        return _arrived, (type(self), Packer(self.data).pack(), attributes)

    @classmethod
    def from_batches(
        cls, batches: Sequence[Mapping[str, Any]], pad_value_dict: Mapping[str, float] | None = None
    ) -> Self:
        """Stack batches; tensors are right-padded along dim 1 to the longest.

        Args:
            batches: at least one; the keys of the first are taken, in sorted order.
            pad_value_dict: padding value by key, 0 for keys that are not in it.

        Raises:
            BatchError: no batches, a key is missing from one, or tensors differ in more than dims 0 and 1.
            NotImplementedError: a value is neither a tensor nor a list.
        """
        if not batches:
            raise BatchError(
                "from_batches got 0 batches, it needs at least 1; skip the call when there is nothing to "
                "stack"
            )
        padding = pad_value_dict or {}
        joined = cls()
        for key in sorted(batches[0]):
            missing = [number for number, batch in enumerate(batches) if key not in batch]
            if missing:
                raise BatchError(
                    f"batch key {key!r} is in batch 0 but not in batches {missing}; give every batch the "
                    "same keys"
                )
            joined[key] = join_rows(key, [batch[key] for batch in batches], padding.get(key, 0))
        return joined

    def all_gather(self, group: dist.ProcessGroup | None) -> Self:
        """Return the rows of all ranks of ``group`` in rank order, on every rank; ranks may hold different
        numbers of rows.

        Raises:
            BatchError: on every rank, if keys, dtypes or trailing dimensions differ.
            NotImplementedError: a value is neither a tensor nor a list.
        """
        kinds = {
            key: "tensor" if isinstance(value, Tensor) else type(value).__name__
            for key, value in self.data.items()
        }
        columns = sorted(kinds.items())
        # Compare the columns before any tensor is gathered: if a rank lacked one, the others would wait in
        # its collective.
        of_ranks = gather_jagged_object_lists([columns], group)
        if of_ranks.count(columns) < len(of_ranks):
            raise BatchError(
                f"the ranks of the group hold different columns, in rank order {of_ranks}; give all ranks "
                "the same keys and types"
            )
        gathered = type(self)()
        for key, kind in columns:
            if kind == "tensor":
                gathered[key] = rebalance_nd_tensor(self.data[key], group)
            elif kind == "list":
                gathered[key] = gather_jagged_object_lists(self.data[key], group)
            else:
                raise NotImplementedError(
                    f"batch key {key!r} holds a {kind}; only tensors and lists can be gathered, convert it "
                    "first"
                )
        return gathered

    @property
    def size(self) -> int:
        """Number of rows, B.

        Raises:
            StopIteration: there are no keys.
        """
        return len(self.data[next(iter(self.data))])

    def get_dict(self) -> dict[str, Any]:
        """Return the columns as a plain dictionary (not a copy)."""
        return self.data

    def to(self, device: torch.device | str) -> Self:
        """Move all tensors to ``device``, in place; returns self."""
        for key, value in self.data.items():
            if isinstance(value, Tensor):
                self.data[key] = value.to(device)
        return self

    def chunk(self, rank: int, chunks: int) -> SlicedDataDict:
        """Return the ``rank``-th of ``chunks`` equal, contiguous parts.

        Raises:
            BatchError: the rows do not divide into ``chunks``, or ``rank`` is not one of them.
        """
        total = count_rows(self.data)
        if chunks < 1 or total % chunks:
            raise BatchError(
                f"Batch size ({total}) is not a multiple of chunks ({chunks}); choose a number of chunks "
                "that divides it"
            )
        if not 0 <= rank < chunks:
            raise BatchError(f"rank = {rank} is not one of the chunks = {chunks}; use 0 to {chunks - 1}")
        share = total // chunks
        return self.slice(rank * share, (rank + 1) * share)

    def slice(self, start: int, end: int) -> SlicedDataDict:
        """Return the rows from ``start`` up to, but not including, ``end``. Tensors are views of this batch's
        tensors.

        Raises:
            BatchError: the range is not within the rows.
        """
        sliced = SlicedDataDict()
        for key, value in self.data.items():
            if not 0 <= start <= end <= len(value):
                raise BatchError(
                    f"rows {start} to {end} of batch key {key!r} were requested, but it has "
                    f"{len(value)}; use 0 <= start <= end <= rows"
                )
            sliced[key] = value[start:end]
        return sliced

    def select_indices(self, indices: Sequence[int] | Tensor) -> Self:
        """Return the given rows, in the given order, copied; rows may repeat.

        Raises:
            BatchError: an index is outside the rows.
        """
        rows = _row_numbers(indices)
        total = count_rows(self.data)
        if rows and not 0 <= min(rows) <= max(rows) < total:
            raise BatchError(
                f"row indices run from {min(rows)} to {max(rows)}, the batch has {total} rows; use 0 to "
                f"{total - 1}"
            )
        selected = type(self)()
        for key, value in self.data.items():
            selected[key] = take_rows(value, rows)
        return selected

    def select_columns(self, keys: Iterable[str]) -> BatchedDataDict[Any]:
        """Return the columns with these keys, not copied; keys without a column are left out."""
        return BatchedDataDict({key: self.data[key] for key in keys if key in self.data})

    def repeat_interleave(self, num_repeats: int) -> Self:
        """Return every row ``num_repeats`` times in a row; repeated list items are deep copies."""
        repeated = type(self)()
        for key, value in self.data.items():
            if isinstance(value, Tensor):
                repeated[key] = value.repeat_interleave(num_repeats, dim=0)
            else:
                repeated[key] = [deepcopy(item) for item in value for _ in range(num_repeats)]
        return repeated

    def truncate_tensors(self, dim: int, truncated_len: int) -> None:
        """Truncate every tensor that has a dimension ``dim`` to at most ``truncated_len`` along it, in place
        (views, no copies)."""
        for key, value in self.data.items():
            if isinstance(value, Tensor) and value.ndim > dim:
                self.data[key] = value.narrow(dim, 0, min(truncated_len, value.shape[dim]))

    def reorder_data(self, reordered_indices: Sequence[int] | Tensor) -> None:
        """Undo a reordering in place: row r becomes row ``reordered_indices[r]``.

        Given the order that ``shard_by_batch_size`` returned, this restores the original order of rows that
        were computed on the shards and stacked in shard order.

        Raises:
            BatchError: the indices are not a permutation of the rows.
        """
        order = _row_numbers(reordered_indices)
        total = count_rows(self.data)
        if sorted(order) != list(range(total)):
            raise BatchError(
                f"{len(order)} reordering indices are not a permutation of the {total} rows; give every row "
                "number exactly once"
            )
        # This is the inverse of the permutation.
        place_of = sorted(range(total), key=order.__getitem__)
        for key, value in self.data.items():
            self.data[key] = take_rows(value, place_of)

    @overload
    def shard_by_batch_size(
        self, shards: int, batch_size: int | None = None, allow_uneven_shards: bool = False
    ) -> list[SlicedDataDict]: ...

    @overload
    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        *,
        dynamic_batching_args: DynamicBatchingArgs,
    ) -> tuple[list[SlicedDataDict], list[int]]: ...

    @overload
    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        *,
        sequence_packing_args: SequencePackingArgs,
    ) -> tuple[list[SlicedDataDict], list[int]]: ...

    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: DynamicBatchingArgs | None = None,
        sequence_packing_args: SequencePackingArgs | None = None,
    ) -> list[SlicedDataDict] | tuple[list[SlicedDataDict], list[int]]:
        """Distribute rows over shards, after dividing them into chunks of ``batch_size``.

        Each shard gets its part of every chunk, in chunk order. By default a part is a contiguous slice. With
        dynamic batching or sequence packing, rows are assigned by length, the shards carry their
        micro-batches, and the order of the rows is returned too. No row is physically packed or truncated
        here.

        Args:
            shards: number of data-parallel shards.
            batch_size: rows of a chunk (a global batch); None takes all rows as one chunk.
            allow_uneven_shards: accept any number of rows; shards have ``ceil(B / shards)`` rows, the last
                ones fewer. Needs ``batch_size`` None; not for dynamic batching.
            dynamic_batching_args, sequence_packing_args: at most one of them.

        Returns:
            The shards; with either argument, also a list whose r-th entry is the original row of row r of the
            stacked shards (the argument of ``reorder_data``).

        Raises:
            BatchError: (also an AssertionError) sizes do not divide, columns differ in size, or lengths are
                missing or out of range.
            PackingError: (a ValueError) rows cannot be packed as requested.
        """
        dealt = self.deal(
            shards, batch_size, allow_uneven_shards, dynamic_batching_args, sequence_packing_args
        )
        parts = [deal.shard() for deal in dealt]
        if dynamic_batching_args is None and sequence_packing_args is None:
            return parts
        return parts, [row for deal in dealt for row in deal.rows]

    def deal(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: DynamicBatchingArgs | None = None,
        sequence_packing_args: SequencePackingArgs | None = None,
    ) -> list[DealtRows]:
        """Shard by batch size without copying a row before it is sent; the worker receives the shard that
        ``shard_by_batch_size`` would return."""
        if dynamic_batching_args is not None and sequence_packing_args is not None:
            raise BatchError(
                "dynamic_batching_args and sequence_packing_args cannot be passed together; leave one of "
                "them out"
            )
        total = count_rows(self.data)
        if total == 0 and not (
            allow_uneven_shards and dynamic_batching_args is None and sequence_packing_args is None
        ):
            raise BatchError(
                "the batch has 0 rows, it needs at least one a shard; skip the step, or shard plainly with "
                "allow_uneven_shards"
            )
        chunk = self._chunk_size(total, shards, batch_size, allow_uneven_shards)
        if dynamic_batching_args is not None:
            if total % shards:
                raise BatchError(
                    f"Batch size ({total}) is not a multiple of shards ({shards}), which dynamic batching "
                    "needs; pad the batch"
                )
            lengths, width = self._lengths_and_width(dynamic_batching_args)
            return self._dealt(
                plan_dynamic(lengths, width, chunk, shards, dynamic_batching_args), packed=False
            )
        if sequence_packing_args is not None:
            lengths, _ = self._lengths_and_width(sequence_packing_args)
            return self._dealt(plan_packed(lengths, chunk, shards, sequence_packing_args), packed=True)
        row_lists = plan_uneven(total, shards) if allow_uneven_shards else plan_even(total, chunk, shards)
        packer = Packer(self.data)
        return [DealtRows(self, packer, rows, {}) for rows in row_lists]

    def get_batch(self, batch_idx: int, batch_size: int | None = None) -> SlicedDataDict:
        """Return the rows of one global batch, with its micro-batches if there are any.

        Args:
            batch_idx: number of the global batch.
            batch_size: rows of each global batch on this shard; ignored for packed batches, which know their
                own sizes.

        Raises:
            BatchError: there is no such global batch, or ``batch_size`` is missing or disagrees with the
                micro-batches.
        """
        if self.elem_counts_per_gb is not None:
            self._require_batch_number(batch_idx, len(self.elem_counts_per_gb))
            start = sum(self.elem_counts_per_gb[:batch_idx])
            batch_size = self.elem_counts_per_gb[batch_idx]
        elif batch_size is None or batch_size < 1:
            raise BatchError(
                f"batch_size = {batch_size} must be at least 1 for a batch that is not packed; give the "
                "rows of a global batch"
            )
        else:
            self._require_batch_number(batch_idx, self.size // batch_size)
            start = batch_idx * batch_size
        batch = self.slice(start, start + batch_size)
        if self.micro_batch_indices is not None and self.micro_batch_lengths is not None:
            self._require_batch_number(batch_idx, len(self.micro_batch_indices))
            # This is the end of the last micro-batch, which is counted from the first row of its global
            # batch.
            planned = self.micro_batch_indices[batch_idx][-1][1]
            if planned != batch_size:
                raise BatchError(
                    f"batch_size = {batch_size}, but the micro-batches were planned for {planned} rows; ask "
                    f"for {planned}"
                )
            batch.micro_batch_indices = [self.micro_batch_indices[batch_idx]]
            batch.micro_batch_lengths = [self.micro_batch_lengths[batch_idx]]
            batch.elem_counts_per_gb = [batch_size] if self.elem_counts_per_gb is not None else None
        return batch

    def make_microbatch_iterator(self, microbatch_size: int) -> Iterator[SlicedDataDict]:
        """Return an iterator over micro-batches of ``microbatch_size`` rows, in order; their tensors are
        views.

        Raises:
            BatchError: the rows do not divide by ``microbatch_size``. Raised at the call, not at the first
                step.
        """
        total = count_rows(self.data)
        if microbatch_size < 1 or total % microbatch_size:
            raise BatchError(
                f"Batch size ({total}) is not a multiple of microbatch_size ({microbatch_size}); choose one "
                "that divides it"
            )
        # Return an expression instead of using yield, so that the checks above run at the call.
        return (self.slice(start, start + microbatch_size) for start in range(0, total, microbatch_size))

    def make_microbatch_iterator_with_dynamic_shapes(self, sequence_dim: int = 1) -> Iterator[SlicedDataDict]:
        """Yield the planned micro-batches, with tensors truncated along ``sequence_dim`` to the padded length
        of each.

        Raises:
            BatchError: the batch was not sharded with dynamic batching or packing.
        """
        # Read the plan here rather than in the generator, so that a batch without a plan is refused at the
        # call.
        return self._dynamic_micro_batches(self._micro_batches(), sequence_dim)

    def get_microbatch_iterator_dynamic_shapes_len(self) -> int:
        """Return the number of planned micro-batches.

        Raises:
            BatchError: the batch was not sharded with dynamic batching or packing.
        """
        return len(self._micro_batches())

    def make_microbatch_iterator_for_packable_sequences(self) -> Iterator[SlicedDataDict]:
        """Yield the rows of each pack, unpacked and at full width; the worker packs them.

        Raises:
            BatchError: the batch was not sharded with dynamic batching or packing.
        """
        return (self.slice(start, end) for start, end, _ in self._micro_batches())

    def get_microbatch_iterator_for_packable_sequences_len(self) -> tuple[int, int]:
        """Return the number of packs, and the longest padded total length in tokens.

        Raises:
            BatchError: the batch was not sharded with dynamic batching or packing.
        """
        packs = self._micro_batches()
        return len(packs), max(length for _, _, length in packs)

    def _dynamic_micro_batches(
        self, micro_batches: list[tuple[int, int, int]], sequence_dim: int
    ) -> Iterator[SlicedDataDict]:
        for start, end, length in micro_batches:
            micro_batch = self.slice(start, end)
            micro_batch.truncate_tensors(sequence_dim, length)
            yield micro_batch

    def _micro_batches(self) -> list[tuple[int, int, int]]:
        """Return the first row, the row after the last, and the length of every micro-batch of every global
        batch held here."""
        if self.micro_batch_indices is None or self.micro_batch_lengths is None:
            raise BatchError(
                "this batch has no micro-batch plan (micro_batch_indices is None); "
                "shard it with dynamic_batching_args or sequence_packing_args first"
            )
        planned: list[tuple[int, int, int]] = []
        offset = 0
        for ranges, lengths in zip(self.micro_batch_indices, self.micro_batch_lengths, strict=True):
            for (start, end), length in zip(ranges, lengths, strict=True):
                planned.append((offset + start, offset + end, length))
            # The end of the last micro-batch equals the number of rows of its global batch.
            offset += ranges[-1][1]
        return planned

    @staticmethod
    def _require_batch_number(batch_idx: int, available: int) -> None:
        if not 0 <= batch_idx < available:
            raise BatchError(
                f"batch_idx = {batch_idx}, but there are {available} global batches here; use 0 to "
                f"{available - 1}"
            )

    @staticmethod
    def _chunk_size(total: int, shards: int, batch_size: int | None, allow_uneven: bool) -> int:
        """Return the rows of a chunk, after checking that everything divides."""
        if shards < 1:
            raise BatchError(f"shards = {shards} must be at least 1; give the data-parallel size")
        if allow_uneven:
            if batch_size is not None:
                raise BatchError(
                    f"batch_size must be None if allow_uneven_shards is True, got {batch_size}; leave one "
                    "of them out"
                )
            return max(total, 1)
        chunk = total if batch_size is None else batch_size
        if chunk < 1 or total % chunk:
            raise BatchError(
                f"Total batch size ({total}) is not a multiple of batch_size ({chunk}); choose a batch_size "
                "that divides it"
            )
        if chunk % shards:
            raise BatchError(
                f"Batch size ({chunk}) is not a multiple of shards ({shards}); change the batch size or the "
                "data-parallel size"
            )
        return chunk

    def _lengths_and_width(self, args: DynamicBatchingArgs | SequencePackingArgs) -> tuple[list[int], int]:
        """Return the checked lengths of all rows, and S."""
        inputs = self._column(args["input_key"], "input_key")
        lengths = self._column(args["input_lengths_key"], "input_lengths_key")
        if inputs.ndim < 2:
            raise BatchError(
                f"batch key {args['input_key']!r} has shape {tuple(inputs.shape)}, it must be [B, S]; name "
                "the padded inputs"
            )
        if lengths.ndim != 1 or lengths.dtype.is_floating_point or lengths.dtype == torch.bool:
            raise BatchError(
                f"batch key {args['input_lengths_key']!r} has shape {tuple(lengths.shape)} and dtype "
                f"{lengths.dtype}; "
                "lengths must be integers of shape [B]"
            )
        values, width = lengths.tolist(), inputs.shape[1]
        if values and not 1 <= min(values) <= max(values) <= width:
            bad = next(row for row, value in enumerate(values) if not 1 <= value <= width)
            raise BatchError(
                f"{args['input_lengths_key']}[{bad}] = {values[bad]} is outside 1 to {width}, the width of "
                f"{args['input_key']!r}; "
                "correct the lengths or drop empty rows"
            )
        return values, width

    def _column(self, key: str, role: str) -> Tensor:
        value = self.data.get(key)
        if not isinstance(value, Tensor):
            raise BatchError(
                f"{role} = {key!r} must name a tensor of the batch, which has the keys {sorted(self.data)}; "
                "name one of them"
            )
        return value

    def _dealt(self, plans: Sequence[ShardPlan], packed: bool) -> list[DealtRows]:
        # Share one packer between all shards, so that every column is examined only once.
        packer = Packer(self.data)
        return [DealtRows(self, packer, plan.rows, _micro_batches_of(plan, packed)) for plan in plans]


class SlicedDataDict(BatchedDataDict[Mapping[str, Any]]):
    """Part of a batch: a shard, a global batch or a micro-batch."""


class DealtRows:
    """Rows of a batch that are assigned to a worker. When pickled for another process, they become the shard
    itself.

    Args:
        batch: all rows.
        packer: of the batch, shared with the other parts.
        rows: row numbers, in order.
        micro_batches: attributes of the shard.
    """

    def __init__(
        self,
        batch: BatchedDataDict[Any],
        packer: Packer,
        rows: Sequence[int],
        micro_batches: Mapping[str, Any],
    ) -> None:
        self.rows = rows
        self._batch = batch
        self._packer = packer
        self._micro_batches = micro_batches

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.rows)

    def shard(self) -> SlicedDataDict:
        """Return the rows, copied."""
        shard = SlicedDataDict()
        for key, value in self._batch.data.items():
            shard[key] = take_rows(value, self.rows)
        vars(shard).update(self._micro_batches)
        return shard

    def __reduce__(self) -> tuple[Any, ...]:
        # Select the rows only now, when Ray pickles the call, so that the driver never holds copies of all
        # shards.
        return _arrived, (SlicedDataDict, self._packer.pack(self.rows), dict(self._micro_batches))


def with_columns(dealt: Sequence[DealtRows], keys: Collection[str]) -> list[DealtRows]:
    """Return the same rows with only the columns ``keys`` that the batch has; return the given objects if it
    has no other columns."""
    batch = dealt[0]._batch
    kept = {key: value for key, value in batch.data.items() if key in keys}
    if len(kept) == len(batch.data):
        return list(dealt)
    narrow: BatchedDataDict[Any] = BatchedDataDict(kept)
    packer = Packer(kept)
    return [DealtRows(narrow, packer, deal.rows, deal._micro_batches) for deal in dealt]


def _micro_batches_of(plan: ShardPlan, packed: bool) -> dict[str, Any]:
    return {
        "micro_batch_indices": plan.micro_batch_indices,
        "micro_batch_lengths": plan.micro_batch_lengths,
        "elem_counts_per_gb": plan.elem_counts_per_gb if packed else None,
    }


def _arrived(
    kind: type[BatchedDataDict[Any]], parcels: Parcels, attributes: Mapping[str, Any]
) -> BatchedDataDict[Any]:
    """Return the batch that another process has sent."""
    batch = kind(parcels.unpack())
    vars(batch).update(attributes)
    return batch


def _row_numbers(indices: Sequence[int] | Tensor) -> list[int]:
    return list(map(int, indices))
