"""Streams the distributed optimizer's state to the rank that writes it, in slices of bounded size, while the checkpoint is written, and
from a checkpoint's files to where each rank keeps its share.

Megatron-Core's "fully reshardable" checkpoint wants each state of each buffer as one tensor on the host, twelve bytes a parameter, and up
to 0.19 brings them together on the device, on every data-parallel rank. Here the checkpoint is planned with outlines: tensors of torch's
meta device, which have a shape and an address but no memory. When a tensor's turn to be written has come, the first rank of the
data-parallel group asks for its values. What it has itself it copies to the host, the rest is sent to it. So it has one tensor on the
host at a time, and of others' values one slice on the device; the other ranks need nothing beyond their own state.

A load is planned with outlines as well, where Megatron-Core has every data-parallel rank read all of a buffer. Each rank then reads what it
keeps itself, a slice at a time, into the memory that training has anyway.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import math
import operator
import queue
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, extract_matching_values, merge
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from converters.checkpoint.safetensors_file import Box, intersection, part, relative, shape_of, whole
from converters.torch_dist.reader import TorchDistCheckpoint
from megarl.checkpoint.storage import read_again
from megarl.distributed.device import runtime
from megarl.errors import CheckpointError

STATES = ("param", "exp_avg", "exp_avg_sq")
SLICE_BYTES = 256 * 2**20
"""What a rank receives of others' values at once, so the device memory that a save takes; and the host memory that a load takes."""
_ITEM = 4
_ADDRESSES = 2**56
_END = -1


@dataclass(frozen=True, slots=True)
class _Place:
    """One state of one buffer of one optimizer, among the addresses of a stream: ``first`` is its first element there."""

    first: int
    source: int
    buffer: int
    state: str


