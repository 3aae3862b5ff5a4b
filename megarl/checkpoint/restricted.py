"""Reads the two kinds of file that torch writes as pickles, so that neither can run code: DCP's index lets in the few classes it consists
of, and everything else goes through torch's own restricted loader."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from megarl.errors import CheckpointError

METADATA_FILE = ".metadata"
_METADATA_CLASSES = frozenset(
    {
        ("pathlib", "PosixPath"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        *[
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                "Metadata",
                "MetadataIndex",
                "TensorStorageMetadata",
                "TensorProperties",
                "ChunkStorageMetadata",
                "BytesStorageMetadata",
                "StorageMeta",
                "_MEM_FORMAT_ENCODING",
            )
        ],
    }
)


def read_plain(path: Path) -> dict[str, Any]:
    """What is no tensor of an optimizer checkpoint: hyperparameters, counters, the schedule.

    Raises:
        CheckpointError: the file is missing, damaged, or holds more than plain values.
    """
    try:
        return torch.load(path, weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. It is damaged or no optimizer checkpoint; take another one") from error


class _MetadataUnpickler(pickle.Unpickler):
    """Knows the classes that DCP's index consists of, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or (module, name) in _METADATA_CLASSES:
            return super().find_class(module, name)
        raise CheckpointError(
            f"a checkpoint's {METADATA_FILE} names {module}.{name}, which no checkpoint needs; do not trust this checkpoint"
        )


class RestrictedReader(dcp.FileSystemReader):
    """DCP's reader, with an index that cannot run code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / METADATA_FILE
        try:
            with path.open("rb") as file:
                metadata = _MetadataUnpickler(file).load()
        except (OSError, EOFError, pickle.UnpicklingError, AttributeError, IndexError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}. It is damaged; take another checkpoint") from error
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{path} holds a {type(metadata).__name__}, not a checkpoint's index; take another checkpoint")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
