"""Files of a checkpoint that ranks have staged in memory (``megarl.checkpoint.staging``), created here by the
process that writes the checkpoint to disk.

NAME.staged describes a file NAME: the memory that contains its parts, their order in the file, and where each
is in that memory. Byte parts are written unchanged; a tensor becomes an archive of ``torch.save``.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NotRequired, TypedDict, cast

from converters.files.hashing import ALGORITHM
from megarl.checkpoint.manifest import Entry
from megarl.checkpoint.storage import storage_error
from megarl.errors import CheckpointError

if TYPE_CHECKING:
    import torch

SUFFIX = ".distcp.staged"
"""Suffix of a description's file name; no other file of a checkpoint has it."""
_PLAIN_SUFFIX = ".distcp"


def description_name(name: str) -> str:
    """Return the name of the file that describes the staged file ``name``."""
    return f"{name.removesuffix(_PLAIN_SUFFIX)}{SUFFIX}"


def plain_name(name: str) -> str:
    """Return the name of the file that a description belongs to; other names are returned unchanged."""
    return f"{name.removesuffix(SUFFIX)}{_PLAIN_SUFFIX}" if name.endswith(SUFFIX) else name


class Address(TypedDict):
    """The open file of a rank's memory, for other processes of this user on this node."""

    process: int
    descriptor: int
    device: int
    inode: int


class Piece(TypedDict):
    """A part of a file: its offset in the memory and its length in the file. Only a tensor has the other
    keys."""

    place: int
    length: int
    dtype: NotRequired[str]
    shape: NotRequired[Sequence[int]]
    stride: NotRequired[Sequence[int]]


class Description(TypedDict):
    """Content of NAME.staged; ``memory`` is None if no part needs memory."""

    memory: Address | None
    pieces: list[Piece]


class StagedFile:
    """A staged file whose memory is open, so that it can be read even after the rank has ended.

    Args:
        description: path of the description.

    Raises:
        CheckpointError: it is not a description, or its memory cannot be opened.
        OSError: the description cannot be read.
    """

    def __init__(self, description: Path) -> None:
        said = _read(description)
        self._pieces = said["pieces"]
        self._name = plain_name(description.name)
        self._memory = None if said["memory"] is None else _opened(self._name, said["memory"])

    @property
    def kept_bytes(self) -> int:
        """Bytes of the memory, which the rank reuses for its next checkpoint."""
        return 0 if self._memory is None else len(self._memory)

    def write(self, target: Path) -> Entry:
        """Write the file to the directory ``target`` and sync it to disk.

        Returns:
            Size and hash of the bytes that should be on disk.

        Raises:
            OSError: the file cannot be written.
            CheckpointError: an archive's length differs from the description, so that the checkpoint's index
                is wrong.
        """
        with (target / self._name).open("wb") as file:
            stream = _Stream(file)
            for piece in self._pieces:
                begun = stream.length
                self._write_piece(piece, stream)
                if stream.length - begun != piece["length"]:
                    what = (
                        f"a tensor of {self._name} takes {stream.length - begun} bytes, and its index "
                        f"says {piece['length']}"
                    )
                    raise CheckpointError(f"{what}; a defect of megarl. Fix: checkpointing.async_save=false")
            file.flush()
            os.fsync(file.fileno())
        return {"size": stream.length, "hash": stream.digest.hexdigest()}

    def _write_piece(self, piece: Piece, stream: _Stream) -> None:
        place = piece["place"]
        if "dtype" not in piece:
            if self._memory is not None:
                stream.write(memoryview(self._memory)[place : place + piece["length"]])
            return
        import torch

        values = tensor_at(
            self._memory, place, getattr(torch, piece["dtype"]), piece["shape"], piece["stride"]
        )
        try:
            torch.save(values, cast("BinaryIO", stream))
        except RuntimeError as error:
            raise storage_error(error) from None


def open_staged(source: Path) -> dict[str, StagedFile]:
    """Open all staged files below ``source``. Return them by the relative path of their description.

    Raises:
        CheckpointError: a file is not a description, or its memory cannot be opened.
        OSError: a description cannot be read.
    """
    return {
        path.relative_to(source).as_posix(): StagedFile(path) for path in sorted(source.rglob(f"*{SUFFIX}"))
    }


def tensor_at(
    memory: mmap.mmap | None, place: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """Return the tensor at byte offset ``place`` of the memory, in its own storage. ``memory`` may be None
    only for an empty tensor."""
    import torch

    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.empty_strided(shape, stride, dtype=dtype)
    assert memory is not None
    # View as bytes first, because frombuffer does not support every dtype.
    return (
        torch.frombuffer(memory, dtype=torch.uint8, offset=place, count=size)
        .view(dtype)
        .as_strided(shape, stride)
    )


class _Stream:
    """Writes to a file and hashes the data.

    Attributes:
        length: number of bytes written.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.new(ALGORITHM)
        self.length = 0

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append ``data`` and return its number of bytes."""
        self._file.write(data)
        self.digest.update(data)
        written = memoryview(data).nbytes
        self.length += written
        return written

    def flush(self) -> None:
        """Do nothing: the file is flushed once at the end."""


def _read(description: Path) -> Description:
    """Read a description.

    Raises:
        CheckpointError: the file is not a description.
    """
    try:
        said: Description = json.loads(description.read_text())
        if said.keys() == {"memory", "pieces"}:
            return said
    except (ValueError, AttributeError):
        pass
    raise CheckpointError(
        f"{description} is not a file of megarl. Fix: no file of the model may be called *{SUFFIX}"
    )


def _opened(name: str, address: Address) -> mmap.mmap:
    """Open the memory of the rank that staged a file.

    Raises:
        CheckpointError: the rank has ended, or its memory is not accessible.
    """
    what = f"the memory of process {address['process']} that holds {name} cannot be opened"
    try:
        # Non-blocking, because by now the descriptor may refer to a pipe.
        descriptor = os.open(
            f"/proc/{address['process']}/fd/{address['descriptor']}",
            os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK,
        )
    except FileNotFoundError:
        raise CheckpointError(f"{what}: the process has ended") from None
    except OSError as error:
        raise CheckpointError(
            f"{what}: {error.strerror}. Fix: run driver and ranks of a node in one container"
        ) from None
    try:
        status = os.fstat(descriptor)
        # Compare the inode, because process ids and descriptors are reused.
        if (status.st_dev, status.st_ino) != (address["device"], address["inode"]):
            raise CheckpointError(f"{what}: the process has ended, and another process has its id")
        # A private mapping, because torch does not accept read-only memory.
        return mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
