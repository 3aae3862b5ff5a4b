"""Environments and rewards that a configuration names, as far as it has to know them to be checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megarl.errors import ConfigError, Violation
from megarl.import_path import is_import_path, load_object

REWARD, ENVIRONMENT = "env.reward", "env.environment"
BUILT_IN_REWARDS = ("exact_match", "math_verify")


def environment_class(name: str) -> Callable[..., Any]:
    """The class at an import path that an environment is made by.

    Raises:
        ConfigError: there is none, or it lacks a method.
    """
    kind = load_object(name, ENVIRONMENT)
    missing = [method for method in ("step", "fault_of_reference", "close") if not callable(getattr(kind, method, None))]
    if not callable(kind) or missing:
        bound = f"it lacks {', '.join(missing)}" if missing else "it cannot be called"
        raise ConfigError([Violation(ENVIRONMENT, name, bound, "name a class like megarl.rollout.environment:SingleTurn")])
    return kind


def check_reward(name: object) -> None:
    """Refuse a name that no reward function has.

    Raises:
        ConfigError: it is no built-in one, and nothing that can be called is at that import path.
    """
    if not isinstance(name, str) or (name not in BUILT_IN_REWARDS and not is_import_path(name)):
        bound = f"it must be {', '.join(BUILT_IN_REWARDS)} or an import path"
        raise ConfigError([Violation(REWARD, name, bound, "write one of those names, or path/to/file.py:function")])
    if is_import_path(name) and not callable(function := load_object(name, REWARD)):
        bound = f"it is {type(function).__name__}, which cannot be called"
        raise ConfigError([Violation(REWARD, name, bound, "name a function")])
