"""The registry of algorithms, as the configuration reads it: sections, and what a step needs, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NotRequired, get_type_hints

from typing_extensions import TypedDict

from megarl.config.sections import RunConfig
from megarl.errors import ConfigError, Violation
from megarl.import_path import is_import_path, load_object
from megarl.key import Key

if TYPE_CHECKING:
    from megarl.algorithms.algorithm import Algorithm, Role

KEY = "algorithm"

ALGORITHMS: Mapping[str, str] = MappingProxyType({"grpo": "megarl.algorithms.grpo:GRPO", "sft": "megarl.algorithms.sft:SFT"})
"""Import paths of the built-in algorithms, by the name that the configuration has for them."""

ORDER = (
    "algorithm",
    "seed",
    "run_dir",
    "cluster",
    "policy",
    "grpo",
    "sft",
    "loss_fn",
    "env",
    "data",
    "checkpointing",
    "logger",
    "profiler",
    "deadlines",
)
"""Sections of a run and its other keys, in the order in which a configuration is written."""

_NEEDED = ("SECTIONS", "GENERATES", "PROMPTS", "GENERATIONS", "roles", "section", "step")


@cache
def algorithm_class(name: str) -> type[Algorithm]:
    """The algorithm of that name or import path.

    Raises:
        ConfigError: there is none, or what is there is no algorithm.
    """
    path = ALGORITHMS.get(name, name)
    if not is_import_path(path):
        known = f"must be {', '.join(sorted(ALGORITHMS))} or an import path"
        raise ConfigError([Violation(KEY, name, known, "write one of those names, or path/to/file.py:Name")])
    found: Any = load_object(path, KEY)
    missing = [attribute for attribute in _NEEDED if not hasattr(found, attribute)]
    if missing or not found.SECTIONS:
        bound = f"it is no algorithm: it lacks {', '.join(missing or ['a section'])}"
        raise ConfigError([Violation(KEY, name, bound, "name a subclass of megarl.algorithms.algorithm:Algorithm")])
    return found


def generates(config: Mapping[str, Any]) -> bool:
    """Whether the steps of a checked run sample responses."""
    return algorithm_class(config[KEY]).GENERATES


def step_size(config: Mapping[str, Any]) -> tuple[int, int]:
    """Prompts (records) of a step of a checked run, and responses to each."""
    algorithm = algorithm_class(config[KEY])
    prompts = config["policy"]["train_global_batch_size"] if algorithm.PROMPTS is None else _at(config, algorithm.PROMPTS)
    return prompts, 1 if algorithm.GENERATIONS is None else _at(config, algorithm.GENERATIONS)


def roles(config: Mapping[str, Any]) -> tuple[Role, ...]:
    """The models of a checked run, by the part that they play."""
    return algorithm_class(config[KEY]).roles(config)


def sections_of(name: object) -> Mapping[str, Any]:
    """The sections of an algorithm, TypedDicts by name; none where there is no such algorithm."""
    try:
        return algorithm_class(name).SECTIONS if isinstance(name, str) else {}
    except ConfigError:
        return {}


@cache
def built_in_sections() -> Mapping[str, Any]:
    """The sections that the built-in algorithms have for themselves, TypedDicts by name."""
    return {algorithm_class(name).section(): algorithm_class(name).SECTIONS[algorithm_class(name).section()] for name in ALGORITHMS}


def run_type(name: object) -> Any:
    """The TypedDict of a whole run: what all runs have, and the sections of the built-in algorithms and of the algorithm of that name."""
    return _run_type(tuple(sections_of(name).items()))


@cache
def _run_type(sections: tuple[tuple[str, Any], ...]) -> Any:
    keys: dict[str, Any] = get_type_hints(RunConfig, include_extras=True)
    for name, section in {**built_in_sections(), **dict(sections)}.items():
        keys.setdefault(name, NotRequired[Annotated[section, Key(f"settings of {name.upper()}.")]])
    ordered = {name: keys[name] for name in (*ORDER, *keys) if name in keys}
    # made by a call: which sections there are is known only now
    make: Any = TypedDict
    made = make("RunConfig", ordered)
    made.__doc__ = RunConfig.__doc__
    return made


def _at(config: Mapping[str, Any], path: str) -> Any:
    value: Any = config
    for part in path.split("."):
        value = value[part]
    return value
