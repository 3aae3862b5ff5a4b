"""A toy environment with two tools of its own, whose calls it makes itself and rewards."""

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
    """Answers calls until a response has none, which is compared with the record's answer."""

    tools = [get_json_schema(tool) for tool in TOOLS.values()]  # noqa: RUF012 - as a person writes it

    def step(self, message: Mapping[str, Any]) -> Step:
        """Answer a response."""
        answers = []
        for call in message.get("tool_calls", []):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            said = TOOLS[name](**arguments)  # what this raises is told to the policy
            answers.append({"role": "tool", "name": name, "tool_call_id": call["id"], "content": str(said)})
        if answers:
            return Step(answers, reward=0.1, metrics={"calls": len(answers)})
        right = float(message["content"].strip() == self.record.answer)
        return Step(
            reward=right, accuracy=right, done=True
        )  # without accuracy, the sum of all rewards is reported as it
