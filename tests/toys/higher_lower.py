"""A toy environment as NeMo-RL has them: a number is to be guessed, and each guess is told whether it was too
high or too low."""

from __future__ import annotations

from typing import Any

import torch

from megarl.rollout.nemo_rl import EnvironmentInterface, EnvironmentReturn


class HigherLower(EnvironmentInterface[dict[str, Any]]):
    """Rewards a right guess by 1 less a tenth for each guess before; ``env.options.most`` bounds the
    guesses."""

    def __init__(self, cfg: dict[str, Any]) -> None:
        self.most = cfg["most"]
        self.batches: list[int] = []

    def step(
        self, message_log_batch: list[list[dict[str, str]]], metadata: list[dict[str, Any]]
    ) -> EnvironmentReturn[dict[str, Any]]:
        """Compare the last message of each conversation with its number."""
        self.batches.append(len(metadata))
        observations, following, rewards, ends = [], [], [], []
        for log, known in zip(message_log_batch, metadata, strict=True):
            said, wanted = log[-1]["content"].strip(), int(known["ground_truth"])
            guesses = known.get("guesses", 0) + 1
            guess = int(said) if said.isdecimal() else -1
            observations.append({"role": "environment", "content": "higher" if guess < wanted else "lower"})
            rewards.append(1.0 - (guesses - 1) / 10 if guess == wanted else 0.0)
            ends.append(guess == wanted or guesses == self.most)
            following.append({**known, "guesses": guesses})
        stops: list[list[str] | None] = [["\n"] if known["guesses"] == 1 else None for known in following]
        return EnvironmentReturn(
            observations, following, stops, torch.tensor(rewards), torch.tensor(ends), [None] * len(ends)
        )  # type: ignore[arg-type]

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Part of the interface."""
        return batch, {}
