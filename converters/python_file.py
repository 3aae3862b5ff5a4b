"""Modules of a user's own, run from the files that the user names; nothing in a checkpoint can cause that."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from types import ModuleType

_MODULES: dict[str, ModuleType] = {}


class PythonFileError(Exception):
    """A file that cannot be read as Python, or whose code fails; the text says which, without the file's name."""


def modules_from_files() -> list[ModuleType]:
    """The modules that were run from files. Other processes cannot import them by name, so that their objects travel by value."""
    return list(_MODULES.values())


def module_of_file(path: Path) -> ModuleType:
    """The module of a file, run once in a process as long as the file stays the same.

    It can import the files beside it, also later, as a script can; a package that is installed under such a name comes first.

    Raises:
        PythonFileError: it cannot be read, or fails in whatever way, ending itself among them.
    """
    try:
        text = path.read_bytes()
        # not with this file's own __future__, by which annotations would be texts
        code = compile(text, str(path), "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError) as error:
        raise PythonFileError(f"cannot be read as a Python file ({error})") from error
    name = f"user_file_{path.stem}_{hashlib.sha256(str(path.absolute()).encode() + text).hexdigest()[:16]}"
    if name in _MODULES:
        return _MODULES[name]
    module = ModuleType(name)
    module.__file__ = str(path)
    # where dataclasses and pickles look a class of the file up
    sys.modules[name] = module
    directory = str(path.absolute().parent)
    if directory not in sys.path:
        sys.path.append(directory)
    try:
        exec(code, module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise PythonFileError(f"fails: {type(error).__name__}: {error}") from error
    _MODULES[name] = module
    return module
