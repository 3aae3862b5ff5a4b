"""Check of a configuration against the TypedDicts: types, missing keys and unknown keys.
``megarl.config.rules`` checks which values are compatible with each other."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

from pydantic import ConfigDict, TypeAdapter, ValidationError

from megarl.config.algorithms import ALGORITHMS, KEY, ORDER, run_type, sections_of
from megarl.config.environments import EnvConfig, named_environments
from megarl.config.guesses import nearest
from megarl.config.models import POLICY, as_of_policy, in_full, model_sections
from megarl.config.nested import at, has
from megarl.config.policy import PolicyConfig
from megarl.errors import Violation
from megarl.import_path import is_import_path
from megarl.key import keys_of, named_section_types, section_types

if TYPE_CHECKING:
    from megarl.config.plugins import ModelSection

REMOVED_VALUES: Mapping[tuple[str, str], str] = {
    (
        "moe_router_load_balancing_type",
        "micro_batch_aux_loss",
    ): "it was removed, as its loss depended on the division of a batch: write "
    "aux_loss (over the global batch) or seq_aux_loss (over each sequence)",
}
"""(last part of a key, value that an earlier version allowed) -> advice on its replacement."""


Steps: TypeAlias = tuple[tuple[int | str, bool], ...]

# Strict: pydantic must not convert texts to numbers, or numbers to booleans.
STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

EXPECTED = {
    "int_type": "a whole number is wanted",
    "int_from_float": "a whole number is wanted",
    "float_type": "a number is wanted",
    "finite_number": "a finite number is wanted",
    "bool_type": "true or false is wanted",
    "string_type": "text is wanted",
    "list_type": "a list is wanted",
    "dict_type": "a section of keys and values is wanted",
}


_SEARCH = "remove it; megarl keys {} looks for one like it"
IN_PLACE_OF_A_SECTION = "set its keys one by one, or merge a file that has the section by --with FILE"
# "gpu" is so like "cpu" that it would be proposed.
_VALUES = {"gpu": "cuda"}
_SIMILAR = 0.5
"""Minimum similarity at which an allowed value is proposed for a wrong one, low enough for fp16 and
float16."""


class Absent:
    """Type of ``ABSENT``, the value of an absent key in a violation."""

    def __repr__(self) -> str:
        return "<absent>"


ABSENT = Absent()


@cache
def known_paths(section: Any) -> tuple[str, ...]:
    """Return every dotted path that a section's TypedDict allows, subsections included. NAME stands for a
    name that users choose."""
    paths: list[str] = []
    for key, annotation in keys_of(section).items():
        paths.append(key)
        for inner in section_types(annotation):
            paths.extend(f"{key}.{path}" for path in known_paths(inner))
        for inner in named_section_types(annotation):
            paths.extend(f"{key}.NAME.{path}" for path in known_paths(inner))
    return tuple(dict.fromkeys(paths))


@cache
def _adapter(section: Any) -> TypeAdapter[Any]:
    """Return pydantic's validator of a TypedDict, strict in all of its subsections."""
    pending = [section]
    while pending:
        current = pending.pop()
        # pydantic reads this attribute of each TypedDict separately. A section without it would accept
        # unknown keys, and convert texts to numbers.
        current.__pydantic_config__ = STRICT
        for annotation in keys_of(current).values():
            pending += [*section_types(annotation), *named_section_types(annotation)]
    return TypeAdapter(section)


def check_run(config: Mapping[str, Any]) -> list[Violation]:
    """Return the schema violations of a run's configuration."""
    name, env = config.get("algorithm"), config.get("env")
    named: Mapping[str, Any] = {}
    if isinstance(env, Mapping):
        named = named_environments(env)
        # Check named environments separately, because no TypedDict can contain names that users choose.
        config = {**config, "env": {key: value for key, value in env.items() if key not in named}}
    violations = check_section(config, run_type(name), own=next(iter(sections_of(name)), ""))
    for environment, section in named.items():
        violations += check_section(section, EnvConfig, prefix=f"env.{environment}")
    known = {violation.key for violation in violations}
    for path, model in model_sections(config).items():
        violations += _violations_of_model(config, path, model, known)
    if isinstance(name, str) and is_import_path(name) and not sections_of(name):
        # The custom algorithm cannot be loaded, so its sections are unknown and must not be reported as
        # unknown keys.
        return [violation for violation in violations if violation.key in ORDER or "." in violation.key]
    return violations


