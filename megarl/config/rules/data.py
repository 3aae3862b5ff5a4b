"""Rules on data sources: their locations, their fields, and their weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megarl.config.data_sources import (
    FIELD_KEYS,
    NAMED_SETS,
    PAIR_KEYS,
    DataSource,
    ValidationSource,
    fields_of_key,
    is_file,
    key_steps,
    set_module,
    sources_of,
)
from megarl.config.environments import fault_of_name, faults_of_ranges, named_environments
from megarl.config.nested import at
from megarl.config.rules.view import Rule, View
from megarl.config.schema import ABSENT
from megarl.config.validation_sets import GENERATIONS, SAMPLING_KEYS, TEMPERATURE, set_name
from megarl.errors import Violation

_SETS = ("train", "validation")


def _sources(view: View) -> Iterator[tuple[str, ValidationSource]]:
    for key in _SETS:
        yield from _of_set(view, key)


def _of_set(view: View, key: str) -> Iterator[tuple[str, ValidationSource]]:
    """Yield (dotted path, section) of the sources in ``data.train`` or ``data.validation``. A single source
    with a value of the wrong type is left out, because further violations would only follow from that
    value."""
    value = view.get(f"data.{key}")
    if not isinstance(value, Mapping) or all(view.has(f"data.{key}.{name}") for name in value):
        yield from sources_of({key: value}, key)


def one_source(view: View) -> Iterator[Violation]:
    """Require that each source has either ``path`` or ``name``; both only for a built-in data set."""
    for section, source in _sources(view):
        path, name = source.get("path"), source.get("name")
        if path is not None and name is not None and set_module(source) is None:
            known = (
                f"name one of {', '.join(NAMED_SETS)}, without prompt_key"
                if name not in NAMED_SETS
                else "remove prompt_key"
            )
            bound = "path and name are both given, but name is not a data set of known form"
            yield Violation(
                section,
                source,
                bound,
                f"give path for a file or directory, or name for a data set; for both, {known}",
            )
        elif path is None and name is None:
            yield Violation(
                section,
                source,
                "neither path nor name is given",
                "give path for a file or directory, or name for a data set",
            )
        elif path is not None and is_file(path):
            for key in ("subset", "split"):
                if source.get(key) is not None:
                    yield Violation(
                        f"{section}.{key}",
                        source[key],
                        "a file has no subsets or splits",
                        "remove it, or give name instead of path",
                    )


def fields_are_named(view: View) -> Iterator[Violation]:
    """Require that the field keys of a source are compatible with each other, and have a valid form."""
    pairs = view.compares_answers
    for section, source in _sources(view):
        messages = source.get("messages_key") is not None
        if pairs:
            yield from _faults_of_pairs(section, source)
        elif messages and source.get("prompt_key") is not None:
            fix = "remove one of them"
            yield Violation(f"{section}.prompt_key", source["prompt_key"], "messages_key is given too", fix)
        elif set_module(source) is not None and source.get("answer_key") is not None:
            fix = "remove it, or give prompt_key as well"
            yield Violation(
                f"{section}.answer_key",
                source["answer_key"],
                f"the answer field of {source['name']} is built in",
                fix,
            )
        for key in ("system_key", "tools_key") if ("prompt_key", []) in source.items() else ():
            if source.get(key) is not None:
                fix = "remove it, or name the fields of the prompt"
                yield Violation(f"{section}.{key}", source[key], "prompt_key = [] has no messages", fix)
        bound = "it is neither a field nor a path through objects and lists"
        for place, extra in enumerate(source.get("extra_keys") or []):
            if isinstance(extra, str) and key_steps(extra) is None:
                yield Violation(
                    f"{section}.extra_keys.{place}",
                    extra,
                    bound,
                    "write for example source or extra_info.index",
                )
        for key in (*FIELD_KEYS, *PAIR_KEYS):
            value = source.get(key)
            names = fields_of_key(value) if isinstance(value, str | list) else ()
            # In SFT, prompt_key = [] means training on a text without a prompt.
            is_empty = value == [] and (key != "prompt_key" or pairs or view.algorithm.GENERATES)
            if is_empty or any(isinstance(name, str) and key_steps(name) is None for name in names):
                yield Violation(
                    f"{section}.{key}",
                    value,
                    bound,
                    "write for example answer, reward_model.ground_truth or prompt[0].content",
                )


def _faults_of_pairs(section: str, source: DataSource) -> Iterator[Violation]:
    """Refuse the field keys that nothing reads in a source of preference pairs."""
    for key in ("answer_key", "messages_key", "extra_keys"):
        if source.get(key) is not None:
            bound = (
                "the records are pairs, whose answers are read by chosen_key and rejected_key, and "
                "nothing reads it"
            )
            yield Violation(f"{section}.{key}", source[key], bound, "remove it")


def pairs_have_a_reader(view: View) -> Iterator[Violation]:
    """Refuse ``chosen_key`` and ``rejected_key`` if the algorithm does not train on preference pairs."""
    view.require(view.has("algorithm") and not view.compares_answers)
    for section, source in _sources(view):
        for key in PAIR_KEYS:
            if source.get(key) is not None:
                bound = f"algorithm {view['algorithm']!r} does not compare answers, and nothing reads it"
                yield Violation(
                    f"{section}.{key}", at(source, key), bound, "remove it, or write algorithm: dpo or rm"
                )


def sources_can_be_mixed(view: View) -> Iterator[Violation]:
    """Require weights for all training sources or for none, no empty list of sources, and numbers within
    their bounds."""
    for key in _SETS:
        sources = view.get(f"data.{key}")
        if not isinstance(sources, list):
            continue
        if not sources:
            yield Violation(f"data.{key}", sources, "a list of sources has at least one", "add a source")
        for section, source in _of_set(view, key):
            # ``values_in_range`` does not look into lists.
            yield from faults_of_ranges(source, ValidationSource, section)
    sources = dict(_of_set(view, "train"))
    weighted = [section for section, source in sources.items() if source.get("weight") is not None]
    if weighted and len(weighted) < len(sources):
        lacking = next(section for section in sources if section not in weighted)
        bound = f"{', '.join(weighted)} has a weight and this source has none"
        yield Violation(f"{lacking}.weight", ABSENT, bound, "give all sources a weight, or none")
    for section in weighted:
        if sources[section].get("repeat") is not None:
            fix = "remove repeat, and give the source more weight"
            yield Violation(
                f"{section}.repeat",
                sources[section]["repeat"],
                "sources with weights are sampled by weight, not by repeats",
                fix,
            )
    for section, source in _of_set(view, "validation"):
        if source.get("weight") is not None:
            fix = "remove it, or limit the set by max_samples"
            yield Violation(
                f"{section}.weight", source["weight"], "a validation uses all records of its sets", fix
            )


def environments_are_there(view: View) -> Iterator[Violation]:
    """Require that ``env_name`` of each source is a named environment of the run."""
    env = view.get("env")
    names = list(named_environments(env)) if isinstance(env, Mapping) else []
    for section, source in _sources(view):
        name = source.get("env_name")
        if name is not None and name not in names:
            fix = f"write one of {', '.join(names)}" if names else "remove it"
            yield Violation(
                f"{section}.env_name",
                name,
                f"the named environments are {', '.join(names) or 'none'}",
                fix,
            )


def validation_sets_are_told_apart(view: View) -> Iterator[Violation]:
    """Require that validation sets have different names, and that the sources of a set have the same
    sampling settings."""
    view.require(view.algorithm.GENERATES)
    sets: dict[str, dict[str, ValidationSource]] = {}
    for section, source in _of_set(view, "validation"):
        sets.setdefault(set_name(source), {})[section] = source
        if source.get("val_set") is not None:
            yield from fault_of_name(f"{section}.val_set", source["val_set"])
    for name, members in sets.items():
        (first, known), *others = members.items()
        for section, source in others:
            unnamed = next((each for each in (section, first) if members[each].get("val_set") is None), None)
            if unnamed is not None:
                bound = f"{first} and {section} would both have the name {name}"
                yield Violation(
                    f"{unnamed}.val_set",
                    ABSENT,
                    bound,
                    "give both a val_set; sources with the same val_set form one set",
                )
                continue
            for key in SAMPLING_KEYS:
                # Distinguish absent from null: an absent key takes the run's value.
                if source.get(key, ABSENT) != known.get(key, ABSENT):
                    bound = f"{first} belongs to the same set, {name}, and has {known.get(key, ABSENT)!r}"
                    fix = "write the same in both, or give one of them another val_set"
                    yield Violation(f"{section}.{key}", source.get(key, ABSENT), bound, fix)


def several_answers_differ(view: View) -> Iterator[Violation]:
    """Refuse several responses per validation prompt with greedy decoding, because all would be the same."""
    view.require(view.algorithm.GENERATES)
    shared = {
        GENERATIONS: f"{view.algorithm.section()}.{GENERATIONS}",
        TEMPERATURE: f"policy.generation.{TEMPERATURE}",
    }
    for section, source in _of_set(view, "validation"):
        keys = {name: f"{section}.{name}" if name in source else path for name, path in shared.items()}
        answers = source[GENERATIONS] if GENERATIONS in source else view.get(shared[GENERATIONS])
        temperature = source[TEMPERATURE] if TEMPERATURE in source else view.get(shared[TEMPERATURE])
        if answers is not None and answers > 1 and temperature == 0:
            bound = f"{keys[GENERATIONS]} = {answers}, and greedy responses to a prompt are all the same"
            yield Violation(
                keys[TEMPERATURE],
                temperature,
                bound,
                "write for example 0.6, or request one response a prompt",
            )


def validation_that_scores_draws_nothing(view: View) -> Iterator[Violation]:
    """Refuse ``val_set`` and sampling keys for algorithms whose validation only scores given answers, such
    as SFT and DPO."""
    view.require(not view.algorithm.GENERATES)
    bound = f"the validation of {view['algorithm']} scores the reference answers of all sources as one set"
    for section, source in _of_set(view, "validation"):
        for key in ("val_set", *SAMPLING_KEYS):
            if key in source:
                yield Violation(f"{section}.{key}", source[key], bound, "remove it")


DATA_RULES: tuple[Rule, ...] = (
    one_source,
    fields_are_named,
    pairs_have_a_reader,
    sources_can_be_mixed,
    environments_are_there,
    validation_sets_are_told_apart,
    several_answers_differ,
    validation_that_scores_draws_nothing,
)
