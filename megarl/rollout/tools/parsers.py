"""Parsers of the tool calls in texts that models write. A parser has the name that vLLM has for its
format."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from megarl.config.environments import TOOL_PARSERS

Calls: TypeAlias = list[dict[str, Any]]
"""Calls in the form of messages: ``{"id", "type": "function", "function": {"name", "arguments": {...}}}``."""

Found: TypeAlias = Iterator[tuple[str, Any]]
"""Names and arguments; the arguments are an object or its JSON text."""


class BadCallError(ValueError):
    """A text begins a call that cannot be read; the message is shown to the policy."""


_HERMES = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
# Of several marks before one ">", and of several recipients before one "<", the first decides. The atomic
# groups try no other, so that a policy's text of any length takes time in proportion to its length.
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


def _hermes(text: str) -> Found:
    for body, end in _HERMES.findall(text):
        yield _named(_object(_closed(body, end)), "arguments")


def _qwen3_coder(text: str, texts: Collection[tuple[str, str]] = ()) -> Found:
    """Read calls whose values are not quoted; ``texts`` has the functions and parameters that take texts."""
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
    # A response may be a JSON object without being a call.
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
            # Some versions write the call's id behind the name.
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


# For each form, the function that finds calls, the pattern of calls in a text, and whether they are written
# with special tokens; the pattern's first group then begins where the calls begin.
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
    name: str | None, tools: Iterable[Mapping[str, Any]] = ()
) -> Callable[[str, Sequence[str]], tuple[str, Calls]]:
    """Return a parser of responses. It takes a response and a sequence, whose first element is the response's
    text with special tokens, read only if the format needs it. It returns the text without the calls, and the
    calls. With None the parser finds no calls.

    The parser raises ``BadCallError`` for a call that cannot be read.

    Args:
        name: name of the format.
        tools: descriptions of the tools. A format that does not quote values needs them to tell the text
            ``42`` from the number.
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
        # If calls are written with special tokens, the response, which lacks these, does not show where a
        # call begins. The content is then what precedes the calls in the full text.
        first = marks.search(text) if is_special else None
        return (text[: first.start(1)] if first else marks.sub("", response)).strip(), calls

    return parse


def _parameters_of_text(tools: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for tool in tools:
        function = tool.get("function", {})
        for parameter, kind in function.get("parameters", {}).get("properties", {}).items():
            if _takes_text(kind):
                yield function["name"], parameter


def _takes_text(kind: Any) -> bool:
    """Return whether the schema of a parameter allows a text."""
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
    # Use an id of nine letters and digits, which Mistral's chat templates require.
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
    """Yield consecutive JSON objects that are separated by white space or semicolons."""
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
    """Convert an unquoted value: from JSON if it is valid JSON, from one of Python's words, else keep the
    text."""
    if text in _WORDS:
        return _WORDS[text]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
