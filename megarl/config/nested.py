"""Access to nested mappings by dotted paths, and merging of two nested mappings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

MappingT = TypeVar("MappingT", bound=Mapping[Any, Any])


def at(config: Mapping[Any, Any], path: str) -> Any:
    """Return the value at a dotted path, or None if some part of the path is missing."""
    value: Any = config
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def has(config: Mapping[Any, Any], path: str) -> bool:
    """Return whether a dotted path exists, even if its value is None."""
    above, _, name = path.rpartition(".")
    section = at(config, above) if above else config
    return isinstance(section, Mapping) and name in section


def put(config: MappingT, path: str, value: Any) -> MappingT:
    """Return a copy of ``config`` with ``value`` at a dotted path. Missing mappings on the path are created,
    existing ones are copied; everything else is shared with ``config``."""
    name, _, rest = path.partition(".")
    inner = config.get(name)
    changed: Any = {
        **config,
        name: value if not rest else put(inner if isinstance(inner, Mapping) else {}, rest, value),
    }
    return changed


def merge(under: Mapping[Any, Any], over: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return ``under`` with the values of ``over`` merged in. Where both have a mapping, the two are merged
    recursively; otherwise the value of ``over`` is taken."""
    result = dict(under)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merge(result[key], value) if both else value
    return result
