"""Registry of algorithms, and what the configuration needs to know of each: its sections, models and batch
sizes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, NotRequired

from typing_extensions import TypedDict

from megarl.config.asynchrony import NAME as ASYNC
from megarl.config.nested import at
from megarl.config.sections import AlgorithmConfig, RunConfig
from megarl.errors import ConfigError, Violation
from megarl.import_path import is_import_path, load_object
from megarl.key import Key, keys_of, section_types

if TYPE_CHECKING:
    from megarl.config.plugins import AlgorithmSpec, ModelSection, Role

KEY: Final = "algorithm"

ALGORITHMS: Mapping[str, str] = MappingProxyType(
    {
        "grpo": "megarl.algorithms.grpo:GRPO",
        "sft": "megarl.algorithms.sft:SFT",
        "dpo": "megarl.algorithms.dpo:DPO",
        "rm": "megarl.algorithms.rm:RM",
        "ppo": "megarl.algorithms.ppo:PPO",
        "distillation": "megarl.algorithms.distillation:Distillation",
    }
)
"""Name of each built-in algorithm -> import path of its class."""

OF_ALGORITHMS = (
    "grpo",
    "sft",
    "dpo",
    "rm",
    "ppo",
    "critic",
    "reward_model",
    "distillation",
    "teacher",
    "teachers",
    "loss_fn",
    "env",
)
"""Top-level sections that only some algorithms read; all others in ``ORDER`` belong to every run."""

ORDER = (
    "algorithm",
    "seed",
    "recipe",
    "run_dir",
    "cluster",
    "policy",
    *OF_ALGORITHMS,
    "data",
    "checkpointing",
    "logger",
    "profiler",
    "deadlines",
    "debug",
)
"""Top-level keys of a configuration, in the order in which they are written."""

# Attributes without which a class is not accepted as an algorithm.
_NEEDED = (
    "SECTIONS",
    "OPTIONAL",
    "MODELS",
    "GENERATES",
    "PAIRS",
    "SCORES",
    "PROMPTS",
    "GENERATIONS",
    "roles",
    "section",
    "step",
)


# Cache the class: ``forget_objects`` may load a custom file a second time, and TypedDicts of two loads are
# not identical.
@cache
def algorithm_class(name: str) -> type[AlgorithmSpec]:
    """Return the class of the algorithm with this name or import path.

    Raises:
        ConfigError: there is no such algorithm, or the object at the import path is not a valid algorithm.
    """
    path = ALGORITHMS.get(name, name)
    if not is_import_path(path):
        known = f"must be {', '.join(sorted(ALGORITHMS))} or an import path"
        raise ConfigError([Violation(KEY, name, known, "write one of those names, or path/to/file.py:Name")])
    found: Any = load_object(path, KEY)
    missing = [attribute for attribute in _NEEDED if not hasattr(found, attribute)]
    if missing or not found.SECTIONS:
        bound = f"it is not an algorithm: it lacks {', '.join(missing or ['a section'])}"
        raise ConfigError(
            [Violation(KEY, name, bound, "name a subclass of megarl.algorithms.algorithm:Algorithm")]
        )
    fault = _fault_of(found)
    if fault is not None:
        raise ConfigError([Violation(KEY, name, *fault)])
    return found


def _fault_of(algorithm: type[AlgorithmSpec]) -> tuple[str, str] | None:
    """Return what is wrong with a custom algorithm class, and how to fix it, or None if the class is
    valid."""
    abstract = sorted(getattr(algorithm, "__abstractmethods__", ()))
    if abstract:
        return f"it does not implement {', '.join(abstract)}", "write these methods"
    for attribute in ("SECTIONS", "MODELS"):
        taken = sorted(getattr(algorithm, attribute).keys() & set(ORDER) - set(OF_ALGORITHMS))
        if taken:
            return (
                f"its {attribute} have {', '.join(taken)}, which every run has",
                "give its own sections other names",
            )
    twice = sorted(algorithm.SECTIONS.keys() & algorithm.MODELS.keys())
    if twice:
        return f"its SECTIONS and its MODELS both have {', '.join(twice)}", "give one of them another name"
    keys = {name: keys_of(section).keys() for name, section in algorithm.SECTIONS.items()}
    section = algorithm.section()
    if "max_num_steps" not in keys[section]:
        return (
            f"its first section, {section}, has no max_num_steps",
            "add the key, and others of megarl.algorithms.algorithm:Algorithm",
        )
    for attribute in ("PROMPTS", "GENERATIONS"):
        path = getattr(algorithm, attribute)
        first, _, key = (path or "").partition(".")
        if path is not None and key not in keys.get(first, ()):
            return f"its {attribute} = {path!r} is not a key of its SECTIONS", "write the dotted name of one"
    return None


def own_section(config: RunConfig) -> AlgorithmConfig:
    """Return the section of a checked run that the algorithm names as its own (``grpo`` for GRPO)."""
    section: AlgorithmConfig = at(config, algorithm_class(config[KEY]).section())
    return section


def replay_key(config: RunConfig) -> str:
    """Return the dotted key for the directory of an earlier run whose ledger the run may replay."""
    return f"{algorithm_class(config[KEY]).section()}.{ASYNC}.replay"


def generates(config: RunConfig) -> bool:
    """Return whether the algorithm of a checked run samples responses in its training steps."""
    return algorithm_class(config[KEY]).GENERATES


def rows_of_record(config: RunConfig) -> int:
    """Return the number of batch rows per record in training: 2 for a preference pair, else 1. Batch sizes
    in the configuration count records, not rows."""
    return 2 if algorithm_class(config[KEY]).PAIRS else 1


def step_size(config: RunConfig) -> tuple[int, int]:
    """Return (prompts per step, responses per prompt) of a checked run. Without generation, a prompt is a
    training record, with one response."""
    algorithm = algorithm_class(config[KEY])
    prompts = (
        config["policy"]["train_global_batch_size"]
        if algorithm.PROMPTS is None
        else at(config, algorithm.PROMPTS)
    )
    return prompts, 1 if algorithm.GENERATIONS is None else at(config, algorithm.GENERATIONS)


def roles(config: RunConfig) -> tuple[Role, ...]:
    """Return the roles of the models that a checked run needs, the actor first."""
    return algorithm_class(config[KEY]).roles(config)


def sections_of(name: object) -> Mapping[str, type]:
    """Return the sections that an algorithm reads, name -> TypedDict; empty if there is no such algorithm."""
    try:
        return algorithm_class(name).SECTIONS if isinstance(name, str) else {}
    except ConfigError:
        return {}


def models_of(name: object) -> Mapping[str, ModelSection]:
    """Return the sections for an algorithm's models other than the policy, by name; empty if there is no
    such algorithm."""
    try:
        return algorithm_class(name).MODELS if isinstance(name, str) else {}
    except ConfigError:
        return {}


@cache
def built_in_models() -> Mapping[str, ModelSection]:
    """Return the sections for models other than the policy, by name, over all built-in algorithms."""
    models: dict[str, ModelSection] = {}
    for name in ALGORITHMS:
        models |= algorithm_class(name).MODELS
    return models


@cache
def built_in_sections() -> Mapping[str, type]:
    """Return each built-in algorithm's own section, name -> TypedDict."""
    sections = {}
    for algorithm in map(algorithm_class, ALGORITHMS):
        name = algorithm.section()
        sections[name] = algorithm.SECTIONS[name]
    return sections


