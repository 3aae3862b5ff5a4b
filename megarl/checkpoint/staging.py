"""Staging of a checkpoint: each rank copies its tensors to shared memory that it keeps from save to save, and
the
process that writes the checkpoint to disk creates the files from it.

A rank that wrote its file in shared memory itself would need the time of some ten copies, because all pages
are new, and an archive needs the checksums of its tensors. A copy to existing pages takes the time of one. So
a rank copies the values, and leaves a description of the file next to the checkpoint's other files. The file
that is created from them is the one that the rank would have written, to the last byte.

The memory has no name in any directory (``memfd_create``): it disappears with the last process that has it
open, however that process ends.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, _item_size, _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megarl.checkpoint.background import waits_in_memory
from megarl.checkpoint.host_memory import available_bytes
from megarl.checkpoint.staged_file import description_name, tensor_at
from megarl.checkpoint.storage import storage_error
from megarl.errors import CheckpointError

_Bytes = bytes | bytearray | memoryview
# This is a multiple of the size of every dtype, as torch.frombuffer requires, and the size of a cache line.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class StagedTensor:
    """A tensor of a file, before it is copied.

    Attributes:
        dtype, shape, stride: as they are saved.
        fill: receives a host tensor with these properties, and copies the values into it.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    fill: Callable[[Tensor], Any]

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


def staged(tensor: Tensor) -> StagedTensor:
    """Return a tensor of any device as a ``StagedTensor``, with the strides of a copy in memory of
    its own."""
    values = tensor.detach()
    # Keep the strides only if the tensor fills its storage: torch.save writes the whole storage of a view,
    # and the copy in memory has to look like what DCP would write.
    is_alone = values.is_cpu and values.untyped_storage().nbytes() == values.nbytes
    like = values if is_alone else torch.empty_like(values, device="meta")
    return StagedTensor(
        values.dtype, tuple(values.shape), tuple(like.stride()), lambda target: target.copy_(values)
    )


class StagingBuffer:
    """Shared memory of one rank for one of the directories of a checkpoint. It grows to the largest save, and
    is kept until ``close``.

    The next save overwrites it, so the process that writes the files must have read it by then.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._memory: mmap.mmap | None = None
        self._capacity = 0
        self._lengths: dict[tuple[torch.dtype, tuple[int, ...], tuple[int, ...]], int] = {}

    def write(self, path: Path, pieces: Sequence[_Bytes | StagedTensor]) -> list[tuple[int, int]]:
        """Copy the pieces of a file to this buffer, and write the file's description. Nobody else may write
        to ``path``.

        Args:
            path: of the file to be created.
            pieces: bytes, which the file holds unchanged, and tensors, each of which becomes an archive of
                ``torch.save``.

        Returns:
            Offset and number of bytes of each piece in the file.

        Raises:
            CheckpointError: there is no memory for the pieces.
            OSError: the description cannot be written.
        """
        sizes = [piece.nbytes if isinstance(piece, StagedTensor) else len(piece) for piece in pieces]
        places, end = _rows(sizes)
        self._reserve(end)
        described = list(map(self._keep, pieces, places))
        spans, length = [], 0
        for each in described:
            spans.append((length, each["length"]))
            length += each["length"]
        description = {"memory": self._address(), "pieces": described}
        path.with_name(description_name(path.name)).write_text(json.dumps(description))
        return spans

    def close(self) -> None:
        """Return the memory, as soon as nobody reads it any more."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor, self._memory, self._capacity = None, None, 0

    def _reserve(self, size: int) -> None:
        if size <= self._capacity:
            return
        available = available_bytes()
        # Check first: a page of shared memory that is not available kills the process with SIGBUS instead of
        # raising ENOSPC.
        if size - self._capacity > available:
            raise CheckpointError(
                f"{size - self._capacity} bytes more of memory are needed to copy it, and {available} are "
                "available"
            )
        if self._descriptor is None:
            self._descriptor = os.memfd_create("megarl-checkpoint", os.MFD_CLOEXEC)
        # Pages are allocated when they are written, so that a sparse file costs nothing until it holds a
        # tensor.
        os.ftruncate(self._descriptor, size)
        self._memory, self._capacity = mmap.mmap(self._descriptor, size), size
        # Use huge pages if the system allows it: fewer pages make the first save faster.
        with contextlib.suppress(OSError, AttributeError):
            self._memory.madvise(mmap.MADV_HUGEPAGE)

    def _keep(self, piece: _Bytes | StagedTensor, place: int) -> dict[str, Any]:
        """Copy a piece, and return its part of the description."""
        if not isinstance(piece, StagedTensor):
            if piece:
                assert self._memory is not None
                self._memory[place : place + len(piece)] = piece
            return {"place": place, "length": len(piece)}
        values = tensor_at(self._memory, place, piece.dtype, piece.shape, piece.stride)
        piece.fill(values)
        kind = (piece.dtype, piece.shape, piece.stride)
        # Cache the length of an archive, which depends only on dtype, shape and strides: making one takes as
        # long as a copy.
        if kind not in self._lengths:
            self._lengths[kind] = _archive_length(values)
        dtype = str(piece.dtype).removeprefix("torch.")
        return {
            "place": place,
            "length": self._lengths[kind],
            "dtype": dtype,
            "shape": piece.shape,
            "stride": piece.stride,
        }

    def _address(self) -> dict[str, int] | None:
        """Return where another process of this node and user finds the memory; None if it is empty."""
        if self._descriptor is None:
            return None
        status = os.fstat(self._descriptor)
        return {
            "process": os.getpid(),
            "descriptor": self._descriptor,
            "device": status.st_dev,
            "inode": status.st_ino,
        }


