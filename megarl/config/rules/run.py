"""Rules on the algorithm and its sections, on losses and environments, on batch sizes, and on the run's
outputs."""

from __future__ import annotations

import copy
import difflib
import fnmatch
import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megarl.config.algorithms import OF_ALGORITHMS, algorithm_class
from megarl.config.arithmetic import divisors_near, each_of, multiples_near, sequence_share
from megarl.config.backend import scores
from megarl.config.data_sources import DataSource, sources_of
from megarl.config.environments import (
    ENVIRONMENT,
    OF_TOOLS,
    REWARDED,
    SINGLE_TURN,
    TOOLS,
    EnvConfig,
    RewardOptions,
    environment_class,
    environments_of,
    fault_of_name,
    faults_of_ranges,
    faults_of_rewards,
    faults_of_tools,
    named_environments,
)
from megarl.config.losses import (
    CLIPPED_PG,
    ESTIMATORS,
    FUNCTION,
    ClippedPGLossConfig,
)
from megarl.config.losses import SECTION as LOSS
from megarl.config.nested import at
from megarl.config.rules.backends import MEGATRON, backend_of
from megarl.config.rules.parallel import axis_sizes, layout_of, sequence_parallel_key, training_shape
from megarl.config.rules.view import NotApplicableError, Rule, View
from megarl.config.schema import ABSENT
from megarl.errors import ConfigError, Violation
from megarl.import_path import is_import_path, load_object
from megarl.key import keys_of

POLICY_WORKERS = "lm_policy"
"""Name of the policy's worker group."""


_ADD = "add it, or begin with a recipe of this algorithm (megarl recipes)"


def algorithm_is_known(view: View) -> Iterator[Violation]:
    """Require that ``algorithm`` is a built-in algorithm, or the import path of a valid one."""
    try:
        algorithm_class(view["algorithm"])
    except ConfigError as error:
        yield from error.violations


def sections_of_algorithm(view: View) -> Iterator[Violation]:
    """Require the sections that the algorithm reads."""
    algorithm, name = view.algorithm, view["algorithm"]
    for section in algorithm.SECTIONS:
        if section not in algorithm.OPTIONAL and not view.written(section):
            yield Violation(section, ABSENT, f"algorithm {name!r} needs this section", _ADD)
    if (
        algorithm.GENERATES
        and view.has("policy")
        and view.get("policy.generation") is None
        and not _faulty(view, "policy.generation")
    ):
        yield Violation(
            "policy.generation",
            None,
            f"algorithm {name!r} generates responses and needs this section",
            "add it",
        )


def _faulty(view: View, path: str) -> bool:
    return view.written(path) and not view.has(path)


def megatron_trains(view: View) -> Iterator[Violation]:
    """Require ``megatron_cfg.optimizer`` if the policy is trained on Megatron."""
    # ``view.algorithm`` is never None. It raises without an algorithm, so the rule does not apply to models
    # that are not trained.
    view.require(view.algorithm is not None and backend_of(view) == "megatron")
    key = f"{MEGATRON}.optimizer"
    if not view.written(key):
        yield Violation(
            key, ABSENT, "the policy is trained and needs an optimizer", "add the section, with at least lr"
        )


SCORING = "policy.reward_model_cfg"


def model_has_the_head_of_the_algorithm(view: View) -> Iterator[Violation]:
    """Require the kind of model that the algorithm trains: a reward model or a language model."""
    wanted, name = view.algorithm.SCORES, view["algorithm"]
    view.require(view.has("policy") and not view.has_faults(SCORING) and scores(view["policy"]) != wanted)
    key = f"{SCORING}.enabled"
    if wanted:
        yield Violation(
            key, view.get(key, ABSENT), f"algorithm {name!r} trains a scoring model", "write true"
        )
    else:
        yield Violation(
            key, True, f"algorithm {name!r} trains a language model", f"write false, or remove {SCORING}"
        )


def has_scoring_model(view: View) -> bool:
    """Return whether the ``policy`` section describes a reward model or critic."""
    return not view.has_faults(SCORING) and scores(view["policy"])


def prompt_template_has_place(view: View) -> Iterator[Violation]:
    """Require that the prompt template contains ``{prompt}``."""
    key = "data.prompt_template"
    template = view[key]
    view.require(template is not None)
    if "{prompt}" not in template:
        yield Violation(
            key, template, "it must contain {prompt}, where the prompt is inserted", "add {prompt}"
        )


VALIDATES = ("val_period", "val_at_start", "val_at_end")


