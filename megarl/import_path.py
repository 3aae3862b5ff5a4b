"""Custom objects that a configuration names by import path: ``path/to/file.py:name``,
``package.module:name`` or ``given:name``.

``given:name`` is an object that a program passed to ``megarl.train``. It exists only in the processes to
which it was sent, and in no file. A later run with the same configuration gets an error that asks for the
object.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from converters.python_file import PythonFileError, module_of_file
from megarl.errors import ConfigError, Violation

logger = logging.getLogger(__name__)

# Seconds of an import after which a warning is logged, because an endless one would look like a hanging
# program.
_SLOW_S = 10.0


def is_import_path(text: str) -> bool:
    """Return whether a value is an import path. It is one if it contains a colon, which no built-in name
    does."""
    return ":" in text


def load_object(path: str, key: str) -> Any:
    """Return the object at an import path. This executes its module, so only names in a configuration are
    loaded.

    Objects are cached until ``forget_objects``, so a change of the file does not affect a run in progress.

    Args:
        path: ``path/to/file.py:name``, relative to the working directory, ``package.module:name``, or
            ``given:name``.
        key: dotted key that has the path, for the error.

    Raises:
        ConfigError: there is no such file, module or name, or importing the module fails.
    """
    # Do not cache it in ``_loaded``: a later call in this process may register another object under this
    # name.
    if path in _given:
        return _given[path][0]
    if (path, key) not in _loaded:
        _loaded[path, key] = _load(path, key)
    return _loaded[path, key]


_loaded: dict[tuple[str, str], Any] = {}

GIVEN = "given:"
_given: dict[str, tuple[Any, bytes]] = {}


def give_object(name: str, value: Any, pickled: bytes) -> None:
    """Register an object in this process under ``given:NAME``.

    Args:
        name: NAME, an identifier.
        value: the object.
        pickled: the object pickled by cloudpickle, to send to other processes.
    """
    _given[f"{GIVEN}{name}"] = value, pickled


def unpickle_object(path: str, pickled: bytes) -> None:
    """Unpickle an object, and register it under its path ``given:NAME``. The pickle comes from the parent
    process through a pipe, never from a file.

    Raises:
        ConfigError: unpickling fails here, for example because a module is missing.
    """
    import cloudpickle

    try:
        value = cloudpickle.loads(pickled)
    # Unpickling executes custom code, which may raise anything.
    except (Exception, SystemExit) as error:
        bound = f"it cannot be recreated in another process: {type(error).__name__}: {error}"
        raise _refused(path, path, bound, "let it use only modules that can be imported by name") from error
    give_object(path.removeprefix(GIVEN), value, pickled)


def pickled_object(path: str) -> bytes | None:
    """Return the pickle of an object registered by ``give_object``, or None for any other path."""
    return _given[path][1] if path in _given else None


def forget_objects() -> None:
    """Clear the cache of ``load_object`` at the start of a run. Objects registered by ``give_object``
    stay."""
    _loaded.clear()


def _load(path: str, key: str) -> Any:
    if path.startswith(GIVEN):
        bound = "it is an object of the program that called megarl.train, which this process does not have"
        fix = (
            "call megarl.train with it again and the same run_dir, or write it into a file and give "
            "path/to/file.py:name"
        )
        raise _refused(key, path, bound, fix)
    source, _, name = path.rpartition(":")
    if not source or not name.isidentifier():
        raise _refused(
            key, path, "it is not an import path", "write path/to/file.py:name or package.module:name"
        )
    file = Path(source).expanduser()
    if source.endswith(".py") and not file.is_file():
        raise _refused(key, path, f"there is no file {file.absolute()}", "give the path of a Python file")
    try:
        with _told_when_slow(source, key):
            module = module_of_file(file) if source.endswith(".py") else importlib.import_module(source)
    except PythonFileError as error:
        raise _refused(key, path, f"{source} {error}", f"correct {source}") from error
    # Importing executes custom code, which may raise anything, including SystemExit.
    except (Exception, SystemExit) as error:
        file = Path(f"{source.replace('.', '/')}.py")
        fix = f"write {file}:{name}" if file.is_file() else f"correct {source}"
        raise _refused(key, path, f"{source} fails: {type(error).__name__}: {error}", fix) from error
    if not hasattr(module, name):
        own = []
        for each, value in vars(module).items():
            # What the module imports is not meant.
            is_imported = getattr(value, "__module__", module.__name__) != module.__name__
            if not (each.startswith("_") or is_imported or inspect.ismodule(value)):
                own.append(each)
        there = ", ".join(sorted(own)[:8])
        raise _refused(key, path, f"{source} has no {name}", f"write one of its names ({there})")
    return getattr(module, name)


@contextlib.contextmanager
def _told_when_slow(source: str, key: str) -> Iterator[None]:
    """Log a warning if the import of a module inside the ``with`` block takes longer than ``_SLOW_S``."""
    text = (
        "%s: %s is still being imported after %g s; megarl waits for it. Fix: move slow code out "
        "of the module's top level"
    )
    timer = threading.Timer(_SLOW_S, logger.warning, (text, key, source, _SLOW_S))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _refused(key: str, path: str, bound: str, fix: str) -> ConfigError:
    return ConfigError([Violation(key, path, bound, fix)])
