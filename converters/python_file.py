"""Run Python files that a user names as modules. Nothing in a checkpoint can trigger this."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

_MODULES: dict[str, ModuleType] = {}


class PythonFileError(Exception):
    """A file cannot be read as Python, or its code failed. The message gives the reason without the file's
    name."""


def modules_from_files() -> list[ModuleType]:
    """Return the modules that were run from files. Other processes cannot import them by name, so their
    objects must be pickled by value."""
    return list(_MODULES.values())


def module_of_file(path: Path) -> ModuleType:
    """Run a file as a module, or return the module of an earlier run if the file is unchanged. Like a script,
    the module can import files in its directory.

    Raises:
        PythonFileError: the file cannot be read, raises any exception (also SystemExit), or imports a file of
            its directory whose name Python resolves to another module.
    """
    try:
        text = path.read_bytes()
        # Do not inherit this module's __future__ imports, which would turn annotations into strings.
        code = compile(text, str(path), "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError) as error:
        raise PythonFileError(f"cannot be read as a Python file ({error})") from error
    # With a hash of path and text in the name, a changed file is another module, and files of equal names do
    # not collide.
    name = f"user_file_{path.stem}_{hashlib.sha256(str(path.absolute()).encode() + text).hexdigest()[:16]}"
    if name in _MODULES:
        return _MODULES[name]
    module = ModuleType(name)
    module.__file__ = str(path)
    # Dataclasses and pickle look up classes in ``sys.modules``.
    sys.modules[name] = module
    directory = str(path.absolute().parent)
    if directory not in sys.path:
        # At the end, so that its files do not shadow installed modules.
        sys.path.append(directory)
    try:
        _refuse_others_names(text, path.absolute().parent)
        exec(code, module.__dict__)
    except PythonFileError:
        del sys.modules[name]
        raise
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise PythonFileError(f"fails: {type(error).__name__}: {error}") from error
    _MODULES[name] = module
    return module


def _refuse_others_names(text: bytes, directory: Path) -> None:
    """Reject a file that imports a file of its directory whose name Python resolves to another module; that
    module would be run silently instead.

    Args:
        text: contents of the file.
        directory: directory of the file.
    """
    seen, unread = set[str](), [text]
    while unread:
        for name in set(_imported_names(unread.pop())) - seen:
            seen.add(name)
            beside = list(filter(Path.is_file, (directory / f"{name}.py", directory / name / "__init__.py")))
            if not beside:
                continue
            found = _origin_of(name)
            if found not in {str(each.resolve()) for each in beside}:
                raise PythonFileError(
                    f"imports {name}, which is next to it, but Python finds {found} instead; "
                    "rename the one next to it"
                )
            unread.append(Path(found).read_bytes())


def _imported_names(text: bytes) -> Iterator[str]:
    try:
        nodes = list(ast.walk(ast.parse(text)))
    # Running the file will report the error.
    except (SyntaxError, ValueError):
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            for each in node.names:
                yield each.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _origin_of(name: str) -> str:
    """Return the file that Python would import for a name, or a description if it is not a file."""
    # importlib's cached listing of the directory may be older than the file.
    importlib.invalidate_caches()
    found = getattr(sys.modules[name], "__file__", None) if name in sys.modules else None
    if name not in sys.modules:
        spec = importlib.util.find_spec(name)
        found = spec.origin if spec else None
    return str(Path(found).resolve()) if found and Path(found).is_file() else "a module of its own"