class _Source:
    """One distributed optimizer's state, as the ranks of its data-parallel group share it. Positions are elements of a buffer."""

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self._optimizer = optimizer
        self._group = optimizer.data_parallel_group
        self._ranks, self._rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        self._device = runtime().device
        self._own = [self._pieces_of(index) for index in range(len(optimizer.gbuf_ranges))]

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes the state of its group, as the main replica does in every checkpoint of Megatron-Core."""
        return self._rank == 0

    def _pieces_of(self, buffer: int) -> list[tuple[int, int, torch.nn.Parameter]]:
        """First and last position of what this rank has of each parameter, in order."""
        (buckets,) = self._optimizer.gbuf_ranges[buffer].values()
        ranges = ((parameter, found["gbuf_world"]) for bucket in buckets for parameter, found in bucket["param_map"].items())
        return sorted(((world.start, world.end, parameter) for parameter, world in ranges), key=operator.itemgetter(0, 1))

    def size(self, buffer: int) -> int:
        """Elements of a buffer, padding included."""
        return int(self._optimizer.buffers[buffer].grad_data.numel())

    def collect(self, buffer: int, state: str, start: int, count: int) -> torch.Tensor:
        """[count] float32 on the host from position ``start``, all of it one parameter's. For the writer; the others are in ``serve``."""
        whole = torch.empty(count, dtype=torch.float32)
        step = max(1, SLICE_BYTES // _ITEM)
        for first in range(0, count, step):
            self._fetch(buffer, state, start + first, whole[first : first + step])
        return whole

    def _fetch(self, buffer: int, state: str, start: int, out: torch.Tensor) -> None:
        stop = start + out.numel()
        self._request(buffer, STATES.index(state), start, stop)
        receives, received = [], []
        for owner, first, last in self._owners(buffer, start, stop):
            part = out[first - start : last - start]
            if owner == self._rank:
                part.copy_(self._values(buffer, state, first, last))
                continue
            memory = self._received_into(part)
            received.append((part, memory))
            receives.append(dist.P2POp(dist.irecv, memory, dist.get_global_rank(self._group, owner), self._group))
        _wait(receives)
        for part, memory in received:
            if memory is not part:
                part.copy_(memory)

    def _received_into(self, part: torch.Tensor) -> torch.Tensor:
        """Memory of this rank's device for what another rank sends into ``part``; ``part`` itself where collectives write to the host."""
        return part if self._device.type == "cpu" else torch.empty(part.shape, device=self._device)

    def serve(self) -> None:
        """Send what the writer asks for until it has all."""
        while True:
            buffer, state, start, stop = self._request()
            if buffer == _END:
                return
            sends = []
            for owner, first, last in self._owners(buffer, start, stop):
                if owner == self._rank:
                    values = self._values(buffer, STATES[state], first, last).to(self._device, torch.float32)
                    sends.append(dist.P2POp(dist.isend, values, dist.get_global_rank(self._group, 0), self._group))
            _wait(sends)

    def finish(self) -> None:
        """Let the other ranks go."""
        self._request(_END, 0, 0, 0)

    def _request(self, *numbers: int) -> tuple[int, int, int, int]:
        """What the writer says to all: buffer, state, first and last position. The others, who give no numbers, get those."""
        if self._ranks == 1:
            return numbers  # type: ignore[return-value]
        request = torch.tensor(numbers or [0, 0, 0, 0], dtype=torch.int64, device=self._device)
        dist.broadcast(request, src=dist.get_global_rank(self._group, 0), group=self._group)
        return tuple(request.tolist())

    def _owners(self, buffer: int, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The ranks that have the positions, with the first and the last one of each: a bucket is shared out equally, end to end."""
        buckets = self._optimizer.buffers[buffer].buckets
        bucket = buckets[bisect.bisect_right([each.offset for each in buckets], start) - 1]
        share = bucket.grad_data.numel() // self._ranks
        while start < stop:
            owner = (start - bucket.offset) // share
            last = min(stop, bucket.offset + (owner + 1) * share)
            yield owner, start, last
            start = last

    def fill(self, buffer: int, state: str, start: int, stop: int, read: Callable[[int, int, torch.Tensor], None]) -> None:
        """Have ``read`` fill what this rank has of the positions from ``start`` to ``stop``, all of them one parameter's.

        Args:
            read: is given the first and the last of some positions, and their values where the optimizer keeps them, [last - first].
        """
        step = max(1, SLICE_BYTES // _ITEM // 2)  # what is read may be put together from pieces: both are there then
        own = self._own[buffer]
        for number in range(bisect.bisect_right(own, start, key=operator.itemgetter(1)), len(own)):
            begin, end, parameter = own[number]
            first, last = max(begin, start), min(end, stop)
            if first >= last:
                return
            kept = self._optimizer._get_main_param_and_optimizer_states(parameter)[state].detach()
            for position in range(first, last, step):
                behind = min(position + step, last)
                read(position, behind, kept.view(-1)[position - begin : behind - begin])
            if self._optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:  # which may have given a copy in float32
                self._optimizer._set_main_param_and_optimizer_states(parameter, {state: kept})

    def _values(self, buffer: int, state: str, first: int, last: int) -> torch.Tensor:
        """This rank's values at positions that are all of one parameter, where the optimizer keeps them."""
        own = self._own[buffer]
        start, stop, parameter = own[bisect.bisect_right(own, first, key=operator.itemgetter(0)) - 1]
        assert start <= first and last <= stop, (start, first, last, stop)
        kept = self._optimizer._get_main_param_and_optimizer_states(parameter)[state]
        return kept.detach().view(-1)[first - start : last - start]


def _wait(operations: Sequence[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(list(operations)) if operations else ():
        work.wait()


class StateStream:
    """The state of all distributed optimizers of a rank, for one save: outlines of it, and their values when they are asked for."""

    def __init__(self) -> None:
        self._addresses = torch.empty(_ADDRESSES, dtype=torch.float32, device="meta")
        self._sources: list[_Source] = []
        self._places: list[_Place] = []  # in the order of their addresses
        self._size = 0
        self._ended = 0

    def outlines(self, optimizer: DistributedOptimizer) -> dict[Any, Any]:
        """What ``DistributedOptimizer.get_parameter_state_dp_zero`` returns, without memory: for each buffer and dtype, each state as one
        float32 tensor of the meta device."""
        source = _Source(optimizer)
        self._sources.append(source)
        state: dict[Any, Any] = {"buckets_coalesced": True}
        for buffer, ranges in enumerate(optimizer.gbuf_ranges):
            for dtype in ranges:
                state[buffer] = {dtype: {name: self._outline(buffer, name, source.size(buffer)) for name in STATES}}
        return state

    def _outline(self, buffer: int, state: str, size: int) -> torch.Tensor:
        first = self._size
        self._places.append(_Place(first, len(self._sources) - 1, buffer, state))
        self._size += size
        return self._addresses[first : self._size]

    def values(self, tensors: Sequence[tuple[Any, torch.Tensor]]) -> Generator[tuple[Any, torch.Tensor], None, None]:
        """What is to be written, with its values on the host: one tensor at a time, which loses its memory when the next one is asked for;
        those of one optimizer after those of another.

        A collective over the data-parallel groups; ``close`` ends it where a caller stops early.

        Raises:
            CheckpointError: an outline is that of no state, or of one that another rank is to write.
        """
        outlined: list[list[tuple[Any, torch.Tensor, _Place]]] = [[] for _ in self._sources]
        for item, tensor in tensors:
            if tensor.is_meta:
                place = self._place_of(tensor)
                outlined[place.source].append((item, tensor, place))
            else:
                yield item, tensor.to("cpu")
        for index, mine in enumerate(outlined):
            yield from self._from_source(index, mine)

    def _from_source(self, index: int, mine: Sequence[tuple[Any, torch.Tensor, _Place]]) -> Iterator[tuple[Any, torch.Tensor]]:
        """One optimizer's part of ``values``."""
        source = self._sources[index]
        if source.is_writer:
            try:
                for item, tensor, place in mine:
                    flat = source.collect(place.buffer, place.state, int(tensor.storage_offset()) - place.first, tensor.numel())
                    yield item, flat.view(tensor.shape)
                    # whoever wrote it has a name for it until the next one is there
                    flat.untyped_storage().resize_(0)
            finally:
                self._ended = index + 1
                source.finish()
        elif mine:
            raise CheckpointError(f"{mine[0][0].index.fqn} is to be written by a rank that is not the first of its data-parallel group")
        else:
            self._ended = index + 1
            source.serve()

    def close(self) -> None:
        """Go through the exchanges that ``values`` has left, so that no other rank waits."""
        for index in range(self._ended, len(self._sources)):
            for _ in self._from_source(index, ()):
                pass

    def fill(self, outlines: Sequence[ShardedTensor], checkpoint: TorchDistCheckpoint) -> None:
        """Read what this rank keeps of the outlined tensors to where it is kept. Positions that the checkpoint does not have, which padding
        of a vocabulary has, become zero.

        Raises:
            CheckpointError: a tensor of the checkpoint has another shape.
            ConversionError: a file of the checkpoint is missing or damaged.
        """
        for outline in outlines:
            place = self._place_of(outline.data)
            begin = int(outline.data.storage_offset()) - place.first
            read = functools.partial(_read, outline, begin, checkpoint)
            self._sources[place.source].fill(place.buffer, place.state, begin, begin + outline.data.numel(), read)

    def _place_of(self, tensor: torch.Tensor) -> _Place:
        ours = tensor.untyped_storage()._cdata == self._addresses.untyped_storage()._cdata
        if not ours or not tensor.is_contiguous():
            raise CheckpointError(f"a tensor of shape {list(tensor.shape)} without memory is no state of an optimizer; a defect of megarl")
        return self._places[bisect.bisect_right(self._places, tensor.storage_offset(), key=operator.attrgetter("first")) - 1]


def _read(outline: ShardedTensor, begin: int, checkpoint: TorchDistCheckpoint, first: int, last: int, values: torch.Tensor) -> None:
    """Fill ``values`` with the elements from ``first - begin`` to ``last - begin`` of a tensor, as the checkpoint has them."""
    key, stored = outline.key, checkpoint.shape(outline.key)
    if tuple(outline.global_shape) != stored and not outline.allow_shape_mismatch:
        raise CheckpointError(f"{key} has shape {list(stored)} in {checkpoint.directory}, and {list(outline.global_shape)} in this model")
    leading = tuple((offset, offset + 1) for offset in outline.global_offset[: outline.prepend_axis_num])
    origin = outline.global_offset[outline.prepend_axis_num :]
    for box in boxes(outline.local_shape, first - begin, last - begin):
        count = math.prod(shape_of(box))
        target, values = values[:count], values[count:]
        wanted = (*leading, *((start + offset, stop + offset) for (start, stop), offset in zip(box, origin, strict=True)))
        there = intersection(wanted, whole(stored))
        if there != wanted:
            target.zero_()
        if there is not None:
            inside = relative(there, [start for start, _ in wanted])
            stored_part = read_again(functools.partial(checkpoint.read, key, there), f"{key} of {checkpoint.directory}")
            part(target.view(shape_of(wanted)), inside).copy_(stored_part)


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The boxes that, one behind the other, are the elements from ``start`` to ``stop`` of a tensor in row-major order."""
    if start >= stop:
        return
    if len(shape) < 2:
        yield ((start, stop),) * len(shape)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # the rows that are in it as a whole
    if first > last:  # inside one row
        yield from (((last, first), *box) for box in boxes(shape[1:], start - last * row, stop - last * row))
        return
    yield from (((first - 1, first), *box) for box in boxes(shape[1:], start - (first - 1) * row, row))
    if first < last:
        yield ((first, last), *whole(shape[1:]))
    yield from (((last, last + 1), *box) for box in boxes(shape[1:], 0, stop - last * row))


class StreamedLoad(TorchDistLoadShardedStrategy):
    """Megarl's way of loading: Megatron-Core's, which leaves outlines as they are, and makes outlines of what is read to where it belongs,
    so that nothing puts that together in other memory once more.

    Args:
        held: addresses of the memory that tensors belong in.

    Attributes:
        outlines: what was to be loaded and has no memory; for ``StateStream.fill``.
    """

    def __init__(self, held: Collection[int] = ()) -> None:
        super().__init__()
        self._held = held
        self.outlines: list[ShardedTensor] = []

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path, *arguments: Any) -> dict[str, Any]:
        """As Megatron-Core's; tensors of the meta device stay such, and what is read into ``held`` memory becomes such."""
        outlined, plain = extract_matching_values(sharded_state_dict, lambda each: isinstance(each, ShardedTensor) and each.data.is_meta)
        loaded: dict[str, Any] = dict_list_map_inplace(self._without_memory, super().load(plain, checkpoint_dir, *arguments))
        merge(loaded, dict_list_map_inplace(self._left_as_it_is, outlined))
        return loaded

    def _without_memory(self, value: Any) -> Any:
        there = isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in self._held
        return torch.empty_like(value, device="meta") if there else value

    def _left_as_it_is(self, outline: ShardedTensor) -> torch.Tensor:
        self.outlines.append(outline)
        return outline.data


class StreamedSave(TorchDistSaveShardedStrategy):
    """Megatron-Core's way of saving, in which each rank writes its one file itself, from tensors that come when their turn has come.

    Args:
        stream: gives outlines their values; None where there are none.
        finishing: is given what writes the index on the first rank, and returns what is called in its place.
    """

    def __init__(
        self, stream: StateStream | None = None, finishing: Callable[[Callable[..., Any]], Callable[..., None]] = lambda function: function
    ) -> None:
        # one file a rank: more would only make more files
        super().__init__("torch_dist", 1, thread_count=1)
        self._stream, self._finishing = stream or StateStream(), finishing

    def _get_save_and_finalize_callbacks(self, writer: FileSystemWriterAsync, *arguments: Any) -> Any:
        writer.finish = self._finishing(writer.finish)
        request = super()._get_save_and_finalize_callbacks(writer, *arguments)
        return request._replace(async_fn=functools.partial(self._write, writer), async_fn_args=(), preload_fn=None)

    def _write(self, writer: FileSystemWriterAsync) -> None:
        """Write this rank's file, and be there for what other ranks write. What fails here fails on all ranks, at the end of the save."""
        results: dict[int, Any] | Exception = {}
        for path, key, (plain, tensors) in writer.write_buckets:
            answer: queue.Queue[Any] = queue.Queue()
            counter: queue.Queue[int] = queue.Queue()
            counter.put(0)
            transforms = [writer.transforms] if hasattr(writer, "transforms") else []
            with contextlib.closing(self._stream.values(tensors)) as values:
                FileSystemWriterAsync.write_preloaded_data(transforms, 0, (path, key, (plain, values)), answer, counter, use_fsync=True)
            index, written = answer.get()
            results = written if isinstance(written, Exception) else {index: written}
        self._stream.close()
        if writer.results_queue is not None:
            writer.results_queue.put(results)
