"""Streams the distributed optimizer's state between each rank's memory and checkpoint files, without sending
state between ranks.

Megatron-Core's "fully reshardable" checkpoint needs each optimizer state of each buffer as one host tensor,
twelve bytes per parameter, and up to 0.19 gathers it on the device of every data-parallel rank. Here a save
is planned with outlines: meta tensors that have a shape and an address but no memory. Each rank writes only
the elements that it keeps itself, as boxes (the format accepts chunks of any size), and only one chunk at a
time is on the host.

A load is planned with outlines too. Megatron-Core makes every data-parallel rank read the whole buffer. Here
each rank reads only the elements that it keeps, slice by slice, into the memory of the optimizer.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, extract_matching_values, merge
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, StateDict
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from converters.checkpoint.boxes import Box, intersection, part, relative, shape_of, single, whole
from converters.torch_dist.reader import TorchDistCheckpoint
from megarl.checkpoint.storage import read_again
from megarl.errors import CheckpointError
from megarl.models.megatron.adam import ShardedAdamW

STATES = ("param", "exp_avg", "exp_avg_sq")
SLICE_BYTES = 256 * 2**20
"""Maximum bytes that a rank reads at once, and thus the host memory that a load takes."""
# Bytes per element: outlines are float32, whatever format the state is stored in.
_ITEM = 4
# An upper bound on the elements of all states of a rank; at four bytes each they stay below 2**63 bytes.
_ADDRESSES = 2**56


@dataclass(frozen=True, slots=True)
class _Place:
    """One state of one buffer of one optimizer in the stream's address range; ``first`` is the address of its
    first element."""

    first: int
    source: int
    buffer: int
    state: str


class _Source:
    """The part of one distributed optimizer's state that this rank keeps. Positions are element indices in a
    buffer."""

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self._optimizer = optimizer
        self._own = list(map(self._kept_of, range(len(optimizer.gbuf_ranges))))
        # State in formats other than float32 that arrives in several reads, with the number of elements still
        # missing.
        self._gathering: dict[tuple[torch.nn.Parameter, str], tuple[torch.Tensor, int]] = {}

    def _kept_of(self, buffer: int) -> list[tuple[int, int, torch.nn.Parameter]]:
        """Return (start, end, parameter) of each range of a buffer that this rank keeps, in order."""
        # Unpacking into one element checks that the buffer has a single dtype.
        (buckets,) = self._optimizer.gbuf_ranges[buffer].values()
        kept = []
        for bucket in buckets:
            for parameter, ranges in bucket["param_map"].items():
                kept.append((ranges["gbuf_world"].start, ranges["gbuf_world"].end, parameter))
        return sorted(kept, key=operator.itemgetter(0, 1))

    def size(self, buffer: int) -> int:
        """Return the number of elements of a buffer, padding included."""
        return int(self._optimizer.buffers[buffer].grad_data.numel())

    def kept(self, buffer: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield (start, end) of each range within ``start`` to ``stop`` that this rank keeps; both positions
        must belong to one parameter."""
        for begin, end, _ in self._kept_between(buffer, start, stop):
            yield max(begin, start), min(end, stop)

    def _kept_between(
        self, buffer: int, start: int, stop: int
    ) -> Iterator[tuple[int, int, torch.nn.Parameter]]:
        own = self._own[buffer]
        for number in range(bisect.bisect_right(own, start, key=operator.itemgetter(1)), len(own)):
            if own[number][0] >= stop:
                return
            yield own[number]

    def copy(self, buffer: int, state: str, first: int, target: torch.Tensor) -> None:
        """Fill ``target`` [n] (float32, on the host) with the elements from position ``first`` on.

        This rank must keep all of them, and they must belong to one parameter.
        """
        last = first + target.numel()
        ((begin, end, parameter),) = self._kept_between(buffer, first, last)
        assert begin <= first and last <= end, (begin, first, last, end)
        target.copy_(self._values(parameter, state)[first - begin : last - begin])

    def _shard_of(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        """Return the optimizer's own shard of a parameter."""
        group, order = self._optimizer.model_param_group_index_map[parameter]
        shard: torch.Tensor = self._optimizer.optimizer.param_groups[group]["params"][order]
        return shard

    def _values(self, parameter: torch.nn.Parameter, state: str) -> torch.Tensor:
        """Return this rank's part of a state as flat float32: a view if the state is float32, else a
        converted copy."""
        adam, shard = self._optimizer.optimizer, self._shard_of(parameter)
        if isinstance(adam, ShardedAdamW):
            return adam.read_state(shard, state)
        # Return a view, because ``fill`` reads the checkpoint directly into it.
        return (shard if state == "param" else adam.state[shard][state]).detach().view(-1)

    def _store(self, parameter: torch.nn.Parameter, state: str, values: torch.Tensor, read: int) -> None:
        """Convert values to the state's own format once all values of a parameter were read.

        Args:
            parameter, state: the parameter, and the name of its state.
            values: [n] float32.
            read: number of values that were read since the last call.
        """
        adam = self._optimizer.optimizer
        if not isinstance(adam, ShardedAdamW):
            return
        _, missing = self._gathering.pop((parameter, state), (values, values.numel()))
        if missing > read:
            # Wait for the rest: a block of 8-bit state has one scale, so half a block cannot be stored.
            self._gathering[parameter, state] = values, missing - read
        else:
            adam.write_state(self._shard_of(parameter), state, values)

    def fill(
        self, buffer: int, state: str, start: int, stop: int, read: Callable[[int, int, torch.Tensor], None]
    ) -> None:
        """Read this rank's part of the positions from ``start`` to ``stop``, which must belong to one
        parameter.

        Args:
            buffer, state: the buffer, and the name of the state.
            start, stop: the positions.
            read: called with the start and end of a range and with a tensor [end - start], which it must
                fill.
        """
        step = max(
            1, SLICE_BYTES // _ITEM // 2
        )  # half, because chunks and the tensor joined from them may exist together
        for begin, end, parameter in self._kept_between(buffer, start, stop):
            first, last = max(begin, start), min(end, stop)
            gathered = self._gathering.get((parameter, state))
            kept = self._values(parameter, state) if gathered is None else gathered[0]
            for position in range(first, last, step):
                behind = min(position + step, last)
                read(position, behind, kept[position - begin : behind - begin])
            self._store(parameter, state, kept, last - first)


class StateStream:
    """Optimizer state of all distributed optimizers of a rank, for one save or load: outlines, and their
    values on request."""

    def __init__(self) -> None:
        # One long meta tensor; an offset in it identifies an element of the state of all optimizers.
        self._addresses = torch.empty(_ADDRESSES, dtype=torch.float32, device="meta")
        self._sources: list[_Source] = []
        self._places: list[_Place] = []  # sorted by address
        self._size = 0

    def outlines(self, optimizer: DistributedOptimizer) -> dict[Any, Any]:
        """Return the result of ``DistributedOptimizer.get_parameter_state_dp_zero`` without memory: for each
        buffer and dtype, each state is a float32 meta tensor."""
        source = _Source(optimizer)
        self._sources.append(source)
        # Megatron-Core's mark that the buckets of a buffer are joined into one tensor, padding included.
        state: dict[Any, Any] = {"buckets_coalesced": True}
        for buffer, ranges in enumerate(optimizer.gbuf_ranges):
            for dtype in ranges:
                outlines = {name: self._outline(buffer, name, source.size(buffer)) for name in STATES}
                state[buffer] = {dtype: outlines}
        return state

    def _outline(self, buffer: int, state: str, size: int) -> torch.Tensor:
        first = self._size
        self._places.append(_Place(first, len(self._sources) - 1, buffer, state))
        self._size += size
        return self._addresses[first : self._size]

    def pieces(self, outline: ShardedTensor) -> Iterator[ShardedTensor]:
        """Yield the parts of an outlined tensor that this rank keeps and writes: boxes, without memory.

        If several data-parallel groups hold the tensor, the main replica's group writes it.

        Raises:
            CheckpointError: the outline does not belong to this stream.
        """
        place = self._place_of(outline.data)
        if not _is_of_main_group(outline.replica_id):
            return
        begin = int(outline.data.storage_offset()) - place.first
        leading = (1,) * outline.prepend_axis_num
        for first, last in self._sources[place.source].kept(
            place.buffer, begin, begin + outline.data.numel()
        ):
            address = place.first + first
            for box in boxes(outline.local_shape, first - begin, last - begin):
                shape = (*leading, *shape_of(box))
                start = (*[0] * len(leading), *(position for position, _ in box))
                count = math.prod(shape)
                yield dataclasses.replace(
                    outline,
                    data=self._addresses[address : address + count].view(shape),
                    local_shape=shape,
                    global_offset=tuple(map(operator.add, outline.global_offset, start)),
                    # Turn the prepended layer axis into an ordinary one of length 1: a box must have all
                    # dimensions of the full tensor.
                    prepend_axis_num=0,
                    axis_fragmentations=None,  # the boxes of a tensor form no grid
                    replica_id=0,
                )
                address += count

    def values(self, tensors: Sequence[tuple[Any, torch.Tensor]]) -> Iterator[tuple[Any, torch.Tensor]]:
        """Yield each item with its tensor's values on the host, one tensor at a time. Memory for an outline's
        values is freed when the next tensor is requested.

        Raises:
            CheckpointError: an outline does not belong to this stream.
        """
        for item, tensor in tensors:
            if not tensor.is_meta:
                yield item, tensor.to("cpu")
                continue
            values = torch.empty(tensor.shape, dtype=tensor.dtype)
            self.copy(tensor, values)
            yield item, values
            # Free the memory explicitly: the writer keeps a reference to the tensor until it gets the next
            # one.
            values.untyped_storage().resize_(0)

    def copy(self, outline: torch.Tensor, target: torch.Tensor) -> None:
        """Fill ``target`` (contiguous, on the host, with the outline's shape) with an outline's values.

        Raises:
            CheckpointError: the outline does not belong to this stream.
        """
        place = self._place_of(outline)
        first = int(outline.storage_offset()) - place.first
        self._sources[place.source].copy(place.buffer, place.state, first, target.view(-1))

    def fill(self, outlines: Sequence[ShardedTensor], checkpoint: TorchDistCheckpoint) -> None:
        """Read this rank's part of the outlined tensors into the optimizers' memory. Elements that the
        checkpoint lacks, such as vocabulary padding, become zero.

        Raises:
            CheckpointError: a tensor has another shape in the checkpoint.
            ConversionError: a file of the checkpoint is missing or damaged.
        """
        for outline in outlines:
            place = self._place_of(outline.data)
            begin = int(outline.data.storage_offset()) - place.first
            read = functools.partial(_read, outline, begin, checkpoint)
            self._sources[place.source].fill(
                place.buffer, place.state, begin, begin + outline.data.numel(), read
            )

    def _place_of(self, tensor: torch.Tensor) -> _Place:
        ours = tensor.untyped_storage()._cdata == self._addresses.untyped_storage()._cdata
        if not ours or not tensor.is_contiguous():
            raise CheckpointError(
                f"a tensor of shape {list(tensor.shape)} without memory is no state of an optimizer; a "
                "defect of megarl"
            )
        # The state that contains the address is the last one that begins at or before it.
        return self._places[
            bisect.bisect_right(self._places, tensor.storage_offset(), key=operator.attrgetter("first")) - 1
        ]


def _is_of_main_group(replica_id: int | tuple[int, ...]) -> bool:
    """Return whether a replica is in the main replica's data-parallel group. The last element of
    ``replica_id``, its rank in that group, is ignored."""
    return isinstance(replica_id, int) or not any(replica_id[:-1])


def _read(
    outline: ShardedTensor,
    begin: int,
    checkpoint: TorchDistCheckpoint,
    first: int,
    last: int,
    values: torch.Tensor,
) -> None:
    """Fill ``values`` from the checkpoint with elements ``first - begin`` to ``last - begin`` of a tensor."""
    key, stored = outline.key, checkpoint.shape(outline.key)
    if tuple(outline.global_shape) != stored and not outline.allow_shape_mismatch:
        raise CheckpointError(
            f"{key} has shape {list(stored)} in {checkpoint.directory}, and {list(outline.global_shape)} in "
            "this model"
        )
    leading = single(outline.global_offset[: outline.prepend_axis_num])
    origin = outline.global_offset[outline.prepend_axis_num :]
    for box in boxes(outline.local_shape, first - begin, last - begin):
        count = math.prod(shape_of(box))
        # Boxes come in row-major order, so their elements are consecutive in ``values``.
        target, values = values[:count], values[count:]
        wanted = (
            *leading,
            *((start + offset, stop + offset) for (start, stop), offset in zip(box, origin, strict=True)),
        )
        there = intersection(wanted, whole(stored))
        if there != wanted:
            # This layout pads the vocabulary further than the layout that wrote the checkpoint.
            target.zero_()
        if there is not None:
            inside = relative(there, wanted)
            stored_part = read_again(
                functools.partial(checkpoint.read, key, there), f"{key} of {checkpoint.directory}"
            )
            part(target.view(shape_of(wanted)), inside).copy_(stored_part)


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in a storage that contains nothing else, because a save writes the whole storage.
    Contiguous host memory is not copied."""
    tensor = tensor.detach()
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    if not tensor.is_cpu or not tensor.is_contiguous() or not tensor.numel():
        return tensor.clone()
    # A numpy view gets a new storage with the bounds of the tensor. View it as bytes, because numpy lacks
    # some dtypes.
    values = torch.from_numpy(tensor.view(-1).view(torch.uint8).numpy()).view(tensor.dtype)
    # Restore the strides: they are saved too, and a dimension of size 1 may have any stride.
    return values.as_strided(tensor.shape, tensor.stride())


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield boxes that together cover the elements from ``start`` to ``stop`` of a tensor, in row-major
    order."""
    if start >= stop:
        return
    if len(shape) < 2:
        yield ((start, stop),) * len(shape)
        return
    # Each dimension needs at most three boxes: the end of a row, whole rows, and the start of a row.
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # the full rows in the range
    if first > last:  # inside one row
        for box in boxes(shape[1:], start - last * row, stop - last * row):
            yield ((last, first), *box)
        return
    for box in boxes(shape[1:], start - (first - 1) * row, row):
        yield ((first - 1, first), *box)
    if first < last:
        yield ((first, last), *whole(shape[1:]))
    for box in boxes(shape[1:], 0, stop - last * row):
        yield ((last, last + 1), *box)


class StreamedLoad(TorchDistLoadShardedStrategy):
    """Megatron-Core's load strategy, except that tensors without memory (outlines) are left for
    ``StateStream.fill``.

    Tensors that were read directly into their final memory are returned as meta tensors too, so that nobody
    copies them again.

    Args:
        held: storage addresses of that final memory.

    Attributes:
        outlines: the requested outlines, for ``StateStream.fill``.
    """

    def __init__(self, held: Collection[int] = ()) -> None:
        super().__init__()
        self._held = held
        self.outlines: list[ShardedTensor] = []

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path, *arguments: Any) -> StateDict:
        """Load like Megatron-Core, but return meta tensors for outlines and for tensors that were read into
        ``held`` memory."""
        # Megatron-Core would allocate host memory for an outline and read all of it on every rank.
        outlined, plain = extract_matching_values(
            sharded_state_dict, lambda each: isinstance(each, ShardedTensor) and each.data.is_meta
        )
        loaded: StateDict = dict_list_map_inplace(
            self._without_memory, super().load(plain, checkpoint_dir, *arguments)
        )
        merge(loaded, dict_list_map_inplace(self._left_as_it_is, outlined))
        return loaded

    def _without_memory(self, value: Any) -> Any:
        # Compare storages: DCP reads into the tensors that it is given, which may be the model's own.
        there = isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in self._held
        return torch.empty_like(value, device="meta") if there else value

    def _left_as_it_is(self, outline: ShardedTensor) -> torch.Tensor:
        self.outlines.append(outline)
        return outline.data
