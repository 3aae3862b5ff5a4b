"""Nested mappings: values at dotted paths, and merging one mapping over another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

MappingT = TypeVar("MappingT", bound=Mapping[Any, Any])


def at(config: Mapping[Any, Any], path: str) -> Any:
    """Return the value at a dotted path, or None if there is none."""
    value: Any = config
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def has(config: Mapping[Any, Any], path: str) -> bool:
    """Return whether there is a value at a dotted path; the value may be None."""
    above, _, name = path.rpartition(".")
    section = at(config, above) if above else config
    return isinstance(section, Mapping) and name in section


def put(config: MappingT, path: str, value: Any) -> MappingT:
    """Return a copy with a new value at a dotted path. Only the mappings above the path are copied; the rest
    is shared."""
    name, _, rest = path.partition(".")
    inner = config.get(name)
    changed: Any = {
        **config,
        name: value if not rest else put(inner if isinstance(inner, Mapping) else {}, rest, value),
    }
    return changed


def merge(under: Mapping[Any, Any], over: Mapping[Any, Any]) -> dict[Any, Any]:
    """Merge two nested mappings. The value of ``over`` takes precedence, unless both values are mappings."""
    result = dict(under)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merge(result[key], value) if both else value
    return result