def validation_has_data(view: View) -> Iterator[Violation]:
    """Require ``data.validation`` if the run validates."""
    section = view.algorithm.section()
    view.require(view.has("data") and view["data.validation"] is None)
    asked = [key for key in VALIDATES if view.get(f"{section}.{key}", 0)]
    if asked:
        key = f"{section}.{asked[0]}"
        off = " ".join(f"{section}.{each}={0 if each == 'val_period' else 'false'}" for each in asked)
        yield Violation(
            key,
            view[key],
            "there is no data.validation",
            f"give data.validation, such as {{name: AIME2024}}, or write {off}",
        )


def metric_of_checkpoints_has_a_prefix(view: View) -> Iterator[Violation]:
    """Require that ``checkpointing.metric_name`` begins with ``train/``, ``validation/`` or ``val_``, as the
    names of metrics do."""
    key = "checkpointing.metric_name"
    name = view.get(key)
    view.require(isinstance(name, str) and name != "step" and view.get("checkpointing.enabled", False))
    # NeMo-RL writes `val:accuracy`. Propose the part after the colon with megarl's prefixes.
    if not name.startswith(("train/", "validation/", "val_")):
        bare = re.split(r"[/:]", name)[-1]
        prefixes = ("validation",) if name.startswith("val") else ("train", "validation")
        names = " or ".join(f"{prefix}/{bare}" for prefix in prefixes)
        yield Violation(
            key, name, "names of metrics start with train/, validation/ or val_", f"write {names}"
        )


def steps_are_counted(view: View) -> Iterator[Violation]:
    """Require that a custom algorithm's numbers of steps, prompts and responses are integers of at least 1,
    whatever its own schema allows."""
    algorithm = view.algorithm
    view.require(is_import_path(view["algorithm"]))
    for key in (f"{algorithm.section()}.max_num_steps", algorithm.PROMPTS, algorithm.GENERATIONS):
        value = None if key is None else view.get(key)
        if (
            key is not None
            and value is not None
            and (not isinstance(value, int) or isinstance(value, bool) or value < 1)
        ):
            yield Violation(key, value, "it must be an integer of at least 1", "write one")


def sections_have_a_reader(view: View) -> Iterator[Violation]:
    """Refuse sections that only other algorithms read, because they would have no effect."""
    algorithm, name = view.algorithm, view["algorithm"]
    for section in OF_ALGORITHMS:
        if section not in {*algorithm.SECTIONS, *algorithm.MODELS} and view.get(section) is not None:
            fix = f"remove it: ~{section} on the command line, or {section}: null in a file with defaults"
            yield Violation(section, view[section], f"algorithm {name!r} does not read this section", fix)


def loss_is_known(view: View) -> Iterator[Violation]:
    """Require that ``loss_fn.function`` is the built-in loss, or the import path of a class that can be
    constructed from the section."""
    view.require(view.algorithm.SECTIONS.get(LOSS) is ClippedPGLossConfig)
    yield from _known_or_own(
        view,
        FUNCTION,
        (CLIPPED_PG,),
        f"{LOSS}.options",
        "Name",
        lambda found: _fault_of_loss(found, view[LOSS]),
    )


def estimator_is_known(view: View) -> Iterator[Violation]:
    """Require that ``adv_estimator.name`` is a built-in estimator, or the import path of a function."""
    section = f"{view.algorithm.section()}.adv_estimator"
    yield from _known_or_own(
        view, f"{section}.name", ESTIMATORS, f"{section}.options", "name", _fault_of_estimator
    )


def _fault_of_estimator(found: Any) -> str | None:
    """Return why an object cannot be an advantage estimator, or None."""
    if inspect.isclass(found) or not callable(found):
        return f"it is {'a class' if inspect.isclass(found) else f'{found!r:.60}'}, but must be a function"
    return None if _takes(found, None) else "it does not accept its one argument, the AdvantageInputs"


def _fault_of_loss(found: Any, section: ClippedPGLossConfig) -> str | None:
    """Return why a custom loss cannot be constructed from its section, or not be called as a loss; None if
    it is valid."""
    if not inspect.isclass(found) and not _takes(found, section):
        return f"it is {found!r:.60}, but must be a class"
    try:
        # Pass a copy, because the custom class may change it.
        made = found(copy.deepcopy(dict(section)))
    # Custom code may raise any exception, including SystemExit.
    except (Exception, SystemExit) as error:
        return f"it cannot be constructed from the section {LOSS}: {type(error).__name__}: {error}"
    if not callable(made) or not _takes(made, None, None, None, next_token_logprobs=None):
        return (
            f"it constructs a {type(made).__name__}, which cannot be called as (data, global_valid_seqs, "
            "global_valid_toks, next_token_logprobs=...): it gets log-probabilities, not logits, and further "
            "parameters need a default (megarl.algorithms.interfaces)"
        )
    return (
        None
        if hasattr(made, "loss_type")
        else f"it constructs a {type(made).__name__} without a loss_type (megarl.algorithms.interfaces)"
    )