def _violations_of_model(
    config: Mapping[str, Any], path: str, model: ModelSection, known: set[str]
) -> Iterator[Violation]:
    """Yield the schema violations of a section that inherits from ``policy``. Faults of inherited values are
    left out, because they are reported for ``policy``.

    Args:
        config: the run's configuration.
        path: dotted path of the section.
        model: declaration of the section.
        known: dotted keys of the violations that are reported already.
    """
    policy, own = config.get(POLICY), at(config, path)
    own = {} if own is None else own
    if not isinstance(policy, Mapping) or not isinstance(own, Mapping):
        return
    for violation in check_section(in_full(policy, own, model), PolicyConfig, prefix=path):
        if as_of_policy(violation.key, [path]) not in known or has(
            own, violation.key.removeprefix(f"{path}.")
        ):
            yield violation


def check_policy(config: Mapping[str, Any]) -> list[Violation]:
    """Return the schema violations of a ``policy`` section; their keys begin with ``policy``."""
    return check_section(config, PolicyConfig, prefix="policy")


def check_section(
    config: Mapping[str, Any], section: Any, prefix: str = "", own: str = ""
) -> list[Violation]:
    """Return the schema violations of a section, at most one per key.

    Args:
        config: the section as plain containers.
        section: its TypedDict.
        prefix: dotted path of the section, with which the keys of violations begin.
        own: subsection of the run's algorithm, whose keys are proposed first.
    """
    try:
        _adapter(section).validate_python(config)
    except ValidationError as error:
        faults = error.errors(include_url=False)
    else:
        return []
    # For a union such as "section or list of sections", pydantic reports the errors of all members. Keep
    # those of the member that the user meant.
    located = _likeliest_members([(_steps(config, fault), fault) for fault in faults])
    violations = list[Violation]()
    for steps, fault in located:
        location = tuple(part for part, real in steps if real)
        violations.append(_violation(fault, location, section, prefix, own))
    # Keep the first violation of each key, in the original order.
    return list({violation.key: violation for violation in reversed(violations)}.values())[::-1]


def _steps(config: Any, fault: Any) -> Steps:
    """Return the parts of a pydantic error's location, each with True if it is a key or index inside
    ``config``, and False if it names a member of a union."""
    steps: list[tuple[int | str, bool]] = []
    current = config
    for position, part in enumerate(fault["loc"]):
        last = position == len(fault["loc"]) - 1
        real = True
        if isinstance(current, Mapping) and (part in current or (last and fault["type"] == "missing")):
            current = current.get(part)
        elif isinstance(current, list) and isinstance(part, int) and part < len(current):
            current = current[part]
        else:
            real = False
        steps.append((part, real))
    return tuple(steps)


def _likeliest_members(located: list[tuple[Steps, Any]]) -> list[tuple[Steps, Any]]:
    """Keep, for each union, only the errors of the member that the user most likely meant: the one whose
    errors are deepest, and among equals the one with the fewest errors."""
    kept = located
    for level in range(max((len(steps) for steps, _ in located), default=0)):
        members: dict[Steps, dict[int | str, list[tuple[Steps, Any]]]] = {}
        for entry in kept:
            steps = entry[0]
            if level < len(steps) and not steps[level][1]:
                members.setdefault(steps[:level], {}).setdefault(steps[level][0], []).append(entry)
        for faults_by_member in members.values():
            best = max(
                faults_by_member.values(),
                key=lambda faults: (max(len(steps) for steps, _ in faults), -len(faults)),
            )
            # Compare by identity, because errors are dictionaries, which are not hashable.
            dropped = set[int]()
            for faults in faults_by_member.values():
                dropped.update(map(id, faults if faults is not best else ()))
            kept = [entry for entry in kept if id(entry) not in dropped]
    return kept


