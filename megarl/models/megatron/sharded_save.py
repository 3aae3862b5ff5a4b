"""Writes a checkpoint with Megatron-Core's dist-checkpointing: every rank writes a part, and an error on one
rank is raised on all.

In Megatron-Core only the main replicas write, and all of them are in the first data-parallel rank. Here the
ranks that hold the same tensors divide the writing among themselves. The division depends only on the layout
and the tensor sizes, so the same layout always writes the same files.
"""

from __future__ import annotations

import functools
import io
import itertools
import queue
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from megatron.core.dist_checkpointing.exchange_utils import determine_main_replica_uniform_distribution
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, apply_factories
from megatron.core.dist_checkpointing.strategies import common, filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    distribute_main_replicas_with_precomputed_distribution,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from megarl.checkpoint.collective import failing_together
from megarl.checkpoint.staging import StagedTensor, StagingBuffer, staged, staged_results
from megarl.checkpoint.storage import storage_error
from megarl.errors import CheckpointError
from megarl.models.megatron.parallel import holders
from megarl.models.megatron.state_stream import StateStream, alone
from megarl.patched import patched

_Plain = Sequence[tuple[WriteItem, io.BytesIO]]
_Tensors = Sequence[tuple[WriteItem, torch.Tensor]]
_PIECES = "pieces of optimizer state"


def save_sharded(
    state: ShardedStateDict, directory: Path, stream: StateStream, buffer: StagingBuffer | None = None
) -> None:
    """Write a sharded state dict of Megatron-Core to an empty directory. Collective over all ranks.

    Args:
        state: the state dict; it is modified.
        directory: directory of the files.
        stream: supplies the values of the outlines (meta tensors) in ``state``.
        buffer: host memory in which to stage this rank's file; None writes the file now.

    Raises:
        CheckpointError: on all ranks, with the reason, if one rank could not write.
    """
    # Megatron would start a manager process only to pass on results. It takes seconds to start and outlives a
    # killed rank.
    if filesystem_async._results_queue is None:
        # A queue within the process is enough, because this rank writes in its own thread.
        filesystem_async._results_queue = queue.Queue()
    first = _FirstRank()
    strategy = StreamedSave(stream, first.writes, buffer)
    failure: CheckpointException | None = None
    try:
        with patched(*first.replacements()):
            dist_checkpointing.save(shared_out(state, stream), str(directory), strategy)
    except (
        CheckpointException
    ) as error:  # not an Exception; raised on all ranks, but only rank 0 has the reason
        failure = error
    with failing_together(f"writing {directory}"):
        if failure is not None:
            raise CheckpointError(f"{failure}. Check free space and permissions there") from failure
        first.require_written()


def shared_out(state: ShardedStateDict, stream: StateStream) -> ShardedStateDict:
    """Return a sharded state dict in which exactly one rank writes each tensor. Collective over the ranks
    that hold the same tensors.

    Each rank writes the parts of the stream's outlines that it keeps. Every other tensor is assigned in full
    to one of its holders: largest tensor first, to the holder with the least to write so far. Non-tensor
    objects are written by the main replica.

    Args:
        state: the state dict; it is modified.
        stream: the stream that made the outlines in ``state``.
    """
    # Apply factories first: they split tensors, such as an MLP's gate and up projections, and the resulting
    # tensors are what is assigned and written.
    apply_factories(state)
    outlined, rest = extract_matching_values(
        state, lambda each: isinstance(each, ShardedTensor) and each.data.is_meta
    )
    for group in _groups_of_holders():
        distribution = determine_main_replica_uniform_distribution(rest, group)
        distribute_main_replicas_with_precomputed_distribution(rest, group, distribution)
    for each in nested_values(rest):
        # Separate tensors from the larger storages that they are views of, because Megatron-Core would copy
        # and save the whole storage.
        if (
            isinstance(each, ShardedTensor)
            and type(each.data) in (torch.Tensor, torch.nn.Parameter)
            and each.data.is_cpu
        ):
            each.data = alone(each.data)
    pieces = dict(enumerate(itertools.chain.from_iterable(map(stream.pieces, nested_values(outlined)))))
    # Omit an empty dict, because it would be stored in the common state that all ranks share.
    return {**rest, _PIECES: pieces} if pieces else rest


def _groups_of_holders() -> list[dist.ProcessGroup]:
    """Return this rank's groups of ranks among which tensors are divided for writing, to be processed in
    order.

    The group that shares the experts is normally a subset of the other group; it is listed only if it is not,
    as when an expert is sharded over fewer ranks than the other layers.
    """
    most, experts = holders(of_experts=False), holders(of_experts=True)
    within = set(dist.get_process_group_ranks(experts)) <= set(dist.get_process_group_ranks(most))
    return [most] if within else [most, experts]