def _takes(function: Any, *arguments: Any, **named: Any) -> bool:
    try:
        inspect.signature(function).bind(*arguments, **named)
    except TypeError:
        return False
    # Functions written in C may have no signature.
    except ValueError:
        return True
    return True


def _known_or_own(
    view: View,
    key: str,
    built_in: Sequence[str],
    options: str,
    called: str,
    fault_of: Callable[[Any], str | None],
) -> Iterator[Violation]:
    """Require that a key names a built-in object, or the import path of a valid custom one.

    Args:
        view: the configuration.
        key: dotted key with the name.
        built_in: names of the built-in objects.
        options: dotted key of settings, which only a custom object may have.
        called: placeholder for the object's name in the advice.
        fault_of: returns what is wrong with a custom object, or None.
    """
    name = view[key]
    if name in built_in:
        if view.get(options):
            yield Violation(options, view[options], f"{key} is {name}, which does not read it", "remove it")
    elif not is_import_path(name):
        near = difflib.get_close_matches(name, built_in, n=1)
        fix = (
            f"did you mean {near[0]!r}?" if near else f"write one of those names, or path/to/file.py:{called}"
        )
        yield Violation(key, name, f"it must be {', '.join(built_in)} or an import path", fix)
    else:
        try:
            found = load_object(name, key)
        except ConfigError as error:
            yield from error.violations
            return
        if (fault := fault_of(found)) is not None:
            yield Violation(key, name, fault, f"correct {name.rpartition(':')[0]}, or write {built_in[0]}")


ESTIMATOR = "grpo.adv_estimator"


def advantages_are_left(view: View) -> Iterator[Violation]:
    """Require at least 2 responses per prompt for estimators that compare them, and clip bounds that leave
    some advantages nonzero."""
    kind, minus_baseline = view[f"{ESTIMATOR}.name"], view[f"{ESTIMATOR}.minus_baseline"]
    # Custom estimators need not compare the responses to a prompt.
    whitens_alone = kind not in ESTIMATORS or (kind == "reinforce_plus_plus" and not minus_baseline)
    key = "grpo.num_generations_per_prompt"
    if view.get(key) == 1 and not whitens_alone:
        fix = "write 2 or more: a response is compared with the others to its prompt"
        yield Violation(key, 1, "it must be at least 2", fix)
    if view.get("grpo.advantage_clip_low") == 0 and view.get("grpo.advantage_clip_high") == 0:
        yield Violation(
            "grpo.advantage_clip_low",
            0,
            "advantage_clip_high is 0 too, so all advantages would be 0",
            "widen one of the two",
        )


def ratios_of_sequences_meet_advantages_of_tokens(view: View) -> Iterator[Violation]:
    """Refuse sequence-level options that have an effect only with per-token advantages, if all tokens of a
    response have the same advantage. Custom algorithms are exempt, because they may compute their own
    advantages."""
    ratios, gradient = f"{LOSS}.sequence_level_importance_ratios", f"{LOSS}.sequence_level_ratio_gradient"
    forced = f"{LOSS}.{_FORCED}"
    view.require(view["algorithm"] == "grpo" and view.get(ratios, False))
    kind = view[f"{ESTIMATOR}.name"]
    view.require(kind in ESTIMATORS)
    view.require(kind != "reinforce_plus_plus" or not view.get(f"{LOSS}.use_kl_in_reward", False))
    without = f" without {LOSS}.use_kl_in_reward" if kind == "reinforce_plus_plus" else ""
    reason = f"{ESTIMATOR}.name is {kind}{without}: all tokens of a response have the same advantage"
    if view.get(gradient) == "token":
        fix = (
            f"remove it, or write reinforce_plus_plus with {LOSS}.use_kl_in_reward, which has "
            "per-token advantages"
        )
        yield Violation(gradient, "token", f"{reason}, so token and sequence have the same gradient", fix)
    elif view.get(forced) and view.get(f"{LOSS}.use_importance_sampling_correction") is False:
        bound = (
            f"{forced} is true, and {reason}, so ratios of tokens, which are 1 too, have the same gradient"
        )
        yield Violation(ratios, True, bound, f"write {ratios}: false")


_FORCED = "force_on_policy_ratio"


