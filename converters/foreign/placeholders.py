"""Placeholders for the names in a foreign pickle: objects that record their arguments, and do nothing.

Megatron-LM pickles its parsed arguments, among them enums, dtypes, signals and any classes that a fork has
added. None of these is imported, because reading the arguments does not need them.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

# Arguments consist of these types. Any other name of the standard library is a reason to distrust the file.
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
# torch.save writes module names of Python 2.
_OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
# The content of these containers is read, and calling them has no other effect.
_REAL: dict[tuple[str, str], Any] = {
    ("builtins", "frozenset"): frozenset,
    ("builtins", "set"): set,
    ("collections", "OrderedDict"): dict,
    ("torch", "Size"): tuple,
}


class Placeholder:
    """Stand-in for an object in a pickle that is not needed. It accepts every operation of unpickling.

    Attributes:
        what: module and name of the class or function.
        given: arguments that it was called with.
        state: state that the pickle sets.
    """

    what = ""

    def __new__(cls, *given: Any, **named: Any) -> Placeholder:
        # Set the attributes here rather than in __init__, which pickle does not call for every object.
        self = object.__new__(cls)
        self.given, self.state = (*given, *named.values()), None
        return self

    def __init__(self, *given: Any, **named: Any) -> None:
        self.given: tuple[Any, ...]
        self.state: Any

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        """Accept an entry, like a dictionary."""

    def append(self, value: Any) -> None:
        """Accept an item, like a list."""

    def extend(self, values: Any) -> None:
        """Accept items, like a list."""

    def add(self, value: Any) -> None:
        """Accept an item, like a set."""

    def __repr__(self) -> str:
        return self.what + (repr(self.given) if self.given else "")


class Arguments(Placeholder):
    """Stand-in for an ``argparse.Namespace``: its state is the dictionary of its attributes."""

    what = "argparse.Namespace"


def placeholder(module: str, name: str) -> Any:
    """Return the stand-in for a name in a pickle of arguments, or None for a name that does not
    belong there."""
    module = _OLD_MODULES.get(module, module)
    if (module, name) in _REAL:
        return _REAL[module, name]
    if (module, name) in {("argparse", "Namespace"), ("types", "SimpleNamespace")}:
        return Arguments
    if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
        return getattr(torch, name)
    root = module.partition(".")[0]
    # A class of a fork becomes a placeholder. A name of the standard library does so only if arguments need
    # it.
    known = name in _STANDARD.get(module, ()) or module in _STANDARD_MODULES
    if root in sys.stdlib_module_names and not known:
        return None
    return type(name.rpartition(".")[2], (Placeholder,), {"what": f"{module}.{name}"})
