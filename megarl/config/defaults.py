"""Fills in absent optional keys: with the defaults that stand at their fields, or with what follows from other keys.

A key that is there, even with null, is left alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from megarl.config.algorithms import ORDER, built_in_sections, sections_of
from megarl.config.arithmetic import sequence_share
from megarl.config.data_sources import DataConfig
from megarl.config.engines import engine_kind, is_engine
from megarl.config.environments import BUILT_IN_REWARDS, EnvConfig, named_environments
from megarl.config.generation import GenerationConfig
from megarl.config.losses import ClippedPGLossConfig
from megarl.config.models import in_full, model_sections
from megarl.config.nested import at, put
from megarl.config.policy import (
    DTensorConfig,
    MegatronConfig,
    MegatronDDPConfig,
    MegatronOptimizerConfig,
    MegatronSchedulerConfig,
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
    SamplesConfig,
)
from megarl.errors import ConfigError, Violation
from megarl.import_path import is_import_path
from megarl.key import defaults_of, keys_of, section_types

if TYPE_CHECKING:
    from megarl.config.plugins import ModelSection

_SECTIONS: Mapping[str, Any] = {
    "loss_fn": ClippedPGLossConfig,
    "env": EnvConfig,
    "data": DataConfig,
    "cluster": ClusterConfig,
}
"""Sections that are filled in where they are there."""


def complete_run(config: Mapping[str, Any], name: str = "run") -> Config:
    """A copy of a run's configuration with every absent optional key filled in.

    Args:
        config: plain containers; need not be valid.
        name: what the run's directory is called when the configuration does not say.
    """
    run = copy.deepcopy(dict(config))
    run.setdefault("run_dir", str(Path("runs") / name))
    run["deadlines"] = _complete_deadlines(_section(run, "deadlines"))
    models = {path: in_full(_section(run, "policy"), at(run, path) or {}, section) for path, section in _well_formed_models(run)}
    run["policy"] = complete_policy(_section(run, "policy"))
    for path, model in models.items():
        run = put(run, path, complete_policy(model))
    for key, section in {**_SECTIONS, **built_in_sections(), **sections_of(run.get("algorithm"))}.items():
        if isinstance(run.get(key), dict):
            run[key] = _with_inner_sections(fill(run[key], defaults_of(section)), section)
    _complete_environments(run)
    _fill_sizes_of_validation(run)
    if isinstance(run.get("ppo"), dict):
        run["ppo"].setdefault("critic_ppo_epochs", run["ppo"]["ppo_epochs"])
    run["checkpointing"] = fill(_section(run, "checkpointing"), defaults_of(CheckpointingConfig))
    run["logger"] = fill(_section(run, "logger"), defaults_of(LoggerConfig))
    run["logger"]["samples"] = fill(_section(run["logger"], "samples"), defaults_of(SamplesConfig))
    run["debug"] = fill(_section(run, "debug"), defaults_of(DebugConfig))
    run["profiler"] = fill(_section(run, "profiler"), defaults_of(ProfilerConfig))
    if isinstance(run["run_dir"], str):
        run["checkpointing"].setdefault("checkpoint_dir", str(Path(run["run_dir"]) / "checkpoints"))
    return {key: run[key] for key in (*ORDER, *run) if key in run}


def _well_formed_models(run: Config) -> Iterator[tuple[str, ModelSection]]:
    """The sections of models beside the policy that are there as sections, or not at all."""
    for path, section in model_sections(run).items():
        given = at(run, path)
        if given is None or isinstance(given, dict):
            yield path, section


def _complete_deadlines(section: Config) -> Config:
    """Phases without a key of their own have that of a step, and reading a checkpoint that of writing one."""
    filled = fill(section, defaults_of(DeadlinesConfig))
    follow = {"logprobs_s": "step_s", "generate_s": "step_s", "refit_s": "step_s", "validate_s": "step_s", "load_s": "save_s"}
    return fill(filled, {key: filled[other] for key, other in follow.items()})


def complete_policy(policy: Mapping[str, Any]) -> PolicyConfig:
    """A copy of a ``policy`` section with every absent optional key filled in."""
    filled = copy.deepcopy(dict(policy))
    if "make_sequence_length_divisible_by" not in filled:
        filled["make_sequence_length_divisible_by"] = _padding_of(filled)
    optimizer = _section(_section(filled, "megatron_cfg"), "optimizer")
    if "max_grad_norm" not in filled and "clip_grad" in optimizer:
        filled["max_grad_norm"] = optimizer["clip_grad"] or None
    filled = fill(filled, defaults_of(PolicyConfig))
    if "logprob_batch_size" not in filled and "train_micro_batch_size" in filled:
        filled["logprob_batch_size"] = filled["train_micro_batch_size"]
    if isinstance(filled["generation"], dict):
        itself = "megatron" if _section(filled, "megatron_cfg").get("enabled") is True else "hf"
        filled["generation"] = fill(filled["generation"], {"backend": itself, **defaults_of(GenerationConfig)})
        if is_engine(filled["generation"]["backend"]):
            filled["generation"] = _complete_engine(filled["generation"], filled)
        if "generation_batch_size" not in filled and "logprob_batch_size" in filled:
            filled["generation_batch_size"] = filled["logprob_batch_size"]
    if _section(filled, "megatron_cfg").get("enabled") is True:
        filled["megatron_cfg"] = _complete_megatron(filled["megatron_cfg"], filled)
    if isinstance(filled["reward_model_cfg"], dict):
        filled["reward_model_cfg"] = fill(filled["reward_model_cfg"], defaults_of(RewardModelConfig))
    if isinstance(filled["optimizer"], dict):
        filled["optimizer"] = fill(filled["optimizer"], defaults_of(PytorchOptimizerConfig))
    if _section(filled, "dtensor_cfg").get("enabled") is True:
        filled["dtensor_cfg"] = fill(filled["dtensor_cfg"], defaults_of(DTensorConfig))
    return cast(PolicyConfig, filled)


def _complete_megatron(megatron: Config, policy: Config) -> Config:
    filled = fill(megatron, defaults_of(MegatronConfig))
    if isinstance(filled["family_file"], str):
        # workers may run in another directory
        filled["family_file"] = str(Path(filled["family_file"]).expanduser().absolute())
    precision = policy.get("precision")
    filled.setdefault("pipeline_dtype", precision)
    data_parallel = "distributed_data_parallel_config"
    filled[data_parallel] = fill(_section(filled, data_parallel), defaults_of(MegatronDDPConfig))
    if isinstance(filled.get("optimizer"), dict):
        derived = {"bf16": precision == "bfloat16", "fp16": precision == "float16", "clip_grad": policy["max_grad_norm"] or 0.0}
        filled["optimizer"] = fill(filled["optimizer"], {**defaults_of(MegatronOptimizerConfig), **derived})
        decay = filled["optimizer"]["weight_decay"]
        decays = {"start_weight_decay": decay, "end_weight_decay": decay}
        filled["scheduler"] = fill(_section(filled, "scheduler"), {**defaults_of(MegatronSchedulerConfig), **decays})
    return filled


def _complete_engine(generation: Config, policy: Config) -> Config:
    """The section with what its engine fills in; as it is where there is no such engine, which a rule says.

    Raises:
        ConfigError: the code of a user's own engine fails on it.
    """
    filled = fill(generation, {"model_name": policy.get("model_name")})
    try:
        kind = engine_kind(filled["backend"])
        if kind.section is not None:
            filled["engine_cfg"] = _with_inner_sections(fill(_section(filled, "engine_cfg"), defaults_of(kind.section)), kind.section)
        return kind.complete(filled, policy)
    except ConfigError:
        return filled
    except Exception as error:
        if not is_import_path(filled["backend"]):
            raise
        bound = f"its kind cannot complete the section: {type(error).__name__}: {error}"
        raise ConfigError([Violation("policy.generation.backend", filled["backend"], bound, "mend its complete")]) from error


def _padding_of(policy: Config) -> int:
    """Return what lets all ranks of a sequence have equal parts, with sequence parallelism or without."""
    for section, tensor in (("megatron_cfg", "tensor_model_parallel_size"), ("dtensor_cfg", "tensor_parallel_size")):
        chosen = _section(policy, section)
        sizes = [chosen.get(key, 1) for key in (tensor, "context_parallel_size")]
        if chosen.get("enabled") is True and all(isinstance(size, int) and size > 0 for size in sizes):
            return sequence_share(sizes[0], sizes[1], sequence_parallel=True)
    return 1


_OF_ALL_ENVIRONMENTS = (
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
"""Keys that an environment with a name has from the ``env`` section where it lacks them."""


def _complete_environments(run: Config) -> None:
    """Fill in the environments that have names; a number of workers is one of processes."""
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
        env[name] = fill(given, {**defaults_of(EnvConfig), **{key: env[key] for key in _OF_ALL_ENVIRONMENTS}})


def _fill_sizes_of_validation(run: Config) -> None:
    for section in ("sft", "dpo", "rm"):
        if isinstance(run.get(section), dict):
            for key in ("global_batch_size", "micro_batch_size"):
                if f"train_{key}" in run["policy"]:
                    run[section].setdefault(f"val_{key}", run["policy"][f"train_{key}"])


def fill(section: Mapping[str, Any], defaults: Mapping[str, Any]) -> Config:
    """The section, followed by the defaults of the keys it lacks."""
    return {**section, **{key: copy.deepcopy(value) for key, value in defaults.items() if key not in section}}


def _with_inner_sections(config: Config, section: Any) -> Config:
    """A filled-in section whose own sections are filled in too, as far as their keys have defaults."""
    for name, annotation in keys_of(section).items():
        for inner in section_types(annotation):
            if isinstance(config.get(name), dict):
                config[name] = fill(config[name], defaults_of(inner))
    return config


def _section(config: Mapping[str, Any], key: str) -> Config:
    """A section as a dictionary; empty when it is absent or not a section."""
    section = config.get(key)
    return dict(section) if isinstance(section, Mapping) else {}
