"""Staging of checkpoints: a rank copies its tensors to shared memory that it keeps between saves, and the
process that writes the checkpoint to disk creates the files from it.

Writing a file to new shared memory takes about ten times as long as a copy to memory that was used before,
because all its pages are new and an archive needs checksums of its tensors. So a rank only copies the values,
and leaves a description of the file next to the checkpoint's other files. The file created from both is
identical to the one that the rank would have written.

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
from megarl.checkpoint.staged_file import Address, Description, Piece, description_name, tensor_at
from megarl.checkpoint.storage import storage_error
from megarl.errors import CheckpointError

_Bytes = bytes | bytearray | memoryview
# A multiple of every dtype's size, as torch.frombuffer requires, and the size of a cache line.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class StagedTensor:
    """A tensor of a staged file, before its values are copied.

    Attributes:
        dtype, shape, stride: the properties with which it is saved.
        fill: copies the values into a host tensor with these properties.
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
    """Describe a tensor on any device as a ``StagedTensor``; its values are copied when ``fill`` is
    called.

    The strides are those with which DCP would save the tensor: its own if it is on the host and fills its
    storage, else those of a dense copy.
    """
    values = tensor.detach()
    # torch.save writes the whole storage of a view, and the staged file must be identical to DCP's, which
    # copies views first.
    is_alone = values.is_cpu and values.untyped_storage().nbytes() == values.nbytes
    like = values if is_alone else torch.empty_like(values, device="meta")
    return StagedTensor(
        values.dtype, tuple(values.shape), tuple(like.stride()), lambda target: target.copy_(values)
    )


class StagingBuffer:
    """Shared memory in which one rank stages its file of one checkpoint directory. It grows to the largest
    save and is kept until ``close``.

    The next save overwrites it, so the writing process must have read it by then.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._memory: mmap.mmap | None = None
        self._capacity = 0
        self._lengths: dict[tuple[torch.dtype, tuple[int, ...], tuple[int, ...]], int] = {}

    def write(self, path: Path, pieces: Sequence[_Bytes | StagedTensor]) -> list[tuple[int, int]]:
        """Copy the parts of a file to this buffer and write the file's description. No other rank may write
        to ``path``.

        Args:
            path: path of the file to be created.
            pieces: bytes, which the file contains unchanged, and tensors, each of which becomes an archive of
                ``torch.save``.

        Returns:
            Offset and length in bytes of each part in the file.

        Raises:
            CheckpointError: there is too little memory.
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
        description: Description = {"memory": self._address(), "pieces": described}
        path.with_name(description_name(path.name)).write_text(json.dumps(description))
        return spans

    def close(self) -> None:
        """Free the memory once no other process reads it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor, self._memory, self._capacity = None, None, 0

    def _reserve(self, size: int) -> None:
        if size <= self._capacity:
            return
        available = available_bytes()
        # Check first: writing to a page of shared memory that is not available kills the process with SIGBUS.
        if size - self._capacity > available:
            raise CheckpointError(
                f"{size - self._capacity} bytes more of memory are needed to copy it, and {available} are "
                "available"
            )
        if self._descriptor is None:
            self._descriptor = os.memfd_create("megarl-checkpoint", os.MFD_CLOEXEC)
        # Pages are allocated when written, so the enlarged file takes no memory yet.
        os.ftruncate(self._descriptor, size)
        self._memory, self._capacity = mmap.mmap(self._descriptor, size), size
        # Huge pages, where available, make the first save faster.
        with contextlib.suppress(OSError, AttributeError):
            self._memory.madvise(mmap.MADV_HUGEPAGE)

    def _keep(self, piece: _Bytes | StagedTensor, place: int) -> Piece:
        """Copy one part to the buffer and return its entry for the description."""
        if not isinstance(piece, StagedTensor):
            if piece:
                assert self._memory is not None
                self._memory[place : place + len(piece)] = piece
            return {"place": place, "length": len(piece)}
        values = tensor_at(self._memory, place, piece.dtype, piece.shape, piece.stride)
        piece.fill(values)
        kind = (piece.dtype, piece.shape, piece.stride)
        # Cache the archive length, which depends only on dtype, shape and strides: computing it takes as long
        # as a copy.
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

    def _address(self) -> Address | None:
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
    """A rank's staging buffers, one per checkpoint directory that it writes, by directory name."""

    def __init__(self) -> None:
        self._buffers: dict[str, StagingBuffer] = {}

    def of(self, directory: Path) -> StagingBuffer | None:
        """Return the buffer for ``directory``, shared with directories of the same name in other
        checkpoints.

        Return None for a directory on disk, and free all buffers.
        """
        if waits_in_memory(directory):
            return self._buffers.setdefault(directory.name, StagingBuffer())
        self.close()
        return None

    def close(self) -> None:
        """Free the memory of all buffers."""
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
    """Stage a file, and return the results that DCP would report after writing it.

    Args:
        buffer: buffer to which the content is copied.
        path: path of the file.
        name: name of the file in the checkpoint's index.
        plain: non-tensor items, which come first in the file.
        tensors: the items that follow.

    Raises:
        CheckpointError: there is too little memory.
        OSError: the description cannot be written.
    """
    spans = buffer.write(path, [*(data.getbuffer() for _, data in plain), *(tensor for _, tensor in tensors)])
    results = []
    for (item, _), (start, size) in zip((*plain, *tensors), spans, strict=True):
        results.append(WriteResult(item.index, size, _StorageInfo(name, start, size)))
    return results


class RankWriter(dcp.FileSystemWriter):
    """DCP's writer, extended to stage this rank's file and to report storage errors.

    Args:
        directory: directory of the files.
        buffer: host memory in which to stage the file; None writes it to disk.
    """

    def __init__(self, directory: Path, buffer: StagingBuffer | None) -> None:
        # No sync here: all files are synced once, before the directory is renamed (appears_whole).
        super().__init__(str(directory), sync_files=False)
        self._directory, self._buffer = directory, buffer

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write or stage the items that a plan assigns to this rank; arguments and result as in DCP."""
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
            # DCP sorts tensors by size if there is a GPU, and the staged file must be identical.
            tensors.sort(key=lambda each: _item_size(each[0]))
        future: Future[list[WriteResult]] = Future()
        future.set_result(staged_results(self._buffer, self._directory / name, name, plain, tensors))
        return future


class _Counted:
    """A stream that counts bytes and discards them."""

    def __init__(self) -> None:
        self.length = 0

    def write(self, data: _Bytes) -> int:
        """Count the bytes of ``data``."""
        size = memoryview(data).nbytes
        self.length += size
        return size

    def flush(self) -> None:
        """Do nothing."""


def _archive_length(tensor: Tensor) -> int:
    """Return the bytes of the archive that ``torch.save`` writes; they do not depend on the values."""
    counted = _Counted()
    torch.save(tensor, cast("BinaryIO", counted))
    return counted.length


def _rows(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Return the byte offset of each part, aligned to ``_ALIGNMENT``, and the offset after the last part."""
    places, end = [], 0
    for size in sizes:
        places.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return places, end
