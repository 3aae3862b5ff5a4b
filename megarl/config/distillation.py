"""Assignment of teachers to training sources in a distillation."""

from __future__ import annotations

from collections.abc import Sequence

from megarl.config.data_sources import DataConfig, DataSource
from megarl.config.nested import at
from megarl.config.sections import RunConfig
from megarl.config.validation_sets import set_name

SECTION = "distillation"
TEACHER, TEACHERS = "teacher", "teachers"
"""Top-level sections: of a single teacher, and of several teachers by name."""
OF_SOURCE = f"{SECTION}.teacher_of_source"


def source_key(source: DataSource) -> str:
    """Return the key of a source in ``distillation.teacher_of_source``: its ``env_name``, else the name that
    its validation set would have."""
    return str(source.get("env_name") or set_name(source))


def train_sources(data: DataConfig) -> Sequence[DataSource]:
    """Return the training sources of a ``data`` section, in order."""
    given = data["train"]
    return given if isinstance(given, list) else [given]


def teachers_of_sources(config: RunConfig) -> list[str]:
    """Return the name of the teacher of each training source of a checked run; ``teacher`` for a single
    unnamed teacher."""
    names = list(at(config, TEACHERS) or {})
    if not names:
        return [TEACHER] * len(train_sources(config["data"]))
    chosen = at(config, OF_SOURCE)
    return [
        # A rule requires the mapping if there are several teachers.
        names[0] if chosen is None else chosen[source_key(source)]
        for source in train_sources(config["data"])
    ]
