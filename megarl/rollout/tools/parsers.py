"""Parsers that extract tool calls from responses. Each has the name of vLLM's parser for the same format."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from megarl.config.environments import TOOL_PARSERS

Calls: TypeAlias = list[dict[str, Any]]
"""Parsed tool calls in OpenAI's message format: ``{"id", "type": "function", "function": {"name",
"arguments": {...}}}``."""

Found: TypeAlias = Iterator[tuple[str, Any]]
"""Pairs of a function name and its arguments, which are an object or its JSON text."""


class BadCallError(ValueError):
    """A response contains a tool call that cannot be parsed. The policy sees the error text."""


_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
# The first of several marks before ">" counts, and likewise the first of several recipients before "<".
# Atomic groups prevent backtracking to the others, which would take quadratic time on long responses.
_TO_MARK = r"(?<![^>\n])(?>[^>\n]*?"
_FUNCTION = re.compile(_TO_MARK + r"<function=)([^>\n]++)>(.*?)(</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(_TO_MARK + r"<parameter=)([^>\n]++)>\n?(.*?)\n?(</parameter>|\Z)", re.DOTALL)
_MISTRAL = re.compile(r"(\[TOOL_CALLS\])\s*(.*)", re.DOTALL)
_CALLS, _BEGIN, _END, _SEPARATOR = (
    f"<\uff5ctool\u2581{name}\uff5c>"
    for name in ("calls\u2581begin", "call\u2581begin", "call\u2581end", "sep")
)
"""Special tokens of DeepSeek."""
_DEEPSEEK = re.compile(rf"{_BEGIN}(.*?)({_END}|\Z)", re.DOTALL)
_FENCED = re.compile(rf"(?:function{_SEPARATOR})?([^\n<]++)(?:\n```json\n|{_SEPARATOR})")
_HARMONY = re.compile(
    r"(?:\A|<)(?>[^<]*?(to=functions\.)([\w.-]++))[^<]*+(?:<\|channel\|>\w++[^<]*+)?+"
    r"(?:<\|constrain\|>\w++)?+<\|message\|>(.*?)(?=<\|call\|>|\Z)",
    re.DOTALL,
)

if TYPE_CHECKING:
    from megarl.data.messages import ToolDeclaration


def _hermes(text: str) -> Found:
    for body, end in _HERMES.findall(text):
        yield _named(_object(_closed(body, end)), "arguments")


def _qwen3_coder(text: str, texts: Collection[tuple[str, str]] = ()) -> Found:
    """Parse calls whose values are unquoted. ``texts`` holds the (function, parameter) pairs whose values
    stay strings."""
    for body, end in _HERMES.findall(text):
        found = _FUNCTION.search(_closed(body, end))
        if found is None or not found[3]:
            raise BadCallError("<function=NAME>...</function> is expected inside <tool_call>")
        function, arguments = found[1].strip(), {}
        for name, value, closed in _PARAMETER.findall(found[2]):
            text_of_value, parameter = _closed(value, closed), name.strip()
            is_text = (function, parameter) in texts
            arguments[parameter] = text_of_value if is_text else _plain(text_of_value)
        yield function, arguments


def _llama3(text: str) -> Found:
    body = text.replace("<|python_tag|>", "").replace("<|eom_id|>", "").replace("<|eot_id|>", "").strip()
    # A JSON object without a name may be the response itself, not a call.
    if not body.startswith("{") or '"name"' not in body:
        return
    for part in _objects(body):
        yield _named(part, "parameters")


def _mistral(text: str) -> Found:
    found = _MISTRAL.search(text)
    if found is None:
        return
    body = found[2].replace("</s>", "").strip()
    if "[ARGS]" in body:
        for part in filter(None, body.split("[TOOL_CALLS]")):
            name, _, arguments = part.partition("[ARGS]")
            # Some versions of Mistral's template write the call's id after the name.
            yield name.partition("[CALL_ID]")[0].strip(), arguments
        return
    calls = _json(body)
    for call in calls if isinstance(calls, list) else [calls]:
        yield _named(call, "arguments")


def _deepseek(text: str) -> Found:
    for body, end in _DEEPSEEK.findall(text):
        found = _FENCED.match(_closed(body, end))
        if found is None:
            raise BadCallError("the name of a function and its arguments are expected in a call")
        yield found[1].strip(), body[found.end() :].rstrip().removesuffix("\n```")


def _gpt_oss(text: str) -> Found:
    for _, name, arguments in _HARMONY.findall(text):
        yield name, arguments


# For each format: the function that finds calls, the pattern of a call, and whether calls are written with
# special tokens. In the latter case the pattern's first group starts where the calls start.
_FORMS: Mapping[str, tuple[Callable[[str], Found], re.Pattern[str], bool]] = {
    "hermes": (_hermes, _HERMES, False),
    "qwen3_coder": (_qwen3_coder, _HERMES, False),
    "llama3": (_llama3, re.compile(r"\A\s*(\{).*", re.DOTALL), True),
    "mistral": (_mistral, _MISTRAL, True),
    "deepseek": (_deepseek, re.compile(f"({_CALLS}).*", re.DOTALL), True),
    "gpt-oss": (_gpt_oss, _HARMONY, True),
}
assert tuple(_FORMS) == TOOL_PARSERS


def parser_of(
    name: str | None, tools: Iterable[ToolDeclaration] = ()
) -> Callable[[str, Sequence[str]], tuple[str, Calls]]:
    """Return a function that parses the tool calls of a response.

    The returned function takes the response, and a sequence with the same response including special tokens
    (read only if the format writes calls with special tokens). It returns the text without the calls, and the
    calls. It raises ``BadCallError`` for a call that cannot be parsed.

    Args:
        name: name of the format. None returns a parser that finds no calls.
        tools: schemas of the tools. Formats with unquoted values need them to tell the string ``42`` from the
            number.
    """
    if name is None:
        return lambda response, full: (response, [])
    find, marks, is_special = _FORMS[name]
    if find is _qwen3_coder:
        find = functools.partial(_qwen3_coder, texts=set(_parameters_of_text(tools)))

    def parse(response: str, full: Sequence[str]) -> tuple[str, Calls]:
        text = full[0] if is_special and full else response
        found = list(find(text))
        calls = [_call(number, *each) for number, each in enumerate(found)]
        if not calls:
            return response, calls
        # The response text lacks special tokens, so it does not show where such calls start. Use the text
        # before the calls in the full text instead.
        first = marks.search(text) if is_special else None
        return (text[: first.start(1)] if first else marks.sub("", response)).strip(), calls

    return parse


def _parameters_of_text(tools: Iterable[ToolDeclaration]) -> Iterator[tuple[str, str]]:
    for tool in tools:
        function = tool.get("function", {})
        for parameter, kind in function.get("parameters", {}).get("properties", {}).items():
            if _takes_text(kind):
                yield function["name"], parameter


def _takes_text(kind: Any) -> bool:
    """Return whether a parameter's JSON schema allows a string."""
    if not isinstance(kind, Mapping):
        return False
    types = kind.get("type")
    return "string" in (types if isinstance(types, list) else [types]) or any(
        map(_takes_text, kind.get("anyOf", ()))
    )


