"""The arguments of a user's reward function: what each parameter is given, by its name.

A function may be written for megarl, for verl's ``compute_score``, for TRL's ``reward_funcs`` or for
verifiers' rubrics: the names of its parameters say what they are to hold. Parameters that hold values of
several responses (``completions``) get lists of one, and the function returns a list of one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
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
"""What a parameter of each name holds."""

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
"""What a parameter of each name holds a list of."""

GIVEN_BY_CALLERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "solution_str": ("data_source", "ground_truth", "extra_info"),
        "solution_strs": ("data_sources", "ground_truths", "extra_infos"),
        "completions": ("prompts",),
        "completion": ("prompt", "answer", "state", "info", "task"),
    }
)
"""What verl, TRL and verifiers give by name in addition to the response, which ``**kwargs`` may be asked
for."""

_OF_VERIFIERS = frozenset({"info", "task", "state"})
_NAMED = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.KEYWORD_ONLY,
)


@dataclass(frozen=True, slots=True)
class Arguments:
    """The arguments of a call of a reward function.

    Attributes:
        positional, keywords: names of the parameters that are given, in their order.
        takes_rest: it has ``**kwargs``, which get what no parameter names: columns of the record, and what
            the caller gives that the function was written for.
        is_of_several: it takes lists of responses and returns a list of numbers.
        takes_messages: of a conversation, a response is a list of messages to it, as to TRL's and verifiers'
            functions.
    """

    positional: tuple[str, ...]
    keywords: tuple[str, ...]
    takes_rest: bool = False
    is_of_several: bool = False
    takes_messages: bool = False

    @property
    def wants_record(self) -> bool:
        """True if it reads more than the response and the reference answer."""
        read = {SEVERAL.get(name) or SINGLE.get(name) for name in (*self.positional, *self.keywords)}
        return self.takes_rest or not read <= {RESPONSE, ANSWER}


def arguments_of(function: Callable[..., Any]) -> Arguments:
    """Return how a reward function is called. Whether its names are known is ``unknown_parameters``' to
    say."""
    parameters = _parameters_of(function)
    if parameters is None:
        # Without a signature, as of some functions in C, there are no names to go by.
        return Arguments((RESPONSE, ANSWER), ())
    names = [each.name for each in parameters if each.kind in _NAMED]
    # A known name gets its value even where it has a default; an unknown one keeps its default.
    given = [
        each
        for each in parameters
        if each.kind in _NAMED and (each.default is inspect.Parameter.empty or _is_known(each.name))
    ]
    rest = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    several = any(name in SEVERAL for name in names)
    return Arguments(
        tuple(each.name for each in given if each.kind is inspect.Parameter.POSITIONAL_ONLY),
        tuple(each.name for each in given if each.kind is not inspect.Parameter.POSITIONAL_ONLY),
        takes_rest=rest,
        is_of_several=several,
        takes_messages=several or bool(_OF_VERIFIERS & set(names)),
    )


def unknown_parameters(function: Callable[..., Any], columns: Collection[str] = ()) -> list[str]:
    """Return the parameters without a default that are given nothing.

    Args:
        function: of the user.
        columns: fields of the data that records keep (``extra_keys``); a parameter may be called as one.
    """
    parameters = _parameters_of(function) or ()
    required = [
        each.name for each in parameters if each.kind in _NAMED and each.default is inspect.Parameter.empty
    ]
    return [name for name in required if not _is_known(name) and name not in columns]


def takes_a_response(function: Callable[..., Any]) -> bool:
    """Return whether a function reads the response, without which it can score nothing."""
    arguments = arguments_of(function)
    names = (*arguments.positional, *arguments.keywords)
    return any((SEVERAL.get(name) or SINGLE.get(name)) in (RESPONSE, STATE) for name in names)


def known_names() -> str:
    """Return the names of parameters in words, for messages."""
    ways: dict[str, list[str]] = {}
    for name, meaning in SINGLE.items():
        ways.setdefault(meaning, []).append(name)
    return (
        ", ".join(" or ".join(names) for names in ways.values())
        + ", lists of them (completions, prompts, ground_truths), columns of the data"
    )


def values_for(
    arguments: Arguments, values: Mapping[str, Any], columns: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return positional and keyword arguments of a call.

    Args:
        arguments: of the function.
        values: by what they are, ``PROMPT`` to ``STATE``.
        columns: fields of the record.
    """
    named = {
        name: _value(name, arguments, values, columns)
        for name in (*arguments.positional, *arguments.keywords)
    }
    positional = [named.pop(name) for name in arguments.positional]
    if arguments.takes_rest:
        taken = {*arguments.positional, *named}
        rest = {name: _listed(each, arguments) for name, each in columns.items() if name.isidentifier()}
        further = [name for each in taken for name in GIVEN_BY_CALLERS.get(each, ())]
        # In this order: a column called `prompts` is not what TRL gives under that name.
        rest |= {name: _value(name, arguments, values, columns) for name in further}
        named |= {name: each for name, each in rest.items() if name not in taken}
    return positional, named


def _value(name: str, arguments: Arguments, values: Mapping[str, Any], columns: Mapping[str, Any]) -> Any:
    # A field of the data that is called so is what the function was written for: verl's extra_info, TRL's
    # ground_truth. What the policy has sampled never comes from the data, whatever columns they have.
    if name in columns and (SINGLE.get(name) or SEVERAL.get(name)) not in (RESPONSE, PROMPT, STATE):
        found = columns[name]
    elif name in SEVERAL:
        found = values[SEVERAL[name]]
    elif name in SINGLE:
        found = values[SINGLE[name]]
    else:
        raise LookupError(
            f"its parameter {name!r} is no field of the record, which has {', '.join(sorted(columns))}"
        )
    return _listed(found, arguments)


def _listed(value: Any, arguments: Arguments) -> Any:
    return [value] if arguments.is_of_several else value


def _is_known(name: str) -> bool:
    return name in SINGLE or name in SEVERAL


def _parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Return the parameters of a function; None for one that does not say."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def describe_faults(function: Callable[..., Any], columns: Collection[str]) -> Iterator[str]:
    """Yield what is wrong with the parameters of a reward function, in words."""
    unknown = unknown_parameters(function, columns)
    if unknown:
        yield (
            f"nothing is known to give its {'parameters' if len(unknown) > 1 else 'parameter'} "
            f"{', '.join(map(repr, unknown))}"
        )
    elif not takes_a_response(function):
        yield "it does not take the response"
