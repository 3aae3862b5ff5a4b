"""Arguments of a custom reward function, chosen by the names of its parameters.

A function may be written for megarl, for verl's ``compute_score``, for TRL's ``reward_funcs`` or for
verifiers' rubrics. If its parameters are names of lists (``completions``), it gets lists with one item and
returns such a list.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any

PROMPT, RESPONSE, ANSWER, RECORD, SOURCE, STATE = (
    "prompt",
    "response",
    "answer",
    "record",
    "data_source",
    "state",
)

SINGLE: Mapping[str, str] = MappingProxyType(
    {
        "prompt": PROMPT,
        "response": RESPONSE,
        "completion": RESPONSE,
        "solution_str": RESPONSE,
        "answer": ANSWER,
        "ground_truth": ANSWER,
        "record": RECORD,
        "extra_info": RECORD,
        "info": RECORD,
        "data_source": SOURCE,
        "task": SOURCE,
        "state": STATE,
    }
)
"""Parameter name -> kind of its value, for parameters with a single value."""

SEVERAL: Mapping[str, str] = MappingProxyType(
    {
        "prompts": PROMPT,
        "responses": RESPONSE,
        "completions": RESPONSE,
        "solution_strs": RESPONSE,
        "answers": ANSWER,
        "ground_truths": ANSWER,
        "records": RECORD,
        "extra_infos": RECORD,
        "data_sources": SOURCE,
    }
)
"""Parameter name -> kind of the items, for parameters with a list."""

GIVEN_BY_CALLERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "solution_str": ("data_source", "ground_truth", "extra_info"),
        "solution_strs": ("data_sources", "ground_truths", "extra_infos"),
        "completions": ("prompts",),
        "completion": ("prompt", "answer", "state", "info", "task"),
        "state": ("prompt", "completion", "answer", "info", "task"),
    }
)
"""Parameter name by which a function for verl, TRL or verifiers is recognised -> further arguments that this
library passes by keyword, and ``**kwargs`` may therefore expect."""

# Parameter names by which a function is recognised as a rubric of verifiers.
_OF_VERIFIERS = frozenset({"info", "task", "state"})
_NAMED = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
)


@dataclass(frozen=True, slots=True)
class Arguments:
    """Arguments with which a reward function is called.

    Attributes:
        positional, keywords: names of the parameters that get values, in order.
        optional: names of parameters with a default; a record field of the same name replaces it.
        takes_rest: the function has ``**kwargs``, which get all remaining record fields, and the further
            arguments of the library for which the function was written.
        is_of_several: the function takes lists with one item per response, and returns a list of numbers.
        takes_messages: for records with messages, the response is passed as a list of messages, as TRL and
            verifiers do.
    """

    positional: tuple[str, ...]
    keywords: tuple[str, ...]
    optional: tuple[str, ...] = ()
    takes_rest: bool = False
    is_of_several: bool = False
    takes_messages: bool = False

    @property
    def reads_record(self) -> bool:
        """True if a required parameter or ``**kwargs`` may get a field of the record."""
        read = {SEVERAL.get(name) or SINGLE.get(name) for name in (*self.positional, *self.keywords)}
        return self.takes_rest or not read <= {RESPONSE, ANSWER}

    @property
    def wants_record(self) -> bool:
        """True if the function may read more than the response and the reference answer."""
        return self.reads_record or bool(self.optional)


def arguments_of(function: Callable[..., Any]) -> Arguments:
    """Return the arguments with which a reward function is called. Unknown parameter names are not reported
    here, see ``unknown_parameters``."""
    parameters = _parameters_of(function)
    if parameters is None:
        # Functions in C may have no signature; call them with response and reference answer.
        return Arguments((RESPONSE, ANSWER), ())
    positional, keywords, optional, names, takes_rest = [], [], [], set(), False
    for each in parameters:
        takes_rest = takes_rest or each.kind is inspect.Parameter.VAR_KEYWORD
        if each.kind not in _NAMED:
            continue
        names.add(each.name)
        # A parameter with a known name gets its value even if it has a default; one with an unknown name
        # keeps its default.
        if each.default is not inspect.Parameter.empty and not _is_known(each.name):
            if each.kind is not inspect.Parameter.POSITIONAL_ONLY:
                optional.append(each.name)
        elif each.kind is inspect.Parameter.POSITIONAL_ONLY:
            positional.append(each.name)
        else:
            keywords.append(each.name)
    several = not names.isdisjoint(SEVERAL)
    return Arguments(
        tuple(positional),
        tuple(keywords),
        optional=tuple(optional),
        takes_rest=takes_rest,
        is_of_several=several,
        takes_messages=several or bool(_OF_VERIFIERS & names),
    )


def unknown_parameters(function: Callable[..., Any], columns: Collection[str] = ()) -> list[str]:
    """Return the names of required parameters for which there is no value.

    Args:
        function: the custom reward function.
        columns: record fields that parameters may be named after (``extra_keys``).
    """
    unknown = []
    for each in _parameters_of(function) or ():
        is_required = each.kind in _NAMED and each.default is inspect.Parameter.empty
        if is_required and not _is_known(each.name) and each.name not in columns:
            unknown.append(each.name)
    return unknown


def takes_a_response(function: Callable[..., Any]) -> bool:
    """Return whether a function has a parameter for the response, without which it cannot score anything."""
    arguments = arguments_of(function)
    names = (*arguments.positional, *arguments.keywords)
    return any((SEVERAL.get(name) or SINGLE.get(name)) in (RESPONSE, STATE) for name in names)


def known_names() -> str:
    """Return the known parameter names as text for messages."""
    ways: dict[str, list[str]] = {}
    for name, meaning in SINGLE.items():
        ways.setdefault(meaning, []).append(name)
    return (
        ", ".join(" or ".join(names) for names in ways.values())
        + ", lists of them (completions, prompts, ground_truths), columns of the data"
    )


def values_for(
    arguments: Arguments, values: Mapping[str, object], columns: Mapping[str, object]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and keyword arguments for a call of a reward function.

    Args:
        arguments: result of ``arguments_of``.
        values: value of each kind (``PROMPT``, ``RESPONSE``, ... ``STATE``).
        columns: fields of the record that are passed on.
    """
    named = {
        name: _value(name, arguments, values, columns)
        for name in (*arguments.positional, *arguments.keywords)
    }
    positional = list(map(named.pop, arguments.positional))
    for name in arguments.optional:
        if name in columns:
            named[name] = _listed(columns[name], arguments)
    if arguments.takes_rest:
        taken = {*arguments.positional, *named}
        rest = {name: _listed(each, arguments) for name, each in columns.items() if name.isidentifier()}
        # In this order: a column called `prompts` is not what TRL gives under that name.
        for name in chain.from_iterable(GIVEN_BY_CALLERS.get(each, ()) for each in taken):
            rest[name] = _value(name, arguments, values, columns)
        named |= {name: each for name, each in rest.items() if name not in taken}
    return positional, named


