"""Conversion of messages in other tools' formats (ShareGPT, HH transcripts, JSON text, content parts,
function calls) to ``role`` and ``content``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from megarl.errors import RecordError

ChatMessage: TypeAlias = Mapping[str, Any]
"""A message of a conversation: ``role`` and ``content``; ``tool_calls`` of an assistant; ``name`` and
``tool_call_id`` of a tool; and any further key that a chat template reads."""

ToolDeclaration: TypeAlias = Mapping[str, Any]
"""A tool as chat templates take it: ``{"type": "function", "function": {"name", "description",
"parameters"}}``, where the parameters are a JSON schema."""

ToolCall: TypeAlias = Mapping[str, Any]
"""A call of a tool: ``name`` and ``arguments``, by themselves or as the value of ``function``."""

_ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "model", "bot", "ai", "chatgpt"), "assistant"),
    **dict.fromkeys(("function", "observation", "function_response", "tool_response"), "tool"),
}
# Roles of messages whose content is a JSON list of calls.
_CALLS = frozenset({"function_call", "tool_call"})
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
# HH puts a blank line before each turn; without it, the words may occur inside a turn.
_SPEAKER = re.compile(r"(?:\A\n*|\n\n)(Human|Assistant):")
_PYTHON_LIST = re.compile(r"\s*\[\s*\{\s*'")


def as_messages(value: Any, key: str, origin: str) -> Any:
    """Convert stored messages to ``{"role", "content"}`` form. Any other value is returned unchanged.

    Args:
        value: a list of messages, its JSON text, or an HH transcript with ``Human:`` and ``Assistant:``.
        key: field that holds the messages, for error messages.
        origin: location of the record, for error messages.

    Raises:
        RecordError: a content part is not text, or a function call is not JSON; the message says how to fix
            it.
    """
    if isinstance(value, str):
        value = messages_in_json(value) or _messages_in_transcript(value) or value
    if not isinstance(value, list):
        return value
    pending: list[str] = []
    return [
        _message(each, key, place, origin, pending) if isinstance(each, Mapping) else each
        for place, each in enumerate(value)
    ]


def as_prompt(value: Any, key: str, origin: str) -> Any:
    """Convert a stored prompt to messages, or return it as text.

    A text is parsed as messages only if it can hardly be meant as text: JSON of messages, or an HH transcript
    that ends with ``Assistant:``.
    """
    if not isinstance(value, str):
        return as_messages(value, key, origin)
    found = messages_in_json(value)
    if found is None and value.startswith("\n\nHuman:") and value.rstrip().endswith("\n\nAssistant:"):
        # Drop the empty turn behind the final "Assistant:", which the response will fill.
        found = (_messages_in_transcript(value) or [])[:-1]
    return as_messages(found, key, origin) if found else value


def messages_in_json(text: str) -> list[Any] | None:
    """Parse a text that is a JSON list of messages. Return None for any other text."""
    if not text.lstrip().startswith("["):
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if are_messages(found) else None


def are_messages(value: Any) -> bool:
    """Return whether a value is a non-empty list of objects that all have a role."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(each, Mapping) and role_of(each) is not None for each in value)
    )


def role_of(message: ChatMessage) -> str | None:
    """Return the role of a stored message under its common name, or None if it has no role."""
    given = message.get("role") if message.get("role") is not None else message.get("from")
    if not isinstance(given, str):
        return None
    name = given.strip().lower()
    return "assistant" if name in _CALLS else _ROLES.get(name, given)


def advice_for_text(text: str) -> str:
    """Return the fix for an error message about a text in which no messages were found."""
    if _PYTHON_LIST.match(text):
        return "the text is Python's print of a list, not JSON: write json.dumps(messages)"
    return (
        "write [{'role': 'user', 'content': '...'}, ...], also as JSON text; an answer that is plain "
        "text needs prompt_key as well"
    )


def _messages_in_transcript(text: str) -> list[dict[str, str]] | None:
    begin, *parts = _SPEAKER.split(text)
    if begin.strip() or parts[:1] != ["Human"] or "Assistant" not in parts[::2]:
        return None
    return [
        {"role": _ROLES[role.lower()], "content": said.strip()}
        for role, said in zip(parts[::2], parts[1::2], strict=True)
    ]


def _message(given: ChatMessage, key: str, place: int, origin: str, pending: list[str]) -> dict[str, Any]:
    """Convert one message. ``pending`` holds the ids of converted calls whose results have not come yet."""
    where = f"{origin}: {key}[{place}]"
    message = dict(given)
    role = role_of(message)
    # ShareGPT names the fields of a message from and value.
    if message.get("role") is None and message.get("from") is not None:
        message["role"] = message.pop("from")
    if message.get("content") is None and message.get("value") is not None:
        message["content"] = message.pop("value")
    if isinstance(message.get("content"), list):
        message["content"] = _text_of_parts(message["content"], where)
    # The later check of roles rejects the message and reports its position.
    if role is None:
        return message
    if message.get("tool_calls"):
        message["tool_calls"] = _objects(message["tool_calls"], where)
    calls: Any = message.pop("function_call", None)
    if message["role"].strip().lower() in _CALLS:
        calls, message["content"] = message.get("content"), None
        if isinstance(calls, str):
            calls = _parsed_calls(calls, where)
    message["role"] = role
    if isinstance(calls, Mapping):
        calls = [calls] if calls.get("name") is not None else []
    if calls and not message.get("tool_calls"):
        message["tool_calls"] = []
        for number, call in enumerate(calls):
            message["tool_calls"].append(_tool_call(call, place, number, where))
            pending.append(message["tool_calls"][-1]["id"])
    elif role == "tool" and pending:
        # In formats without ids, results come in the order of the calls.
        message.setdefault("tool_call_id", pending.pop(0))
    return message


def _objects(calls: Any, where: str) -> list[Any]:
    """Return the tool calls of a message as objects. The list and each call may be JSON text."""
    calls = _parsed_calls(calls, where) if isinstance(calls, str) else calls
    if isinstance(calls, Mapping):
        calls = [calls]
    if not isinstance(calls, list | None):
        raise _no_call(calls, where)
    found: list[Any] = []
    for call in calls or ():
        found.append(_parsed_calls(call, where) if isinstance(call, str) else call)
        if not isinstance(found[-1], Mapping):
            raise _no_call(found[-1], where)
    return found


def _parsed_calls(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _no_call(text, where) from error


def _tool_call(call: Any, place: int, number: int, where: str) -> dict[str, Any]:
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        raise _no_call(call, where)
    function = {"name": call["name"], "arguments": call.get("arguments", {})}
    # Mistral's templates require ids of exactly nine letters and digits.
    return {"id": f"c{place:05d}{number:03d}", "type": "function", "function": function}


def _no_call(call: Any, where: str) -> RecordError:
    return RecordError(
        f"{where}: {repr(call)[:80]} is no function call. Fix: write {{'name': '...', 'arguments': "
        "{...}}, as JSON where it is text"
    )


def _text_of_parts(parts: Sequence[Any], where: str) -> str:
    texts = []
    for part in parts:
        is_text = not isinstance(part, Mapping) or part.get("type", "text") in _TEXT_PARTS
        text = part.get("text") if isinstance(part, Mapping) else part
        if not is_text or not isinstance(text, str):
            raise RecordError(
                f"{where} has the content part {repr(part)[:60]}, which is no text, and only text is read. "
                "Fix: write the content as "
                "text, or leave such records out with data.on_bad_record=skip"
            )
        texts.append(text)
    return "".join(texts)
