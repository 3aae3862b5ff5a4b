"""Restricted unpickling. A pickle can name any function to call, so only the few classes and functions are
allowed that a kind of file needs. The converters read pickles in no other way."""

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

# Exceptions that reading a damaged pickle may raise.
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


# Py_TPFLAGS_HEAPTYPE: set for classes defined in Python, whose attributes can be changed, and not for those
# defined in C.
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
    """Metaclass of stand-ins for classes and functions that a pickle names. Calling a stand-in calls the
    original, but the pickle cannot change the original's attributes."""

    real: Any

    def __call__(cls, *given: Any, **named: Any) -> Any:
        return cls.real(*given, **named)

    def __setstate__(cls, state: Any) -> None:
        # Without this method, pickle would set attributes on the object itself.
        raise TypeError(f"an attribute of {cls.__name__} itself is set")

    def __setattr__(cls, name: str, value: Any) -> None:
        raise TypeError(f"{name} of {cls.__name__} itself is set")


@functools.lru_cache(maxsize=256)
def _inert(found: Any) -> Any:
    """Return a stand-in for a class or function with changeable attributes; return anything else
    unchanged."""
    if not callable(found) or (isinstance(found, type) and not found.__flags__ & _CHANGEABLE):
        return found

    if isinstance(found, enum.EnumMeta):
        return _stand_in(
            found, lambda *given: _Member(found(*given)), lambda cls, *given: _Member(found(*given))
        )
    # The opcode REDUCE calls the object, and NEWOBJ calls its ``__new__``. The stand-in supports both.
    return _stand_in(found, found, lambda cls, *given, **named: found.__new__(found, *given, **named))


def _stand_in(found: Any, call: Callable[..., Any], make: Callable[..., Any]) -> type:
    """Create a stand-in.

    Args:
        found: class or function to represent.
        call: what calling the stand-in runs.
        make: creates an object without initialising it.
    """
    return _Inert(str(getattr(found, "__name__", found)), (), {"real": staticmethod(call), "__new__": make})


class _Member:
    """Stand-in for an enum member, which is shared by the whole process. It compares equal to the member, and
    has no attributes to change."""

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
    """Read a pickle with restrictions.

    Args:
        file: open file.
        known: returns the object for (module, name); None if the pickle must not name it.
        what: name of the pickle for error messages.
        persistent: returns the object for a persistent id.

    Raises:
        ConversionError: the pickle names something that is not allowed.
        EOFError, ValueError and others in ``DAMAGED``: the pickle is damaged.
    """
    return _Unpickler(file, known, persistent, what).load()


def index_name(module: str, name: str) -> Any:
    """Return the object for a name in the index of ``torch.distributed.checkpoint``; None if no index needs
    it."""
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
        # Megatron-Core also stores the save plans of the ranks.
        *[
            ("torch.distributed.checkpoint.planner", name)
            for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")
        ],
    }
)


def load_plain(source: Path | IO[bytes], what: str | None = None) -> Any:
    """Load the output of ``torch.save``: tensors to the CPU, plain values and ``BytesIO``.

    Args:
        source: the file, or its contents.
        what: name for error messages.

    Raises:
        ConversionError: the file is missing or damaged, or contains other objects.
    """
    try:
        # Transformer Engine saves the extra state of modules as BytesIO.
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
