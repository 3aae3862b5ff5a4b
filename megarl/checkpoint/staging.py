"""Staging of a checkpoint: each rank copies its tensors to shared memory that it keeps from save to save, and
the process that brings the checkpoint to the disk makes the files of them.

A rank that wrote its file in shared memory itself would take the time of some ten copies: all pages are new,
and an archive needs the checksums of its tensors. A copy to pages that are there takes the time of one. So a
rank copies the values, and leaves a description of the file beside the checkpoint's other files. The file
that is made of it is the one that the rank would have written, to the last byte.

The memory has no name in any directory (``memfd_create``): it is gone with the last process that has it open,
however that ends.
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
# A multiple of the size of every dtype, as torch.frombuffer needs it, and a cache line.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class StagedTensor:
    """A tensor of a file, before it is copied.

    Attributes:
        dtype, shape, stride: as they are saved.
        fill: is given a tensor on the host of that kind, and copies the values there.
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
    """Return a tensor of any device, with the strides that a copy of it in memory of its own has."""
    values = tensor.detach()
    # torch.save writes the whole storage of a view: the copy in memory has to look like what DCP would write.
    is_alone = values.is_cpu and values.untyped_storage().nbytes() == values.nbytes
    like = values if is_alone else torch.empty_like(values, device="meta")
    return StagedTensor(
        values.dtype, tuple(values.shape), tuple(like.stride()), lambda target: target.copy_(values)
    )


class StagingBuffer:
    """Shared memory of one rank for one of the directories of a checkpoint. It grows to the largest save, and
    is kept until ``close``.

    What an earlier save left here is overwritten: whoever reads it has to be through.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = None
        self._memory: mmap.mmap | None = None
        self._capacity = 0
        self._lengths: dict[tuple[torch.dtype, tuple[int, ...], tuple[int, ...]], int] = {}

    def write(self, path: Path, pieces: Sequence[_Bytes | StagedTensor]) -> list[tuple[int, int]]:
        """Copy the pieces of a file here, and describe it. Nobody may write to ``path`` itself.

        Args:
            path: of the file that is to be made.
            pieces: bytes, which are in the file as they are, and tensors, each of which becomes an archive of
                ``torch.save``.

        Returns:
            Of each piece where it begins in the file, and its bytes there.

        Raises:
            CheckpointError: there is no memory for them.
            OSError: the description cannot be written.
        """
        sizes = [piece.nbytes if isinstance(piece, StagedTensor) else len(piece) for piece in pieces]
        places, end = _rows(sizes)
        self._reserve(end)
        described = [self._keep(piece, place) for piece, place in zip(pieces, places, strict=True)]
        spans, length = [], 0
        for each in described:
            spans.append((length, each["length"]))
            length += each["length"]
        description = {"memory": self._address(), "pieces": described}
        path.with_name(description_name(path.name)).write_text(json.dumps(description))
        return spans

    def close(self) -> None:
        """Give the memory back, as soon as nobody reads it any more."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor, self._memory, self._capacity = None, None, 0

    def _reserve(self, size: int) -> None:
        if size <= self._capacity:
            return
        available = available_bytes()
        # Asked first: a page of shared memory that cannot be had kills the process with SIGBUS, where ENOSPC
        # would be an error.
        if size - self._capacity > available:
            raise CheckpointError(
                f"{size - self._capacity} bytes more of memory are needed to copy it, and {available} are "
                "available"
            )
        if self._descriptor is None:
            self._descriptor = os.memfd_create("megarl-checkpoint", os.MFD_CLOEXEC)
        # Pages are taken when they are written, so that a sparse file costs nothing until a tensor is in it.
        os.ftruncate(self._descriptor, size)
        self._memory, self._capacity = mmap.mmap(self._descriptor, size), size
        # fewer pages, so that the first save takes less, where the system allows it
        with contextlib.suppress(OSError, AttributeError):
            self._memory.madvise(mmap.MADV_HUGEPAGE)

    def _keep(self, piece: _Bytes | StagedTensor, place: int) -> dict[str, Any]:
        """Copy a piece; what its description says of it."""
        if not isinstance(piece, StagedTensor):
            if piece:
                assert self._memory is not None
                self._memory[place : place + len(piece)] = piece
            return {"place": place, "length": len(piece)}
        values = tensor_at(self._memory, place, piece.dtype, piece.shape, piece.stride)
        piece.fill(values)
        kind = (piece.dtype, piece.shape, piece.stride)
        # An archive's length depends on dtype, shape and strides alone, and to make one takes as long as a
        # copy.
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
    """The buffers of a rank: one for each directory that it writes of a checkpoint, by the directory's
    name."""

    def __init__(self) -> None:
        self._buffers: dict[str, StagingBuffer] = {}

    def of(self, directory: Path) -> StagingBuffer | None:
        """Return the buffer of ``directory``, and of directories of its name in other checkpoints. None where
        it is on the disk already: then the memory of all is given back."""
        if waits_in_memory(directory):
            return self._buffers.setdefault(directory.name, StagingBuffer())
        self.close()
        return None

    def close(self) -> None:
        """Give all of the memory back."""
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
    """Stage a file; what DCP would say of it if it had been written.

    Args:
        buffer: where its tensors are copied to.
        path: of the file.
        name: of it in the index.
        plain: what is no tensor, and is in the file first.
        tensors: behind it.

    Raises:
        CheckpointError: there is no memory for them.
        OSError: the description of the file cannot be written.
    """
    spans = buffer.write(path, [*(data.getbuffer() for _, data in plain), *(tensor for _, tensor in tensors)])
    items = [item for item, _ in (*plain, *tensors)]
    return [
        WriteResult(item.index, size, _StorageInfo(name, start, size))
        for item, (start, size) in zip(items, spans, strict=True)
    ]


class RankWriter(dcp.FileSystemWriter):
    """DCP's way of saving, in which the one file of this rank may be staged, and errors of the storage are
    told.

    Args:
        directory: of the files.
        buffer: where the file is staged; None: it is written.
    """

    def __init__(self, directory: Path, buffer: StagingBuffer | None) -> None:
        # Everything is synced once, before the checkpoint gets its name (appears_whole).
        super().__init__(str(directory), sync_files=False)
        self._directory, self._buffer = directory, buffer

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write or stage what a plan gives to this rank; as of DCP."""
        if self._buffer is None:
            try:
                return super().write_data(plan, planner)
            except RuntimeError as error:
                raise storage_error(error) from None
        name = f"{plan.storage_data.prefix}0{DEFAULT_SUFFIX}"
        found: list[tuple[WriteItem, Any]] = [(item, planner.resolve_data(item)) for item in plan.items]
        plain = [(item, data) for item, data in found if item.type == WriteItemType.BYTE_IO]
        tensors = [(item, staged(data)) for item, data in found if item.type != WriteItemType.BYTE_IO]
        if torch.cuda.is_available():
            # so does DCP, which copies from the device while it writes
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
        """Nothing."""


def _archive_length(tensor: Tensor) -> int:
    """Return bytes of the archive that ``torch.save`` makes, which do not depend on the values."""
    counted = _Counted()
    torch.save(tensor, cast("BinaryIO", counted))
    return counted.length


def _rows(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Return places for pieces of these sizes one behind the other, and where the last one ends."""
    places, end = [], 0
    for size in sizes:
        places.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return places, end
