"""Tools that the policy may call: the schema of each, which the chat template shows, and the function that
runs."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from megarl.config.environments import EnvConfig, ToolConfig, own_function, tool_sections
from megarl.errors import ConfigError, Violation
from megarl.rollout.rewards import awaited
from megarl.rollout.tools.calculator import calculate
from megarl.rollout.tools.http import post
from megarl.rollout.tools.search import DocumentIndex

if TYPE_CHECKING:
    from megarl.data.messages import ToolDeclaration

Call: TypeAlias = Callable[..., Any]
"""Function that is called with the policy's arguments as keyword arguments. Its result is converted to text.
An exception is reported to the policy as a failed call."""

# Maximum characters of a tool's result that the policy receives; longer results are truncated with a note.
_LONGEST = 100_000


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the policy may call.

    Attributes:
        name: name by which the policy calls the tool.
        schema: JSON schema in OpenAI's function format, which the chat template shows.
        begin: creates the callable for one conversation. The callable may have a method ``close``.
    """

    name: str
    schema: ToolDeclaration
    begin: Callable[[], Call]


def tools_of(section: EnvConfig, key: str = "env") -> list[Tool]:
    """Build the tools that an environment's section lists.

    Raises:
        ConfigError: a tool cannot be built.
    """
    return [_tool(name, inner, f"{key}.tools.{name}") for name, inner in tool_sections(section).items()]


def _tool(name: str, section: ToolConfig, key: str) -> Tool:
    kind = section["tool"]
    if kind not in _BUILT_IN:
        return _own(name, own_function(kind, f"{key}.tool"), section, f"{key}.tool")
    description, parameters, make = _BUILT_IN[kind]
    properties = {
        parameter: {"type": "string", "description": about} for parameter, about in parameters.items()
    }
    return Tool(
        name,
        _schema(name, section.get("description") or description, properties, list(properties)),
        make(section, key),
    )


def _schema(
    name: str, description: str, properties: Mapping[str, Any], required: Sequence[str]
) -> ToolDeclaration:
    parameters = {"type": "object", "properties": dict(properties), "required": list(required)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


def _own(name: str, function: Callable[..., Any], section: ToolConfig, key: str) -> Tool:
    """Build a tool from a user-defined function. transformers derives the schema from its annotations and
    docstring.

    Raises:
        ConfigError: no schema can be derived.
    """
    from transformers.utils import get_json_schema

    try:
        found = get_json_schema(function)
    except Exception as error:
        fix = "annotate its parameters, and describe each in the docstring under Args:"
        raise ConfigError(
            [Violation(key, section["tool"], f"its docstring does not say what the tool takes: {error}", fix)]
        ) from error
    described = {**found["function"], "name": name}
    if section.get("description"):
        described["description"] = section["description"]
    return Tool(name, {"type": "function", "function": described}, lambda: function)


def _python(section: ToolConfig, key: str) -> Callable[[], Call]:
    from megarl.rollout.tools.python import Python

    return Python.maker(section, key)


def _search(section: ToolConfig, key: str) -> Callable[[], Call]:
    index = DocumentIndex(section["documents"], f"{key}.documents")
    return lambda: functools.partial(index.search, count=section.get("results", 3))


# Built-in tools: description, parameters (all strings) with their descriptions, and the factory of
# ``Tool.begin``.
_BUILT_IN: Mapping[str, tuple[str, Mapping[str, str], Callable[[ToolConfig, str], Callable[[], Call]]]] = {
    "calculator": (
        "Evaluate an arithmetic expression.",
        {"expression": "numbers, parentheses and the operators + - * / // % **"},
        lambda section, key: lambda: calculate,
    ),
    "python": (
        "Run Python code and return what it prints. Variables and functions stay for later calls.",
        {"code": "the code; the value of a last expression is printed"},
        _python,
    ),
    "search": ("Search a collection of documents.", {"query": "the words to look for"}, _search),
    "http": (
        "Ask a service.",
        {"query": "what is asked"},
        lambda section, key: lambda: functools.partial(post, section["url"], section.get("timeout_s", 10.0)),
    ),
}


class Toolbox:
    """The tools of one conversation. Each is created at its first call."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._begun: dict[str, Call] = {}

    def fault_of(self, name: str, arguments: Mapping[str, Any]) -> str | None:
        """Return an error text for the policy if a call is invalid (unknown tool, missing or unknown
        arguments), else None."""
        if name not in self._tools:
            return f"there is no tool {name!r}; the tools are {', '.join(self._tools)}"
        parameters = self._tools[name].schema["function"]["parameters"]
        properties = parameters.get("properties", {})
        if not {*parameters.get("required", ())} <= arguments.keys() <= properties.keys():
            return (
                f"{name} takes {', '.join(properties) or 'no arguments'}, not "
                f"{', '.join(arguments) or 'none'}"
            )
        return None

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool and return its result as text. Exceptions of the tool propagate."""
        if name not in self._begun:
            self._begun[name] = self._tools[name].begin()
        found = awaited(self._begun[name](**arguments))
        text = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str)
        return (
            text
            if len(text) <= _LONGEST
            else f"{text[:_LONGEST]}\n[... {len(text) - _LONGEST:,} characters left out]"
        )

    def close(self) -> None:
        """Close the tools that were called."""
        with contextlib.ExitStack() as stack:
            for call in self._begun.values():
                if inspect.ismethod(getattr(call, "close", None)):
                    stack.callback(call.close)  # type: ignore[attr-defined]
