"""The one place where pickles are read, and only with the few names in them that their kind of file needs: what a file names is called."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch

from converters.errors import ConversionError

# a damaged pickle can fail in any of these ways
DAMAGED = (EOFError, pickle.UnpicklingError, AttributeError, IndexError, KeyError, TypeError, ValueError)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], known: Callable[[str, str], Any], persistent: Callable[[Any], Any] | None, what: str) -> None:
        super().__init__(file)
        self._known, self._persistent, self._what = known, persistent, what

    def find_class(self, module: str, name: str) -> Any:
        found = self._known(module, name)
        if found is None:
            raise ConversionError(
                f"{self._what} names {module}.{name}, which none needs; loading it could run code", "do not trust this file"
            )
        return found

    def persistent_load(self, identifier: Any) -> Any:
        if self._persistent is None:
            raise TypeError(f"a reference to {identifier!r} outside the pickle")
        return self._persistent(identifier)


def unpickle(file: IO[bytes], known: Callable[[str, str], Any], what: str, persistent: Callable[[Any], Any] | None = None) -> Any:
    """Read a pickle.

    Args:
        file: open for reading.
        known: what a module and a name in it stand for; None for what the pickle may not name.
        what: to call the pickle by in errors.
        persistent: what a reference to something outside the pickle stands for.

    Raises:
        ConversionError: the pickle names something that is not known.
        EOFError, ValueError and the others of ``DAMAGED``: it is damaged.
    """
    return _Unpickler(file, known, persistent, what).load()


def index_name(module: str, name: str) -> Any:
    """What a name in an index of ``torch.distributed.checkpoint`` stands for; None for what no index needs."""
    dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
    if not dtype and (module, name) not in _INDEX_CLASSES:
        return None
    return getattr(importlib.import_module(module), name)


_INDEX_CLASSES = frozenset(
    {
        ("pathlib", "PosixPath"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
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
        # Megatron-Core keeps the plans of the ranks that saved beside the index
        *[("torch.distributed.checkpoint.planner", name) for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")],
    }
)


def load_plain(path: Path) -> Any:
    """What ``torch.save`` wrote: tensors and plain values.

    Raises:
        ConversionError: the file is missing, damaged, or holds more than that.
    """
    try:
        return torch.load(path, weights_only=True)
    except (OSError, RuntimeError, *DAMAGED) as error:
        raise ConversionError(f"{path} cannot be read: {error}", "it is damaged or of another kind; take another one") from error
