"""A toy environment of several turns: the policy guesses a number, and hears whether it is larger or
smaller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.rollout.message_env import MessageEnv, Step


class Guess(MessageEnv):
    """Rewards 1 for the number of the record, and 0.1 for each guess that is at most ``env.options.near``
    away."""

    def step(self, message: Mapping[str, Any]) -> Step:
        """Compare a response with the number."""
        number = int(self.record.answer)
        try:
            guess = int(message["content"])
        except ValueError:
            return Step("?", metrics={"no_numbers": 1})
        if guess == number:
            return Step(reward=1.0, done=True)
        near = abs(guess - number) <= self.section["options"]["near"]
        return Step("larger" if guess < number else "smaller", reward=0.1 * near, metrics={"near": near})

    @staticmethod
    def fault_of_reference(answer: str) -> str | None:
        """A reference answer has to be a whole number."""
        return None if answer.lstrip("-").isdecimal() else "it is no whole number"
