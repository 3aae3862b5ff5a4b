"""Restricted unpickling, the only way in which the converters read pickles. A pickle may name only the few
classes and functions that its kind of file needs, because the names in it are called."""

from __future__ import annotations

import enum
import functools
import importlib
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch

from converters.errors import ConversionError

# Reading a damaged pickle can raise any of these errors.
DAMAGED = (
    EOFError,
    pickle.UnpicklingError,
    AttributeError,
    IndexError,
    KeyError,
    TypeError,
    ValueError,
    OverflowError,
    RecursionError,
    MemoryError,
    RuntimeError,
    AssertionError,
)


# This is Py_TPFLAGS_HEAPTYPE, the flag of a class that Python code defined. C code defines classes without
# it.
_CHANGEABLE = 1 << 9


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        file: IO[bytes],
        known: Callable[[str, str], Any],
        persistent: Callable[[Any], Any] | None,
        what: str,
    ) -> None:
        super().__init__(file)
        self._known, self._persistent, self._what = known, persistent, what

    def find_class(self, module: str, name: str) -> Any:
        found = self._known(module, name)
        if found is None:
            raise ConversionError(
                f"{self._what} names {module}.{name}, which no checkpoint needs; loading it could run code",
                "do not trust this file",
            )
        return _inert(found)

    def persistent_load(self, identifier: Any) -> Any:
        if self._persistent is None:
            raise TypeError(f"a reference to {identifier!r} outside the pickle")
        return self._persistent(identifier)


class _Inert(type):
    """Metaclass of stand-ins for the classes and functions that a pickle names. Calling a stand-in calls the
    original, but the pickle cannot change the original."""

    real: Any

    def __call__(cls, *given: Any, **named: Any) -> Any:
        return cls.real(*given, **named)

    def __setstate__(cls, state: Any) -> None:
        # Refuse this: pickle would set attributes on any object that the file names.
        raise TypeError(f"an attribute of {cls.__name__} itself is set")

    def __setattr__(cls, name: str, value: Any) -> None:
        raise TypeError(f"{name} of {cls.__name__} itself is set")


@functools.lru_cache(maxsize=256)
def _inert(found: Any) -> Any:
    """Return a stand-in for a class or function whose attributes could be set; return anything else
    itself."""
    if not callable(found) or (isinstance(found, type) and not found.__flags__ & _CHANGEABLE):
        return found

    if isinstance(found, enum.EnumMeta):
        return _stand_in(
            found, lambda *given: _Member(found(*given)), lambda cls, *given: _Member(found(*given))
        )
    # The opcode REDUCE calls the name, and NEWOBJ calls only its __new__. The stand-in supports both.
    return _stand_in(found, found, lambda cls, *given, **named: found.__new__(found, *given, **named))


def _stand_in(found: Any, call: Callable[..., Any], make: Callable[..., Any]) -> type:
    """Return a stand-in, given the function that calling it runs, and the function that creates an object
    without calling it."""
    return _Inert(str(getattr(found, "__name__", found)), (), {"real": staticmethod(call), "__new__": make})


class _Member:
    """Stand-in for an enumeration member in a pickle, since the whole process shares the member. It compares
    equal to the member and has no attributes to set."""

    __slots__ = ("_member",)

    def __init__(self, member: enum.Enum) -> None:
        self._member = member

    def __eq__(self, other: object) -> bool:
        return self._member == (other._member if isinstance(other, _Member) else other)

    def __hash__(self) -> int:
        return hash(self._member)

    def __repr__(self) -> str:
        return repr(self._member)

    def __setstate__(self, state: Any) -> None:
        # Without this method pickle would set the attributes itself.
        raise TypeError(f"an attribute of {self._member} is set")


def unpickle(
    file: IO[bytes],
    known: Callable[[str, str], Any],
    what: str,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Read a pickle.

    Args:
        file: file open for reading.
        known: returns what a module and a name in it stand for; None if the pickle may not name it.
        what: name of the pickle in errors.
        persistent: returns what a reference to something outside the pickle stands for.

    Raises:
        ConversionError: the pickle has a name that is not known.
        EOFError, ValueError and the others of ``DAMAGED``: the pickle is damaged.
    """
    return _Unpickler(file, known, persistent, what).load()


def index_name(module: str, name: str) -> Any:
    """Return the object of a name in an index of ``torch.distributed.checkpoint``, or None if no index needs
    that name."""
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
        # Megatron-Core stores the plans of the ranks that saved next to the index.
        *[
            ("torch.distributed.checkpoint.planner", name)
            for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")
        ],
    }
)


def load_plain(source: Path | IO[bytes], what: str | None = None) -> Any:
    """Load the data that ``torch.save`` wrote: tensors onto the host, plain values and in-memory files of
    bytes.

    Args:
        source: the file, or its content.
        what: name of the data in errors.

    Raises:
        ConversionError: the file is missing, damaged, or holds other data.
    """
    try:
        # Transformer Engine saves the extra states of its modules as memory files.
        with torch.serialization.safe_globals([io.BytesIO]):
            return torch.load(source, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ConversionError(
            f"{what or source} is damaged or holds more than plain values, and loading it could run code: "
            f"{error}",
            "do not trust this file",
        ) from error
    except (OSError, RuntimeError, *DAMAGED) as error:
        raise ConversionError(
            f"{what or source} cannot be read: {error}", "it is damaged or of another kind; use another file"
        ) from error
