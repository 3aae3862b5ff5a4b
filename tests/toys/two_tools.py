"""A toy environment that runs the calls of its two tools and rewards each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers.utils import get_json_schema

from megarl.rollout.message_env import MessageEnv, Step


def product(left: int, right: int) -> int:
    """Multiply two numbers.

    Args:
        left: a number
        right: another number
    """
    return left * right


def length(text: str) -> int:
    """Count the characters of a text.

    Args:
        text: the text
    """
    return len(text)


TOOLS: dict[str, Callable[..., int]] = {"product": product, "length": length}


class TwoTools(MessageEnv):
    """Run tool calls until a response has none, and compare that response with the record's answer."""

    tools = [get_json_schema(tool) for tool in TOOLS.values()]  # noqa: RUF012 - as a person writes it

    def step(self, message: Mapping[str, Any]) -> Step:
        """Return the results of the response's tool calls, or the final reward."""
        results = []
        for call in message.get("tool_calls", []):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            result = TOOLS[name](**arguments)  # an exception becomes a message to the policy
            results.append({"role": "tool", "name": name, "tool_call_id": call["id"], "content": str(result)})
        if results:
            return Step(results, reward=0.1, metrics={"calls": len(results)})
        correct = float(message["content"].strip() == self.record.answer)
        # without accuracy, the sum of all rewards is reported as the accuracy
        return Step(reward=correct, accuracy=correct, done=True)
