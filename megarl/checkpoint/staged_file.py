"""Files of a checkpoint that ranks have staged (``megarl.checkpoint.staging``), made by the process that brings the checkpoint to the disk.

A file NAME is described in NAME.staged: in which memory its pieces lie, in which order they are in the file, and how many bytes each takes
there. Some are there as they are; a tensor becomes an archive of ``torch.save``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from megarl.checkpoint.manifest import ALGORITHM, Entry
from megarl.checkpoint.storage import storage_error
from megarl.errors import CheckpointError

if TYPE_CHECKING:
    import torch

SUFFIX = ".staged"


class StagedFile:
    """A file that is described, with its memory open.

    Args:
        description: path of the description.
        descriptor: of the memory, where this process has it open; it is closed.

    Raises:
        CheckpointError: the memory is gone.
        OSError: the description cannot be read.
    """

    def __init__(self, description: Path, descriptor: int | None = None) -> None:
        said = json.loads(description.read_text())
        self._pieces: list[dict[str, Any]] = said["pieces"]
        self._name = description.name.removesuffix(SUFFIX)
        self._memory: mmap.mmap | None = None
        opened = _opened(description) if descriptor is None else descriptor
        if opened is not None:
            try:
                # private, for torch takes no memory that must not be written to
                self._memory = mmap.mmap(opened, os.fstat(opened).st_size, access=mmap.ACCESS_COPY)
            finally:
                os.close(opened)

    def write(self, target: Path) -> Entry:
        """Make the file in the directory ``target``, and wait until it is on the disk.

        Returns:
            Its size and hash, of what was to be written.

        Raises:
            OSError: it cannot be written.
            CheckpointError: an archive has another length than was said, so that the checkpoint's index is wrong.
        """
        with (target / self._name).open("wb") as file:
            stream = _Stream(file)
            for piece in self._pieces:
                begun = stream.length
                self._write_piece(piece, stream)
                if stream.length - begun != piece["length"]:
                    what = f"a tensor of {self._name} takes {stream.length - begun} bytes, and its index says {piece['length']}"
                    raise CheckpointError(f"{what}; a defect of megarl. Fix: checkpointing.async_save=false")
            file.flush()
            os.fsync(file.fileno())
        return {"size": stream.length, "hash": stream.digest.hexdigest()}

    def close(self) -> None:
        """Let go of the memory."""
        self._memory = None

    def _write_piece(self, piece: dict[str, Any], stream: _Stream) -> None:
        place = piece["place"]
        if "dtype" not in piece:
            if self._memory is not None:
                stream.write(memoryview(self._memory)[place : place + piece["length"]])
            return
        import torch

        values = tensor_at(self._memory, place, getattr(torch, piece["dtype"]), piece["shape"], piece["stride"])
        try:
            torch.save(values, cast("BinaryIO", stream))
        except RuntimeError as error:
            raise storage_error(error) from None


def open_memory(source: Path) -> dict[str, int]:
    """Open the memory of all files that are described below ``source``, for another process. What is open stays, whatever becomes of ranks.

    Returns:
        By path of its description below ``source``, a descriptor of each memory.

    Raises:
        CheckpointError: the memory of one is gone.
        OSError: a description cannot be read.
    """
    opened: dict[str, int] = {}
    try:
        for path in sorted(source.rglob(f"*{SUFFIX}")):
            descriptor = _opened(path)
            if descriptor is not None:
                opened[path.relative_to(source).as_posix()] = descriptor
    except BaseException:
        for descriptor in opened.values():
            os.close(descriptor)
        raise
    return opened


@contextlib.contextmanager
def staged_files(source: Path, names: Iterable[str], descriptors: Mapping[str, int]) -> Iterator[dict[str, StagedFile]]:
    """The files that are described below ``source``, with their memory open.

    Args:
        source: a directory.
        names: paths of files below it.
        descriptors: of memory that this process has open already, by paths of descriptions below ``source``.

    Yields:
        By path of its description below ``source``, each file that is to be made.

    Raises:
        CheckpointError: the memory of one is gone.
        OSError: a description cannot be read.
    """
    opened: dict[str, StagedFile] = {}
    try:
        for name in names:
            if name.endswith(SUFFIX):
                opened[name] = StagedFile(source / name, descriptors.get(name))
        yield opened
    finally:
        for each in opened.values():
            each.close()


def tensor_at(memory: mmap.mmap | None, place: int, dtype: torch.dtype, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """The tensor that lies somewhere in memory, in a storage that holds nothing else."""
    import torch

    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.empty_strided(shape, stride, dtype=dtype)
    assert memory is not None
    # an array of bytes first: not every dtype can be asked for
    return torch.frombuffer(memory, dtype=torch.uint8, offset=place, count=size).view(dtype).as_strided(shape, stride)


class _Stream:
    """A file that is written to, with its hash.

    Attributes:
        length: bytes so far.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.new(ALGORITHM)
        self.length = 0

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Add to the file."""
        self._file.write(data)
        self.digest.update(data)
        written = memoryview(data).nbytes
        self.length += written
        return written

    def flush(self) -> None:
        """Nothing: the file is flushed as a whole."""


def _opened(description: Path) -> int | None:
    """A descriptor of the memory that a description names; None where it names none, for nothing is in it."""
    address = json.loads(description.read_text())["memory"]
    if address is None:
        return None
    gone = f"process {address['process']} has ended before the memory that {description.name.removesuffix(SUFFIX)} is in could be opened"
    try:
        descriptor = os.open(f"/proc/{address['process']}/fd/{address['descriptor']}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{gone}: {os.strerror(error.errno or 0)}") from None
    status = os.fstat(descriptor)
    if (status.st_dev, status.st_ino) != (address["device"], address["inode"]):
        os.close(descriptor)
        raise CheckpointError(f"{gone}, and its number is another one's")
    return descriptor
