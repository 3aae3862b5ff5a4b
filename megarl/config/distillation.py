"""Which teacher has the records of which source of the training data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megarl.config.validation_sets import set_name

SECTION = "distillation"
TEACHER, TEACHERS = "teacher", "teachers"
"""Sections: of the only teacher, and of several by name."""
OF_SOURCE = f"{SECTION}.teacher_of_source"


def source_key(source: Mapping[str, Any]) -> str:
    """What ``distillation.teacher_of_source`` calls a source: its environment, else the end of its name or path."""
    return str(source.get("env_name") or set_name(source))


def train_sources(config: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The training sources of a run, in their order."""
    given = config["data"]["train"]
    return [given] if isinstance(given, Mapping) else list(given)


def teachers_of_sources(config: Mapping[str, Any]) -> list[str]:
    """The teacher of each training source of a checked run, by its name; ``teacher`` where it has none."""
    names = list(config.get(TEACHERS) or {})
    if not names:
        return [TEACHER] * len(train_sources(config))
    chosen = config[SECTION]["teacher_of_source"]
    return [names[0] if chosen is None else chosen[source_key(source)] for source in train_sources(config)]
