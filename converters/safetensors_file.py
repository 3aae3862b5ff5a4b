"""One safetensors file: where its tensors lie, and their bytes read in place. Format: https://github.com/huggingface/safetensors."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from converters.boxes import Box, read_box, whole
from converters.errors import ConversionError
from converters.open_files import OpenFiles
from converters.regular_file import require_regular

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class _Entry:
    stored: str
    shape: tuple[int, ...]
    offset: int


class SafetensorsFile:
    """A file whose header was read. Safe to be read from several threads; memory in use is what is asked for.

    Args:
        path: of the file.
        files: that opens it, for this and for others.

    Raises:
        ConversionError: it is no readable safetensors file.
    """

    def __init__(self, path: Path, files: OpenFiles | None = None) -> None:
        self.path = require_regular(path)
        self._files = files or OpenFiles()
        try:
            # the library judges the header: sizes, overlaps, holes, the length of the file
            with safe_open(path, framework="pt", device="cpu") as judged:
                names = set(judged.keys())
        except (SafetensorError, OSError) as error:
            raise ConversionError(f"{path} is not a readable safetensors file ({error})", "fetch or write the file again") from error
        with self._files.use(path) as descriptor:
            self._entries = _read_header(descriptor)
        assert names == set(self._entries)

    def keys(self) -> list[str]:
        """Names of all tensors."""
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._entries[name].shape

    def stored_dtype(self, name: str) -> str:
        """What the file calls the dtype of a tensor."""
        return self._entries[name].stored

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor.

        Raises:
            ConversionError: torch has no such dtype, or it is not supported here.
        """
        stored = self._entries[name].stored
        if stored not in DTYPES:
            raise ConversionError(f"{name} is stored as {stored}, which is not supported", f"store it as one of {', '.join(DTYPES)}")
        return DTYPES[stored]

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A tensor, or a box of it, as a fresh contiguous CPU tensor.

        Raises:
            ConversionError: the file has become shorter, or cannot be read.
        """
        entry = self._entries[name]
        box = whole(entry.shape) if box is None else box
        with self._files.use(self.path) as descriptor:
            return read_box(descriptor, entry.offset, self.dtype(name), entry.shape, box, f"{name} in {self.path}")


def _read_header(descriptor: int) -> dict[str, _Entry]:
    (length,) = struct.unpack("<Q", os.pread(descriptor, 8, 0))
    header: dict[str, Any] = json.loads(os.pread(descriptor, length, 8))
    return {
        name: _Entry(entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
        if name != "__metadata__"
    }
