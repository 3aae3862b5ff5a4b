"""Read safetensors files (https://github.com/huggingface/safetensors). Headers are read without importing
torch."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from converters.errors import ConversionError
from converters.files.kinds import misplaced_kind
from converters.files.reading import require_regular

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from converters.checkpoint.boxes import Box

DTYPE_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
"""Dtype name in a file -> torch's name."""


class OpenFiles:
    """Opens files only while they are used, because a checkpoint may have more files than a process may open.
    A file that was replaced since its first use is rejected. Thread-safe.

    Args:
        flags: flags for ``os.open``; a file to write to must exist.
    """

    def __init__(self, flags: int = os.O_RDONLY) -> None:
        self._flags = flags | os.O_CLOEXEC
        self._identities: dict[Path, tuple[int, int]] = {}

    @contextmanager
    def use(self, path: Path) -> Iterator[int]:
        """Open a file, and yield its descriptor for the duration of the block.

        Raises:
            ConversionError: the file cannot be opened, or was replaced since its first use.
        """
        try:
            descriptor = os.open(require_regular(path), self._flags)
        except OSError as error:
            raise ConversionError(
                f"{path} cannot be read ({error})", "check the file and its permissions, or fetch it again"
            ) from error
        try:
            status = os.fstat(descriptor)
            identity = (status.st_dev, status.st_ino)
            # Another inode means another save; reading it would mix two checkpoints.
            if self._identities.setdefault(path, identity) != identity:
                raise ConversionError(
                    f"{path} has changed while it was in use",
                    "run it again, and leave the checkpoint alone meanwhile",
                )
            yield descriptor
        finally:
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class _Entry:
    stored: str
    shape: tuple[int, ...]
    offset: int


class SafetensorsFile:
    """A safetensors file whose header has been read. Tensors are read on request. Thread-safe.

    Args:
        path: the file.
        files: opener that may be shared with other files.

    Raises:
        ConversionError: the file is not a valid safetensors file.
    """

    def __init__(self, path: Path, files: OpenFiles | None = None) -> None:
        self.path = require_regular(path)
        self._files = files or OpenFiles()
        try:
            # The library verifies sizes, overlaps, gaps and the file's length. framework="pt" would import
            # torch.
            with safe_open(path, framework="numpy") as judged:
                names = set(judged.keys())
        except (SafetensorError, OSError) as error:
            kind = misplaced_kind(path)
            if kind is not None:
                raise ConversionError(f"{path} is {kind[0]}", kind[1]) from error
            raise ConversionError(
                f"{path} is not a readable safetensors file ({error})", "fetch or write the file again"
            ) from error
        # The library does not expose the offsets, which are needed to read boxes without memory mapping.
        with self._files.use(path) as descriptor:
            self._entries = _read_header(descriptor)
        assert names == set(self._entries)

    def keys(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._entries[name].shape

    def stored_dtype(self, name: str) -> str:
        """Return the dtype of a tensor as the file names it, such as ``BF16``."""
        return self._entries[name].stored

    def dtype_name(self, name: str) -> str:
        """Return the dtype of a tensor as torch names it, such as ``bfloat16``.

        Raises:
            ConversionError: the dtype is not supported.
        """
        stored = self._entries[name].stored
        if stored not in DTYPE_NAMES:
            raise ConversionError(
                f"{name} is stored as {stored}, which is not supported",
                f"store it as one of {', '.join(DTYPE_NAMES)}",
            )
        return DTYPE_NAMES[stored]

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor; errors as in ``dtype_name``."""
        import torch

        return getattr(torch, self.dtype_name(name))

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Read a tensor, or a box of it, to a new contiguous CPU tensor.

        Raises:
            ConversionError: the file has become shorter or cannot be read.
        """
        from converters.checkpoint.boxes import read_box, whole

        entry = self._entries[name]
        box = whole(entry.shape) if box is None else box
        with self._files.use(self.path) as descriptor:
            return read_box(
                descriptor, entry.offset, self.dtype(name), entry.shape, box, f"{name} in {self.path}"
            )


def _read_header(descriptor: int) -> dict[str, _Entry]:
    # The length of the header is a little-endian u64. Offsets of tensors count from the end of the header.
    (length,) = struct.unpack("<Q", os.pread(descriptor, 8, 0))
    header: dict[str, Any] = json.loads(os.pread(descriptor, length, 8))
    return {
        name: _Entry(entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
        if name != "__metadata__"
    }
