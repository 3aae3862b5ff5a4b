"""Models of a run other than the policy: their sections have the keys of ``policy``, and inherit absent keys
from ``policy``.

To check such a model or to estimate its memory, its section replaces ``policy`` in the configuration. Faults
are then reported under the section's own name.
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
# Match the section within a dotted key, but not the word in a sentence.
_OF_POLICY = re.compile(rf"\b{POLICY}(?=\.\w|\[)")
# Keys that depend on what a model is used for.
_NOT_INHERITED = ("generation", "generation_batch_size", "reward_model_cfg", "peft", "merged_adapter")


def model_sections(config: Mapping[str, Any]) -> dict[str, ModelSection]:
    """Return the sections of models other than the policy, by dotted path, of a run's configuration that need
    not be valid."""
    found: dict[str, ModelSection] = {}
    for name, section in models_of(config.get(KEY)).items():
        given = config.get(name)
        if section.by_name:
            found |= {f"{name}.{each}": section for each in given} if isinstance(given, Mapping) else {}
        elif given is not None or not section.is_optional:
            found[name] = section
    return found


def model_roles(config: RunConfig) -> tuple[Role, ...]:
    """Return the roles of a checked run whose models have workers, the actor first."""
    return tuple(role for role in roles(config) if role.has_workers)


def in_full(policy: Mapping[str, Any], own: Mapping[str, Any], section: ModelSection) -> Config:
    """Return a model's section in full: its own keys merged over those of ``policy``, subsections key by key.

    A scoring model has no ``generation`` section. A language model inherits the policy's, because it
    determines the distribution that tokens are sampled from, and so the log-probabilities.
    """
    of_policy = {key: value for key, value in policy.items() if key not in _NOT_INHERITED}
    if section.scores:
        of_policy["reward_model_cfg"] = {"enabled": True}
    else:
        of_policy |= {key: policy[key] for key in ("generation", "generation_batch_size") if key in policy}
    # Copy, because a default that is completed for one model must not appear in another.
    return merge(copy.deepcopy(of_policy), copy.deepcopy(dict(own)))


def renamed(violation: Violation, path: str) -> Violation:
    """Return a violation that was found while the section at ``path`` replaced ``policy``, with its keys
    renamed to that path."""
    key = path if violation.key == POLICY else renamed_text(violation.key, path)
    bound, fix = renamed_text(violation.bound, path), renamed_text(violation.fix, path)
    candidates = []
    for each in violation.candidates:
        candidates.append({renamed_text(name, path): value for name, value in each.items()})
    return Violation(key, violation.value, bound, fix, tuple(candidates))


def renamed_text(text: str, path: str) -> str:
    """Return a text in which the keys of ``policy`` are replaced by those of the section at ``path``."""
    return _OF_POLICY.sub(path, text)


def as_of_policy(key: str, paths: Iterable[str]) -> str:
    """Return the key of ``policy`` that corresponds to a dotted key in one of the sections at ``paths``; any
    other key is returned unchanged."""
    for path in paths:
        if key == path or key.startswith(f"{path}."):
            return f"{POLICY}{key.removeprefix(path)}"
    return key
