"""A dictionary of columns with one row per sample. It can be joined, sharded over data-parallel ranks, split
into micro-batches, and gathered over ranks.

Columns are tensors, or lists with one item per row. The collectives accept a different number of rows on each
rank, and work in any process group on the device of its backend.
"""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import reduce
from itertools import chain
from typing import Any, Generic, Self, TypedDict, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.distributed.parcels import Columns, Packer, Parcels
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

# Maximum dimensions of a tensor that can be gathered. It determines the size of the header of a gather.
_MAX_DIMENSIONS = 8
# The first pickle protocol with out-of-band buffers.
_OUT_OF_BAND = 5
# The header of a gather encodes a dtype as its index in this tuple, so all ranks need the same order.
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
    """All-gather the rows of all ranks, and stack them in rank order.

    Args:
        tensor: [rows, ...]. The number of rows may differ between ranks and may be 0. All other dimensions
            and the dtype must be equal.
        group: process group; None for the default group.

    Returns:
        [sum of rows, ...], detached, on the device of ``tensor``.

    Raises:
        BatchError: dtypes or trailing dimensions differ; raised on every rank.
    """
    row_counts = _gather_row_counts(tensor, group)
    row_bytes = _row_bytes(tensor)
    # Pad the rows, because all_gather requires equal sizes on all ranks. The padding is removed below.
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
    """All-gather the lists of all ranks, and concatenate them in rank order. Lists may have different
    lengths.

    Objects are unpickled on the other ranks, so ``group`` must contain only ranks of this job.
    """
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, objects, group=group)
    return list(chain.from_iterable(gathered))


def _gather_row_counts(tensor: Tensor, group: dist.ProcessGroup | None) -> list[int]:
    """All-gather the number of rows. All ranks see all shapes and raise the same error; otherwise some would
    wait indefinitely."""
    known = tensor.dtype in _DTYPES and 1 <= tensor.ndim <= _MAX_DIMENSIONS
    header = [
        _DTYPES.index(tensor.dtype) if known else -1,
        tensor.ndim,
        *list(tensor.shape)[:_MAX_DIMENSIONS],
    ]
    # The header has a fixed size, because ranks may have different numbers of dimensions.
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
    # Compare all entries except entry 2: only the number of rows may differ.
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
    """Return a tensor's bytes as a flat uint8 tensor, which every backend can send. gloo, for example, does
    not support bool, nor bfloat16 in every operation."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _from_bytes(data: Tensor, like: Tensor, rows: int) -> Tensor:
    return data.view(like.dtype).reshape(rows, *like.shape[1:])


def count_rows(columns: Columns) -> int:
    """Return the number of rows that all columns have; 0 without columns.

    Raises:
        BatchError: columns have different numbers of rows, or one is a scalar.
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
    """Return the given rows of a column, in this order. Tensors are always copied, because pickling a view
    would send its whole storage."""
    if isinstance(value, Tensor):
        return value.index_select(0, torch.as_tensor(rows, dtype=torch.int64, device=value.device))
    return [value[row] for row in rows]


