"""Configurations: what they look like, how they are read, what must hold between their keys. Needs neither torch nor ray."""

from __future__ import annotations

from megarl.config.defaults import complete_policy, complete_run
from megarl.config.load import OverridesError, load_config, load_config_with_inheritance, parse_hydra_overrides
from megarl.config.model_facts import ModelFacts, published_config, read_model_facts
from megarl.config.rules import check
from megarl.config.validate import validate_config, validate_policy_config

__all__ = [
    "ModelFacts",
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
