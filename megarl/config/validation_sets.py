"""Validation sets as the configuration defines them: sources, names and sampling settings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from megarl.config.algorithms import ALGORITHMS, own_section
from megarl.config.backend import generation_of
from megarl.config.data_sources import DataSource, ValidationSource
from megarl.config.sections import RunConfig

GENERATIONS: Final = "val_num_generations_per_prompt"
TEMPERATURE: Final = "val_temperature"
TOP_P: Final = "val_top_p"
TOP_K: Final = "val_top_k"
SAMPLING_KEYS: Final = (GENERATIONS, TEMPERATURE, TOP_P, TOP_K)
"""Keys of a validation source that apply to its whole set. Absent ones take the value of the algorithm's
section (the first) or of ``policy.generation`` (the others)."""
_IN_EVALUATION = {
    "num_generations_per_prompt": GENERATIONS,
    "temperature": TEMPERATURE,
    "top_p": TOP_P,
    "top_k": TOP_K,
}


def instead_in_evaluation(key: str) -> str | None:
    """Return the key that an evaluation reads in place of a sampling key of training, such as
    ``val_temperature`` for ``temperature``; None for any other key.

    Args:
        key: dotted key, or only its last part; the result has the same form.
    """
    section, _, name = key.rpartition(".")
    found = _IN_EVALUATION.get(name)
    sections = ALGORITHMS if found == GENERATIONS else ("policy.generation",)
    if found is None or section not in ("", *sections):
        return None
    return f"{section}.{found}" if section else found


@dataclass(frozen=True, slots=True)
class SetPlan:
    """Settings of one validation set.

    Attributes:
        name: name of the set, used in metrics and to seed its sampling.
        places: indices of its sources in the list of validation sources.
        generations: number k of responses per prompt.
        temperature: sampling temperature; 0 for greedy decoding.
        top_p, top_k: as in ``policy.generation``.
        max_prompts: number of prompts to use, the first ones; None for all.
    """

    name: str
    places: tuple[int, ...]
    generations: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    max_prompts: int | None = None

    @property
    def sampling(self) -> Mapping[str, Any] | None:
        """Sampling settings as keys of ``policy.generation``; None for greedy decoding."""
        if self.temperature == 0:
            return None
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}

    @property
    def drawn(self) -> str:
        """Description of the sampling settings for people."""
        if self.temperature == 0:
            return "greedy"
        top_k = "" if self.top_k is None else f", top-k {self.top_k}"
        return f"temperature {self.temperature:g}, top-p {self.top_p:g}{top_k}"


@dataclass(slots=True)
class _Members:
    """Members of one validation set: indices of its sources, and the sampling keys that the sources set."""

    places: list[int] = field(default_factory=list)
    said: dict[str, Any] = field(default_factory=dict)


def set_name(source: DataSource) -> str:
    """Return the name of a source's validation set: ``val_set``, else the last part of the source's name or
    path, with characters that metric names cannot contain replaced by ``_``."""
    given = source.get("val_set")
    if given is not None:
        return str(given)
    name = source.get("name")
    end = str(name).rstrip("/").rpartition("/")[2] if name is not None else Path(str(source.get("path"))).stem
    # The name must satisfy `fault_of_name`, like names that users choose.
    plain = re.sub(r"[^A-Za-z0-9_-]+", "_", end)
    # Names of metrics begin with a letter.
    return plain if re.match(r"[A-Za-z]", plain) else f"set_{plain}"


def validation_sources(config: RunConfig) -> list[ValidationSource]:
    """Return the validation sources of a run, in order; empty without validation data."""
    value = config["data"].get("validation")
    return [value] if isinstance(value, Mapping) else list(value or [])


def set_plans(config: RunConfig) -> list[SetPlan]:
    """Return the validation sets of a checked run, in the order of their first sources. The algorithm must
    generate responses."""
    section, generation = own_section(config), generation_of(config["policy"])
    shared = {
        GENERATIONS: section.get(GENERATIONS, 1),
        **{key: generation[key] for key in (TEMPERATURE, TOP_P, TOP_K)},
    }
    plans = []
    for name, members in _members(validation_sources(config)).items():
        chosen = {**shared, **members.said}
        plans.append(
            SetPlan(
                name,
                tuple(members.places),
                chosen[GENERATIONS],
                # YAML may give 0 and 1 as integers.
                float(chosen[TEMPERATURE]),
                float(chosen[TOP_P]),
                chosen[TOP_K],
                section.get("max_val_samples"),
            )
        )
    return plans


def _members(sources: Sequence[ValidationSource]) -> dict[str, _Members]:
    sets: dict[str, _Members] = {}
    for place, source in enumerate(sources):
        members = sets.setdefault(set_name(source), _Members())
        members.places.append(place)
        # A rule has checked that all sources of a set have the same values.
        members.said |= {key: source[key] for key in SAMPLING_KEYS if key in source}
    return sets
