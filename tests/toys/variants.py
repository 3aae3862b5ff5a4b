"""Toy variants of GRPO, each named in a configuration: an estimator of advantages, a loss, and an
algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megarl.algorithms.advantages import AdvantageInputs
from megarl.algorithms.grpo import GRPO
from megarl.algorithms.interfaces import LossInputType, LossType


def above_the_others(inputs: AdvantageInputs) -> Tensor:
    """The reward of a response less the mean of the others of its prompt, times ``options.scale``; [B]."""
    advantages = torch.zeros_like(inputs.net_rewards)
    for row, group in enumerate(inputs.groups):
        others = (inputs.groups == group) & (inputs.compared != 0)
        others[row] = False
        if others.any():
            advantages[row] = inputs.net_rewards[row] - inputs.net_rewards[others].mean()
    return advantages * inputs.settings["adv_estimator"]["options"].get("scale", 1.0)


class PlainGradient:
    """Minus the log-probabilities of sampled tokens times their advantages, over the tokens of the global
    batch (REINFORCE)."""

    loss_type, input_type = LossType.TOKEN_LEVEL, LossInputType.LOGPROB
    metric_reductions: Mapping[str, Any] = {}

    def __init__(self, section: Mapping[str, Any]) -> None:
        self.scale = section["options"].get("scale", 1.0)

    def __call__(
        self, data: Any, global_valid_seqs: Any, global_valid_toks: Any, next_token_logprobs: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Return loss and metrics of one micro-batch, see ``LossFunction``."""
        mask = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(1)
        loss = (
            -self.scale * (next_token_logprobs * data["advantages"][:, 1:] * mask).sum() / global_valid_toks
        )
        return loss, {"loss": loss.detach()}


class OnlyBetter(GRPO):
    """GRPO that learns from responses better than the others alone."""

    def advantages(self, samples: Any, batch: Any) -> tuple[Tensor, dict[str, float]]:
        """As GRPO's, without those below 0."""
        advantages, metrics = super().advantages(samples, batch)
        return advantages.clamp(min=0), metrics
