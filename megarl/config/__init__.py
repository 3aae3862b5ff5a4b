"""Configurations: schema, loader, and rules between keys. Importing this package imports neither torch nor
Ray.

The names below are imported on first use, so a module that only lists recipes or looks up keys does not
import the YAML reader.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megarl.config.defaults import complete_policy, complete_run
    from megarl.config.load import (
        OverridesError,
        load_config,
        load_config_with_inheritance,
        parse_hydra_overrides,
    )
    from megarl.config.model_facts import published_config, read_model_facts
    from megarl.config.rules import check
    from megarl.config.validate import validate_config, validate_policy_config

__all__ = [
    "OverridesError",
    "check",
    "complete_policy",
    "complete_run",
    "load_config",
    "load_config_with_inheritance",
    "parse_hydra_overrides",
    "published_config",
    "read_model_facts",
    "validate_config",
    "validate_policy_config",
]
_MODULES = {
    "defaults": ("complete_policy", "complete_run"),
    "load": ("OverridesError", "load_config", "load_config_with_inheritance", "parse_hydra_overrides"),
    "model_facts": ("published_config", "read_model_facts"),
    "rules": ("check",),
    "validate": ("validate_config", "validate_policy_config"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
