"""The environment of the process: its variables, of which this is the one reader in megarl, and installed
packages."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from collections.abc import Iterator, Mapping

DISTRIBUTION = "megarl-trainer"
"""Name by which package indexes and pip know megarl."""


def snapshot() -> dict[str, str]:
    """Return a copy of the whole environment, to hand on to child processes."""
    return dict(os.environ)


def text(name: str, default: str | None = None) -> str | None:
    """Return the value of ``name``; a variable that is blank counts as unset."""
    value = os.environ.get(name, "").strip()
    return value or default


def integer(name: str, default: int) -> int:
    """Return the value of ``name`` as an integer.

    Raises:
        ValueError: the variable is set to something that is not an integer.
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
    """True for ``1``, ``true``, ``yes``, ``on`` (any case), False for ``0``, ``false``, ``no``, ``off``."""
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
    """Set variables for this process, and for children started within; afterwards they are what they were."""
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
"""Variables by which a file that is read could run code: torch would then read a pickle as it comes wherever
nobody has said otherwise."""


def forget_unsafe() -> list[str]:
    """Take such variables out of the environment of this process, and of what it starts from now on; those
    that were there."""
    return [name for name in UNSAFE if os.environ.pop(name, None) is not None]


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution; None without it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
