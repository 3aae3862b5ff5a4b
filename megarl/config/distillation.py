"""Assignment of teachers to the sources of the training data."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.config.data_sources import DataConfig, DataSource
from megarl.config.nested import at
from megarl.config.sections import RunConfig
from megarl.config.validation_sets import set_name

SECTION = "distillation"
TEACHER, TEACHERS = "teacher", "teachers"
"""Sections of a single teacher, and of several teachers by name."""
OF_SOURCE = f"{SECTION}.teacher_of_source"


def source_key(source: DataSource) -> str:
    """Return the name of a source in ``distillation.teacher_of_source``: its environment if it has one,
    otherwise the name of its set."""
    return str(source.get("env_name") or set_name(source))


def train_sources(data: DataConfig) -> Sequence[DataSource]:
    """Return the training sources of a ``data`` section, in order."""
    given = data["train"]
    return given if isinstance(given, list) else [given]


def teachers_of_sources(config: RunConfig) -> list[str]:
    """Return the name of the teacher of each training source of a checked run; ``teacher`` if there is a
    single teacher without a name."""
    names = list(at(config, TEACHERS) or {})
    if not names:
        return [TEACHER] * len(train_sources(config["data"]))
    chosen = at(config, OF_SOURCE)
    return [
        names[0] if chosen is None else chosen[source_key(source)] for source in train_sources(config["data"])
    ]