class StreamedSave(TorchDistSaveShardedStrategy):
    """Megatron-Core's save strategy with two changes: each rank writes its single file itself, and copies a
    tensor to the host only when it is written.

    Args:
        stream: supplies the values of the outlines.
        finishing: wraps the function that writes the index on the first rank; the wrapper is called in its
            place.
        buffer: host memory in which to stage the file; None writes the file now.
    """

    def __init__(
        self,
        stream: StateStream,
        finishing: Callable[[Callable[..., Any]], Callable[..., None]],
        buffer: StagingBuffer | None = None,
    ) -> None:
        # One thread writes one file; more threads would only create more files.
        super().__init__("torch_dist", 1, thread_count=1)
        self._stream, self._finishing, self._buffer = stream, finishing, buffer

    def _get_save_and_finalize_callbacks(self, writer: FileSystemWriterAsync, *arguments: Any) -> Any:
        # Wrap the method first, because the request is created with the bound method.
        writer.finish = self._finishing(writer.finish)
        request = super()._get_save_and_finalize_callbacks(writer, *arguments)
        # Do not preload: it would copy all of the rank's tensors to the host before the first one is written.
        return request._replace(
            async_fn=functools.partial(self._write, writer), async_fn_args=(), preload_fn=None
        )

    def _write(self, writer: FileSystemWriterAsync) -> None:
        """Write this rank's file. An error here is raised on all ranks at the end of the save."""
        results: dict[int, Any] | Exception = {}
        for path, name, (plain, tensors) in writer.write_buckets:
            written = (
                self._staged(path, name, plain, tensors)
                if self._buffer
                else self._written(writer, path, name, plain, tensors)
            )
            # Megatron-Core's finalizer expects results by writer index; each rank has one writer.
            results = written if isinstance(written, Exception) else {0: written}
        if writer.results_queue is not None:
            writer.results_queue.put(results)

    def _written(
        self, writer: FileSystemWriterAsync, path: str, name: str, plain: _Plain, tensors: _Tensors
    ) -> list[WriteResult] | Exception:
        """Write the file. Return the location of each write item in it, or the error."""
        answer: queue.Queue[Any] = queue.Queue()
        # Queues of the threading kind suffice, because the function is called in this process.
        counter: queue.Queue[int] = queue.Queue()
        counter.put(0)
        # Newer versions of the writer have transforms and require them here.
        transforms = [writer.transforms] if hasattr(writer, "transforms") else []
        bucket = (path, name, (plain, self._stream.values(tensors)))
        FileSystemWriterAsync.write_preloaded_data(transforms, 0, bucket, answer, counter, use_fsync=True)
        written: list[WriteResult] | Exception = answer.get()[1]
        return storage_error(written) if isinstance(written, Exception) else written

    def _staged(
        self, path: str, name: str, plain: _Plain, tensors: _Tensors
    ) -> list[WriteResult] | Exception:
        """Stage the file in host memory. Return the location that each write item will have in it, or the
        error."""
        assert self._buffer is not None
        try:
            return staged_results(
                self._buffer,
                Path(path),
                name,
                plain,
                [(item, self._to_stage(tensor)) for item, tensor in tensors],
            )
        except Exception as error:
            return error

    def _to_stage(self, tensor: torch.Tensor) -> StagedTensor:
        if not tensor.is_meta:
            return staged(tensor)
        return StagedTensor(
            tensor.dtype, tuple(tensor.shape), tensor.stride(), functools.partial(self._stream.copy, tensor)
        )


class _FirstRank:
    """Collects the first error in files that only rank 0 writes: common state, index, checkpoint config.

    Raised at once, the error would leave the other ranks waiting in the next collective of Megatron-Core's
    save. Instead the save continues, and fails on all ranks at its end.
    """

    def __init__(self) -> None:
        self._failure: Exception | None = None

    def writes(self, function: Callable[..., Any]) -> Callable[..., None]:
        """Return ``function`` wrapped so that its error is stored instead of raised."""

        def kept(*arguments: Any, **options: Any) -> None:
            try:
                function(*arguments, **options)
            except Exception as error:
                # Keep the first error, because later ones are mostly its consequences.
                self._failure = self._failure or error

        return kept

    def replacements(self) -> list[tuple[Any, str, Any]]:
        """Return wrapped versions of Megatron-Core's functions that write only on rank 0, as arguments of
        ``patched``."""
        found: list[tuple[Any, str]] = [(serialization, "save_config")]
        # Later versions write the common state together with the tensors.
        if hasattr(common, "TorchCommonSaveStrategy"):
            found.append((common.TorchCommonSaveStrategy, "save_common"))
        return [(owner, name, self.writes(getattr(owner, name))) for owner, name in found]

    def require_written(self) -> None:
        """Raise the first stored error, if any."""
        if self._failure is not None:
            raise self._failure
