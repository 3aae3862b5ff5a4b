"""All rules between keys, in one table. Pure functions of a configuration; no torch, no ray, no files."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from megarl.config.model_facts import ModelFacts
from megarl.config.not_yet import NOT_YET_RULES
from megarl.config.rules.backends import BACKEND_RULES
from megarl.config.rules.generation import GENERATION_RULES
from megarl.config.rules.optimizer import OPTIMIZER_RULES
from megarl.config.rules.parallel import EXPERT_RULES, PARALLEL_RULES
from megarl.config.rules.ranges import RANGE_RULES
from megarl.config.rules.run import BATCH_RULES, RUN_RULES
from megarl.config.rules.view import Rule, View, apply_rules
from megarl.errors import Violation

RULES: tuple[Rule, ...] = (
    *RANGE_RULES,
    *BACKEND_RULES,
    *PARALLEL_RULES,
    *EXPERT_RULES,
    *BATCH_RULES,
    *OPTIMIZER_RULES,
    *GENERATION_RULES,
    *RUN_RULES,
)


def check(config: Mapping[str, Any], facts: ModelFacts | None = None, faulty: Collection[str] = ()) -> list[Violation]:
    """Every broken rule between keys.

    Args:
        config: plain containers, defaults filled in; keys that are absent only silence the rules that need them.
        facts: sizes of the model, for the rules that need them.
        faulty: dotted paths of values of the wrong type, which count as absent.
    """
    view = View(config, faulty, facts)
    refused = list(apply_rules(NOT_YET_RULES, view))
    refused_keys = {violation.key for violation in refused}
    broken = [violation for violation in apply_rules(RULES, view) if violation.key not in refused_keys]
    return refused + broken