class StagingBuffers:
    """The buffers of a rank: one for each directory of a checkpoint that it writes, by the
    directory's name."""

    def __init__(self) -> None:
        self._buffers: dict[str, StagingBuffer] = {}

    def of(self, directory: Path) -> StagingBuffer | None:
        """Return the buffer of ``directory``, and of directories with its name in other checkpoints. Return
        None for a directory that is on disk; then the memory of all buffers is returned."""
        if waits_in_memory(directory):
            return self._buffers.setdefault(directory.name, StagingBuffer())
        self.close()
        return None

    def close(self) -> None:
        """Return the memory of all buffers."""
        for buffer in self._buffers.values():
            buffer.close()
        self._buffers.clear()


def staged_results(
    buffer: StagingBuffer,
    path: Path,
    name: str,
    plain: Sequence[tuple[WriteItem, io.BytesIO]],
    tensors: Sequence[tuple[WriteItem, StagedTensor]],
) -> list[WriteResult]:
    """Stage a file, and return what DCP would report if it had been written.

    Args:
        buffer: buffer that its tensors are copied to.
        path: of the file.
        name: of the file in the index.
        plain: the items that are not tensors, which come first in the file.
        tensors: the items that follow.

    Raises:
        CheckpointError: there is no memory for them.
        OSError: the description of the file cannot be written.
    """
    spans = buffer.write(path, [*(data.getbuffer() for _, data in plain), *(tensor for _, tensor in tensors)])
    results = []
    for (item, _), (start, size) in zip((*plain, *tensors), spans, strict=True):
        results.append(WriteResult(item.index, size, _StorageInfo(name, start, size)))
    return results


class RankWriter(dcp.FileSystemWriter):
    """DCP's writer, which may stage the one file of this rank, and reports errors of the storage.

    Args:
        directory: of the files.
        buffer: where the file is staged; None writes it.
    """

    def __init__(self, directory: Path, buffer: StagingBuffer | None) -> None:
        # Do not sync here: everything is synced once, before the checkpoint gets its name (appears_whole).
        super().__init__(str(directory), sync_files=False)
        self._directory, self._buffer = directory, buffer

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write or stage what a plan assigns to this rank; arguments and result as in DCP."""
        if self._buffer is None:
            try:
                return super().write_data(plan, planner)
            except RuntimeError as error:
                raise storage_error(error) from None
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        plain: list[tuple[WriteItem, Any]] = []
        tensors = []
        for item in plan.items:
            data: Any = planner.resolve_data(item)
            if item.type == WriteItemType.BYTE_IO:
                plain.append((item, data))
            else:
                tensors.append((item, staged(data)))
        if torch.cuda.is_available():
            # Sort the tensors like DCP, which copies from the device while it writes.
            tensors.sort(key=lambda each: _item_size(each[0]))
        future: Future[list[WriteResult]] = Future()
        future.set_result(staged_results(self._buffer, self._directory / name, name, plain, tensors))
        return future


class _Counted:
    """A stream that counts bytes and keeps none."""

    def __init__(self) -> None:
        self.length = 0

    def write(self, data: _Bytes) -> int:
        """Count bytes."""
        size = memoryview(data).nbytes
        self.length += size
        return size

    def flush(self) -> None:
        """Do nothing."""


def _archive_length(tensor: Tensor) -> int:
    """Return the bytes of the archive that ``torch.save`` writes, which do not depend on the values."""
    counted = _Counted()
    torch.save(tensor, cast("BinaryIO", counted))
    return counted.length


def _rows(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Return offsets for pieces of these sizes, one after the other, and the offset behind the last one."""
    places, end = [], 0
    for size in sizes:
        places.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return places, end
