"""Completion of a configuration: absent optional keys get the default declared at their field, or a value
derived from other keys. A key that is present is never changed, even if it is null."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from megarl.config.algorithms import ORDER, built_in_sections, sections_of
from megarl.config.arithmetic import sequence_share
from megarl.config.data_sources import DataConfig, sources_of
from megarl.config.engines import engine_kind, is_engine
from megarl.config.environments import BUILT_IN_REWARDS, OF_TOOLS, TOOLS, EnvConfig, named_environments
from megarl.config.generation import EngineCheckConfig, GenerationConfig
from megarl.config.losses import ClippedPGLossConfig
from megarl.config.models import in_full, model_sections
from megarl.config.nested import at, put
from megarl.config.places import places_of
from megarl.config.policy import (
    DTensorConfig,
    MegatronConfig,
    MegatronDDPConfig,
    MegatronOptimizerConfig,
    MegatronSchedulerConfig,
    PeftConfig,
    PolicyConfig,
    PytorchOptimizerConfig,
    RewardModelConfig,
)
from megarl.config.sections import (
    CheckpointingConfig,
    ClusterConfig,
    Config,
    DeadlinesConfig,
    DebugConfig,
    LoggerConfig,
    ProfilerConfig,
)
from megarl.errors import ConfigError, Violation
from megarl.import_path import is_import_path
from megarl.key import defaults_of, fields_of, keys_of, section_types

if TYPE_CHECKING:
    from megarl.config.plugins import ModelSection

# Sections that get defaults only if they are present. Sections of algorithms are treated likewise.
_GIVEN: Mapping[str, type] = {
    "loss_fn": ClippedPGLossConfig,
    "env": EnvConfig,
    "data": DataConfig,
    "cluster": ClusterConfig,
}
# Sections that every run has; they get defaults even if they are absent.
_ALWAYS: Mapping[str, type] = {
    "deadlines": DeadlinesConfig,
    "checkpointing": CheckpointingConfig,
    "logger": LoggerConfig,
    "debug": DebugConfig,
    "profiler": ProfilerConfig,
}


def complete_run(config: Mapping[str, Any], name: str = "run") -> Config:
    """Return a copy of a run's configuration with every absent optional key filled in.

    Args:
        config: plain containers; need not be valid.
        name: name of the run directory if the configuration does not set it.
    """
    # Copy, because the search for proposals completes the same configuration repeatedly with other values.
    run = without_tildes(copy.deepcopy(dict(config)))
    run.setdefault("run_dir", str(Path("runs") / name))
    # Complete the other models first: they inherit only what the user wrote for the policy, because their own
    # keys may lead to other defaults.
    models = {
        path: in_full(_section(run, "policy"), at(run, path) or {}, section)
        for path, section in _well_formed_models(run)
    }
    run["policy"] = complete_policy(_section(run, "policy"))
    for path, model in models.items():
        run = put(run, path, complete_policy(model))
    # The run's algorithm comes after the built-in ones, because a custom one may declare their sections with
    # another TypedDict.
    for key, section in {
        **_GIVEN,
        **built_in_sections(),
        **sections_of(run.get("algorithm")),
        **_ALWAYS,
    }.items():
        if key in _ALWAYS or isinstance(run.get(key), dict):
            run[key] = _complete(_section(run, key), section)
    _complete_environments(run)
    _fill_sizes_of_validation(run)
    if isinstance(run["run_dir"], str):
        run["checkpointing"].setdefault("checkpoint_dir", str(Path(run["run_dir"]) / "checkpoints"))
    # Order the keys as in a recipe, because the dry run prints them.
    return {key: run[key] for key in (*ORDER, *run) if key in run}


def without_tildes(run: Config) -> Config:
    """Return the configuration with ``~`` at the beginning of paths replaced by the user's home directory,
    because no shell expands it in a YAML file or after ``key=``."""
    for key, place in places_of(run):
        home = os.path.expanduser(place)
        if at(run, key) == place != home:
            run = put(run, key, home)
    data = run.get("data")
    for kind in ("train", "validation") if isinstance(data, dict) else ():
        for _, source in sources_of(cast(Config, data), kind):
            if isinstance(source.get("path"), str):
                source["path"] = os.path.expanduser(source["path"])
    return run


def _well_formed_models(run: Config) -> Iterator[tuple[str, ModelSection]]:
    """Yield (path, declaration) of each model other than the policy, unless its section is present and not a
    mapping."""
    for path, section in model_sections(run).items():
        given = at(run, path)
        if given is None or isinstance(given, dict):
            yield path, section


def complete_policy(policy: Mapping[str, Any]) -> PolicyConfig:
    """Return a copy of a ``policy`` section with every absent optional key filled in."""
    filled = copy.deepcopy(dict(policy))
    if "make_sequence_length_divisible_by" not in filled:
        filled["make_sequence_length_divisible_by"] = _padding_of(filled)
    optimizer = _section(_section(filled, "megatron_cfg"), "optimizer")
    if "max_grad_norm" not in filled and "clip_grad" in optimizer:
        # Megatron uses 0 for no clipping, and the other backends use null.
        filled["max_grad_norm"] = optimizer["clip_grad"] or None
    filled = _filled(filled, PolicyConfig)
    if isinstance(filled["merged_adapter"], str):
        # Make the path absolute, because workers may run in another directory.
        filled["merged_adapter"] = str(Path(filled["merged_adapter"]).expanduser().absolute())
    if isinstance(filled["generation"], dict):
        itself = "megatron" if _section(filled, "megatron_cfg").get("enabled") is True else "hf"
        filled["generation"] = fill(
            filled["generation"], {"backend": itself, **defaults_of(GenerationConfig)}
        )
        if isinstance(filled["generation"]["engine_check"], dict):
            filled["generation"]["engine_check"] = _filled(
                filled["generation"]["engine_check"], EngineCheckConfig
            )
        if is_engine(cast(GenerationConfig, filled["generation"])):
            filled["generation"] = _complete_engine(filled["generation"], filled)
        if "generation_batch_size" not in filled and "logprob_batch_size" in filled:
            filled["generation_batch_size"] = filled["logprob_batch_size"]
    if _section(filled, "megatron_cfg").get("enabled") is True:
        filled["megatron_cfg"] = _complete_megatron(filled["megatron_cfg"], filled)
    for key, kind in (
        ("reward_model_cfg", RewardModelConfig),
        ("peft", PeftConfig),
        ("optimizer", PytorchOptimizerConfig),
        ("dtensor_cfg", DTensorConfig),
    ):
        if isinstance(filled[key], dict) and (key != "dtensor_cfg" or filled[key].get("enabled") is True):
            filled[key] = _filled(filled[key], kind)
    return cast(PolicyConfig, filled)


def _complete_megatron(megatron: Config, policy: Config) -> Config:
    filled = _filled(megatron, MegatronConfig)
    if isinstance(filled["family_file"], str):
        # Make the path absolute, because workers may run in another directory.
        filled["family_file"] = str(Path(filled["family_file"]).expanduser().absolute())
    precision = policy.get("precision")
    filled.setdefault("pipeline_dtype", precision)
    data_parallel = "distributed_data_parallel_config"
    filled[data_parallel] = _filled(_section(filled, data_parallel), MegatronDDPConfig)
    if isinstance(filled.get("optimizer"), dict):
        derived = {
            "bf16": precision == "bfloat16",
            "fp16": precision == "float16",
            "clip_grad": policy["max_grad_norm"] or 0.0,
        }
        filled["optimizer"] = fill(filled["optimizer"], {**defaults_of(MegatronOptimizerConfig), **derived})
        decay = filled["optimizer"]["weight_decay"]
        decays = {"start_weight_decay": decay, "end_weight_decay": decay}
        filled["scheduler"] = fill(
            _section(filled, "scheduler"), {**defaults_of(MegatronSchedulerConfig), **decays}
        )
    return filled


def _complete_engine(generation: Config, policy: Config) -> Config:
    """Return the ``generation`` section with the defaults of its engine. If there is no such engine it is
    returned without them, because a rule reports that.

    Raises:
        ConfigError: the code of a custom engine fails on the section.
    """
    filled = fill(generation, {"model_name": policy.get("model_name")})
    try:
        kind = engine_kind(filled["backend"])
        if kind.section is not None:
            filled["engine_cfg"] = _complete(_section(filled, "engine_cfg"), kind.section)
        return kind.complete(filled, policy)
    # Ignore this error: ``engine_is_known`` reports it together with all other violations.
    except ConfigError:
        return filled
    except Exception as error:
        if not is_import_path(filled["backend"]):
            raise
        bound = f"its EngineKind cannot complete the section: {type(error).__name__}: {error}"
        raise ConfigError(
            [Violation("policy.generation.backend", filled["backend"], bound, "correct its method complete")]
        ) from error


def _padding_of(policy: Config) -> int:
    """Return the number of tokens by which padded sequences must be divisible, so that the tensor- and
    context-parallel ranks get equal parts, even with sequence parallelism."""
    for section, tensor in (
        ("megatron_cfg", "tensor_model_parallel_size"),
        ("dtensor_cfg", "tensor_parallel_size"),
    ):
        chosen = _section(policy, section)
        sizes = [chosen.get(key, 1) for key in (tensor, "context_parallel_size")]
        if chosen.get("enabled") is True and all(isinstance(size, int) and size > 0 for size in sizes):
            return sequence_share(sizes[0], sizes[1], sequence_parallel=True)
    return 1


# Keys that a named environment inherits from ``env``.
_OF_ALL_ENVIRONMENTS: tuple[str, ...] = (
    "strip",
    "keep_special_tokens",
    "processes",
    "timeout_s",
    "on_error",
    "on_timeout",
    "threads",
    "step_timeout_s",
    "tool_parser",
    "on_bad_call",
    "on_tool_error",
)


def _complete_environments(run: Config) -> None:
    """Fill in the sections of named environments, and ``processes`` from ``num_workers`` where only that is
    given."""
    env = run.get("env")
    if not isinstance(env, dict):
        return
    if env.get("num_workers") is not None and env["processes"] is None:
        env["processes"] = env["num_workers"]
    for name, section in named_environments(env).items():
        given = dict(section)
        if given.get("num_workers") is not None:
            given.setdefault("processes", given["num_workers"])
        if name in BUILT_IN_REWARDS and not {"rewards", "environment"} & given.keys():
            given.setdefault("reward", name)
        shared = _OF_ALL_ENVIRONMENTS + (OF_TOOLS if given.get("environment") == TOOLS else ())
        env[name] = fill(given, {**defaults_of(EnvConfig), **{key: env[key] for key in shared}})


def _fill_sizes_of_validation(run: Config) -> None:
    for section in ("sft", "dpo", "rm"):
        if isinstance(run.get(section), dict):
            for key in ("global_batch_size", "micro_batch_size"):
                if f"train_{key}" in run["policy"]:
                    run[section].setdefault(f"val_{key}", run["policy"][f"train_{key}"])


def fill(section: Mapping[str, Any], defaults: Mapping[str, Any]) -> Config:
    """Return the section's keys, followed by copies of the defaults of its absent keys."""
    filled = dict(section)
    for key, value in defaults.items():
        if key not in filled:
            # Copy the default, because all configurations would share a list or a section otherwise.
            filled[key] = copy.deepcopy(value)
    return filled


def _filled(config: Mapping[str, Any], kind: type) -> Config:
    """Return a section with its absent keys set to their defaults, or to the value of the key that they
    follow. ``kind`` is the section's TypedDict."""
    filled = fill(config, defaults_of(kind))
    for name, key in fields_of(kind).items():
        # Do this after the defaults, because the followed key may be absent itself.
        if key.follows in filled:
            filled.setdefault(name, filled[key.follows])
    return filled


def _complete(config: Mapping[str, Any], kind: type) -> Config:
    """Return a section with its defaults filled in, and its direct subsections with theirs. ``kind`` is the
    section's TypedDict."""
    filled = _filled(config, kind)
    for name, annotation in keys_of(kind).items():
        for inner in section_types(annotation):
            if isinstance(filled.get(name), dict):
                filled[name] = _filled(filled[name], inner)
    return filled


def _section(config: Mapping[str, Any], key: str) -> Config:
    """Return a copy of a subsection; empty if it is absent or not a mapping."""
    section = config.get(key)
    return dict(section) if isinstance(section, Mapping) else {}