def dynamic_sampling_finds_signals(view: View) -> Iterator[Violation]:
    """Require settings with which dynamic sampling can distinguish prompts with and without a training
    signal."""
    key, multiplier = "grpo.use_dynamic_sampling", "grpo.batch_multiplier"
    view.require(view[key])
    prompts, generations = view["grpo.num_prompts_per_step"], view["grpo.num_generations_per_prompt"]
    if generations == 1:
        bound = f"{key} is true, and with one response per prompt there are no responses that differ"
        yield Violation("grpo.num_generations_per_prompt", 1, bound, f"write 2 or more, or {key}: false")
    if view[f"{ESTIMATOR}.name"] == "reinforce_plus_plus" and not view[f"{ESTIMATOR}.minus_baseline"]:
        bound = (
            f"{ESTIMATOR} compares responses across all prompts of a step, so responses with equal "
            "rewards have a signal too"
        )
        yield Violation(key, True, bound, "write false, or minus_baseline: true")
    if abs(prompts * view[multiplier] - round(prompts * view[multiplier])) > _ROUNDING:
        bound = f"multiplied by grpo.num_prompts_per_step = {prompts} it must be a whole number"
        yield Violation(
            multiplier, view[multiplier], bound, f"write {math.ceil(prompts * view[multiplier]) / prompts:g}"
        )
    if view["grpo.max_num_epochs"] is not None:
        bound = (
            f"{key} is true: a step takes as many prompts as it needs, so the number of steps of "
            "an epoch is unknown"
        )
        yield Violation(
            "grpo.max_num_epochs", view["grpo.max_num_epochs"], bound, "write null, and max_num_steps"
        )


# The product of an integer and a decimal fraction such as 1.1 is an integer only up to rounding.
_ROUNDING = 1e-9


def critic_warm_up_ends(view: View) -> Iterator[Violation]:
    """Require that ``critic_warmup_steps`` leaves at least one step in which the actor is trained."""
    key, last = "ppo.critic_warmup_steps", view["ppo.max_num_steps"]
    if view[key] >= last:
        bound = f"the run has {last} steps, and the actor would be trained in none"
        yield Violation(key, view[key], bound, "write a smaller number", ({key: last - 1},))


def scores_of_answers_count(view: View) -> Iterator[Violation]:
    """Refuse a reward model whose scores have weight 0."""
    key = f"{view.algorithm.section()}.reward_model_weight"
    if view.get("reward_model") is not None and view[key] == 0:
        yield Violation(
            key,
            0,
            "the scores of the reward model would not count",
            "write another number, or remove reward_model",
        )


def several_rewards_are_compared(view: View) -> Iterator[Violation]:
    """Require for the estimator ``gdpo`` at least two rewards, the same weight for a reward's name in all
    environments, and no KL in the reward."""
    view.require(view[f"{ESTIMATOR}.name"] == "gdpo")
    key = f"{ESTIMATOR}.name"
    if view.get("loss_fn.use_kl_in_reward", False):
        bound = (
            f"{key} is gdpo, which compares the rewards of env.rewards, and the divergence is not one of them"
        )
        yield Violation("loss_fn.use_kl_in_reward", True, bound, "write false, or use another estimator")
    weights: dict[str, float] = {}
    for section_key, section in _environments(view):
        rewards = section.get("rewards") or {}
        if section.get("environment", SINGLE_TURN) in REWARDED and len(rewards) < 2:
            bound = f"gdpo compares several rewards, and {section_key} has {len(rewards) or 'one'}"
            yield Violation(key, "gdpo", bound, f"name several under {section_key}.rewards, or write grpo")
        for name, reward in rewards.items():
            weight = reward.get("weight", 1.0)
            if weights.setdefault(name, weight) != weight:
                bound = (
                    f"another environment has the weight {weights[name]} for this name, and gdpo "
                    "adds up rewards by name"
                )
                yield Violation(
                    f"{section_key}.rewards.{name}.weight",
                    weight,
                    bound,
                    "write the same weight, or another name",
                )


def reward_is_known(view: View) -> Iterator[Violation]:
    """Require valid reward functions: built-in ones with options that they read, or import paths of
    functions whose parameters all records can fill."""
    sources = [source for kind in ("train", "validation") for _, source in sources_of(view["data"], kind)]
    environments = dict(_environments(view))
    for key, section in environments.items():
        if section.get("environment", SINGLE_TURN) not in REWARDED:
            continue
        # With several environments, the records of a source without env_name name their environments
        # themselves.
        names = {key.removeprefix("env.")} | ({None} if len(environments) == 1 else set())
        columns = [set(_extra_keys(source)) for source in sources if at(source, "env_name") in names]
        columns = columns or [set(itertools.chain.from_iterable(map(_extra_keys, sources)))]
        for violation in faults_of_rewards(section, key, set.intersection(*columns)):
            yield replace(violation, fix=_parameters_of_keys(violation, sources) + violation.fix)