def _call(number: int, name: Any, arguments: Any) -> dict[str, Any]:
    given = _object(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(name, str) or not name:
        raise BadCallError(f"the name of a function is expected, not {repr(name)[:40]}")
    if not isinstance(given, dict):
        raise BadCallError(f"the arguments of {name} have to be a JSON object")
    # Mistral's chat templates require ids of exactly nine letters and digits.
    return {"id": f"call{number:05d}", "type": "function", "function": {"name": name, "arguments": given}}


def _named(call: Any, key: str) -> tuple[Any, Any]:
    if not isinstance(call, dict) or "name" not in call:
        raise BadCallError(f'a JSON object with "name" and "{key}" is expected')
    return call["name"], call.get(key, call.get("arguments", call.get("parameters", {})))


def _closed(body: str, end: str) -> str:
    if not end:
        raise BadCallError("it does not end")
    return body


def _object(text: str) -> Any:
    found = _json(text.strip() or "{}")
    if not isinstance(found, dict):
        raise BadCallError("a JSON object is expected")
    return found


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadCallError(f"no JSON: {error}") from error


def _objects(text: str) -> Iterator[Any]:
    """Yield the JSON objects of a text in which they follow each other, separated by white space or
    semicolons."""
    decoder = json.JSONDecoder()
    while text:
        try:
            found, end = decoder.raw_decode(text)
        except (ValueError, RecursionError) as error:
            raise BadCallError(f"no JSON: {error}") from error
        yield found
        text = text[end:].lstrip(" \n;")


_WORDS = {"True": True, "False": False, "None": None}


def _plain(text: str) -> Any:
    """Convert an unquoted value: parse ``True``, ``False``, ``None`` and valid JSON, and keep any other
    text."""
    if text in _WORDS:
        return _WORDS[text]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
