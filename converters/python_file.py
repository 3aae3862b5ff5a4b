"""User-defined modules, run from the files that the user names; nothing in a checkpoint can run one."""

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
    """Error for a file that cannot be read as Python, or whose code fails. The message gives the reason
    without the file's name."""


def modules_from_files() -> list[ModuleType]:
    """Return the modules that were run from files. Other processes cannot import them by name, so their
    objects are pickled by value."""
    return list(_MODULES.values())


def module_of_file(path: Path) -> ModuleType:
    """Return the module of a file, which a process runs once as long as the file does not change.

    As in a script, the module can import the files next to it at any time.

    Raises:
        PythonFileError: the file cannot be read, imports a neighbouring file by the name of another module,
            or fails in any way, SystemExit included.
    """
    try:
        text = path.read_bytes()
        # Do not inherit the __future__ imports of this module, which would turn annotations into strings.
        code = compile(text, str(path), "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError) as error:
        raise PythonFileError(f"cannot be read as a Python file ({error})") from error
    # The module's name contains a hash of path and text: a changed file is another module, and equal names do
    # not collide.
    name = f"user_file_{path.stem}_{hashlib.sha256(str(path.absolute()).encode() + text).hexdigest()[:16]}"
    if name in _MODULES:
        return _MODULES[name]
    module = ModuleType(name)
    module.__file__ = str(path)
    # Dataclasses and pickles look up the classes of the file in ``sys.modules``.
    sys.modules[name] = module
    directory = str(path.absolute().parent)
    if directory not in sys.path:
        # Append the directory at the end, so that its files do not shadow installed modules.
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
    """Refuse a file that imports a neighbour whose name Python resolves to another module, which would be run
    silently.

    Args:
        text: content of the file.
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
    # The import that follows will report the error.
    except (SyntaxError, ValueError):
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            for each in node.names:
                yield each.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _origin_of(name: str) -> str:
    """Return the file that Python would import under a name, or a description if there is no file."""
    # The file may be newer than importlib's cached listing of the directory.
    importlib.invalidate_caches()
    found = getattr(sys.modules[name], "__file__", None) if name in sys.modules else None
    if name not in sys.modules:
        spec = importlib.util.find_spec(name)
        found = spec.origin if spec else None
    return str(Path(found).resolve()) if found and Path(found).is_file() else "a module of its own"
