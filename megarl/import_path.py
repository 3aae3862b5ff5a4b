"""Objects that a configuration names by import path: ``path/to/file.py:name`` or ``package.module:name``."""

from __future__ import annotations

import hashlib
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from megarl.errors import ConfigError, Violation

_FROM_FILES: dict[str, ModuleType] = {}


def modules_from_files() -> list[ModuleType]:
    """The modules that were run from files. Other processes cannot import them by name, so that their objects travel by value."""
    return list(_FROM_FILES.values())


def is_import_path(text: str) -> bool:
    """Whether a value names an object and not one of the built-in names, none of which has a colon."""
    return ":" in text


def load_object(path: str, key: str) -> Any:
    """The object at an import path. Its module is run; that happens for names in a configuration alone.

    Args:
        path: ``path/to/file.py:name``, relative to the working directory, or ``package.module:name``.
        key: dotted key of the configuration, for the error.

    Raises:
        ConfigError: there is no such file or module, it fails, or has no such name.
    """
    source, _, name = path.rpartition(":")
    if not source or not name.isidentifier():
        raise _refused(key, path, "it is no import path", "write path/to/file.py:name or package.module:name")
    file = Path(source).expanduser()
    if source.endswith(".py") and not file.is_file():
        raise _refused(key, path, f"there is no file {file.absolute()}", "give the path of a Python file")
    try:
        module = _load_file(file) if source.endswith(".py") else importlib.import_module(source)
    # a user's code may fail in any way, and end itself
    except (Exception, SystemExit) as error:
        raise _refused(key, path, f"{source} fails: {type(error).__name__}: {error}", f"mend {source}") from error
    if not hasattr(module, name):
        there = ", ".join(sorted(each for each in vars(module) if not each.startswith("_"))[:8])
        raise _refused(key, path, f"{source} has no {name}", f"write one of its names ({there})")
    return getattr(module, name)


def _load_file(path: Path) -> ModuleType:
    """The module of a file, run once in a process as long as the file stays the same."""
    text = path.read_bytes()
    name = f"megarl_user_{path.stem}_{hashlib.sha256(str(path.absolute()).encode() + text).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    module = ModuleType(name)
    module.__file__ = str(path)
    # where dataclasses look a class of the file up
    sys.modules[name] = module
    try:
        exec(compile(text, str(path), "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    _FROM_FILES[name] = module
    return module


def _refused(key: str, path: str, bound: str, fix: str) -> ConfigError:
    return ConfigError([Violation(key, path, bound, fix)])
