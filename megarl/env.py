"""Environment of the process: variables, which no other module of megarl reads directly, and installed
packages."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

DISTRIBUTION = "megarl-trainer"
"""Distribution name of megarl, by which pip knows it."""


def snapshot() -> dict[str, str]:
    """Return a copy of all environment variables."""
    return dict(os.environ)


def text(name: str, default: str | None = None) -> str | None:
    """Return the value of an environment variable without surrounding white space, or ``default`` if it is
    unset or blank."""
    value = os.environ.get(name, "").strip()
    return value or default


def integer(name: str, default: int) -> int:
    """Return the value of an environment variable as an integer, or ``default`` if it is unset or blank.

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
    """Return the value of an environment variable as a boolean, or ``default`` if it is unset or blank: True
    for ``1``, ``true``, ``yes`` and ``on``, False for ``0``, ``false``, ``no`` and ``off``, in any case.

    Raises:
        ValueError: the value is none of these.
    """
    value = text(name)
    if value is None:
        return default
    if value.lower() in {"1", "true", "yes", "on"}:
        return True
    if value.lower() in {"0", "false", "no", "off"}:
        return False
    raise ValueError(f"environment variable {name} = {value!r} is not a yes or no; write 1 or 0")


def set_variables(values: Mapping[str, str]) -> None:
    """Set environment variables of this process, and of child processes that it starts from now on."""
    os.environ.update(values)


@contextlib.contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the ``with`` block, and restore their earlier values afterwards."""
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
"""Environment variables that would let a file execute code when it is loaded: with this one, torch unpickles
without restrictions unless the caller sets ``weights_only``."""


def forget_unsafe() -> list[str]:
    """Remove the variables of ``UNSAFE`` from the environment, and return the names of those that were
    set."""
    return [name for name in UNSAFE if os.environ.pop(name, None) is not None]


def installation(extra: str, options: str = "") -> str:
    """Return the command that installs packages for GPUs: the script of a clone, else pip with ``options``.

    Args:
        extra: an extra of megarl, and perhaps a remark after a space.
        options: options of pip, each followed by a space.
    """
    name, _, remark = extra.partition(" ")
    clone = Path(__file__).resolve().parents[1]
    is_clone = (clone / "launch" / "gpu_environment.sh").is_file()
    command = (
        "bash launch/gpu_environment.sh" if is_clone else f"pip install {options}'{DISTRIBUTION}[{name}]'"
    )
    return f"{command} {remark}".rstrip()


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed Python distribution, or None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