def _parameters_of_keys(violation: Violation, sources: Sequence[DataSource]) -> str:
    """Return which parameters get the columns that a reward function's parameters are named after, if the
    sources use these columns as prompt or answer."""
    named = {(part, at(source, f"{part}_key")) for source in sources for part in ("prompt", "answer")}
    return "".join(
        f"your {part}_key {column} is the parameter {part}; "
        for part, column in sorted(named, key=str)
        if repr(column) in violation.bound.partition("there is no value for its parameter")[2]
    )


def _extra_keys(source: DataSource) -> list[str]:
    extra = source.get("extra_keys")
    return [each for each in extra if isinstance(each, str)] if isinstance(extra, list) else []


def environment_is_known(view: View) -> Iterator[Violation]:
    """Require valid environments: built-in ones, or import paths of environment classes; and several turns
    for one with tools."""
    turns = f"{view.algorithm.section()}.max_rollout_turns"
    for section_key, section in _environments(view):
        key, name = f"{section_key}.environment", section.get("environment", SINGLE_TURN)
        if name == TOOLS:
            yield from faults_of_tools(section, section_key)
            if view.get(turns, 1) == 1:
                bound = f"{key} is {TOOLS}, and a tool's output is read in the turn after the call"
                yield Violation(turns, 1, bound, "write 2 or more, as many as a conversation may have")
        else:
            bound = f"only {key}: {TOOLS} reads it, and {key} is {name!r}"
            for of_tools, value in section.items():
                if of_tools in OF_TOOLS and value:
                    path = f"{section_key}.{of_tools}"
                    fix = f"write {key}: {TOOLS}, or remove it, on the command line by ~{path}"
                    yield Violation(path, value, bound, fix)
        if name in REWARDED:
            path = f"{section_key}.options"
            if view.get(path):
                bound = f"only a custom environment reads it, and {key} is {name!r}"
                fix = f"name it: {key}: path/to/file.py:Class, or remove this section"
                yield Violation(path, view[path], bound, fix)
            continue
        if not is_import_path(name):
            yield Violation(
                key,
                name,
                f"it must be {', '.join(REWARDED)} or an import path",
                "write one, such as path/to/file.py:Name",
            )
            continue
        try:
            environment_class(name, key)
        except ConfigError as error:
            yield from error.violations


def _environments(view: View) -> Iterator[tuple[str, EnvConfig]]:
    """Yield (dotted key, section) of each environment in which all values have the right types."""
    for key, section in environments_of(view["env"]).items():
        if not view.has_faults(key):
            yield key, section


def environments_in_range(view: View) -> Iterator[Violation]:
    """Require that names of environments can be part of metric names, and that their numbers are within
    bounds."""
    for name, section in named_environments(view["env"]).items():
        yield from fault_of_name(f"env.{name}", name)
        if not view.has_faults(f"env.{name}"):
            yield from faults_of_ranges(section, EnvConfig, f"env.{name}")


def environments_have_names(view: View) -> Iterator[Violation]:
    """Refuse rewards, tools and an environment class directly in ``env`` if it contains named environments,
    because no record would use them."""
    env = view["env"]
    named = sorted(named_environments(env))
    view.require(bool(named))
    for key in ("reward", "rewards", "options", *keys_of(RewardOptions)):
        if env.get(key) not in (None, {}):
            bound = f"the environments of the run are {', '.join(named)}, and no record uses this key"
            yield Violation(f"env.{key}", env[key], bound, f"move it to env.{named[0]}")
    if not any(section.get("environment") == TOOLS for section in named_environments(env).values()):
        bound = f"none of the environments {', '.join(named)} calls tools"
        fix = f"write env.{named[0]}.environment: {TOOLS}, or remove it"
        yield from (Violation(f"env.{key}", env[key], bound, fix) for key in OF_TOOLS if env.get(key))
    if env.get("environment", SINGLE_TURN) != SINGLE_TURN:
        yield Violation(
            ENVIRONMENT,
            env["environment"],
            f"the environments of the run are {', '.join(named)}",
            f"move it to env.{named[0]}",
        )


# Metrics service -> required key of its section.
_NAMED_BY = {"wandb": "project", "mlflow": "experiment_name", "trackio": "project"}


