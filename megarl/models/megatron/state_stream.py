"""Streams the distributed optimizer's state from each rank's memory into the files of a checkpoint, and from
a checkpoint's files into each rank's memory. No state is sent between ranks.

Megatron-Core's "fully reshardable" checkpoint needs each state of each buffer as one tensor on the host,
twelve bytes per parameter, and up to 0.19 gathers the states on the device, on every data-parallel rank. Here
the checkpoint is planned with outlines: tensors of torch's meta device, which have a shape and an address but
no memory. Each rank writes only the elements of a tensor that it keeps itself, as boxes (the format accepts
pieces of any size). So it writes its share of all bytes, and only one piece at a time is on the host.

A load is planned with outlines as well, whereas Megatron-Core makes every data-parallel rank read all of a
buffer. Each rank then reads the elements that it keeps itself, a slice at a time, into the memory that
training needs anyway.
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
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from converters.checkpoint.boxes import Box, intersection, part, relative, shape_of, single, whole
from converters.torch_dist.reader import TorchDistCheckpoint
from megarl.checkpoint.storage import read_again
from megarl.errors import CheckpointError
from megarl.models.megatron.adam import ShardedAdamW

STATES = ("param", "exp_avg", "exp_avg_sq")
SLICE_BYTES = 256 * 2**20
"""Number of bytes that a rank reads at once, and thus the host memory that a load takes."""
# Bytes of an element: outlines are float32, whatever format the states are stored in.
_ITEM = 4
# More elements than all states of a rank together; at four bytes each, they stay below 2**63 bytes.
_ADDRESSES = 2**56


@dataclass(frozen=True, slots=True)
class _Place:
    """One state of one buffer of one optimizer, in the address range of a stream; ``first`` is the address of
    its first element."""

    first: int
    source: int
    buffer: int
    state: str


class _Source:
    """The state of one distributed optimizer, of which this rank keeps a part. Positions are indices of
    elements in a buffer."""

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self._optimizer = optimizer
        self._own = list(map(self._kept_of, range(len(optimizer.gbuf_ranges))))
        # States in formats other than float32 that are read in several pieces, each with the number of
        # missing elements.
        self._gathering: dict[tuple[torch.nn.Parameter, str], tuple[torch.Tensor, int]] = {}

    def _kept_of(self, buffer: int) -> list[tuple[int, int, torch.nn.Parameter]]:
        """Return the start, the end and the parameter of each part of a buffer that this rank keeps, in
        order."""
        # Each buffer has one dtype, which the unpacking checks.
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
        """Yield the start and the end of each range of positions between ``start`` and ``stop`` that this
        rank keeps; ``start`` and ``stop`` must belong to one parameter."""
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
        """Fill ``target``, [n] float32 on the host, with the elements from position ``first`` on. This rank
        must keep them all, and they must belong to one parameter."""
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
        """Return this rank's part of a state, [n] float32: a view of the state itself, or a float32 copy if
        it is stored in another format."""
        adam, shard = self._optimizer.optimizer, self._shard_of(parameter)
        if isinstance(adam, ShardedAdamW):
            return adam.read_state(shard, state)
        # Return a view of the state itself, so that fill reads a checkpoint directly into it.
        return (shard if state == "param" else adam.state[shard][state]).detach().view(-1)

    def _store(self, parameter: torch.nn.Parameter, state: str, values: torch.Tensor, read: int) -> None:
        """Store values in the state's own format, once all values of a parameter are read: a block is stored
        as a whole.

        Args:
            parameter, state: the parameter and the name of its state.
            values: [n] float32.
            read: number of additional values that were read.
        """
        adam = self._optimizer.optimizer
        if not isinstance(adam, ShardedAdamW):
            return
        _, missing = self._gathering.pop((parameter, state), (values, values.numel()))
        if missing > read:
            # Wait for the rest, because an 8-bit block has one scale, and half a block cannot be stored.
            self._gathering[parameter, state] = values, missing - read
        else:
            adam.write_state(self._shard_of(parameter), state, values)

    def fill(
        self, buffer: int, state: str, start: int, stop: int, read: Callable[[int, int, torch.Tensor], None]
    ) -> None:
        """Make ``read`` fill this rank's part of the positions from ``start`` to ``stop``, which all belong
        to one parameter.

        Args:
            read: is called with the start and the end of some positions, and with their values [end - start]
                in the optimizer's memory.
        """
        step = max(
            1, SLICE_BYTES // _ITEM // 2
        )  # half, because pieces and the tensor they are joined into may exist together
        for begin, end, parameter in self._kept_between(buffer, start, stop):
            first, last = max(begin, start), min(end, stop)
            gathered = self._gathering.get((parameter, state))
            kept = self._values(parameter, state) if gathered is None else gathered[0]
            for position in range(first, last, step):
                behind = min(position + step, last)
                read(position, behind, kept[position - begin : behind - begin])
            self._store(parameter, state, kept, last - first)


class StateStream:
    """The state of all distributed optimizers of a rank, for one save: outlines of the state, and values on
    request."""

    def __init__(self) -> None:
        # One long tensor without memory, whose offsets identify all states of all optimizers.
        self._addresses = torch.empty(_ADDRESSES, dtype=torch.float32, device="meta")
        self._sources: list[_Source] = []
        self._places: list[_Place] = []  # in the order of their addresses
        self._size = 0

    def outlines(self, optimizer: DistributedOptimizer) -> dict[Any, Any]:
        """Return what ``DistributedOptimizer.get_parameter_state_dp_zero`` returns, without memory: for each
        buffer and dtype, each state is one float32 tensor of the meta device."""
        source = _Source(optimizer)
        self._sources.append(source)
        # Megatron-Core marks buffers in this way whose buckets are one tensor, padding included.
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
        """Yield the pieces of a tensor that this rank keeps and writes: boxes of it, without memory. If other
        data-parallel groups have the tensor too, the group of the main replica writes it.

        Raises:
            CheckpointError: the outline does not belong to any state.
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
                    # Turn the layer axis into an ordinary one of length 1: pieces have all dimensions of the
                    # whole tensor.
                    prepend_axis_num=0,
                    axis_fragmentations=None,  # the pieces of a tensor are not a grid
                    replica_id=0,
                )
                address += count

    def values(self, tensors: Sequence[tuple[Any, torch.Tensor]]) -> Iterator[tuple[Any, torch.Tensor]]:
        """Yield each item with its tensor's values on the host, one tensor at a time. The memory for an
        outline's values is freed when the next tensor is requested.

        Raises:
            CheckpointError: an outline does not belong to any state.
        """
        for item, tensor in tensors:
            if not tensor.is_meta:
                yield item, tensor.to("cpu")
                continue
            values = torch.empty(tensor.shape, dtype=tensor.dtype)
            self.copy(tensor, values)
            yield item, values
            # Free the memory now: the writer still refers to the tensor until it has the next one.
            values.untyped_storage().resize_(0)

    def copy(self, outline: torch.Tensor, target: torch.Tensor) -> None:
        """Fill ``target``, contiguous on the host and of the outline's shape, with the values of an outline.

        Raises:
            CheckpointError: the outline does not belong to any state.
        """
        place = self._place_of(outline)
        first = int(outline.storage_offset()) - place.first
        self._sources[place.source].copy(place.buffer, place.state, first, target.view(-1))

    def fill(self, outlines: Sequence[ShardedTensor], checkpoint: TorchDistCheckpoint) -> None:
        """Read this rank's part of the outlined tensors into the optimizers' memory. Positions that are not
        in the checkpoint, such as padding of a vocabulary, become zero.

        Raises:
            CheckpointError: a tensor of the checkpoint has another shape.
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
        # Take the last state that begins at or before the address.
        return self._places[
            bisect.bisect_right(self._places, tensor.storage_offset(), key=operator.attrgetter("first")) - 1
        ]


def _is_of_main_group(replica_id: int | tuple[int, ...]) -> bool:
    """Return whether a replica belongs to the data-parallel group of the main replica: its rank in that
    group, which Megatron-Core puts last, is ignored."""
    return isinstance(replica_id, int) or not any(replica_id[:-1])


def _read(
    outline: ShardedTensor,
    begin: int,
    checkpoint: TorchDistCheckpoint,
    first: int,
    last: int,
    values: torch.Tensor,
) -> None:
    """Fill ``values`` with the elements from ``first - begin`` to ``last - begin`` of a tensor, read from the
    checkpoint."""
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
        # Boxes come in row-major order, so that their elements are consecutive in the flat values.
        target, values = values[:count], values[count:]
        wanted = (
            *leading,
            *((start + offset, stop + offset) for (start, stop), offset in zip(box, origin, strict=True)),
        )
        there = intersection(wanted, whole(stored))
        if there != wanted:
            # This layout has padding of the vocabulary that the writer's layout did not have.
            target.zero_()
        if there is not None:
            inside = relative(there, wanted)
            stored_part = read_again(
                functools.partial(checkpoint.read, key, there), f"{key} of {checkpoint.directory}"
            )
            part(target.view(shape_of(wanted)), inside).copy_(stored_part)


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in a storage without other values, because those would be saved as well. Contiguous
    host memory is not copied."""
    tensor = tensor.detach()
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    if not tensor.is_cpu or not tensor.is_contiguous() or not tensor.numel():
        return tensor.clone()
    # View the tensor as a numpy array, which begins and ends with it. It is viewed as bytes, because numpy
    # lacks some dtypes.
    values = torch.from_numpy(tensor.view(-1).view(torch.uint8).numpy()).view(tensor.dtype)
    # Restore the strides, which are saved: dimensions of size 1 may have any stride.
    return values.as_strided(tensor.shape, tensor.stride())


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that, one after another, contain the elements from ``start`` to ``stop`` of a tensor in
    row-major order."""
    if start >= stop:
        return
    if len(shape) < 2:
        yield ((start, stop),) * len(shape)
        return
    # There are at most three kinds of boxes per dimension: the rest of a row, whole rows, and the beginning
    # of a row.
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # the rows that are included as a whole
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
    """Megarl's load strategy: Megatron-Core's, which leaves outlines unchanged. Tensors that are read
    directly into their final memory are returned as outlines, so that they are not copied to other memory
    again.

    Args:
        held: addresses of the memory that tensors belong in.

    Attributes:
        outlines: the requested tensors that have no memory; for ``StateStream.fill``.
    """

    def __init__(self, held: Collection[int] = ()) -> None:
        super().__init__()
        self._held = held
        self.outlines: list[ShardedTensor] = []

    def load(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path, *arguments: Any
    ) -> dict[str, Any]:
        """Load as Megatron-Core does, except that tensors of the meta device stay such, and tensors that are
        read into ``held`` memory are returned as tensors of the meta device."""
        # Megatron-Core would allocate host memory for an outline, and read all of it on every rank.
        outlined, plain = extract_matching_values(
            sharded_state_dict, lambda each: isinstance(each, ShardedTensor) and each.data.is_meta
        )
        loaded: dict[str, Any] = dict_list_map_inplace(
            self._without_memory, super().load(plain, checkpoint_dir, *arguments)
        )
        merge(loaded, dict_list_map_inplace(self._left_as_it_is, outlined))
        return loaded

    def _without_memory(self, value: Any) -> Any:
        # Compare storages, because DCP reads into the tensors that it is given, and so into the model itself.
        there = isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in self._held
        return torch.empty_like(value, device="meta") if there else value

    def _left_as_it_is(self, outline: ShardedTensor) -> torch.Tensor:
        self.outlines.append(outline)
        return outline.data
