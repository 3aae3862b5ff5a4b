"""What a driver makes of a step before its workers train on it: advantages of rewards, of values, or of a teacher's log-probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from megarl.algorithms.distillation import Distillation
from megarl.algorithms.grpo import GRPO
from megarl.algorithms.loss_functions import ClippedPGLossFn
from megarl.algorithms.ppo import PPO
from megarl.parity.batches import ANSWERS_A_PROMPT, REWARDS, calls_of
from megarl.parity.case import Case
from megarl.parity.losses import policy_gradient_settings
from megarl.parity.options import numbers_of
from megarl.parity.reference_advantages import PART_WEIGHTS


def with_signals_made(case: Case, batch: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """The batch of a case with what a driver makes of its rewards, call by call, in the place of what the reference has made."""
    if case.advantages_kind == "given":
        return batch
    made = [_made(case, data) for data in calls_of(case, batch)]
    columns = {name: torch.cat([of_call[name] for of_call in made]) for name in made[0]}
    return {**{name: values for name, values in batch.items() if name not in REWARDS}, **columns}


def _made(case: Case, data: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    batch, algorithm = dict(data), _algorithm(case)
    if case.advantages_kind == "teacher":
        return {"advantages": algorithm._advantages(batch, data["teacher_logprobs"])[0]}
    advantages, _ = algorithm._advantages(data, batch)
    if case.loss_kind == "value":
        return {name: batch[name] for name in ("prev_values", "returns")}
    return {"advantages": advantages.expand_as(data["token_mask"])}


def _algorithm(case: Case) -> Any:
    """The algorithm without its models: as far as it makes advantages."""
    kind, options = case.advantages_kind, case.advantages_options
    algorithm: Any = object.__new__({"gae": PPO, "teacher": Distillation}.get(kind, GRPO))
    low, high = numbers_of(case.advantages, "clip") if "clip" in options else (None, None)
    algorithm.config = {
        "num_generations_per_prompt": ANSWERS_A_PROMPT,
        "adv_estimator": {
            "name": "reinforce_plus_plus" if kind.startswith("reinforce") else kind,
            "minus_baseline": kind == "reinforce-baseline",
        },
        "use_leave_one_out_baseline": "plain" not in options,
        "normalize_rewards": "raw" not in options,
        "std": "sample" if "sample" in options else "population",
        "advantage_clip_low": low,
        "advantage_clip_high": high,
    }
    if kind == "gae":
        (gamma,), (trace,) = (numbers_of(case.advantages, name) for name in ("gamma", "lambda"))
        own = {"gae_gamma": gamma, "gae_lambda": trace, "normalize_advantages": "white" in options}
        algorithm.config |= {**own, "bootstrap_truncated": "bootstrap" in options}
    algorithm.reward_weights = PART_WEIGHTS
    # of a critic's loss there is an actor's beside it
    actor = case if case.loss_kind == "pg" else replace(case, loss="pg")
    algorithm.loss_fn = ClippedPGLossFn(policy_gradient_settings(actor))
    return algorithm