def _value(
    name: str, arguments: Arguments, values: Mapping[str, object], columns: Mapping[str, object]
) -> Any:
    # Prefer a record field of this name (verl's extra_info, TRL's ground_truth), because the function was
    # written for it. Never take prompt or response from the record. For verl's list extra_infos, use the
    # field extra_info.
    column = name.removesuffix("s") if name in SEVERAL and name not in columns else name
    if column in columns and (SINGLE.get(name) or SEVERAL.get(name)) not in (RESPONSE, PROMPT, STATE):
        found = columns[column]
    elif name in SEVERAL:
        found = values[SEVERAL[name]]
    elif name in SINGLE:
        found = values[SINGLE[name]]
    else:
        raise LookupError(
            f"its parameter {name!r} is not a field of the record, which has {', '.join(sorted(columns))}"
        )
    return _listed(found, arguments)


def _listed(value: object, arguments: Arguments) -> Any:
    return [value] if arguments.is_of_several else value


def _is_known(name: str) -> bool:
    return name in SINGLE or name in SEVERAL


def _parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Return the parameters of a function, or None if Python cannot determine them (some functions in C)."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def describe_faults(function: Callable[..., Any], columns: Collection[str]) -> Iterator[str]:
    """Yield what is wrong with a reward function's parameters, if anything.

    Args:
        function: the custom reward function.
        columns: record fields that parameters may be named after (``extra_keys``).
    """
    unknown = unknown_parameters(function, columns)
    if unknown:
        yield (
            f"there is no value for its {'parameters' if len(unknown) > 1 else 'parameter'} "
            f"{', '.join(map(repr, unknown))}"
        )
    elif not takes_a_response(function):
        yield "it does not take the response"
