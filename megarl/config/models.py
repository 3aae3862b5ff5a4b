"""Models of a run beside the policy: sections that have the keys of ``policy``, and of which absent ones are
as there.

Whoever checks or estimates a model sees a configuration in which its section stands in the place of
``policy``; what is found there is reported under the section's own name.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from megarl.config.algorithms import KEY, models_of, roles
from megarl.config.nested import merge
from megarl.config.sections import Config, RunConfig
from megarl.errors import Violation

if TYPE_CHECKING:
    from megarl.config.plugins import ModelSection, Role

POLICY: Final = "policy"
# The section within a dotted key, and not the word in a sentence.
_OF_POLICY = re.compile(rf"\b{POLICY}(?=\.\w|\[)")
# Keys that say what a model is for.
_NOT_INHERITED = ("generation", "generation_batch_size", "reward_model_cfg", "peft", "merged_adapter")


def model_sections(config: Mapping[str, Any]) -> dict[str, ModelSection]:
    """Return the sections of models beside the policy, by dotted path, of a run's configuration that need not
    be valid."""
    found: dict[str, ModelSection] = {}
    for name, section in models_of(config.get(KEY)).items():
        given = config.get(name)
        if section.by_name:
            found |= {f"{name}.{each}": section for each in given} if isinstance(given, Mapping) else {}
        elif given is not None or not section.is_optional:
            found[name] = section
    return found


def model_roles(config: RunConfig) -> tuple[Role, ...]:
    """The roles of a checked run whose models have workers, the actor first."""
    return tuple(role for role in roles(config) if role.has_workers)


def in_full(policy: Mapping[str, Any], own: Mapping[str, Any], section: ModelSection) -> Config:
    """Return a section as it would be written in full: its own keys over those of ``policy``, of which
    sections merge key by key.

    A model that scores generates nothing. Of a language model the section ``generation`` says, as of the
    policy, from which distribution tokens are sampled, and so what its log-probabilities are.
    """
    of_policy = {key: value for key, value in policy.items() if key not in _NOT_INHERITED}
    if section.scores:
        of_policy["reward_model_cfg"] = {"enabled": True}
    else:
        of_policy |= {key: policy[key] for key in ("generation", "generation_batch_size") if key in policy}
    # Copied: what is filled in for one model must not appear in another.
    return merge(copy.deepcopy(of_policy), copy.deepcopy(dict(own)))


def renamed(violation: Violation, path: str) -> Violation:
    """Return a violation that was found while the section at ``path`` stood in the place of ``policy``."""
    key, bound, fix = (renamed_text(text, path) for text in (violation.key, violation.bound, violation.fix))
    candidates = tuple(
        {renamed_text(name, path): value for name, value in each.items()} for each in violation.candidates
    )
    return Violation(path if key == POLICY else key, violation.value, bound, fix, candidates)


def renamed_text(text: str, path: str) -> str:
    """Return a text with the keys of ``policy`` in it as those of the section at ``path``."""
    return _OF_POLICY.sub(path, text)


def as_of_policy(key: str, paths: Iterable[str]) -> str:
    """Return a dotted key of one of the sections at ``paths`` as the key of ``policy`` that it is; any other
    key as it is."""
    for path in paths:
        if key == path or key.startswith(f"{path}."):
            return f"{POLICY}{key.removeprefix(path)}"
    return key