def services_are_named(view: View) -> Iterator[Violation]:
    """Require the section of each enabled metrics service, which names its project or experiment."""
    for service, name in _NAMED_BY.items():
        key = f"logger.{service}"
        if view.get(f"{key}_enabled") and view.get(key) is None and not _faulty(view, key):
            yield Violation(
                key,
                view.get(key, ABSENT),
                f"{service}_enabled is true and needs it",
                f"add {service}: {{{name}: <name>}}",
            )


_SINK_METHODS = ("write", "truncate_after", "close")


def sinks_are_known(view: View) -> Iterator[Violation]:
    """Require that ``logger.sinks`` are import paths of classes with the methods of
    ``megarl.observe.sinks:Sink``, each listed once."""
    key, paths = "logger.sinks", view["logger.sinks"]
    for path in sorted({path for path in paths if paths.count(path) > 1}):
        yield Violation(key, path, "it is listed twice, and would receive every row twice", "list it once")
    for path in dict.fromkeys(paths):
        try:
            kind = load_object(path, key)
        except ConfigError as error:
            yield from error.violations
            continue
        fault = _fault_of_sink(kind)
        if fault is not None:
            yield Violation(
                key,
                path,
                fault,
                "name a class like megarl.observe.sinks:Sink, made with (log_dir, run_config)",
            )


def _fault_of_sink(kind: Any) -> str | None:
    if not isinstance(kind, type):
        return f"it is {type(kind).__name__}, not a class"
    missing = [method for method in _SINK_METHODS if not callable(getattr(kind, method, None))]
    abstract = sorted(getattr(kind, "__abstractmethods__", ()))
    if missing or abstract:
        return f"it lacks {', '.join([*missing, *abstract])}"
    # Check the methods of the class with a placeholder for `self`, because a sink may only be constructed in
    # a run.
    calls = {"write": ("self", "row"), "truncate_after": ("self", "step"), "close": ("self",)}
    for name, arguments in {kind.__name__: ("log_dir", "run_config"), **calls}.items():
        try:
            inspect.signature(getattr(kind, name) if name in calls else kind).bind(*arguments)
        except (TypeError, ValueError) as error:
            return f"{name} cannot be called with ({', '.join(arguments)}): {error}"
    return None


def profiled_steps(view: View) -> Iterator[Violation]:
    """Require that ``profiler.steps`` begins within the run, and that a profiler records these steps."""
    key, steps = "profiler.steps", view["profiler.steps"]
    view.require(steps is not None)
    last = view[f"{view.algorithm.section()}.max_num_steps"]
    if len(steps) != 2 or not 1 <= steps[0] < steps[1]:
        yield Violation(
            key, steps, "it must be [first, stop], with 1 <= first < stop", "write [3, 5] for steps 3 and 4"
        )
    elif steps[0] > last:
        yield Violation(
            key,
            steps,
            f"the run has {last} steps",
            "start at its last step at the latest",
            ({key: [last, last + 1]},),
        )
    elif not view["profiler.torch_ranks"] and not view["profiler.nsys_workers"]:
        yield Violation(
            key, steps, "no profiler records them", "give profiler.torch_ranks, or profiler.nsys_workers"
        )


def profiled_workers(view: View) -> Iterator[Violation]:
    """Require that ``profiler.torch_ranks`` exist, and that ``profiler.nsys_workers`` matches the policy's
    workers."""
    ranks, patterns = view["profiler.torch_ranks"], view["profiler.nsys_workers"]
    nodes, per_node = training_shape(view)
    outside = [rank for rank in ranks if not 0 <= rank < nodes * per_node]
    if outside:
        yield Violation(
            "profiler.torch_ranks",
            ranks,
            f"ranks of the policy are in [0, {nodes * per_node})",
            f"leave out {outside}",
        )
    matches = [
        pattern.strip()
        for pattern in (patterns or "").split(",")
        if fnmatch.fnmatch(POLICY_WORKERS, pattern.strip())
    ]
    if patterns is not None and not matches:
        bound = f"it matches no worker that is profiled: those of the policy are called {POLICY_WORKERS}"
        yield Violation("profiler.nsys_workers", patterns, bound, 'write "*policy*"')


RUN_RULES: tuple[Rule, ...] = (
    algorithm_is_known,
    sections_of_algorithm,
    sections_have_a_reader,
    steps_are_counted,
    megatron_trains,
    model_has_the_head_of_the_algorithm,
    prompt_template_has_place,
    validation_has_data,
    metric_of_checkpoints_has_a_prefix,
    loss_is_known,
    estimator_is_known,
    advantages_are_left,
    ratios_of_sequences_meet_advantages_of_tokens,
    dynamic_sampling_finds_signals,
    critic_warm_up_ends,
    scores_of_answers_count,
    several_rewards_are_compared,
    reward_is_known,
    environment_is_known,
    environments_in_range,
    environments_have_names,
    services_are_named,
    sinks_are_known,
    profiled_steps,
    profiled_workers,
)


