"""A toy environment: the closer a response comes to the length of the reference answer, the better; empty
ones are masked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.rollout.environment import EnvironmentReturn, Turn


class AsLong:
    """Rewards 1 / (1 + difference of the lengths in characters); ``env.options.farthest`` bounds the
    difference."""

    def __init__(self, section: Mapping[str, Any]) -> None:
        self.farthest = section["options"]["farthest"]

    def step(self, turn: Turn) -> EnvironmentReturn:
        """Rewards for a batch of responses."""
        pairs = zip(turn.responses, turn.records, strict=True)
        differences = [
            min(abs(len(response) - len(record.answer)), self.farthest) for response, record in pairs
        ]
        masked = [not response for response in turn.responses]
        rewards = [1.0 / (1.0 + difference) for difference in differences]
        return EnvironmentReturn(rewards, [True] * len(rewards), masked, metrics={"empty": sum(masked)})

    def fault_of_reference(self, answer: str) -> str | None:
        """A reference answer has to be a number."""
        return None if answer.isdecimal() else "it is no number"

    def close(self) -> None:
        """Nothing is held."""
