"""Write a ``torch_dist`` checkpoint tensor by tensor, without process groups."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from converters.files.atomic import whole_file
from converters.torch_dist.index import write_index
from converters.torch_dist.location import INDEX_FILE

CONFIG_FILE, COMMON_FILE = "metadata.json", "common.pt"
OBJECTS_FILE = "__objects.distcp"
# Megatron-Core decides by these values how to load a checkpoint.
_BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Key, full shape and dtype of a tensor in the checkpoint."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StoredItem:
    """A written chunk of a tensor.

    Attributes:
        key: key of the tensor.
        offsets, sizes: location in the tensor, per dimension.
        file: name of the file.
        begin, length: byte range in the file.
    """

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    begin: int
    length: int


class ItemFile:
    """A file of serialised tensors that is being written.

    Args:
        path: file to create or replace.
    """

    def __init__(self, path: Path) -> None:
        self._name = path.name
        self._file = path.open("wb")
        self.items: list[StoredItem] = []

    def add(self, key: str, offsets: tuple[int, ...], tensor: Tensor) -> None:
        """Append a chunk of a tensor.

        Args:
            key: key of the tensor.
            offsets: location of the chunk, per dimension.
            tensor: the chunk, with all dimensions of the stored tensor.
        """
        begin = self._file.tell()
        _save(tensor, self._file)
        self.items.append(
            StoredItem(key, offsets, tuple(tensor.shape), self._name, begin, self._file.tell() - begin)
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def finish_checkpoint(
    directory: Path, tensors: Iterable[StoredTensor], items: Iterable[StoredItem], object_names: Iterable[str]
) -> None:
    """Write the files that turn item files into a checkpoint: index, module states, ``metadata.json`` and
    ``common.pt``.

    Args:
        directory: directory of the item files.
        tensors: all tensors, in the order of the index.
        items: all chunks of these tensors.
        object_names: names of the module states (``extra_state_keys``), which are all empty and share their
            bytes.
    """
    chunks: dict[str, list[ChunkStorageMetadata]] = {}
    places: dict[MetadataIndex, Any] = {}
    for item in items:
        # pickle writes a repeated object as a reference, so use one object for equal names.
        key, file_name = sys.intern(item.key), sys.intern(item.file)
        chunks.setdefault(key, []).append(
            ChunkStorageMetadata(torch.Size(item.offsets), torch.Size(item.sizes))
        )
        places[MetadataIndex(key, torch.Size(item.offsets))] = _StorageInfo(
            file_name, item.begin, item.length
        )
    entries: dict[str, Any] = {
        sys.intern(tensor.key): TensorStorageMetadata(
            TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), chunks[tensor.key]
        )
        for tensor in tensors
    }
    with (directory / OBJECTS_FILE).open("wb") as file:
        # All module states are empty, so their names share one record.
        _save([None], file)
        length = file.tell()
    for name in object_names:
        entries[name] = BytesStorageMetadata()
        places[MetadataIndex(name)] = _StorageInfo(OBJECTS_FILE, 0, length)
    with whole_file(directory / INDEX_FILE) as file:
        write_index(Metadata(state_dict_metadata=entries, storage_data=places), file)
    write_common(directory, {})
    (directory / CONFIG_FILE).write_text(json.dumps(_BACKEND), encoding="utf-8")


def write_common(directory: Path, state: Mapping[str, Any]) -> None:
    """Write other state to ``common.pt``. It may contain only plain values, so that it can be read safely."""
    with (directory / COMMON_FILE).open("wb") as file:
        _save(dict(state), file)


def _save(value: Any, file: IO[bytes]) -> None:
    """Run ``torch.save``, and re-raise a file system's OSError that torch hides behind a RuntimeError."""
    try:
        torch.save(value, file)
    except RuntimeError as error:
        raise (error.__context__ if isinstance(error.__context__, OSError) else error) from error
