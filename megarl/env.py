"""The environment of the process: its variables, which only this module of megarl reads, and installed
packages."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from collections.abc import Iterator, Mapping

DISTRIBUTION = "megarl-trainer"
"""Name by which package indexes and pip know megarl."""


def snapshot() -> dict[str, str]:
    """Return a copy of the whole environment, to pass on to child processes."""
    return dict(os.environ)


def text(name: str, default: str | None = None) -> str | None:
    """Return the value of ``name``, or ``default`` if the variable is unset or blank."""
    value = os.environ.get(name, "").strip()
    return value or default


def integer(name: str, default: int) -> int:
    """Return the value of ``name`` as an integer, or ``default`` if the variable is unset.

    Raises:
        ValueError: the value is not an integer.
    """
    value = text(name)
    if value is None:
        return default
    try:
        return int(value)
    except ValueError:
        raise ValueError(
            f"environment variable {name} = {value!r} is not an integer; unset it or write a whole number"
        ) from None


def flag(name: str, default: bool = False) -> bool:
    """Return True for ``1``, ``true``, ``yes``, ``on`` (any case), False for ``0``, ``false``, ``no``,
    ``off``, and ``default`` if the variable is unset. Raise ValueError for any other value."""
    value = text(name)
    if value is None:
        return default
    if value.lower() in {"1", "true", "yes", "on"}:
        return True
    if value.lower() in {"0", "false", "no", "off"}:
        return False
    raise ValueError(f"environment variable {name} = {value!r} is not a yes or no; write 1 or 0")


def set_variables(values: Mapping[str, str]) -> None:
    """Set variables for this process and its children (thread counts, rendezvous address)."""
    os.environ.update(values)


@contextlib.contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables for this process, and for children started within the block; restore their earlier values
    afterwards."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


UNSAFE = ("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD",)
"""Variables that could let a file run code when it is read: torch would then unpickle files without
restrictions wherever the caller does not set ``weights_only``."""


def forget_unsafe() -> list[str]:
    """Remove the variables of ``UNSAFE`` from the environment of this process and of later children. Return
    those that were set."""
    return [name for name in UNSAFE if os.environ.pop(name, None) is not None]


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
