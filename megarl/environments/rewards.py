"""Verifiable rewards: 1 for a right answer, 0 for a wrong one, by comparing texts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from megarl.environments.mathematics import JudgementTimeoutError, fault_of_reference, math_verify
from megarl.errors import ConfigError, Violation

logger = logging.getLogger(__name__)

RewardFunction = Callable[[str, str], float]
"""(response, reference answer) -> reward."""


def exact_match(response: str, answer: str, strip: bool = True) -> float:
    """1.0 when the texts are equal; with ``strip``, white space at both ends does not count."""
    return float(response.strip() == answer.strip()) if strip else float(response == answer)


REWARDS: Mapping[str, RewardFunction] = MappingProxyType({"exact_match": exact_match, "math_verify": math_verify})
"""All rewards by the name that ``env.reward`` takes."""

FAULT_OF_REFERENCE: Mapping[str, Callable[[str], str | None]] = MappingProxyType({"math_verify": fault_of_reference})
"""By the name of a reward, what says why a reference answer is of no use to it; None for one that is."""


@dataclass(frozen=True, slots=True)
class Rewards:
    """Rewards of a batch.

    Attributes:
        values: [B] float32.
        timed_out: how many answers could not be judged in time; they have 0.
    """

    values: Tensor
    timed_out: int


def get_reward(name: str, strip: bool = True) -> RewardFunction:
    """The reward of that name.

    Args:
        name: ``exact_match`` or ``math_verify``.
        strip: for ``exact_match``: ignore white space at both ends.

    Raises:
        ConfigError: there is no such reward.
    """
    if name not in REWARDS:
        raise ConfigError([Violation("env.reward", name, f"must be one of {', '.join(sorted(REWARDS))}", "write one of those names")])
    return partial(exact_match, strip=strip) if name == "exact_match" else REWARDS[name]


def compute_rewards(reward: RewardFunction, responses: Sequence[str], answers: Sequence[str]) -> Rewards:
    """The reward of each response. One that cannot be judged in time has 0: to mask it would be a way to escape judgement."""
    values, timed_out = [], 0
    for response, answer in zip(responses, answers, strict=True):
        try:
            values.append(reward(response, answer))
        except JudgementTimeoutError as error:
            logger.warning("%s. The answer ends in %r", error, response[-80:])
            values.append(0.0)
            timed_out += 1
    return Rewards(torch.tensor(values, dtype=torch.float32), timed_out)
