"""Sections of models other than the policy. They have the keys of ``policy``, and inherit absent keys from
it.

For a check or a memory estimate, such a section is put in the place of ``policy``; violations are then
renamed to the section's own path.
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
# Match policy only as the first part of a dotted key, not as a word of a sentence.
_OF_POLICY = re.compile(rf"\b{POLICY}(?=\.\w|\[)")
# Keys that depend on a model's role: a critic does not share the policy's adapter, for example.
_NOT_INHERITED = ("generation", "generation_batch_size", "reward_model_cfg", "peft", "merged_adapter")


def model_sections(config: Mapping[str, Any]) -> dict[str, ModelSection]:
    """Return the sections of ``config`` that configure a model other than the policy, such as a critic or a
    reward model: dotted path -> how it relates to ``policy``. ``config`` need not be valid."""
    found: dict[str, ModelSection] = {}
    for name, section in models_of(config.get(KEY)).items():
        given = config.get(name)
        if section.by_name:
            found |= {f"{name}.{each}": section for each in given} if isinstance(given, Mapping) else {}
        elif given is not None or not section.is_optional:
            found[name] = section
    return found


def model_roles(config: RunConfig) -> tuple[Role, ...]:
    """Return the roles of a checked run whose models have worker processes, the actor first."""
    return tuple(role for role in roles(config) if role.has_workers)


def in_full(policy: Mapping[str, Any], own: Mapping[str, Any], section: ModelSection) -> Config:
    """Return a model's section with absent keys inherited from ``policy``, subsections merged key by key.

    A reward model or critic gets no ``generation`` section. A language model inherits the policy's, because
    its log-probabilities depend on the sampling settings there.

    Args:
        policy: the ``policy`` section.
        own: the model's section as written.
        section: declaration of the section.
    """
    of_policy = {key: value for key, value in policy.items() if key not in _NOT_INHERITED}
    if section.scores:
        of_policy["reward_model_cfg"] = {"enabled": True}
    else:
        of_policy |= {key: policy[key] for key in ("generation", "generation_batch_size") if key in policy}
    # Copy, because filling in one model's defaults must not change another model's section.
    return merge(copy.deepcopy(of_policy), copy.deepcopy(dict(own)))


def renamed(violation: Violation, path: str) -> Violation:
    """Return a violation with ``policy`` replaced by ``path`` in its keys and texts; it was found while the
    section at ``path`` was in the place of ``policy``."""
    key = path if violation.key == POLICY else renamed_text(violation.key, path)
    bound, fix = renamed_text(violation.bound, path), renamed_text(violation.fix, path)
    candidates = []
    for each in violation.candidates:
        candidates.append({renamed_text(name, path): value for name, value in each.items()})
    return Violation(key, violation.value, bound, fix, tuple(candidates))


def renamed_text(text: str, path: str) -> str:
    """Return a text in which keys below ``policy`` are renamed to keys below ``path``."""
    return _OF_POLICY.sub(path, text)


def as_of_policy(key: str, paths: Iterable[str]) -> str:
    """Return the key of ``policy`` that corresponds to a dotted key below one of ``paths``; other keys are
    returned unchanged."""
    for path in paths:
        if key == path or key.startswith(f"{path}."):
            return f"{POLICY}{key.removeprefix(path)}"
    return key