def run_type(name: object) -> Any:
    """Return the TypedDict of a whole run: sections of every run, of the built-in algorithms, and of the
    named algorithm.

    Sections for models other than the policy are plain mappings in it, because they inherit absent keys from
    ``policy`` (``megarl.config.models``).

    Args:
        name: value of ``algorithm``; of any type, because the configuration may be invalid.
    """
    return _run_type(tuple(sections_of(name).items()), tuple(models_of(name).items()))


@cache
def _run_type(sections: tuple[tuple[str, type], ...], models: tuple[tuple[str, ModelSection], ...]) -> Any:
    keys: dict[str, Any] = dict(keys_of(RunConfig))
    for name, model in {**built_in_models(), **dict(models)}.items():
        # Use a plain mapping, because the TypedDict would require keys that the section inherits from policy.
        section: Any = dict[str, dict[str, Any]] if model.by_name else dict[str, Any]
        keys[name] = NotRequired[Annotated[section, Key(model.meaning)]]
    for name, section in {**built_in_sections(), **dict(sections)}.items():
        # Keep the description of loss_fn and env, unless the algorithm declares them with a TypedDict of its
        # own.
        if name not in keys or section not in section_types(keys[name]):
            keys[name] = NotRequired[
                Annotated[
                    section, Key(f"settings of the algorithm `{name}`; other algorithms refuse this section.")
                ]
            ]
    ordered = {name: keys[name] for name in (*ORDER, *keys) if name in keys}
    # Create the TypedDict dynamically, because its sections depend on the algorithm.
    make: Any = TypedDict
    made = make("RunConfig", ordered)
    made.__doc__ = RunConfig.__doc__
    return made
