"""Rules of a configuration: the bounds of single keys, and all rules between keys. Rules are pure functions
of the configuration, without torch, Ray or file access."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cache, partial
from typing import Any

from converters.model_config.architecture import ModelFacts
from megarl.config.algorithms import run_type
from megarl.config.models import model_sections, renamed
from megarl.config.nested import at
from megarl.config.rules.adapters import ADAPTER_RULES
from megarl.config.rules.backends import BACKEND_RULES
from megarl.config.rules.data import DATA_RULES
from megarl.config.rules.distillation import DISTILLATION_RULES
from megarl.config.rules.generation import GENERATION_RULES
from megarl.config.rules.losses import LOSS_RULES
from megarl.config.rules.models import (
    MODEL_RULES,
    TRAINED_MODEL_RULES,
    backbone_is_that_of_the_policy,
    length_is_at_least_the_policy_s,
    model_view,
)
from megarl.config.rules.not_yet import NOT_YET_RULES
from megarl.config.rules.optimizer import OPTIMIZER_RULES
from megarl.config.rules.parallel import EXPERT_RULES, PARALLEL_RULES
from megarl.config.rules.run import BATCH_RULES, RUN_RULES
from megarl.config.rules.table import TABLE_OF_RUNS
from megarl.config.rules.view import Rule, View, apply_rules
from megarl.errors import Violation
from megarl.key import Key, fields_of, keys_of, section_types


@cache
def bounded_keys(section: Any, path: str = "") -> Mapping[str, Key]:
    """Return the keys with bounds in a section and its subsections, by dotted path."""
    found: dict[str, Key] = {}
    for name, annotation in keys_of(section).items():
        full = f"{path}.{name}" if path else name
        key = fields_of(section).get(name)
        if key is not None and key.bounds is not None:
            found[full] = key
        for inner in section_types(annotation):
            found |= bounded_keys(inner, full)
    return found


def values_in_range(view: View) -> Iterator[Violation]:
    """Require that every number is within the bounds of its key."""
    for path, key in bounded_keys(run_type(view.get("algorithm"))).items():
        value, bounds = view.get(path), key.bounds
        if value is not None and bounds is not None and not bounds.holds(value):
            yield Violation(
                path, value, f"it must be {bounds}", key.advice or f"write a value that is {bounds}"
            )


RANGE_RULES: tuple[Rule, ...] = (values_in_range,)


RULES: tuple[Rule, ...] = (
    *RANGE_RULES,
    *BACKEND_RULES,
    *ADAPTER_RULES,
    *PARALLEL_RULES,
    *EXPERT_RULES,
    *BATCH_RULES,
    *OPTIMIZER_RULES,
    *GENERATION_RULES,
    *RUN_RULES,
    *DATA_RULES,
    *DISTILLATION_RULES,
    *LOSS_RULES,
    *TABLE_OF_RUNS,
)


def check(
    config: Mapping[str, Any],
    facts: ModelFacts | None = None,
    faulty: Collection[str] = (),
    facts_of_models: Mapping[str, ModelFacts | None] | None = None,
    *,
    is_refused: bool = False,
) -> list[Violation]:
    """Return all violations of the rules.

    A rule that raises an unexpected exception is skipped if there are violations, because an invalid value
    may be the cause; otherwise the exception is raised.

    Args:
        config: plain containers with their defaults.
        facts: sizes of the policy's model; None if unknown, which skips the rules that need them.
        faulty: dotted paths of values of the wrong type, which count as absent.
        facts_of_models: sizes of the models other than the policy, by the dotted path of their section.
        is_refused: other violations of the configuration are known already.
    """
    failures: list[Exception] = []
    of_run = View(config, faulty, facts)
    of_run.failures = failures
    found = _broken((NOT_YET_RULES, RULES), of_run)
    # Do not report a violation again for a section that inherits the value from the policy.
    known = [(violation.key, violation.value, violation.bound) for violation in found]
    for path, section in model_sections(config).items():
        # The schema check reports a section that is not a mapping.
        if not isinstance(at(config, path), Mapping):
            continue
        of_model = (facts_of_models or {}).get(path)
        found += backbone_is_that_of_the_policy(
            path, section, at(config, path).get("model_name"), facts, of_model
        )
        found += apply_rules([partial(length_is_at_least_the_policy_s, path=path)], of_run)
        view = model_view(config, path, section, faulty, of_model)
        view.failures = failures
        rules = (*RANGE_RULES, *MODEL_RULES, *(TRAINED_MODEL_RULES if section.is_trained else ()))
        for violation in _broken((NOT_YET_RULES, rules), view):
            if (violation.key, violation.value, violation.bound) not in known:
                found.append(renamed(violation, path))
    if failures and not (found or faulty or is_refused):
        # Without any violation the rule itself is at fault.
        raise failures[0]
    return found


def _broken(tables: tuple[tuple[Rule, ...], tuple[Rule, ...]], view: View) -> list[Violation]:
    """Return the violations of two tables of rules. For keys that the first table refuses, the second one
    reports nothing."""
    refused = list(apply_rules(tables[0], view))
    refused_keys = {violation.key for violation in refused}
    return refused + [
        violation for violation in apply_rules(tables[1], view) if violation.key not in refused_keys
    ]
