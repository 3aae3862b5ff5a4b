"""Kinds of conversations that every chat template is tried with. Words of one message are in no other one,
but where said."""

from __future__ import annotations

from typing import Any

from megarl.data.records import Record

Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str | None, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def tool(text: str, identifier: str = "call00001") -> Message:
    return {"role": "tool", "content": text, "tool_call_id": identifier}


def call(name: str, arguments: Any, identifier: str = "call00001") -> Message:
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


TOOLS: tuple[Message, ...] = (
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Look up a temperature.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    },
)
_THINKS = "<think>\nadd both\n</think>\n\n"

CONVERSATIONS: dict[str, list[Message]] = {
    "one turn": [user("Ask one."), assistant("Said two.")],
    "three turns": [
        *(user("Ask one."), assistant("Said two.")),
        *(user("Want further."), assistant("Told st more.")),
        *(user("Stop now."), assistant("Done.")),
    ],
    "system": [{"role": "system", "content": "Be short."}, user("Ask one."), assistant("Said two.")],
    "reasoning in the content": [user("2+2?"), assistant(f"{_THINKS}Four.")],
    "reasoning in a field": [
        user("2+2?"),
        assistant("Four.", reasoning_content="add both", thinking="add both"),
    ],
    "reasoning of two turns": [
        *(user("2+2?"), assistant(f"{_THINKS}Four.")),
        *(user("3+3?"), assistant("<think>\nsum again\n</think>\n\nSix.")),
    ],
    "call without text": [
        *(user("How warm?"), assistant(None, tool_calls=[call("weather", '{"city": "Rome"}')])),
        *(tool("20"), assistant("It is mild.")),
    ],
    "two calls": [
        user("Warm, and which hour?"),
        assistant(
            "",
            tool_calls=[
                call("weather", {"city": "Rome"}),
                call("clock", {"zone": "UTC", "hours": 24}, "call00002"),
            ],
        ),
        *(tool("20"), tool("12:00", "call00002"), assistant("Mild at noon.")),
    ],
    "ends with a call": [
        user("How warm?"),
        assistant("Let me see.", tool_calls=[call("weather", {"city": "Rome"})]),
    ],
    # All four messages are the same words.
    "equal texts": [user("Yes."), assistant("Yes."), user("Yes."), assistant("Yes.")],
    "white space": [
        *(user("  Ask one.\n\n"), assistant("\n\n  Said two. \n")),
        *(user("Ünïcode 你好?"), assistant("Ja 世界 <b>.\n\n- x\n\n")),
    ],
}

NO_TOOLS = frozenset({"call without text", "two calls", "ends with a call"})
NO_REASONING_FIELD = frozenset({"reasoning in a field"})
DROPS_REASONING = frozenset({"reasoning in the content", "reasoning in a field", "reasoning of two turns"})

REFUSED: dict[str, frozenset[str]] = {
    "chatml": NO_TOOLS | NO_REASONING_FIELD,
    "qwen2.5": NO_REASONING_FIELD,
    # one call a turn, and no text beside it
    "llama3.1": NO_REASONING_FIELD | {"two calls", "ends with a call"},
    "llama3.2": NO_REASONING_FIELD | {"two calls", "ends with a call"},
    "gpt-oss": frozenset({"two calls"}),
    "deepseek-v3": NO_REASONING_FIELD,
    "deepseek-r1": DROPS_REASONING,
    "gemma2": NO_TOOLS | NO_REASONING_FIELD | {"system"},
    "gemma3": NO_TOOLS | NO_REASONING_FIELD,
    "phi-3.5": NO_TOOLS | NO_REASONING_FIELD,
    "phi-4": NO_TOOLS | NO_REASONING_FIELD,
    "mistral-v3": NO_REASONING_FIELD | {"ends with a call"},
    "mistral-v0.1": NO_TOOLS | NO_REASONING_FIELD | {"system"},
    "nemotron": NO_TOOLS | DROPS_REASONING,
    "smollm3": NO_TOOLS | NO_REASONING_FIELD,
    "zephyr": NO_TOOLS | NO_REASONING_FIELD,
    "vicuna": NO_TOOLS | NO_REASONING_FIELD,
    # Its calls are named by their ids, "functions.weather:0", which these are not.
    "kimi-k2": NO_TOOLS | NO_REASONING_FIELD,
    "llama2": NO_TOOLS | NO_REASONING_FIELD,
    "olmo2": NO_TOOLS | NO_REASONING_FIELD,
    "command-r": NO_TOOLS | NO_REASONING_FIELD,
    "granite": NO_REASONING_FIELD | {"ends with a call"},
    "deepseek-v3.1": DROPS_REASONING,
    # no text beside a call
    "hermes": NO_REASONING_FIELD | {"ends with a call"},
    "command-a": NO_REASONING_FIELD,
    "ernie": NO_TOOLS | NO_REASONING_FIELD,
    "chatglm": NO_TOOLS | NO_REASONING_FIELD,
    "plain-text": NO_TOOLS | NO_REASONING_FIELD,
}
"""Kinds that a template does not write whole, or cannot be applied to."""


def record_of(messages: list[Message], tools: tuple[Message, ...] = ()) -> Record:
    """Return a conversation as the reader of a data file makes it."""
    last = messages[-1]
    return Record(tuple(messages[:-1]), last["content"] or "", "row 1", last, tools)