def join_rows(key: str, values: Sequence[Any], pad_value: float) -> Any:
    """Stack several columns into one. Lists are concatenated. Tensors are concatenated along dim 0, and
    right-padded along dim 1 to the longest.

    Args:
        key: name of the column, for messages.
        values: only lists; or only tensors with the same number of dimensions and equal sizes from dim 2 on.
        pad_value: value of the padding.

    Raises:
        NotImplementedError: a value is neither a tensor nor a list, or both occur.
        BatchError: the shapes of the tensors differ in more than dims 0 and 1.
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
    # Use the dtype that torch.cat would choose, so that a column's dtype does not depend on its widths.
    dtype = reduce(torch.promote_types, (value.dtype for value in values))
    rows = sum(value.shape[0] for value in values)
    joined = torch.full((rows, width, *values[0].shape[2:]), pad_value, dtype=dtype, device=values[0].device)
    start = 0
    for value in values:
        joined[start : start + value.shape[0], : value.shape[1]] = value
        start += value.shape[0]
    return joined


__all__ = ["BatchedDataDict", "DynamicBatchingArgs", "SequencePackingArgs", "SlicedDataDict"]

DictT = TypeVar("DictT", bound=Columns)


class BatchedDataDict(UserDict[str, Any], Generic[DictT]):
    """A dictionary of columns with the same number of rows B: tensors [B, ...], whose dim 1, if any, is the
    sequence; or lists of B items.

    Attributes:
        micro_batch_indices: for each global batch, the row range ``[start, end]`` of each micro-batch,
            counted from the global batch's first row. None unless the batch was sharded with dynamic batching
            or sequence packing.
        micro_batch_lengths: for each global batch, the length of each micro-batch: of its padded rows
            (dynamic batching) or of all its padded rows together (packing).
        elem_counts_per_gb: for each global batch, its number of rows in this shard. None unless the batch was
            sharded with sequence packing.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.micro_batch_indices: list[list[list[int]]] | None = None
        self.micro_batch_lengths: list[list[int]] | None = None
        self.elem_counts_per_gb: list[int] | None = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Only pickle protocol 5 passes array buffers on without a copy. copy.deepcopy uses an older protocol.
        if protocol < _OUT_OF_BAND:
            return super().__reduce_ex__(protocol)
        attributes = {name: value for name, value in vars(self).items() if name != "data"}
        return _arrived, (type(self), Packer(self.data).pack(), attributes)

    @classmethod
    def from_batches(
        cls, batches: Sequence[Columns], pad_value_dict: Mapping[str, float] | None = None
    ) -> Self:
        """Stack batches. Tensors are right-padded along dim 1 to the longest.

        Args:
            batches: at least one. The result has the keys of the first, sorted.
            pad_value_dict: padding value by key; 0 for other keys.

        Raises:
            BatchError: there are no batches, a batch lacks a key of the first one, or tensors differ in more
                than dims 0 and 1.
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
        """All-gather the rows of all ranks of ``group``, in rank order. Ranks may have different numbers of
        rows.

        Raises:
            BatchError: keys, dtypes or trailing dimensions differ; raised on every rank.
            NotImplementedError: a value is neither a tensor nor a list.
        """
        kinds = {
            key: "tensor" if isinstance(value, Tensor) else type(value).__name__
            for key, value in self.data.items()
        }
        columns = sorted(kinds.items())
        # Compare the columns before gathering any: if a rank lacked one, the others would wait for it in the
        # collective.
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
        """Move all tensors to ``device`` in place, and return self."""
        for key, value in self.data.items():
            if isinstance(value, Tensor):
                self.data[key] = value.to(device)
        return self

    def chunk(self, rank: int, chunks: int) -> SlicedDataDict:
        """Split the rows into ``chunks`` equal, contiguous parts, and return part ``rank``.

        Raises:
            BatchError: ``chunks`` does not divide the number of rows, or ``rank`` is not in [0, chunks).
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
        """Return rows ``start`` to ``end`` (exclusive). Tensors are views.

        Raises:
            BatchError: the range exceeds the rows.
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
        """Return a copy of the given rows, in this order. Rows may repeat.

        Raises:
            BatchError: an index is out of range.
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
        """Repeat each row ``num_repeats`` times, copies next to each other, like ``torch.repeat_interleave``.
        List items are deep-copied."""
        repeated = type(self)()
        for key, value in self.data.items():
            if isinstance(value, Tensor):
                repeated[key] = value.repeat_interleave(num_repeats, dim=0)
            else:
                repeated[key] = [deepcopy(item) for item in value for _ in range(num_repeats)]
        return repeated

    def truncate_tensors(self, dim: int, truncated_len: int) -> None:
        """Truncate dimension ``dim`` of every tensor that has one to at most ``truncated_len``. The columns
        are replaced by views."""
        for key, value in self.data.items():
            if isinstance(value, Tensor) and value.ndim > dim:
                self.data[key] = value.narrow(dim, 0, min(truncated_len, value.shape[dim]))

    def reorder_data(self, reordered_indices: Sequence[int] | Tensor) -> None:
        """Undo a reordering in place: row r becomes row ``reordered_indices[r]``.

        With the order from ``shard_by_batch_size``, this restores the original order of results that were
        computed on the shards and stacked in shard order.

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
        # Sorting the indices by their values gives the inverse permutation.
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
        """Split the rows into chunks of ``batch_size``, and distribute each chunk over shards.

        By default, a shard gets a contiguous slice of each chunk. With dynamic batching or sequence packing,
        rows are assigned by length, the shards contain the plan of their micro-batches, and the order of the
        rows is returned too. Rows are neither truncated nor concatenated here.

        Args:
            shards: number of data-parallel shards.
            batch_size: rows of a chunk (a global batch); None treats all rows as one chunk.
            allow_uneven_shards: accept any number of rows. Shards get ``ceil(B / shards)`` rows, the last
                ones fewer. Requires ``batch_size`` None, and no dynamic batching.
            dynamic_batching_args, sequence_packing_args: at most one of the two.

        Returns:
            The shards. With either argument, also a list whose entry r is the original row of row r of the
            stacked shards (the argument of ``reorder_data``).

        Raises:
            BatchError: (also an AssertionError) a size is not divisible as required, columns have different
                numbers of rows, or lengths are missing or out of range.
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
        """Like ``shard_by_batch_size``, but rows are not copied before they are sent: each result becomes the
        shard when it is unpickled in the worker."""
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
        """Return the rows of one global batch, with the plan of its micro-batches if there is one.

        Args:
            batch_idx: index of the global batch.
            batch_size: rows of a global batch in this shard; ignored after sequence packing, where each
                global batch has its own size.

        Raises:
            BatchError: there is no such global batch, or ``batch_size`` is missing or contradicts the plan.
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
            # The end of the last micro-batch is the planned number of rows.
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
        """Return an iterator over micro-batches of ``microbatch_size`` rows, in order. Tensors are views.

        Raises:
            BatchError: ``microbatch_size`` does not divide the number of rows. Raised by the call, not by the
                iterator.
        """
        total = count_rows(self.data)
        if microbatch_size < 1 or total % microbatch_size:
            raise BatchError(
                f"Batch size ({total}) is not a multiple of microbatch_size ({microbatch_size}); choose one "
                "that divides it"
            )
        # Return a generator expression; with ``yield``, the checks above would only run at the first
        # iteration.
        return (self.slice(start, start + microbatch_size) for start in range(0, total, microbatch_size))

    def make_microbatch_iterator_with_dynamic_shapes(self, sequence_dim: int = 1) -> Iterator[SlicedDataDict]:
        """Return an iterator over the planned micro-batches. Tensors are truncated along ``sequence_dim`` to
        the padded length of their micro-batch.

        Raises:
            BatchError: the batch was not sharded with dynamic batching or packing.
        """
        # Read the plan here and not in the generator, so that the call raises if there is no plan.
        return self._dynamic_micro_batches(self._micro_batches(), sequence_dim)

    def get_microbatch_iterator_dynamic_shapes_len(self) -> int:
        """Return the number of planned micro-batches.

        Raises:
            BatchError: the batch was not sharded with dynamic batching or packing.
        """
        return len(self._micro_batches())

    def make_microbatch_iterator_for_packable_sequences(self) -> Iterator[SlicedDataDict]:
        """Return an iterator over the rows of each pack. Rows have full width; the worker concatenates them.

        Raises:
            BatchError: the batch was not sharded with dynamic batching or packing.
        """
        return (self.slice(start, end) for start, end, _ in self._micro_batches())

    def get_microbatch_iterator_for_packable_sequences_len(self) -> tuple[int, int]:
        """Return the number of packs, and the largest padded length of a pack in tokens.

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
        """Return (first row, row after the last, length) of every micro-batch of all global batches."""
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
        """Check that all sizes are divisible as required, and return the number of rows of a chunk."""
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
        """Check the lengths of all rows, and return them with the padded width S."""
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
        # All shards share one packer, so that each column is analyzed only once.
        packer = Packer(self.data)
        return [DealtRows(self, packer, plan.rows, _micro_batches_of(plan, packed)) for plan in plans]