def _violation(fault: Any, location: tuple[int | str, ...], section: Any, prefix: str, own: str) -> Violation:
    path = ".".join(map(str, location))
    key = ".".join(filter(None, (prefix, path)))
    kind, value = fault["type"], fault["input"]
    if kind == "extra_forbidden":
        near = nearest(path, known_paths(section), own)
        if near == path:
            # In a file, a dot is a part of a name.
            opened, depth = path.replace(".", ": {"), path.count(".")
            return Violation(key, value, "a name in a file has no dots", f"write {opened}: ...{'}' * depth}")
        full = ".".join(filter(None, (prefix, near)))
        return Violation(
            key,
            value,
            "there is no such key",
            f"did you mean {full!r}?" if near else _SEARCH.format(path.split("_")[-1].split(".")[-1]),
        )
    if kind == "missing":
        # pydantic's input of a missing key is the section that lacks it.
        likely = [*(name for name in ALGORITHMS if key == KEY and name in value), "<value>"]
        return Violation(key, ABSENT, "this key is required", f"add {location[-1]}: {likely[0]}")
    if value is None:
        return Violation(
            key,
            None,
            f"null is not allowed here, {_expected(fault)}",
            "give a value, or remove the line to take the default",
        )
    wanted = known_paths(section)
    inner = [name for name in ("path", "name") if f"{path}.{name}" in wanted]
    switch = next((name for name in (f"{path}.enabled", f"{path}_enabled") if name in wanted), None)
    if kind == "dict_type" and isinstance(value, bool) and switch is not None:
        full = ".".join(filter(None, (prefix, switch)))
        return Violation(key, value, _expected(fault), f"write {full}={str(value).lower()}")
    if kind == "dict_type" and isinstance(value, str) and inner:
        # A plain word is more likely the name of a data set than a path.
        is_name = "name" in inner and not any(mark in value for mark in "/.")
        return Violation(
            key, value, _expected(fault), f"write {key}.{'name' if is_name else inner[0]}={value}"
        )
    return Violation(key, value, _expected(fault), _repair(fault, value))


def _expected(fault: Any) -> str:
    if fault["type"] == "literal_error":
        return f"one of {fault['ctx']['expected']} is wanted"
    message = str(fault["msg"])
    return EXPECTED.get(fault["type"], message[:1].lower() + message[1:])


def _repair(fault: Any, value: object) -> str:
    if fault["type"] == "literal_error":
        removed = REMOVED_VALUES.get((str(fault["loc"][-1]), str(value)))
        if removed is not None:
            return removed
        choices = [choice.strip("'") for choice in fault["ctx"]["expected"].replace(" or ", ", ").split(", ")]
        meant = _VALUES.get(str(value), str(value))
        close = difflib.get_close_matches(meant, choices, n=1, cutoff=_SIMILAR)
        return f"did you mean {close[0]!r}?" if close else f"write for example {choices[0]}"
    if fault["type"].startswith("int_") and (whole := _whole(value)) is not None:
        return f"write {whole}"
    if fault["type"] == "bool_type" and value in (0, 1):
        return f"write {str(value == 1).lower()}"
    if fault["type"] == "list_type" and isinstance(value, str | int | float):
        return f"write it in brackets: [{value}]"
    if fault["type"] == "dict_type" and isinstance(value, str):
        return IN_PLACE_OF_A_SECTION
    if isinstance(value, str) and fault["type"] in {"int_type", "float_type", "bool_type"}:
        return (
            f"write {value} without quotes"
            if _reads_as_number_or_flag(value)
            else "write true or false"
            if fault["type"] == "bool_type"
            else "write a number alone, without a unit, a comma or quotes"
        )
    if fault["type"] == "string_type":
        return f'put it in quotes: "{value}"' if isinstance(value, (int, float)) else "write a text"
    return "write a value of that kind"


def _whole(value: object) -> int | None:
    """Return the whole number that a value such as 1000.0, 1e3 or "1e3" denotes, or None."""
    try:
        is_written = isinstance(value, str) and not value.isdigit()
        number = float(value) if is_written or isinstance(value, float) else math.nan  # type: ignore[arg-type]
    except ValueError:
        return None
    return int(number) if number.is_integer() else None


def _reads_as_number_or_flag(text: str) -> bool:
    if text.lower() in {"true", "false"}:
        return True
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