GLOBAL = "policy.train_global_batch_size"
MICRO = "policy.train_micro_batch_size"
PACKING = "policy.sequence_packing"
DYNAMIC = "policy.dynamic_batching"


def samples_fill_global_batches(view: View) -> Iterator[Violation]:
    """Require that the global batch size divides the samples of a step, so that all of them are trained
    on."""
    prompts, generations, size = _samples_of_step(view)
    if prompts * generations % size:
        bound = (
            f"it must divide the {prompts} prompts x {generations} responses = {prompts * generations} "
            "samples of a step"
        )
        yield Violation(
            GLOBAL, size, bound, "write a divisor of them", tuple(_batch_sizes(view, GLOBAL, MICRO))
        )


def _samples_of_step(view: View) -> tuple[int, int, int]:
    """Return (prompts per step, responses per prompt, samples per global batch). The calling rule applies
    only to algorithms that generate."""
    algorithm = view.algorithm
    view.require(algorithm.GENERATES)
    size = view[GLOBAL]
    prompts = size if algorithm.PROMPTS is None else view[algorithm.PROMPTS]
    generations = 1 if algorithm.GENERATIONS is None else view[algorithm.GENERATIONS]
    # Other rules divide by these values. Values below 1 are reported by ``values_in_range``.
    view.require(min(prompts, generations, size) >= 1)
    return prompts, generations, size


def on_policy_batch_is_trained_on_once(view: View) -> Iterator[Violation]:
    """Require for ``force_on_policy_ratio`` that a step is a single global batch, trained on once, because
    later updates are off-policy."""
    key = "loss_fn.force_on_policy_ratio"
    view.require(view[key])
    prompts, generations, size = _samples_of_step(view)
    if prompts * generations != size:
        bound = (
            f"a step trains on its {prompts * generations} samples in global batches of {size}, and all "
            "but the first are off-policy"
        )
        fix = f"set {GLOBAL} to that number of samples, or force_on_policy_ratio: false"
        whole = each_of(GLOBAL, [prompts * generations])
        more = (
            each for each in _batch_sizes(view, GLOBAL, MICRO) if len(each) == 2 and _is_one_batch(view, each)
        )
        yield Violation(key, True, bound, fix, (*whole, *more, {key: False}))
    elif view.algorithm.section() == "ppo" and view["ppo.ppo_epochs"] > 1:
        bound = f"ppo.ppo_epochs = {view['ppo.ppo_epochs']}: after the first epoch the samples are off-policy"
        yield Violation(key, True, bound, "write ppo.ppo_epochs: 1, or force_on_policy_ratio: false")


def global_batch_divides(view: View) -> Iterator[Violation]:
    """Require that the global batch divides over data-parallel ranks, and a rank's part over
    micro-batches."""
    yield from _divides(view, GLOBAL, MICRO)


def validation_batch_divides(view: View) -> Iterator[Violation]:
    """Require that a validation's global batch divides over data-parallel ranks, and a rank's part over
    micro-batches."""
    section = view.algorithm.section()
    view.require(any(view.get(f"{section}.{key}", 0) for key in VALIDATES))
    yield from _divides(view, f"{section}.val_global_batch_size", f"{section}.val_micro_batch_size")