class SlicedDataDict(BatchedDataDict[Columns]):
    """A part of a batch: a shard, a global batch or a micro-batch."""


class MicroBatches(TypedDict, total=False):
    """The micro-batch plan of a shard, if it has one: attributes of ``BatchedDataDict``."""

    micro_batch_indices: list[list[list[int]]]
    micro_batch_lengths: list[list[int]]
    elem_counts_per_gb: list[int] | None


class DealtRows:
    """Rows of a batch that are assigned to one worker. Unpickled in another process, it is the shard itself.

    Args:
        batch: the batch with all rows.
        packer: packer of this batch, shared by all its ``DealtRows``.
        rows: row numbers, in order.
        micro_batches: attributes of the shard with its micro-batch plan.
    """

    def __init__(
        self,
        batch: BatchedDataDict[Any],
        packer: Packer,
        rows: Sequence[int],
        micro_batches: MicroBatches,
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
        """Return a copy of the rows, with the micro-batch plan."""
        shard = SlicedDataDict()
        for key, value in self._batch.data.items():
            shard[key] = take_rows(value, self.rows)
        vars(shard).update(self._micro_batches)
        return shard

    def __reduce__(self) -> tuple[Any, ...]:
        # Copy the rows only now, when Ray pickles the call, so that the driver never has copies of all shards
        # at once.
        return _arrived, (SlicedDataDict, self._packer.pack(self.rows), dict(self._micro_batches))


def with_columns(dealt: Sequence[DealtRows], keys: Collection[str]) -> list[DealtRows]:
    """Return the same rows without the columns that are not in ``keys``. If there are none to remove, the
    given objects are returned."""
    batch = dealt[0]._batch
    kept = {key: value for key, value in batch.data.items() if key in keys}
    if len(kept) == len(batch.data):
        return list(dealt)
    narrow: BatchedDataDict[Any] = BatchedDataDict(kept)
    packer = Packer(kept)
    return [DealtRows(narrow, packer, deal.rows, deal._micro_batches) for deal in dealt]


def _micro_batches_of(plan: ShardPlan, packed: bool) -> MicroBatches:
    return {
        "micro_batch_indices": plan.micro_batch_indices,
        "micro_batch_lengths": plan.micro_batch_lengths,
        "elem_counts_per_gb": plan.elem_counts_per_gb if packed else None,
    }


def _arrived(
    kind: type[BatchedDataDict[Any]], parcels: Parcels, attributes: Mapping[str, object]
) -> BatchedDataDict[Any]:
    """Rebuild a batch that another process has sent."""
    batch = kind(parcels.unpack())
    vars(batch).update(attributes)
    return batch


def _row_numbers(indices: Sequence[int] | Tensor) -> list[int]:
    return list(map(int, indices))
