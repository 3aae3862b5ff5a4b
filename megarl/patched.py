"""Temporary replacement of attributes of modules, classes and objects."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

__all__ = ["patched"]

_ABSENT = object()


@contextlib.contextmanager
def patched(*replacements: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace attributes inside the ``with`` block, and restore them afterwards.

    Args:
        replacements: (owner, attribute name, value) triples. They are applied in order and undone in reverse,
            so an attribute may occur twice.
    """
    originals: list[tuple[Any, str, Any]] = []
    try:
        for owner, name, value in replacements:
            # Save only attributes in the owner's own __dict__. An inherited one must be inherited again
            # afterwards, so it is deleted then.
            original = vars(owner).get(name, _ABSENT)
            setattr(owner, name, value)
            originals.append((owner, name, original))
        yield
    finally:
        for owner, name, original in reversed(originals):
            if original is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