def _divides(view: View, global_key: str, micro_key: str) -> Iterator[Violation]:
    ranks, size, micro = layout_of(view).data, view[global_key], view.get(micro_key, 1)
    view.require(size >= 1 and micro >= 1)
    if size % ranks:
        bound = f"it must be a multiple of the {ranks} data-parallel ranks"
        yield Violation(
            global_key, size, bound, "write such a multiple", tuple(_batch_sizes(view, global_key, micro_key))
        )
        return
    # With a token budget, the number of rows of a micro-batch depends on their lengths.
    by_tokens = view.get(f"{PACKING}.enabled", False) or view.get(f"{DYNAMIC}.enabled", False)
    if not by_tokens and (size // ranks) % micro:
        bound = (
            f"it must divide the {size // ranks} samples ({size} / {ranks} data-parallel ranks) of a "
            "global batch on one rank"
        )
        yield Violation(
            micro_key,
            micro,
            bound,
            "write a divisor of them",
            each_of(micro_key, divisors_near(size // ranks, micro)),
        )


def _batch_sizes(view: View, global_key: str, micro_key: str) -> Iterator[Mapping[str, object]]:
    """Yield changes of the global batch size with which it divides over the ranks, and divides the samples
    of a step. Those that also divide into micro-batches come first; some change the number of prompts as
    well."""
    size = view[global_key]
    try:
        # ``ranks_divide`` reports such ranks; accept any batch size here.
        ranks = layout_of(view).data
    except NotApplicableError:
        ranks = 1
    # Try multiples of ranks x micro-batch size first, so that the first proposal also satisfies the rule on
    # micro-batches.
    units = dict.fromkeys((ranks * max(view.get(micro_key, 1), 1), ranks))
    algorithm = view.algorithm
    if global_key != GLOBAL or not algorithm.GENERATES or algorithm.PROMPTS is None:
        for unit in units:
            yield from each_of(global_key, multiples_near(unit, size))
        return
    prompts, generations, _ = _samples_of_step(view)
    samples = prompts * generations
    for unit in units:
        yield from each_of(GLOBAL, (number for number in divisors_near(samples, size) if number % unit == 0))
    batches = max(samples // size, 1)
    for unit in units:
        # The smallest number of prompts whose responses are a multiple of the unit.
        for others in multiples_near(unit // math.gcd(unit, generations), prompts):
            whole = others * generations
            yield {
                algorithm.PROMPTS: others,
                GLOBAL: whole // batches if whole % (batches * unit) == 0 else whole,
            }


def _is_one_batch(view: View, sizes: Mapping[str, Any]) -> bool:
    algorithm = view.algorithm
    generations = 1 if algorithm.GENERATIONS is None else view[algorithm.GENERATIONS]
    return algorithm.PROMPTS is not None and bool(sizes[GLOBAL] == sizes[algorithm.PROMPTS] * generations)


def one_way_of_batching(view: View) -> Iterator[Violation]:
    """Refuse ``sequence_packing`` and ``dynamic_batching`` together."""
    if view[f"{DYNAMIC}.enabled"] and view[f"{PACKING}.enabled"]:
        yield Violation(
            f"{DYNAMIC}.enabled", True, "sequence packing is enabled too", "disable one of the two"
        )


def token_budgets_given(view: View) -> Iterator[Violation]:
    """Require each ``*_mb_tokens`` in use, large enough for the longest padded sequence, or for two of them
    with preference pairs."""
    longest, together = view["policy.max_total_sequence_length"], _rows_together(view)
    for section in (PACKING, DYNAMIC):
        if not view.get(f"{section}.enabled", False):
            continue
        multiple = _multiple(view, section)
        padded_longest = -(-longest // multiple) * multiple
        for key, rows in ((f"{section}.train_mb_tokens", together), (f"{section}.logprob_mb_tokens", 1)):
            budget, needed = view.get(key), rows * padded_longest
            if budget is None:
                # ``view.get`` gives None for a value of the wrong type too, which the schema check reports.
                if not view.written(key):
                    yield Violation(
                        key,
                        budget,
                        f"{section} is enabled and needs it",
                        "write a number of tokens",
                        ({key: needed},),
                    )
            elif budget < needed:
                padded = f", padded to a multiple of {multiple}" if padded_longest > longest else ""
                held = "a sequence" if rows == 1 else "both answers of a pair, each"
                bound = f"it must hold {held} of policy.max_total_sequence_length = {longest} tokens{padded}"
                yield Violation(key, budget, bound, "write at least that number", ({key: needed},))


def _rows_together(view: View) -> int:
    return 2 if view.compares_answers else 1


def _multiple(view: View, section: str) -> int:
    """Return the number of tokens to whose multiples sequence lengths are padded."""
    _, context, tensor = axis_sizes(view)
    share = sequence_share(tensor, context, view.get(sequence_parallel_key(view), False))
    return math.lcm(share, view["policy.make_sequence_length_divisible_by"]) if section == DYNAMIC else share


def least_tokens(view: View, section: str) -> int:
    """Return the smallest valid ``train_mb_tokens`` of a section: the longest padded sequence, or two of
    them with preference pairs."""
    multiple = _multiple(view, section)
    return _rows_together(view) * -(-view["policy.max_total_sequence_length"] // multiple) * multiple


TRAINED_BATCH_RULES: tuple[Rule, ...] = (samples_fill_global_batches, global_batch_divides)
TOKEN_RULES: tuple[Rule, ...] = (one_way_of_batching, token_budgets_given)
BATCH_RULES: tuple[Rule, ...] = (
    *TRAINED_BATCH_RULES,
    on_policy_batch_is_trained_on_once,
    validation_batch_divides,
    *TOKEN_RULES,
)
