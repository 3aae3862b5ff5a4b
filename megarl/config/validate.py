"""All checks of a configuration in one call: schema, rules between keys, and the model's files. All
violations are reported together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from converters.errors import ConversionError
from converters.family_file import load_family_file
from converters.model_config.architecture import ModelFacts
from megarl.config.algorithms import ORDER
from megarl.config.defaults import complete_policy, complete_run
from megarl.config.model_facts import read_model_facts
from megarl.config.models import POLICY, model_sections, renamed
from megarl.config.nested import at
from megarl.config.other_trainers import without_foreign_keys
from megarl.config.places import places_of, require_answers
from megarl.config.plan import doubt, state_fits
from megarl.config.policy import PolicyConfig
from megarl.config.proposals import Followers, valid
from megarl.config.rules import check
from megarl.config.rules.run import VALIDATES
from megarl.config.rules.view import View
from megarl.config.schema import ABSENT, check_policy, check_run
from megarl.config.sections import Config, RunConfig
from megarl.config.token_budget import with_token_budgets
from megarl.errors import ConfigError, Violation


def validate_config(
    config: Mapping[str, Any], name: str = "run", followers: Callable[[], Followers] = dict
) -> RunConfig:
    """Return a run's configuration with every absent optional key filled in, after checking it.

    Args:
        config: plain containers, as ``load_config`` returns them.
        name: name of the run directory if the configuration does not set it.
        followers: returns the keys that are written as references to other keys; needed only for the
            proposals in an error.

    Raises:
        ConfigError: there are violations; it has all of them, with proposals that satisfy all rules at once.
    """
    # A null section means that an inherited one is removed.
    given, foreign = without_foreign_keys(
        {key: value for key, value in config.items() if value is not None or key not in ORDER}
    )
    # Recursive: calls ``validate_config`` with a number in place of auto.
    given = with_token_budgets(given, lambda changed: validate_config(changed, name, followers))
    completed = complete_run(given, name)
    # Do this before all other checks, which may access these paths and would hang on a dead mount.
    require_answers(dict(places_of(completed)))

    def examine(raw: Mapping[str, Any]) -> tuple[Config, list[Violation]]:
        filled = complete_run(raw, name)
        return filled, _violations(filled, [*foreign, *check_run(raw)], check_run(filled))

    return cast(RunConfig, valid(given, examine, followers))


def unusual_values(config: RunConfig) -> Iterator[str]:
    """Yield warnings about values of a checked configuration that are allowed but hardly ever intended, such
    as a learning rate above 1."""
    trained = [path for path, section in model_sections(config).items() if section.is_trained]
    for path in (POLICY, *trained):
        for key in (f"{path}.megatron_cfg.optimizer.lr", f"{path}.optimizer.kwargs.lr"):
            rate = at(config, key)
            if isinstance(rate, int | float) and rate > 1:
                yield (
                    f"{key} = {rate:g}: a learning rate above 1 destroys a language model in a "
                    "step; is it intended?"
                )
    name, section = at(config, "checkpointing.metric_name"), View(config).algorithm.section()
    validates = any(at(config, f"{section}.{key}") for key in VALIDATES)
    if config["checkpointing"]["enabled"] and f"{name}".startswith(("validation/", "val_")) and not validates:
        yield (
            f"checkpointing.metric_name = {name}: {section}.val_period is 0, and the newest checkpoints are "
            "kept where no metric ranks them; is it intended?"
        )


def doubt_of_memory(config: RunConfig) -> str | None:
    """Return a warning, with changes that would help, if a checked run probably exceeds the memory of its
    devices; otherwise None."""

    def is_valid(changed: RunConfig) -> bool:
        try:
            validate_config(changed)
        except ConfigError:
            return False
        return True

    return doubt(config, is_valid)


def validate_policy_config(policy: Mapping[str, Any], world_size: int | None = None) -> PolicyConfig:
    """Return a ``policy`` section with every absent optional key filled in, after checking it, for programs
    that construct a ``Policy`` themselves.

    Args:
        policy: plain containers.
        world_size: number of worker ranks; None skips the rules that need it.

    Raises:
        ConfigError: there are violations; their keys begin with ``policy``.
    """
    given, foreign = without_foreign_keys({POLICY: policy})

    def examine(raw: Mapping[str, Any]) -> tuple[Config, list[Violation]]:
        config: Config = {**raw, POLICY: complete_policy(raw[POLICY])}
        return config, _violations(
            config, [*foreign, *check_policy(raw[POLICY])], check_policy(config[POLICY])
        )

    if world_size is not None:
        # world_size counts only the policy's ranks, even if the section reserves ranks for engines.
        given["cluster"] = {"gpus_per_node": world_size, "num_nodes": 1, "for_training": True}
    completed: PolicyConfig = valid(given, examine, dict)[POLICY]
    return completed


def _violations(completed: Config, found: list[Violation], after: list[Violation]) -> list[Violation]:
    """Return all violations of a configuration: of the schema, the rules, the model's files and the memory
    plan.

    Args:
        completed: the configuration with its defaults.
        found: schema violations of the configuration as given, which are reported.
        after: schema violations of ``completed``. They only tell which values have wrong types, because a
            default that is derived from a wrong value is wrong too.
    """
    faulty = {violation.key for violation in (*found, *after) if violation.value is not ABSENT}
    facts, model_violations = facts_or_violations(completed[POLICY], faulty)
    facts_of_models: dict[str, ModelFacts | None] = {}
    for path in model_sections(completed):
        facts_of_models[path], more = facts_or_violations(at(completed, path), faulty, path)
        # Models that inherit the policy's model_name would repeat its violation.
        known = [violation.value for violation in model_violations]
        model_violations += [violation for violation in more if violation.value not in known]
    broken = [*found, *model_violations]
    broken += check(completed, facts, faulty, facts_of_models, is_refused=bool(broken))
    # The memory plan is defined only for a configuration without violations.
    return broken or list(state_fits(cast(RunConfig, completed)))


def facts_or_violations(
    policy: Any, faulty: set[str], path: str = POLICY
) -> tuple[ModelFacts | None, list[Violation]]:
    """Return the sizes of the model in a section, None if they are unknown, and the violations in its
    ``model_name`` and ``family_file``.

    Args:
        policy: the section, unchecked.
        faulty: dotted keys of values with wrong types.
        path: dotted path of the section.
    """
    policy = policy if isinstance(policy, Mapping) else {}
    model_name, megatron = policy.get("model_name"), policy.get("megatron_cfg")
    family_file = megatron.get("family_file") if isinstance(megatron, Mapping) else None
    if isinstance(family_file, str):
        try:
            # Load the family before reading the model, which may belong to it.
            load_family_file(Path(family_file))
        except ConversionError as error:
            return None, [
                Violation(
                    f"{path}.megatron_cfg.family_file",
                    family_file,
                    str(error),
                    "megarl convert selftest checks such a file",
                )
            ]
    if not isinstance(model_name, str) or faulty & {path, f"{path}.model_name"}:
        return None, []
    try:
        return read_model_facts(model_name), []
    except ConfigError as error:
        return None, [renamed(violation, path) for violation in error.violations]
