"""Placeholders for objects in a foreign pickle, which record their arguments and do nothing.

Megatron-LM pickles its parsed arguments, which may contain enums, dtypes, signals and classes of a fork. None
of these is imported, because the arguments can be read without them.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

# Types that occur in arguments. Any other name of the standard library makes the file suspicious.
_STANDARD = {
    "_codecs": {"encode"},
    "argparse": {"Namespace"},
    "builtins": {"bytearray", "complex", "getattr", "object", "range", "slice"},
    "collections": {"defaultdict", "deque"},
    "copyreg": {"_reconstructor"},
    "functools": {"partial"},
    "types": {"SimpleNamespace"},
}
_STANDARD_MODULES = frozenset({"datetime", "decimal", "enum", "fractions", "pathlib", "signal", "uuid"})
# torch.save uses module names of Python 2.
_OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
# Real containers, because their contents are read; calling them has no side effect.
_REAL: dict[tuple[str, str], Any] = {
    ("builtins", "frozenset"): frozenset,
    ("builtins", "set"): set,
    ("collections", "OrderedDict"): dict,
    ("torch", "Size"): tuple,
}


class Placeholder:
    """Stand-in for an object in a pickle. Accepts every operation of unpickling.

    Attributes:
        what: module and name of the class or function.
        given: arguments of its call.
        state: state that the pickle sets.
    """

    what = ""

    def __new__(cls, *given: Any, **named: Any) -> Placeholder:
        # pickle does not call ``__init__`` for every object.
        self = object.__new__(cls)
        self.given, self.state = (*given, *named.values()), None
        return self

    def __init__(self, *given: Any, **named: Any) -> None:
        self.given: tuple[Any, ...]
        self.state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Ignore an entry, as of a dictionary."""

    def append(self, value: Any) -> None:
        """Ignore an item, as of a list."""

    def extend(self, values: Any) -> None:
        """Ignore items, as of a list."""

    def add(self, value: Any) -> None:
        """Ignore an item, as of a set."""

    def __repr__(self) -> str:
        return self.what + (repr(self.given) if self.given else "")


class Arguments(Placeholder):
    """Stand-in for ``argparse.Namespace``; its state is the dictionary of attributes."""

    what = "argparse.Namespace"


def placeholder(module: str, name: str) -> Any:
    """Return the stand-in for a name in a pickle of arguments; None if the name is not allowed."""
    module = _OLD_MODULES.get(module, module)
    if (module, name) in _REAL:
        return _REAL[module, name]
    if (module, name) in {("argparse", "Namespace"), ("types", "SimpleNamespace")}:
        return Arguments
    if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
        return getattr(torch, name)
    root = module.partition(".")[0]
    # Classes of forks become placeholders. Names of the standard library are allowed only if arguments need
    # them.
    known = name in _STANDARD.get(module, ()) or module in _STANDARD_MODULES
    if root in sys.stdlib_module_names and not known:
        return None
    return type(name.rpartition(".")[2], (Placeholder,), {"what": f"{module}.{name}"})
